"""One expert's states step by step: several reads an expert, and steps torn by an interrupt."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream import fills
from moe_lab.stream.arena import HostArena
from moe_lab.stream.fills import Entry, Hold, Partition
from moe_lab.stream.jobs import GivenUp, Job, split_jobs
from moe_lab.stream.policy import LRU
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import LastRead
from tests.support.expert_files import write_experts
from tests.support.fake_cuda import FakeCuda, LateArena

KEY = (0, 3)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExpertSource:
    monkeypatch.setattr(fills, "split_jobs", lambda pieces, most: split_jobs(pieces, 1))  # three jobs an expert
    return write_experts(tmp_path / "x.bin")


class Bench:
    """A partition whose jobs wait to be ended by hand."""

    def __init__(self, source: ExpertSource, arena: HostArena | LateArena | None = None) -> None:
        self.jobs: list[Job] = []
        self.torn = 0  # submissions that are interrupted before anything is queued
        self.arena = arena or HostArena(2, source.slot_bytes)
        table = SlotTable(range(2), LRU())
        self.part = Partition(table, source, self.arena, self.submit, self.part_finish)
        self.woken: list[bool] = []

    def submit(self, jobs: Sequence[Job]) -> None:
        if self.torn:
            self.torn -= 1
            raise KeyboardInterrupt
        self.jobs.extend(jobs)

    def part_finish(self, entry: Entry, error: Exception | None) -> None:
        self.woken.append(self.part.finish(entry, error))

    def ask(self) -> tuple[Hold, Entry]:
        hold = Hold(thread=0)
        planned = self.part.plan(hold, [KEY])
        assert planned is not None
        return hold, planned[0][0]

    def end(self, *errors: Exception | None) -> None:
        for error in errors:
            self.jobs.pop(0).done(error)


def test_ready_when_the_last_of_its_reads_has_ended(source: ExpertSource):
    bench = Bench(source)
    _, entry = bench.ask()
    assert not bench.part.advance(entry)
    assert len(bench.jobs) == 3
    bench.end(None, None)
    assert not bench.part.advance(entry)
    bench.end(None)
    assert bench.part.advance(entry)
    assert bench.woken == [False, False, True]
    assert (bench.part.misses, bench.part.bytes_read) == (1, source.expert_nbytes(0))


@pytest.mark.parametrize("failing", [0, 1, 2], ids="job{}".format)
def test_any_failed_read_fails_the_expert_but_its_slot_waits_for_the_others(source: ExpertSource, failing: int):
    bench = Bench(source)
    hold, entry = bench.ask()
    bench.part.advance(entry)
    errors: list[Exception | None] = [None] * 3
    errors[failing] = CheckpointError(source.path, "truncated", "made up", tensor="w", seen=1, wanted=2)
    for ended, error in enumerate(errors, start=1):
        bench.end(error)
        assert (KEY in bench.part.table.resident) == (ended < 3), "the slot went while a read into it was under way"
    with pytest.raises(CheckpointError, match="tensor 'w': layer 0 expert 3: made up"):
        bench.part.advance(entry)
    bench.part.recover(hold, resubmit=True)
    assert len(bench.part.table.free) == 2
    assert bench.part.misses == 0


def test_an_error_that_is_no_file_error_keeps_its_text_and_names_the_expert(source: ExpertSource):
    bench = Bench(source)
    _, entry = bench.ask()
    bench.part.advance(entry)
    bench.end(MemoryError("no room"), None, None)
    with pytest.raises(LabError, match=r"x\.bin: layer 0 expert 3 could not be read: no room"):
        bench.part.advance(entry)


def test_a_torn_submission_is_made_good_for_those_who_joined(source: ExpertSource):
    bench = Bench(source)
    hold, entry = bench.ask()
    joined, same = bench.ask()
    assert same is entry
    bench.torn = 1
    with pytest.raises(KeyboardInterrupt):
        bench.part.advance(entry)
    bench.part.recover(hold, resubmit=True)
    bench.end(None, None, None)
    assert bench.part.advance(entry)
    bench.part.release(joined, [entry])
    assert list(bench.part.table.idle) == [KEY]


@pytest.mark.filterwarnings("ignore:page-locking")
def test_a_torn_start_keeps_its_buffer_for_the_next_try(source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
    arena = LateArena(2, source.slot_bytes, 1, FakeCuda())
    bench = Bench(source, arena)
    free = len(arena.stages.free)
    _, entry = bench.ask()
    with monkeypatch.context() as patch:
        patch.setattr(ExpertSource, "segments", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.part.advance(entry)
    bench.part.advance(entry)
    assert len(arena.stages.free) == free - 1
    assert len(bench.jobs) == 3


def test_a_torn_plan_leaves_no_key_without_an_entry(source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
    bench = Bench(source)
    hold = Hold(thread=0)
    with monkeypatch.context() as patch:
        patch.setattr(fills, "Entry", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.part.plan(hold, [KEY, (0, 4)])
    bench.part.recover(hold, resubmit=True)
    assert bench.part.table.resident == {}
    assert sorted(bench.part.table.free) == [0, 1]


def test_a_read_that_nobody_waits_for_any_more_still_counts_and_stays(source: ExpertSource):
    bench = Bench(source)
    hold, entry = bench.ask()
    bench.part.advance(entry)
    bench.part.release(hold, [entry])
    assert KEY in bench.part.table.resident
    assert KEY not in bench.part.table.idle
    bench.end(None, None, None)
    assert list(bench.part.table.idle) == [KEY]
    assert bench.part.misses == 1


@pytest.mark.parametrize("ahead", [False, True], ids=["demand", "ahead"])
def test_what_was_read_for_a_device_is_kept_when_its_holder_has_left(source: ExpertSource, ahead: bool):
    bench = Bench(source, LateArena(2, source.slot_bytes, 1, FakeCuda()))
    if ahead:
        assert bench.part.prefetch([KEY], most=1) == [KEY]
    hold, entry = bench.ask()
    bench.part.advance(entry)
    bench.part.release(hold, [entry])
    bench.end(None, None, None)
    assert entry.ready
    assert (bench.part.read_ahead, bench.part.misses, list(bench.part.table.idle)) == (ahead, not ahead, [KEY])
    assert len(bench.arena.stages.free) == 1  # type: ignore[union-attr]


def test_the_thread_that_ends_the_last_read_copies_and_wakes_a_holder_only_when_all_is_there(source: ExpertSource):
    cuda = FakeCuda()
    bench = Bench(source, LateArena(2, source.slot_bytes, 2, cuda))
    hold = Hold(thread=0)
    planned = bench.part.plan(hold, [KEY, (0, 4)])
    assert planned is not None
    for entry in planned[0]:
        bench.part.advance(entry)
    bench.end(*[None] * 6)
    assert bench.woken == [False] * 5 + [True]
    assert all(entry.ready for entry in planned[0])
    assert len(cuda.streams) == 2  # the holder's, on which nothing was queued, and the copies'
    assert not cuda.streams[0].queue
    assert len(cuda.streams[1].queue) == 4


def test_a_copy_that_cannot_be_queued_fails_the_expert_by_name_and_loses_nothing(source: ExpertSource):
    class Refusing(LateArena):
        def _copy(self, *_: object) -> None:
            raise RuntimeError("no such slot")

    bench = Bench(source, Refusing(2, source.slot_bytes, 1, FakeCuda()))
    hold, entry = bench.ask()
    bench.part.advance(entry)
    bench.end(None, None, None)
    with pytest.raises(LabError, match="layer 0 expert 3 could not be read: no such slot"):
        bench.part.advance(entry)
    bench.part.recover(hold, resubmit=True)
    assert len(bench.part.table.free) == 2
    assert len(bench.arena.stages.free) == 1  # type: ignore[union-attr]


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [GivenUp(), OSError("made up")], ids=["given-up", "failed"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=["first", "second", "last"])
def test_what_did_not_come_whole_is_not_checked(error: Exception, order: tuple[int, ...]):
    """One of three jobs ends in an error, in every order: a checksum of half an expert would only be a second one."""
    last = LastRead(3, [lambda: pytest.fail("checked")])
    ends = [error, None, None]
    assert [last.after(ends[job]) for job in order] == [ends[job] for job in order]


def test_what_came_whole_is_checked_once_by_whoever_is_last():
    wrong = OSError("its bytes")
    last = LastRead(3, [lambda: None, lambda: wrong])
    assert [last.after(None) for _ in range(3)] == [None, None, wrong]
