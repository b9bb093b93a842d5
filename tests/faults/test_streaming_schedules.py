"""Whole caches and whole layers under random schedules: readers without threads, one seed, a clock that is made up."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import moe_lab as lab
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.events import EventLog, Kind
from moe_lab.stream.lease import Lease
from moe_lab.stream.policy import POLICIES
from tests.support.expert_files import held, wanted, write_experts
from tests.support.scheduled_pool import ScheduledPool, chooser, scheduled
from tests.support.small_stack import SmallStack

EXPERTS, SLOTS, LAYERS = 6, 4, (0, 1)


class CacheMachine(RuleBasedStateMachine):
    """One caller that leases in two phases, guesses, settles and gives up, over readers that run at any moment."""

    leases: list[Lease]

    @initialize(seed=st.integers(0, 2**31), policy=st.sampled_from(list(POLICIES)), per_layer=st.booleans())
    def start(self, seed: int, policy: str, per_layer: bool) -> None:
        how = {"slots": 2 * SLOTS if per_layer else SLOTS, "per_layer": per_layer, "policy": policy}
        self.cache, self.pool = scheduled(self.source, self.patch, chooser(seed), **how)  # type: ignore[attr-defined]
        self.per_layer = per_layer
        self.log = EventLog(clock=lambda: self.pool.now)
        self.cache.record(self.log)
        self.leases, self.asked = [], 0

    experts = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True)

    @rule(layer=st.sampled_from(LAYERS), experts=experts, wait=st.booleans())
    def lease(self, layer: int, experts: list[int], wait: bool) -> None:
        try:
            lease = self.cache.lease(self.source, layer, experts, wait=wait, timeout_s=1e9)
        except CheckpointError:
            return
        except LabError:
            held_here = {(each.layer, e) for each in self.leases for e in each.experts}
            mine = {key for key in held_here | {(layer, e) for e in experts} if key[0] == layer or not self.per_layer}
            assert len(mine) > SLOTS, "refused though there was room"
            return
        self.asked += 0 if lease.awaited else len(experts)
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def second_phase(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        waited = bool(lease.awaited)
        try:
            lease.wait()
        except CheckpointError:
            self.leases.remove(lease)
            return
        self.asked += len(lease.experts) if waited else 0
        assert held(lease) == wanted(self.source, lease.layer, lease.experts)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))).release()

    @rule(layer=st.sampled_from(LAYERS), experts=experts)
    def guess(self, layer: int, experts: list[int]) -> None:
        self.cache.prefetch(self.source, layer, experts)

    @rule(layer=st.sampled_from(LAYERS), experts=experts)
    def settle(self, layer: int, experts: list[int]) -> None:
        self.cache.settle(layer, experts)

    @rule()
    def give_up(self) -> None:
        self.cache.cancel_prefetches()

    @rule(count=st.integers(1, 4), fails=st.sampled_from([False] * 5 + [True]))
    def readers_run(self, count: int, fails: bool) -> None:
        self.pool.failing = lambda: fails
        for _ in range(count):
            self.pool.run_one()
        self.pool.failing = lambda: False

    @invariant()
    def what_is_at_hand_has_the_files_bytes(self) -> None:
        for lease in getattr(self, "leases", ()):
            ready = [i for i, e in enumerate(lease.experts) if e not in lease.awaited]
            seen, want = held(lease), wanted(self.source, lease.layer, lease.experts)
            assert [seen[i] for i in ready] == [want[i] for i in ready]

    @invariant()
    def nothing_is_lost_and_the_background_keeps_its_limit(self) -> None:
        if not hasattr(self, "cache"):
            return
        for part in self.cache._partitions:
            assert sorted([*part.table.free, *part.table.resident.values()]) == sorted(part.table.slots)
            assert part.under_way == {e for e in part.entries.values() if part._ahead in e.holds}
        assert sum(len(part.under_way) for part in self.cache._partitions) <= self.pool.background
        assert not self.cache._wanting

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for lease in self.leases:
            lease.release()
        while self.pool.run_one():
            pass
        assert not self.cache._line.waiting(), "what waits in line begins once there is room"
        assert self.cache.hits + self.cache.misses >= self.asked
        for part in self.cache._partitions:
            assert set(part.table.idle) == set(part.table.resident)
        check_story(self.log)
        self.cache.close()


def test_what_is_given_up_unread_makes_room_for_the_next_in_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two of three guesses are dropped by the picks before a reader took them: no report follows that would go on."""
    CacheMachine.source = write_experts(tmp_path / "x.bin", layers=LAYERS, experts=EXPERTS)  # type: ignore[attr-defined]
    CacheMachine.patch = monkeypatch  # type: ignore[attr-defined]
    machine = CacheMachine()
    machine.start(seed=0, policy="lru", per_layer=False)
    machine.guess(experts=[1, 2, 0], layer=0)
    machine.settle(experts=[0], layer=0)
    assert machine.cache._line.waiting() == []
    machine.teardown()


def check_story(log: EventLog) -> None:
    """Each read ends once, a key is never read while it is there or on its way, and time does not run backwards."""
    table = log.table()
    assert log.lost == 0
    assert (np.diff(table["at_ns"]) >= 0).all()
    ends = Counter(table["read"][np.isin(table["kind"], [Kind.READY, Kind.FAILED, Kind.DROPPED])].tolist())
    assert max(ends.values(), default=0) <= 1
    there: set[tuple[int, int]] = set()
    for kind, *key in zip(*(table[name].tolist() for name in ("kind", "layer", "expert")), strict=True):
        if kind == Kind.QUEUED:
            assert tuple(key) not in there, f"{key} is read twice"
            there.add((key[0], key[1]))
        elif kind in (Kind.EVICTED, Kind.FAILED, Kind.DROPPED):
            there.discard((key[0], key[1]))


def test_every_order_of_requests_guesses_and_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    CacheMachine.source = write_experts(tmp_path / "x.bin", layers=LAYERS, experts=EXPERTS)  # type: ignore[attr-defined]
    CacheMachine.patch = monkeypatch  # type: ignore[attr-defined]
    case = CacheMachine.TestCase
    case.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
    case("runTest").runTest()


STEPS = 2


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> SmallStack:
    return SmallStack(tmp_path_factory.mktemp("stack"))


@pytest.fixture(scope="module")
def resident(stack: SmallStack):
    """Outputs of the resident layers over all steps, by arm and T; each layer is fed with the one before."""
    known = {}

    def outputs(arm: str, tokens: int) -> list[torch.Tensor]:
        if (arm, tokens) not in known:
            known[arm, tokens] = walk(stack.resident, arm, tokens, lab.Options(), lambda: None)[0]
        return known[arm, tokens]

    return outputs


def walk(
    layers, arm: str, tokens: int, options: lab.Options, between, steps: int = STEPS
) -> tuple[list[torch.Tensor], list]:
    draw = torch.Generator().manual_seed(tokens)
    outs, calls, x = [], [], torch.randn(tokens, layers[0].spec.d_model, generator=draw)
    for _ in range(steps):
        x = 0.7 * x + 0.7 * torch.randn(x.shape, generator=draw)
        for layer in layers:
            between()
            y = layer(x, arm, options=options)
            x = x + y.out
            x = x / x.square().mean(-1, keepdim=True).sqrt()
            assert torch.isfinite(y.out).all()
            outs.append(y.out)
            calls.append(y)
    return outs, calls


def drawn(rng: np.random.Generator) -> tuple[str, int, lab.Options, dict[str, Any]]:
    """Arm, T, options and a cache's: capacity, policy, slots by layer or shared."""
    arms = ["gemv", "reference", "per_token", "mmq", "grouped", "table"]
    arm = str(rng.choice(arms, p=[0.4, 0.2, 0.1, 0.1, 0.1, 0.1]))
    routing = "device" if arm == "gemv" and rng.random() < 0.3 else "host"
    tokens = 1 if arm == "table" else int(rng.integers(1, 4))
    slots = int(rng.choice([1, 2, 4, 7, 13, 36]))
    widths = {1: int(rng.integers(0, 9)), 2: int(rng.integers(0, 9))}
    prefetch, shared = widths if rng.random() < 0.7 else 0, str(rng.choice(["main", "side"]))
    how: dict[str, Any] = {"slots": slots, "policy": str(rng.choice(list(POLICIES)))}
    if rng.random() < 0.3:
        how |= {"slots": max(slots, 6), "per_layer": True}
    return arm, tokens, lab.Options(routing=routing, prefetch=prefetch, shared=shared), how  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(50))
def test_s16_a_layers_bits_under_a_random_schedule(stack, resident, monkeypatch: pytest.MonkeyPatch, seed: int):
    """Capacity, policy, prefetch, arm, routing and T drawn; reads end in any order, some of them in errors."""
    arm, tokens, options, how = drawn(np.random.default_rng(seed))
    choose = chooser(seed)
    cache, pool = scheduled(stack.source, monkeypatch, choose, **how)
    log = EventLog(clock=lambda: pool.now)
    with cache:
        cache.record(log)
        layers = stack.streamed(cache)
        outs, calls = walk(layers, arm, tokens, options, lambda: [pool.run_one() for _ in range(choose(4))])
        assert all(torch.equal(a, b) for a, b in zip(outs, resident(arm, tokens), strict=True))
        assert sum(y.timing.hits for y in calls) == cache.hits
        assert sum(y.timing.misses for y in calls) == cache.misses
        check_story(log)
        fail_once(pool, layers[0], arm, tokens, options)
        again, _ = walk(layers[:1], arm, tokens, options, lambda: None, steps=1)
        assert torch.equal(again[0], resident(arm, tokens)[0])


@pytest.mark.parametrize("threads", [1, 8], ids="threads{}".format)
@pytest.mark.parametrize("seed", range(100, 110))
def test_s16_a_layers_bits_with_real_readers(stack, resident, seed: int, threads: int):
    arm, tokens, options, how = drawn(np.random.default_rng(seed))
    with lab.ExpertCache(threads=threads, **how) as cache:
        log = EventLog()
        cache.record(log)
        outs, calls = walk(stack.streamed(cache), arm, tokens, options, lambda: None)
        assert all(torch.equal(a, b) for a, b in zip(outs, resident(arm, tokens), strict=True))
        assert sum(y.timing.misses for y in calls) == cache.misses
        assert cache.bytes_read == (cache.misses + cache.read_ahead) * stack.source.expert_nbytes(0)


def fail_once(pool: ScheduledPool, layer, arm: str, tokens: int, options: lab.Options) -> None:
    """A call in which every read fails; it is an error exactly where something was to be read on demand."""
    pool.failing = lambda: True
    x = torch.randn(tokens, layer.spec.d_model, generator=torch.Generator().manual_seed(99))
    try:
        y = layer(x, arm, options=options)
    except CheckpointError:
        pass
    else:
        assert y.timing.misses == 0
    while pool.run_one():
        pass
    pool.failing = lambda: False
