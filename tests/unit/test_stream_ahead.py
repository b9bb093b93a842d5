"""The line of what may be read ahead: turns, epochs, and what the cache makes of them."""

import threading
from pathlib import Path

import pytest

from moe_lab.stream.ahead import Line
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog, Kind
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted, write_experts
from tests.support.faulty_disk import Disk, bound, until, usable


def keys(layer: int, *experts: int) -> list[tuple[int, int]]:
    return [(layer, e) for e in experts]


class TestLine:
    """No cache: turns are taken by hand."""

    @pytest.fixture
    def dropped(self) -> list[tuple[int, int]]:
        return []

    @pytest.fixture
    def line(self, dropped: list[tuple[int, int]]) -> Line:
        return Line(dropped.append)

    def taken(self, line: Line, most: int) -> list[tuple[int, int]]:
        begun: list[tuple[int, int]] = []
        for turn in line.turns():
            begun += turn.todo[: most - len(begun)]
            turn.todo = [key for key in turn.todo if key not in begun]
        return begun

    def test_layers_take_turns_in_the_order_of_asking_and_likeliest_first(self, line: Line):
        line.ask(1, keys(1, 5, 2), keys(1, 5, 2))
        line.ask(2, keys(2, 7), keys(2, 7))
        assert self.taken(line, 1) == keys(1, 5)
        assert self.taken(line, 2) == [(1, 2), (2, 7)]
        assert not line

    def test_a_newer_wish_for_a_layer_makes_the_older_one_stale(self, line: Line, dropped: list):
        line.ask(1, keys(1, 5, 2), keys(1, 5, 2))
        line.ask(1, keys(1, 3), keys(1, 3))
        assert line.waiting() == keys(1, 3)
        assert dropped == [], "stale ones are dropped when their turn comes, not before"
        assert self.taken(line, 9) == keys(1, 3)
        assert dropped == keys(1, 5, 2)

    def test_known_picks_leave_only_what_they_want(self, line: Line, dropped: list):
        line.ask(1, keys(1, 5, 2, 8), keys(1, 5, 2, 8))
        line.ask(2, keys(2, 4), keys(2, 4))
        line.settle(1, set(keys(1, 8, 0)))
        assert line.waiting() == [(2, 4), (1, 8)]
        assert self.taken(line, 9) == [(2, 4), (1, 8)]
        assert dropped == keys(1, 5, 2)

    def test_settling_another_layer_changes_nothing(self, line: Line, dropped: list):
        line.ask(1, keys(1, 5), keys(1, 5))
        line.settle(2, set())
        assert self.taken(line, 9) == keys(1, 5)
        assert dropped == []

    def test_cleared_is_stale(self, line: Line, dropped: list):
        line.ask(1, keys(1, 5), keys(1, 5))
        line.clear()
        assert (line.waiting(), self.taken(line, 9), dropped) == ([], [], keys(1, 5))

    def test_nothing_absent_takes_no_place(self, line: Line):
        line.ask(1, keys(1, 5), [])
        assert not line


class TestCache:
    @pytest.fixture
    def disk(self) -> Disk:
        return Disk()

    @pytest.fixture
    def source(self, tmp_path: Path, disk: Disk) -> ExpertSource:
        return write_experts(tmp_path / "x.bin", read_call=disk)

    def test_what_exceeds_the_limit_waits_in_line_and_begins_by_itself(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=8, threads=2) as cache:
            assert cache.prefetch(source, 0, [6, 1, 3, 4]) == [6]  # half of two threads
            assert cache._line.waiting() == keys(0, 1, 3, 4)
            disk.open.set()
            until(lambda: cache.read_ahead == 4)
            order = [source.segments(0, e)[0].file_offset for e in (6, 1, 3, 4)]
            assert [offset for offset in disk.calls if offset in order] == order
            usable(cache, source)

    def test_a_limit_holds_over_layers_with_slots_of_their_own(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=8, threads=4, per_layer=True) as cache:
            assert cache.prefetch(source, 0, [0, 1, 2]) == [0, 1]
            assert cache.prefetch(source, 1, [5]) == []
            disk.open.set()
            until(lambda: cache.read_ahead == 4)
            usable(cache, source)

    def test_known_picks_give_up_what_was_guessed_wrongly_and_not_begun(self, source: ExpertSource, disk: Disk):
        disk.open.clear()
        with bound(source, slots=8, threads=1) as cache:
            blocker = threading.Thread(target=lambda: cache.lease(source, 1, [7]).release())
            blocker.start()
            until(lambda: len(disk.calls) == 1)
            assert cache.prefetch(source, 0, [0, 1, 2]) == [0]  # queued behind the blocker, 1 and 2 in line
            cache.settle(0, [2, 5])
            assert (0, 0) not in cache._partitions[0].table.resident
            assert (0, 2) in cache._partitions[0].table.resident  # in the place of what was given up
            assert cache._line.waiting() == []
            disk.open.set()
            blocker.join(10)
            until(lambda: cache.read_ahead == 1)
            usable(cache, source)
            read = set(disk.calls)
            assert source.segments(0, 0)[0].file_offset in read  # by `usable`, not before
            assert cache.cancel_prefetches() == 0

    def test_a_request_reads_at_once_what_stood_in_line_and_nothing_is_read_twice(
        self, source: ExpertSource, disk: Disk
    ):
        disk.open.clear()
        with bound(source, slots=8, threads=2) as cache:
            cache.prefetch(source, 0, [0, 1, 2, 3])
            threading.Timer(0.05, disk.open.set).start()
            with cache.lease(source, 0, [0, 1, 2, 3]) as lease:
                assert held(lease) == wanted(source, 0, [0, 1, 2, 3])
                assert (lease.hits, lease.late_hits, lease.misses) == (1, 1, 3)
            until(lambda: not cache._line)
            assert len(disk.calls) == len(set(disk.calls)) == 12
            usable(cache, source)

    def test_the_line_waits_for_a_slot_and_goes_on_when_one_is_let_go(self, source: ExpertSource):
        with bound(source, slots=2, threads=4) as cache:
            with cache.lease(source, 0, [0, 1]):
                assert cache.prefetch(source, 1, [4]) == []
                assert cache._line.waiting() == keys(1, 4)
            until(lambda: cache.read_ahead == 1)
            usable(cache, source)

    def test_a_request_that_waits_for_slots_goes_before_the_line(self, source: ExpertSource):
        with bound(source, slots=2, threads=4) as cache:
            blocking = cache.lease(source, 0, [0, 1])
            cache.prefetch(source, 1, [4, 5])
            asked = threading.Thread(target=lambda: cache.lease(source, 0, [2, 3]).release())
            asked.start()
            until(lambda: len(cache._wanting) == 1)
            blocking.release()
            asked.join(10)
            assert not asked.is_alive()
            assert cache.misses == 4
            usable(cache, source)

    def test_a_failed_request_makes_the_line_stale(self, source: ExpertSource, disk: Disk):
        with bound(source, slots=8, threads=2) as cache:
            disk.open.clear()
            cache.prefetch(source, 0, [0, 1, 2])
            disk.errors = [5] * 20
            threading.Timer(0.05, disk.open.set).start()
            with pytest.raises(Exception, match="layer 1 expert 6"):
                cache.lease(source, 1, [6])
            disk.errors = []
            until(lambda: not any(e.holds for e in cache._partitions[0].entries.values()))
            assert cache._line.waiting() == []
            usable(cache, source)

    def test_the_log_tells_each_guess_once_and_what_became_of_it(self, source: ExpertSource, disk: Disk):
        log = EventLog()
        with bound(source, slots=8, threads=2) as cache:
            cache.record(log)
            cache.lease(source, 0, [0]).release()
            disk.open.clear()
            cache.prefetch(source, 0, [0, 1, 2, 3])
            cache.settle(0, [1, 3])
            disk.open.set()
            until(lambda: cache.read_ahead == 2)
            until(lambda: not cache._line)
            table = log.table()
            told = {int(e): int(v) for k, e, v in zip(table["kind"], table["expert"], table["value"], strict=True)
                    if k == Kind.PREDICTED}  # fmt: skip
            assert told == {0: 0, 1: 1, 2: 3, 3: 1}  # RESIDENT, BEGUN, IN_LINE, BEGUN
            reads = table[table["kind"] == Kind.READY]
            assert sorted(reads["expert"].tolist()) == [0, 1, 3]
            for read in reads["read"].tolist():
                kinds = table[table["read"] == read]["kind"].tolist()
                assert [k for k in kinds if k in (6, 7, 8, 10)] == [6, 7, 8, 10]  # queued, started, done, ready
            usable(cache, source)


def test_a_prefetch_costs_no_look_at_all_slots(tmp_path: Path):
    """Counting what is under way must not walk over thousands of entries."""
    source = write_experts(tmp_path / "x.bin", layers=[0], experts=600, shapes=lambda _: ((1, 1),) * 3)
    with ExpertCache(slots=600, threads=1) as cache:
        cache.bind(source, "cpu")
        cache.lease(source, 0, range(500)).release()
        part = cache._partitions[0]

        class Counting(dict):
            walks = 0

            def values(self):
                Counting.walks += 1
                return super().values()

        part.entries = Counting(part.entries)
        cache.prefetch(source, 0, range(500, 520))
        until(lambda: cache.read_ahead == 20)
        assert Counting.walks == 0
