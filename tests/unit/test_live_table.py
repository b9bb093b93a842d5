"""A live cache behind device routing: host routing's bits and counters, the device's slot table in step with it."""

import threading
from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.stream.live_table import LiveTable
from moe_lab.stream.policy import POLICIES
from moe_lab.stream.provider import StreamedExperts
from tests.support.fake_cuda import FakeCuda

DEVICE = lab.Options(routing="device", verify_routing=True)
COUNTERS = ("hits", "misses", "bytes_read", "weight_bytes")
LAYERS = (1, 3)


@pytest.fixture(scope="module")
def model() -> str:
    return str(lab.sample())


def opened(model: str, **how) -> dict[int, MoELayer]:
    cache = lab.ExpertCache(**how)
    ckpt = lab.open(model)
    return {i: ckpt.layer(i, cache=cache) for i in LAYERS}


def rows(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, 256, generator=torch.Generator().manual_seed(seed))


CASES = [
    *((policy, 40, 1, {}) for policy in POLICIES if policy not in ("static", "predicted")),
    ("lru", 4, 8, {}),  # waves: more experts than slots
    ("lru", 12, 8, {"per_layer": True}),
    ("lru", 64, 8, {}),
]


@pytest.mark.parametrize(("policy", "slots", "tokens", "how"), CASES, ids=lambda v: str(v))
def test_bits_and_counters_are_those_of_host_routing(model: str, policy, slots: int, tokens: int, how: dict) -> None:
    by_host, by_device = (opened(model, slots=slots, policy=policy, **how) for _ in range(2))
    for seed in range(6 if tokens == 1 else 2):
        for i in LAYERS:
            x = rows(tokens, 10 * seed + i)
            want, got = by_host[i](x, "gemv"), by_device[i](x, "gemv", options=DEVICE)
            assert torch.equal(got.out, want.out), (seed, i)
            assert torch.equal(got.routing.weights, want.routing.weights)
            for name in COUNTERS:
                assert getattr(got.timing, name) == getattr(want.timing, name), (seed, i, name)
    caches = (layers[LAYERS[0]].experts.cache for layers in (by_host, by_device))
    assert len({(c.hits, c.misses, c.bytes_read) for c in caches}) == 1


def test_what_hits_is_looked_up_once_and_what_misses_twice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_lab_kernels.slots import slot_table

    looked: list[int] = []
    plain = slot_table.slot_table_ref
    monkeypatch.setattr(slot_table, "slot_table_ref", lambda *a, **k: looked.append(1) or plain(*a, **k))
    own, x = opened(model, slots=40)[1], rows(2, 5)
    first = own(x, "gemv", options=lab.Options(routing="device"))
    assert first.timing.misses > 0
    assert len(looked) == 2
    again = own(x, "gemv", options=lab.Options(routing="device"))
    assert (again.timing.misses, len(looked)) == (0, 3)
    assert torch.equal(again.out, first.out)


def test_calls_of_both_kinds_and_prefetches_share_one_cache(model: str) -> None:
    own, resident = opened(model, slots=10), {i: lab.open(model).layer(i) for i in LAYERS}
    for seed in range(8):
        i = LAYERS[seed % 2]
        x = rows(1 + seed % 3, seed)
        experts = own[i].experts
        assert isinstance(experts, StreamedExperts)
        experts.cache.prefetch(experts.source, i, [seed, seed + 1])
        got = own[i](x, "gemv", options=(DEVICE, lab.Options())[seed % 3 == 0])
        assert torch.equal(got.out, resident[i](x, "gemv").out), seed


def test_threads_share_one_table(model: str) -> None:
    own = opened(model, slots=16)
    want = {(i, s): own[i](rows(2, s), "gemv").out for i in LAYERS for s in range(3)}
    wrong: list[tuple[int, int]] = []

    def work(seed: int) -> None:
        for i in LAYERS * 2:
            got = own[i](rows(2, seed), "gemv", options=lab.Options(routing="device")).out
            wrong.extend([(i, seed)] * (not torch.equal(got, want[i, seed])))

    threads = [threading.Thread(target=work, args=(s,)) for s in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


def test_biases_belong_to_experts_and_not_to_slots(model: str) -> None:
    streamed, resident = opened(model, slots=40)[1], lab.open(model).layer(1)
    spec = replace(resident.spec, expert_bias=True)
    g = torch.Generator().manual_seed(1)
    e, f, d = spec.num_experts, spec.d_expert, spec.d_model
    biases = {n: torch.randn(e, w, generator=g) for n, w in (("gate", f), ("up", f), ("down", d))}
    stack, held = resident.experts.stack, streamed.experts
    plain = MoELayer.from_tensors(
        spec, router=resident.router_weights, gate=stack.gate, up=stack.up, down=stack.down, biases=biases,
        shared=resident.shared,
    )  # fmt: skip
    own = MoELayer.streamed(
        spec, router=resident.router_weights, source=held.source, layer=1, cache=held.cache, biases=biases,
        shared=resident.shared,
    )  # fmt: skip
    for seed in range(3):
        assert torch.equal(own(rows(3, seed), "gemv", options=DEVICE).out, plain(rows(3, seed), "gemv").out)


def test_skipped_picks_ask_for_nothing(model: str) -> None:
    own, x = opened(model, slots=4)[3], rows(2, 0)
    skipped = Routing(torch.full((2, 4), -1), torch.ones(2, 4))
    got = own(x, "gemv", routing=skipped, options=DEVICE)
    assert (got.timing.hits, got.timing.misses, got.timing.submissions) == (0, 0, 0)
    assert torch.equal(got.out, own(x, "gemv", routing=skipped).out)
    assert own(x[:0], "gemv", options=DEVICE).out.shape == (0, 256)


@pytest.mark.parametrize("entry", ["slot_of", "owner"])
def test_the_check_names_the_entry_that_is_not_what_the_cache_told(model: str, entry: str) -> None:
    own, x = opened(model, slots=40)[3], rows(1, 0)
    first = own(x, "gemv", options=DEVICE)
    table = own.experts.device_table()
    expert = int(first.routing.ids[0, 0])
    slot = int(table.slot_of[expert])
    if entry == "slot_of":
        table.slot_of[expert], message = (
            slot + 1,
            rf"layer 3's slot_of\[{expert}\] is {slot + 1} on the device and {slot}",
        )
    else:
        table.owner[slot], message = -1, rf"owner\[{slot}\] is -1 on the device"
    with pytest.raises(LabError, match=message):
        own(x, "gemv", options=DEVICE)


def test_of_several_changes_to_one_entry_the_last_counts() -> None:
    live = LiveTable({2: 3, 5: 4}, 3, torch.device("cpu"))
    live.arrived((2, 1), 0)
    live.arrived((5, 3), 0)  # takes the slot
    live.arrived((2, 1), 2)
    live.arrived((5, 3), 1)  # moved
    table, other = live.of(5), live.of(2)
    assert (table.slot_of.tolist(), other.slot_of.tolist()) == ([-1, -1, -1, 1], [-1, 2, -1])
    assert (table.owner.tolist(), table.base, other.base) == ([-1, 6, 1], 3, 0)
    only = live.only(2, {0: 1})
    assert (only.slot_of.tolist(), only.base) == ([1, -1, -1], 0)
    live.check()


class LateTable(LiveTable):
    """Its copies happen when their stream gets to them."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__({0: 4}, 4, torch.device("cpu"), cuda)
        self._cuda = cuda

    def _write(self, changes) -> None:
        late = dict(changes)
        self._cuda.current_stream(None).queue.append(lambda: super(LateTable, self)._write(late))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: plain(*a, **k))


def test_a_stream_waits_for_what_another_one_copied(on_cpu: None) -> None:
    cuda = FakeCuda()
    live, side = LateTable(cuda), cuda.new_stream()
    live.arrived((0, 2), 3)
    with cuda.stream(side):
        live.flush()
    seen: list[list[int]] = []
    table = live.of(0)  # on the main stream, with nothing left to copy
    cuda.current_stream(None).queue.append(lambda: seen.append(table.slot_of.tolist()))
    cuda.current_stream(None).synchronize()
    assert seen == [[-1, -1, 3, -1]]
