"""Experts that a cache's slots keep in planes or tiles: repacked as they come, the same outputs whatever the cache."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.open import Checkpoint
from moe_lab.stream import cache as cache_module
from moe_lab.stream import setup
from moe_lab.stream.arena import DeviceArena
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.packing import Packing
from moe_lab.stream.source import ExpertSource
from tests.support.fake_cuda import FakeCuda, LateArena

LAYER, CALLS = 2, 2


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.randn(CALLS, 2, 256, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=["planar", "tiles"])
def ckpt(request: pytest.FixtureRequest) -> Iterator[Checkpoint]:
    with lab.open(lab.sample(), layout=request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def resident(ckpt: Checkpoint, x: torch.Tensor) -> list[torch.Tensor]:
    layer = ckpt.layer(LAYER)
    assert layer.experts.layout == ckpt.expert_source.layout != "raw"
    return [layer(rows, "gemv").out for rows in x]


@pytest.mark.parametrize(
    ("policy", "slots", "prefetch"),
    [("lru", 1, 0), ("lru", 5, 2), ("s3fifo", 5, 0), ("random_oldest", 3, 0), ("lfu_decay", 8, 0), ("static", 32, 0)],
    ids=str,
)
def test_bits_of_the_resident_layer_and_the_misses_of_raw_slots(
    ckpt: Checkpoint, x: torch.Tensor, resident: list[torch.Tensor], policy: str, slots: int, prefetch: int
) -> None:
    with lab.ExpertCache(slots=slots, policy=policy) as cache, lab.ExpertCache(slots=slots, policy=policy) as raw:
        layer, other = ckpt.layer(LAYER, cache=cache), lab.open(lab.sample()).layer(LAYER, cache=raw)
        outs = [layer(rows, "gemv", options=lab.Options(prefetch=prefetch)).out for rows in x]
        assert all(map(torch.equal, outs, resident))
        if prefetch:
            on_device = lab.Options(prefetch=prefetch, routing="device", verify_routing=True)
            assert torch.equal(layer(x[0], "gemv", options=on_device).out, resident[0])
        if not prefetch:  # which of them a reader begins in time is chance
            for rows in x:
                other(rows, "reference")
            assert (cache.hits, cache.misses, cache.bytes_read) == (raw.hits, raw.misses, raw.bytes_read)


def test_slots_are_counted_in_the_bytes_they_keep(ckpt: Checkpoint) -> None:
    raw, kept = lab.open(lab.sample()).expert_source, ckpt.expert_source
    assert kept.stage_bytes == raw.slot_bytes == raw.stage_bytes
    assert kept.span_bytes(LAYER) == raw.span_bytes(LAYER)
    assert kept.kept_as("raw").slot_bytes == raw.slot_bytes
    assert not kept.same_as(raw)
    assert kept.same_as(raw.kept_as(kept.layout))
    with lab.ExpertCache(gib=4 * kept.slot_bytes / 2**30) as cache:
        ckpt.layer(LAYER, cache=cache)
        assert cache.slots == 4
        plan = cache.memory
        assert plan is not None
        assert (plan.slot_bytes, plan.arena_bytes) == (kept.slot_bytes, 4 * kept.slot_bytes)
        assert plan.raw_bytes == 6 * setup.whole_pages(raw.slot_bytes), "four threads' buffers and two to spare"
        with pytest.raises(LabError, match=f"keeps experts in layout '{kept.layout}', not in 'raw'"):
            cache.bind(raw, "cpu")


def test_a_fault_while_packing_leaves_the_slot_free(
    ckpt: Checkpoint, x: torch.Tensor, resident: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    right, failures = Packing.__call__, [3]

    def failing(self: Packing, source: torch.Tensor, slot: torch.Tensor) -> None:
        right(self, source, slot)
        failures[0] -= 1
        if failures[0] == 0:
            raise RuntimeError("the repacking kernel failed")

    monkeypatch.setattr(Packing, "__call__", failing)
    with lab.ExpertCache(slots=32) as cache:
        layer = ckpt.layer(LAYER, cache=cache)
        with pytest.raises(LabError, match="the repacking kernel failed"):
            layer(x[0], "gemv")
        (part,), deadline = cache._partitions, time.monotonic() + 10
        while len(part.table.free) + len(part.table.idle) < 32:  # the others' reads go on
            assert time.monotonic() < deadline, "a slot is lost"
            time.sleep(0.001)
        assert all(torch.equal(layer(rows, "gemv").out, want) for rows, want in zip(x, resident, strict=True))
        assert len(cache._arena.stages.free) == len(cache._arena.stages.every)  # type: ignore[union-attr]


@pytest.mark.parametrize("locked", [False, True], ids=["read", "from-locked-memory"])
def test_a_device_packs_behind_its_copies(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """Real reader threads over a pretended GPU, whose streams run late and in any order between each other."""
    cuda = FakeCuda()

    def make_late(slots: int, slot_bytes: int, device: torch.device, buffers: int, stage_bytes: int) -> DeviceArena:
        return LateArena(slots, slot_bytes, 2, cuda, stage_bytes)

    monkeypatch.setattr(setup, "DeviceArena", make_late)
    monkeypatch.setattr(cache_module, "resolve_device", lambda device: torch.device("cuda", 0))
    source: ExpertSource = ckpt.expert_source
    if locked:
        source = MemorySource(source, [LAYER], locked=True, cuda=cuda).kept_as(source.layout)
    stack = ckpt.layer(LAYER).experts.by_slot  # type: ignore[union-attr]
    with lab.ExpertCache(slots=3) as cache:
        cache.bind(source, "cuda")
        cache.prefetch(source, LAYER, [9])
        for wave in ([0, 1, 2], [9, 1], [7, 8, 0]):
            with cache.lease(source, LAYER, wave) as lease:
                cuda.synchronize()
                for part in ("gate", "up", "down"):
                    views = lease.views(part)
                    for expert, slot in zip(wave, lease.slots.tolist(), strict=True):
                        assert torch.equal(views[slot], stack.part(part).data[expert]), (part, expert)


def test_what_has_no_such_layout_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    plain = ExpertSource(
        _file(tmp_path, 3 * 64 * 4), {5: [(name, "f32", 64 * 4 * i, 256, (1, 8, 8)) for i, name in enumerate("gud")]}
    )
    with pytest.raises(LabError, match="layer 5: gate cannot be kept in layout 'planar': f32 has no planes"):
        plain.kept_as("planar")
    with pytest.raises(LabError, match="layout is 'columns'; wanted 'raw', 'planar', 'tiles'"):
        plain.kept_as("columns")


def _file(folder: Path, nbytes: int) -> Path:
    path = folder / "plain.bin"
    path.write_bytes(bytes(nbytes))
    return path
