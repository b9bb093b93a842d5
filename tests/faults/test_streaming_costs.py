"""S14: the bookkeeping of a miss costs the same whatever the cache's size. Timed without type checks."""

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_lab.stream.arena import HostArena
from moe_lab.stream.entry import Entry, Hold
from moe_lab.stream.fills import Partition
from moe_lab.stream.jobs import Job
from moe_lab.stream.policy import make_policy
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource

EXPERTS = 5_000


class Instant:
    """A partition whose reads end when they are submitted: it is the bookkeeping that is timed."""

    def __init__(self, source: ExpertSource, slots: int, policy: str) -> None:
        table, arena = SlotTable(range(slots), make_policy(policy)), HostArena(slots, source.slot_bytes)
        self.part = Partition(table, source, arena, self.end, self.report)

    def end(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.done(None)

    def report(self, entry: Entry, error: Exception | None) -> None:
        self.part.finish(entry, error)


@pytest.mark.parametrize(
    ("policy", "ahead"), [("lru", False), ("lru", True), ("lfu_decay", True), ("s3fifo", False)], ids=str
)
def test_s14_a_miss_costs_the_same_in_a_big_cache(tmp_path: Path, policy: str, ahead: bool):
    path = tmp_path / "empty.bin"
    path.write_bytes(b"")
    os.truncate(path, 3 * 4 * EXPERTS)
    parts = [(name, "f32", 4 * EXPERTS * i, 4, (EXPERTS, 1, 1)) for i, name in enumerate("gud")]
    source = ExpertSource(path, {0: parts})
    seconds = {
        slots: min(seconds_of(Instant(source, slots, policy).part, ahead) for _ in range(3)) for slots in (10, 4_000)
    }
    assert max(seconds.values()) < 3 * min(seconds.values()), seconds


def seconds_of(part: Partition, ahead: bool) -> float:
    """Processor time of asking for every expert once, five at a time."""
    gc.disable()  # its time grows with what is alive, whoever made it
    try:
        begin = time.process_time()
        for first in range(0, EXPERTS, 5):
            keys = [(0, expert) for expert in range(first, first + 5)]
            if ahead:
                assert part.prefetch(keys, most=5) == keys
            hold = Hold(thread=0)
            entries, missed = part.plan(hold, keys) or ([], 0)
            assert missed == (0 if ahead else 5)
            assert all([part.advance(entry) for entry in entries])
            part.release(hold, entries)
        return time.process_time() - begin
    finally:
        gc.enable()
        assert part.misses + part.read_ahead == EXPERTS
