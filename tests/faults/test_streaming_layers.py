"""S16: whatever brings an expert in, and whenever, the layer's bits are those of the resident one."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.stream.access import serves_direct
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.pack import pack

LAYER, TOKENS = 3, 6


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with lab.open(lab.sample()) as ckpt:
        return pack(ckpt.expert_source, tmp_path_factory.mktemp("packed") / "lab.experts").path


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    with lab.open(lab.sample()) as ckpt:
        assert ckpt.spec is not None
        return torch.randn(TOKENS, ckpt.spec.d_model, generator=torch.Generator().manual_seed(16))


@pytest.fixture(scope="module")
def resident(x: torch.Tensor) -> torch.Tensor:
    with lab.open(lab.sample()) as ckpt:
        return ckpt.layer(LAYER)(x, "reference").out


@pytest.fixture(scope="module")
def resident_pairs(x: torch.Tensor) -> list[torch.Tensor]:
    """Two tokens a call: BLAS adds up another number of rows in another order."""
    with lab.open(lab.sample()) as ckpt:
        layer = ckpt.layer(LAYER)
        return [layer(x[start : start + 2], "reference").out for start in range(0, TOKENS, 2)]


@pytest.mark.parametrize(
    ("slots", "how", "ahead"),
    [
        (1, {"io": "direct", "threads": 1}, False),
        (5, {"io": "direct", "threads": 8}, True),
        (32, {"io": "dropped", "threads": 8}, True),
        (5, {"io": "buffered", "threads": 1}, True),
        (3, {"threads": 4, "verify": "strict"}, True),
    ],
    ids=["one-slot", "direct", "all", "buffered", "checked"],
)
@pytest.mark.parametrize("from_packed", [False, True], ids=["in-place", "packed"])
def test_s16_the_bits_of_the_resident_layer(
    packed: Path,
    x: torch.Tensor,
    resident: torch.Tensor,
    resident_pairs: list[torch.Tensor],
    slots: int,
    how: dict[str, Any],
    ahead: bool,
    from_packed: bool,
):
    if how.get("io") == "direct" and not serves_direct(packed):
        pytest.skip("this file system serves no direct reads")
    if not from_packed:
        how = {**how, "verify": "off"}  # a model file has no checksums
    with (
        lab.open(lab.sample(), packed=packed if from_packed else None) as ckpt,
        lab.ExpertCache(slots, poison=True, **how) as cache,
    ):
        layer = ckpt.layer(LAYER, cache=cache)
        for number, wanted in enumerate(resident_pairs):
            if ahead:
                cache.prefetch(ckpt.expert_source, LAYER, range(number, 32, 5))
            assert torch.equal(layer(x[2 * number : 2 * number + 2], "reference").out, wanted)
        assert torch.equal(layer(x, "reference").out, resident)
        assert layer(x, "reference").timing.io_mode == cache.io_mode


def test_s16_short_and_slow_reads_and_memory_change_no_bit_either(x: torch.Tensor, resident: torch.Tensor):
    with lab.open(lab.sample()) as ckpt:
        plain = ckpt.expert_source
        for source in (plain.reading_through(FaultyReads(short=777, delay_s=0.001)), MemorySource(plain, [LAYER])):
            ckpt.__dict__["expert_source"] = source
            with lab.ExpertCache(4) as cache:
                assert torch.equal(ckpt.layer(LAYER, cache=cache)(x, "reference").out, resident)


def test_s17_no_tokens_no_reads(packed: Path, x: torch.Tensor):
    with lab.open(lab.sample(), packed=packed) as ckpt, lab.ExpertCache(4) as cache:
        y = ckpt.layer(LAYER, cache=cache)(x[:0], "reference")
        assert (y.out.shape[0], cache.hits, cache.misses, cache.bytes_read) == (0, 0, 0, 0)


def test_s02_more_experts_than_slots_are_each_read_once_in_a_call(
    packed: Path, x: torch.Tensor, resident: torch.Tensor
):
    with lab.open(lab.sample(), packed=packed) as ckpt:
        reads = FaultyReads()
        ckpt.__dict__["expert_source"] = ckpt.expert_source.reading_through(reads)
        with lab.ExpertCache(2) as cache:
            y = ckpt.layer(LAYER, cache=cache)(x, "reference")
            assert torch.equal(y.out, resident)
            distinct = len(y.routing.ids.unique())
            assert distinct > 2
            assert reads.calls == cache.misses == y.timing.misses == distinct
