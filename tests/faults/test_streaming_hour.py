"""An hour of requests in virtual time: 36,000 calls of layers at an injected clock, and nothing drifts.

The clock, the order of reads and their faults come from one seed (`tests.support.virtual_hour`). Counts begin just
below 2^31, which the hour crosses: a number kept in 32 bits would show.
"""

import gc
import os
import sys
import threading
from collections import Counter
from itertools import count
from pathlib import Path
from random import Random

import numpy as np
import pytest

from moe_lab.stream import events
from moe_lab.stream.events import Kind
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.policies.lfu import LFUDecay
from moe_lab.stream.policy import POLICIES, make_policy
from moe_lab.stream.slots import SlotTable
from tests.support.expert_files import write_experts
from tests.support.faulty_disk import bound, usable
from tests.support.scheduled_pool import chooser, scheduled
from tests.support.virtual_hour import Server, in_virtual_time

LAYERS, EXPERTS, SLOTS = (0, 1), 16, 12
TOKENS_A_SECOND, MINUTES = 5.0, 60
EDGE = 2**31 - 9_000  # numbers and a policy's clock begin here, a quarter of an hour before they need 32 bits
FAILS = 1_000  # one read in so many ends in an error


class NotedDecay(LFUDecay):
    """The policy, and a note of every use it counted: key and the clock's time, room for them taken beforehand."""

    name = "noted_decay"

    def __init__(self) -> None:
        super().__init__()
        self._requests = dict.fromkeys(LAYERS, EDGE)
        self._now = EDGE
        self.uses, self.noted = np.full((200_000, 3), -1, np.int64), 0

    def on_hit(self, key: tuple[int, int]) -> None:
        super().on_hit(key)
        self.uses[self.noted] = (*key, self._now)
        self.noted += 1

    def exact(self, key: tuple[int, int]) -> float:
        """log2 of the sum over the key's uses of 2^(t / half_life), all at once."""
        mine = (self.uses[: self.noted, :2] == key).all(1)
        return float(np.logaddexp2.reduce(self.uses[: self.noted][mine, 2] / self.half_life))


class Books:
    """What has to hold at every minute: slots, sums of the log against every counter, and what the process holds."""

    def __init__(self, server: Server) -> None:
        self.server, self.cache = server, server.cache
        self.seen = 0  # events looked at
        self.sums: Counter[str] = Counter()
        self.held = np.zeros((MINUTES + 1, 4), np.int64)

    def minute(self, number: int) -> None:
        """Between two tokens: nobody holds anything."""
        self.check_slots()
        self.add_up()
        self.check_sums()
        self.held[number] = _held()

    def check_slots(self) -> None:
        (part,), cache = self.cache._partitions, self.cache
        assert sorted([*part.table.free, *part.table.resident.values()]) == list(range(SLOTS))
        assert {entry.key: slot for slot, entry in part.entries.items()} == part.table.resident
        assert set(part.table.idle) == {entry.key for entry in part.entries.values() if entry.ready}
        assert part.held == len(part.under_way) <= self.server.pool.background
        assert not any((cache._wanting, cache._short, cache._dropped))
        cache.live_table().check()

    def add_up(self) -> None:
        """The log since the last look."""
        table = self.server.log.table()
        table = table[table["number"] > self.seen]
        assert table["number"][0] == self.seen + 1, "the log wraps in less than a minute"
        assert (np.diff(table["at_ns"]) >= 0).all()
        self.seen = int(table["number"][-1])
        by_kind = {kind: table[table["kind"] == kind] for kind in Kind}
        granted = by_kind[Kind.GRANTED]["request"]
        asked, ended = by_kind[Kind.ASKED], by_kind[Kind.ENDED]
        used, waits = by_kind[Kind.USED], by_kind[Kind.BYTES_WAIT]
        used, waits = used[np.isin(used["request"], granted)], waits[np.isin(waits["request"], granted)]
        asked_ns = asked["at_ns"][np.isin(asked["request"], granted)]
        assert (ended["request"] == granted).all()
        assert (np.diff(asked["request"]) > 0).all(), "no number twice"
        self.sums.update({kind.name: len(rows) for kind, rows in by_kind.items()})
        self.sums["hits"] += int((used["value"] != events.MISS).sum())
        self.sums["late"] += int((used["value"] == events.LATE).sum())
        self.sums["bytes"] += int(by_kind[Kind.READY]["value"].sum())
        self.sums["bytes dropped"] += int(by_kind[Kind.DROPPED]["value"].sum())
        self.sums["waited ns"] += int((waits["at_ns"] - waits["value"]).sum())
        self.sums["inside ns"] += int((ended["at_ns"] - asked_ns).sum())

    def check_sums(self) -> None:
        cache, server, sums = self.cache, self.server, self.sums
        (part,) = cache._partitions
        under_way = sum(entry.jobs is not None and not entry.ready for entry in part.entries.values())
        assert sums["QUEUED"] == sums["READY"] + sums["FAILED"] + sums["DROPPED"] + under_way
        assert sums["READY"] == cache.misses + cache.read_ahead == sums["EVICTED"] + len(part.table.idle)
        assert (sums["bytes"], sums["bytes dropped"]) == (cache.bytes_read, cache.bytes_dropped)
        assert (sums["hits"], sums["late"]) == (server.hits, server.late)
        assert cache.hits == server.hits
        assert (sums["ASKED"], sums["ASKED"] - sums["GRANTED"]) == (server.calls, server.failed)
        assert sums["waited ns"] == pytest.approx(server.wait_ms * 1e6, rel=1e-9)
        assert sums["inside ns"] + server.failed_ns + server.idle_ns == server.pool.now, "walls are the time elapsed"


def _held() -> tuple[int, int, int, int]:
    """What the process holds: Python's allocated blocks, threads, descriptors, resident bytes."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return sys.getallocatedblocks(), threading.active_count(), len(os.listdir("/proc/self/fd")), resident


def test_an_hour_of_requests_drifts_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = MemorySource(write_experts(tmp_path / "x.bin", layers=LAYERS, experts=EXPERTS))
    monkeypatch.setattr(events, "_NUMBERS", count(EDGE))
    policy = NotedDecay()
    cache, pool = scheduled(source, monkeypatch, chooser(0), slots=SLOTS, policy=policy)
    pool.failing = lambda: pool.choose(FAILS) == 0
    in_virtual_time(pool, monkeypatch)
    cache.live_table()
    server = Server(cache, pool, source, seed=1)
    books = Books(server)
    plan, arena, ring = cache.memory, cache._arena.tensor.data_ptr(), len(server.log._ring)
    gc.freeze()  # collections look at what the hour makes alone
    try:
        server.serve(MINUTES, TOKENS_A_SECOND, books.minute)
    finally:
        gc.unfreeze()
    assert server.calls > 35_000
    assert server.number > 2**31
    assert min(server.failed, cache.misses // 100, cache.read_ahead // 100, books.sums["DROPPED"]) > 10, server.__dict__
    assert (cache.memory, cache._arena.tensor.data_ptr(), len(server.log._ring)) == (plan, arena, ring)
    after_five = books.held[5:]
    grown = after_five.max(0) - after_five.min(0)
    blocks, threads, files, resident = grown.tolist()
    assert (threads, files) == (0, 0)
    assert blocks < 2_000, "Python's own blocks: one kept a call would be 33,000"
    assert resident < 2 << 20
    pool.failing = lambda: False
    while pool.run_one():
        pass
    usable(cache, source)
    check_decay(policy)
    cache.close()


def check_decay(policy: NotedDecay) -> None:
    """The sums that were kept use by use are those of all uses at once, and finite."""
    kept = policy._weight
    assert policy._now > 2**31
    assert len(kept) == len(LAYERS) * EXPERTS
    assert np.isfinite(list(kept.values())).all()
    assert max(abs(kept[key] - policy.exact(key)) for key in kept) < 1e-6


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_keeps_no_more_for_each_request(name: str):
    """6,000 requests of an ever changing subject: what a policy holds after 1,000 of them is all it will ever hold."""
    rng, table, blocks = Random(0), SlotTable(range(SLOTS), make_policy(name)), []
    gc.freeze()
    try:
        for number in range(6_000):
            keys = [(0, e) for e in sorted({int(rng.expovariate(0.3) + number // 100) % 64 for _ in range(3)})]
            assert table.take(keys) is not None
            for key in keys:
                table.put_back(key)
            if number % 1_000 == 999:
                gc.collect()
                blocks.append(sys.getallocatedblocks())
    finally:
        gc.unfreeze()
    assert max(blocks) - blocks[0] < 1_000
    if name == "predicted":
        (seen,) = table.policy._layers.values()  # type: ignore[attr-defined]
        assert np.isfinite(seen.score).all()
        assert seen.recent.sum() <= 3


def test_real_readers_keep_nothing_of_their_requests(tmp_path: Path):
    """The same without the made-up clock: threads, descriptors and memory stay, and the sums hold."""
    source = MemorySource(write_experts(tmp_path / "x.bin"))
    rng, hits, misses = Random(0), 0, 0
    with bound(source, slots=6, threads=2) as cache:
        for number in range(2_500):
            if number == 500:
                before = _held()
            experts = {min(int(rng.expovariate(0.5)), 7) for _ in range(2)}
            with cache.lease(source, rng.randrange(2), sorted(experts)) as lease:
                hits, misses = hits + lease.hits, misses + lease.misses
        after = _held()
        assert (after[1], after[2]) == (before[1], before[2])
        assert after[0] - before[0] < 1_000
        assert after[3] - before[3] < 2 << 20
        assert (cache.hits, cache.misses) == (hits, misses)
        assert cache.bytes_read == misses * source.expert_nbytes(0)
        assert not cache._dropped
        assert not cache._pool._urgent  # type: ignore[union-attr]
        usable(cache, source)
