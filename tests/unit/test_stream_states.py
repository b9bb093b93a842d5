"""Every order of plan, read, copy, release and interrupt: a state machine without threads or clock.

Reads happen when the machine says so and may fail; on a device arena copies happen late as well. After each step the
bookkeeping must add up, and whatever a holder was told is ready must show the file's bytes until it lets go.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moe_lab.errors import CheckpointError
from moe_lab.stream import fills
from moe_lab.stream.arena import DeviceArena, HostArena
from moe_lab.stream.fills import Entry, Hold, Partition
from moe_lab.stream.jobs import GivenUp, Job, give_up, split_jobs
from moe_lab.stream.policy import LRU
from moe_lab.stream.slots import SlotTable
from tests.support.expert_files import expert_bytes, write_experts
from tests.support.fake_cuda import FakeCuda, LateArena

EXPERTS, SLOTS, BUFFERS = 6, 4, 2


class Holder:
    """One caller: its entries, which of them it was told are ready, and the stream it works on (device only)."""

    def __init__(self, experts: list[int], stream: Any) -> None:
        self.stream = stream
        self.hold = Hold(thread=0)
        self.keys = [(0, expert) for expert in sorted(experts)]
        self.entries: list[Entry] = []
        self.ready: set[Entry] = set()


def promoted(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.background = False


class CacheMachine(RuleBasedStateMachine):
    """Host arena: a finished read is at once in its slot."""

    def make_arena(self, slot_bytes: int) -> HostArena | DeviceArena:
        return HostArena(SLOTS, slot_bytes)

    @initialize()
    def start(self) -> None:
        self.source = self.shared_source
        self.arena = self.make_arena(self.source.slot_bytes)
        self.arena.poison()  # who reads a slot that nobody owns sees NaN bytes
        self.jobs: list[Job] = []
        self.begun: list[Job] = []
        table = SlotTable(range(SLOTS), LRU())
        self.part = Partition(
            table, self.source, self.arena, self.jobs.extend, self.report, promote=promoted, give_up=give_up
        )
        self.holders: list[Holder] = []

    def report(self, entry: Entry, error: Exception | None) -> None:
        self.part.finish(entry, error)

    def works(self, holder: Holder) -> Any:
        """Where a holder's calls happen."""
        return nullcontext()

    def use(self, holder: Holder, entry: Entry) -> None:
        """What a holder does with an entry it was promised."""
        self.check(entry)

    def check(self, entry: Entry) -> None:
        for part in self.source.parts(0):
            row = self.arena.tensor[entry.slot, part.slot_offset : part.slot_offset + part.nbytes]
            assert row.numpy().tobytes() == expert_bytes(0, entry.key[1], part.name, part.nbytes)

    @rule(
        experts=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=SLOTS, unique=True),
        stream=st.integers(0, 1),
    )
    def ask(self, experts: list[int], stream: int) -> None:
        holder = Holder(experts, stream)
        before = dict(self.part.table.resident)
        planned = self.part.plan(holder.hold, holder.keys)
        if planned is None:
            assert self.part.table.resident == before
            return
        holder.entries = planned[0]
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        with self.works(holder):
            try:
                arrived = [e for e in holder.entries if self.part.advance(e) and e not in holder.ready]
            except CheckpointError:
                self.arena.leave([entry.slot for entry in holder.ready])
                self.part.recover(holder.hold, resubmit=True)
                self.holders.remove(holder)
                return
            self.arena.enter([entry.slot for entry in arrived])
            for entry in arrived:
                holder.ready.add(entry)
                self.use(holder, entry)

    @rule(experts=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=3, unique=True), most=st.integers(0, 2))
    def prefetch(self, experts: list[int], most: int) -> None:
        before = set(self.part.table.resident)
        begun = self.part.prefetch([(0, expert) for expert in experts], most)
        assert len(begun) <= most
        assert not before & set(begun)

    @rule()
    def cancel(self) -> None:
        self.part.cancel()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        job = self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1)))
        if job.free:
            job.claimed = True
            self.begun.append(job)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), fails=st.sampled_from([False] * 9 + [True]))
    def read(self, data: st.DataObject, fails: bool) -> None:
        """What a reader does, given up or not by the time it gets to the piece."""
        job = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        if fails:
            job.done(CheckpointError(self.source.path, "truncated", "made up"))
            return
        job.writable()
        while job.at < len(job.pieces) and not job.stop:
            piece = job.pieces[job.at]
            piece.into[:] = self.file_bytes[piece.offset : piece.offset + len(piece.into)]
            job.at += 1
        job.done(GivenUp() if job.at < len(job.pieces) else None)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), interrupted=st.booleans())
    def let_go(self, data: st.DataObject, interrupted: bool) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        with self.works(holder):
            for entry in holder.ready:
                self.use(holder, entry)
            self.arena.leave([entry.slot for entry in holder.ready])
            if interrupted:
                self.part.recover(holder.hold, resubmit=True)
                self.arena.reclaim([e.stage for e in self.part.entries.values() if e.stage is not None])
            else:
                self.part.release(holder.hold, holder.entries)

    @invariant()
    def no_slot_is_lost_or_shared(self) -> None:
        if not hasattr(self, "part"):
            return
        table = self.part.table
        slots = [*table.free, *table.resident.values()]
        assert sorted(slots) == list(range(SLOTS))
        for key, slot in table.resident.items():
            assert self.part.entries[slot].key == key

    @invariant()
    def only_ready_and_unheld_keys_may_be_evicted(self) -> None:
        for key, slot in self.part.table.resident.items() if hasattr(self, "part") else ():
            entry = self.part.entries[slot]
            assert (key in self.part.table.idle) == (entry.ready and not entry.holds)

    @invariant()
    def what_a_holder_was_promised_stays(self) -> None:
        for holder in getattr(self, "holders", ()):
            for entry in holder.ready:
                self.use(holder, entry)

    def teardown(self) -> None:
        """Let everybody finish: then nothing may be held, in flight or lost."""
        if not hasattr(self, "part"):
            return
        for holder in self.holders:
            self.part.release(holder.hold, holder.entries)
        for job in (*self.begun, *(job for job in self.jobs if job.free)):
            job.claimed = True
            job.done(None)
        table = self.part.table
        assert self.part.held == 0
        assert set(table.idle) == set(table.resident)
        assert len(table.free) + len(table.resident) == SLOTS


class DeviceMachine(CacheMachine):
    """Device arena: reads go to two buffers; copies and holders have two streams each, run when the machine says so."""

    def make_arena(self, slot_bytes: int) -> HostArena | DeviceArena:
        self.cuda = FakeCuda()
        self.cuda.new_stream()
        return LateArena(SLOTS, slot_bytes, BUFFERS, self.cuda)

    def works(self, holder: Holder) -> Any:
        return self.cuda.stream(self.cuda.streams[holder.stream])

    def use(self, holder: Holder, entry: Entry) -> None:
        """A kernel that reads the slot when its turn comes, however late."""
        self.cuda.streams[holder.stream].queue.append(lambda: self.check(entry))

    @rule(stream=st.integers(0, 3))
    def run_stream(self, stream: int) -> None:
        """The holders' two, and those of copies on demand and ahead of it once there are any."""
        if stream < len(self.cuda.streams):
            self.cuda.streams[stream].synchronize()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "cuda"):
            self.cuda.synchronize()

    @invariant()
    def no_buffer_is_lost_or_shared(self) -> None:
        if hasattr(self, "part"):
            used = [id(e.stage) for e in self.part.entries.values() if e.stage is not None]
            assert sorted([*used, *self.arena.stages.free]) == sorted(id(stage) for stage in self.arena.stages.every)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:page-locking")
@pytest.mark.parametrize("machine", [CacheMachine, DeviceMachine], ids=["host", "device"])
def test_every_order_of_events(machine: type[CacheMachine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "x.bin"
    monkeypatch.setattr(
        fills, "split_jobs", lambda pieces, most: split_jobs(pieces, at_least=1)
    )  # a job for every part
    machine.shared_source = write_experts(path, layers=[0], experts=EXPERTS)  # type: ignore[attr-defined]
    machine.file_bytes = np.frombuffer(path.read_bytes(), np.uint8).tobytes()  # type: ignore[attr-defined]
    case = machine.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
    case("runTest").runTest()
