"""The reader pool's two lanes, promotion, withdrawal, and the switch interval while it reads."""

import os
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.stream import interval
from moe_lab.stream.interval import short_switches
from moe_lab.stream.jobs import AHEAD_BYTES, GivenUp, Job, Piece, cut
from moe_lab.stream.reader import ReaderPool
from tests.support.faulty_disk import until


class Gate:
    """A read call that waits for `open`, and says which offsets were read in which order."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.order: list[int] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.order.append(offset)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        assert self.open.wait(20)
        with self._lock:
            self.at_once -= 1
        return os.preadv(fd, buffers, offset)


class Bench:
    """A pool behind a gate."""

    def __init__(self, path: Path, threads: int, background: int | None = None) -> None:
        self.gate = Gate()
        self.done: list[int] = []
        self.pool = ReaderPool([RawFile(path, self.gate) for _ in range(threads)], background)

    def job(self, offset: int, background: bool = False) -> Job:
        def done(error: Exception | None) -> None:
            assert error is None
            self.done.append(offset)

        return Job([Piece(offset, memoryview(bytearray(1)), "w")], done, lambda: None, background)

    def begun(self, count: int) -> None:
        until(lambda: len(self.gate.order) == count)

    def finish(self, count: int) -> None:
        self.gate.open.set()
        until(lambda: len(self.done) == count)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(range(100)))
    return file


@pytest.fixture
def one(path: Path) -> Iterator[Bench]:
    bench = Bench(path, 1)
    yield bench
    bench.gate.open.set()
    bench.pool.close()


class TestLanes:
    def test_urgent_jobs_pass_waiting_background_jobs(self, one: Bench):
        one.pool.submit([one.job(0)])
        one.begun(1)
        one.pool.submit([one.job(i, background=True) for i in (10, 11)])
        one.pool.submit([one.job(i) for i in (20, 21)])
        one.finish(5)
        assert one.gate.order == [0, 20, 21, 10, 11]

    def test_a_promoted_job_passes_the_others_and_is_read_once(self, one: Bench):
        one.pool.submit([one.job(0)])
        one.begun(1)
        ahead = [one.job(i, background=True) for i in (10, 11, 12)]
        one.pool.submit(ahead)
        one.pool.promote([ahead[2]])
        one.pool.promote([ahead[2]])
        one.finish(4)
        assert one.gate.order == [0, 12, 10, 11]

    def test_a_job_that_is_being_read_is_not_read_again_when_promoted(self, one: Bench):
        job = one.job(10, background=True)
        one.pool.submit([job])
        one.begun(1)
        one.pool.promote([job])
        one.pool.submit([one.job(0)])
        one.finish(2)
        assert one.gate.order == [10, 0]

    @pytest.mark.parametrize(("threads", "most"), [(1, 1), (2, 1), (4, 2), (5, 2)])
    def test_background_reads_leave_threads_to_urgent_ones(self, path: Path, threads: int, most: int):
        bench = Bench(path, threads)
        bench.pool.submit([bench.job(i, background=True) for i in range(10)])
        bench.begun(most)
        bench.pool.submit([bench.job(50 + i) for i in range(threads - most)])
        bench.begun(threads)  # every urgent job found a thread although ten background jobs wait
        assert sorted(bench.gate.order[most:]) == [50 + i for i in range(threads - most)]
        bench.finish(10 + threads - most)
        bench.pool.close()

    def test_background_jobs_beyond_the_limit_are_done_when_their_turn_comes(self, path: Path):
        bench = Bench(path, 3, background=1)
        bench.gate.open.set()
        bench.pool.submit([bench.job(i, background=True) for i in range(60)])
        bench.finish(60)
        assert bench.gate.most_at_once == 1
        bench.pool.close()

    def test_withdrawn_jobs_are_neither_read_nor_reported(self, one: Bench):
        one.pool.submit([one.job(0)])
        one.begun(1)
        kept, given_up = one.job(10, background=True), [one.job(i, background=True) for i in (11, 12)]
        one.pool.submit([kept, *given_up])
        one.pool.give_up(given_up)
        one.finish(2)
        assert one.gate.order == one.done == [0, 10]

    def test_a_read_that_is_given_up_ends_at_its_next_piece(self, one: Bench):
        ended: list[Exception | None] = []
        pieces = [Piece(i, memoryview(bytearray(1)), "w") for i in (10, 11, 12)]
        job = Job(pieces, ended.append, lambda: None, background=True)
        one.pool.submit([job])
        one.begun(1)
        one.pool.give_up([job])
        one.gate.open.set()
        until(lambda: ended)
        assert [type(error) for error in ended] == [GivenUp]
        assert one.gate.order == [10]
        assert job.read_bytes == 1

    @pytest.mark.parametrize("promoted", [False, True], ids=["a guess", "promoted"])
    def test_a_guess_is_read_by_small_pieces_and_what_is_left_of_a_promoted_one_at_once(
        self, tmp_path: Path, promoted: bool
    ):
        data, at, order, may, ended = os.urandom(4 * AHEAD_BYTES), 100, [], threading.Event(), []
        (tmp_path / "long").write_bytes(data)

        def reads(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            order.append((offset, sum(b.nbytes for b in buffers)))
            assert may.wait(20)
            return os.preadv(fd, buffers, offset)

        into = memoryview(bytearray(3 * AHEAD_BYTES))
        job = Job([Piece(at, into, "w")], ended.append, lambda: None, background=True)
        pool = ReaderPool([RawFile(tmp_path / "long", reads)])
        pool.submit([job])
        until(lambda: order)
        if promoted:
            pool.promote([job])
        may.set()
        until(lambda: ended)
        pool.close()
        ends = [AHEAD_BYTES, at + into.nbytes] if promoted else [AHEAD_BYTES, 2 * AHEAD_BYTES, at + into.nbytes]
        assert [offset + size for offset, size in order] == ends  # pieces end at blocks; no rest of 100 bytes is left
        assert (ended, bytes(into), job.read_bytes) == ([None], data[at : at + into.nbytes], into.nbytes)

    def test_the_last_piece_of_what_is_given_up_is_no_less_read(self, one: Bench):
        job = one.job(10, background=True)
        one.pool.submit([job])
        one.begun(1)
        one.pool.give_up([job])
        one.finish(1)
        assert one.gate.order == [10]

    def test_a_background_read_is_laid_aside_for_an_urgent_one_and_goes_on_where_it_stopped(self, path: Path):
        may, order = {i: threading.Event() for i in (10, 11, 12, 50)}, []

        def reads(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            order.append(offset)
            assert may[offset].wait(20)
            return os.preadv(fd, buffers, offset)

        ended: list[int] = []
        ahead, urgent = ([Piece(i, memoryview(bytearray(1)), "w") for i in at] for at in ((10, 11, 12), (50,)))
        pool = ReaderPool([RawFile(path, reads) for _ in range(2)], background=2)
        pool.submit([Job(ahead, lambda error: ended.append(10), lambda: None, background=True)])
        until(lambda: order == [10])
        pool.submit([Job(urgent, lambda error: ended.append(50), lambda: None)])
        until(lambda: order == [10, 50])
        may[10].set()
        until(lambda: not pool._ahead)  # laid aside, as the urgent read goes on
        for event in may.values():
            event.set()
        until(lambda: len(ended) == 2)
        assert (order, ended) == ([10, 50, 11, 12], [50, 10])
        pool.close()

    def test_closing_reports_both_lanes(self, path: Path):
        bench, errors = Bench(path, 2), []
        bench.pool.submit([bench.job(0), bench.job(1)])
        bench.begun(2)
        waiting = [Job([], errors.append, lambda: None, background=i < 5) for i in range(10)]
        bench.pool.submit(waiting)
        closer = threading.Thread(target=bench.pool.close)
        closer.start()
        bench.gate.open.set()
        closer.join(10)
        assert len(errors) == 10
        assert all("closed" in str(error) for error in errors)

    def test_each_thread_closes_its_own_file_and_the_last_a_shared_one(self, path: Path):
        own, shared = [RawFile(path), RawFile(path)], RawFile(path)
        pools = ReaderPool(own), ReaderPool([shared] * 3)
        numbers = [file.fd for file in (*own, shared)]
        for pool in pools:
            pool.close()
        for number in numbers:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(number)


class TestSwitchInterval:
    @pytest.fixture(autouse=True)
    def usual(self) -> Iterator[None]:
        before = sys.getswitchinterval()
        sys.setswitchinterval(5e-3)
        yield
        sys.setswitchinterval(before)

    def test_it_is_short_while_a_thread_reads_and_as_before_afterwards(self, path: Path):
        benches = [Bench(path, 2), Bench(path, 1)]
        for bench in benches:
            bench.pool.submit([bench.job(1)])
            bench.begun(1)
            assert sys.getswitchinterval() == pytest.approx(interval.INTERVAL_S)
        benches[0].finish(1)
        until(lambda: interval._depth == 1)
        assert sys.getswitchinterval() == pytest.approx(interval.INTERVAL_S)  # the other still reads
        benches[1].finish(1)
        until(lambda: interval._depth == 0)
        assert sys.getswitchinterval() == pytest.approx(5e-3)
        for bench in benches:
            bench.pool.close()

    def test_a_shorter_one_is_left_alone_and_so_is_one_set_meanwhile(self):
        sys.setswitchinterval(1e-4)
        with short_switches():
            assert sys.getswitchinterval() == pytest.approx(1e-4)
        with short_switches():
            sys.setswitchinterval(2e-3)
        assert sys.getswitchinterval() == pytest.approx(2e-3)

    def test_it_is_restored_after_an_exception(self):
        with pytest.raises(KeyError), short_switches():
            raise KeyError
        assert sys.getswitchinterval() == pytest.approx(5e-3)


class TestCut:
    @pytest.mark.parametrize("size", [4096, 8192, 1 << 20], ids=str)
    @pytest.mark.parametrize(("offset", "nbytes"), [(0, 3 << 20), (37, 3 << 20), (4095, 8193), (5, 100), (7, 0)])
    def test_requests_cover_the_piece_and_end_at_blocks(self, offset: int, nbytes: int, size: int):
        whole = memoryview(bytearray(nbytes))
        parts = list(cut([Piece(offset, whole, "w")], size))
        assert sum(p.into.nbytes for p in parts) == nbytes
        assert [p.offset for p in parts] == [offset, *(p.offset for p in parts[1:])]
        for before, after in pairwise(parts):
            assert before.offset + before.into.nbytes == after.offset
            assert after.offset % 4096 == 0
        assert all(p.into.nbytes <= size + 4096 for p in parts)

    def test_a_request_smaller_than_a_block_still_goes_on(self):
        parts = list(cut([Piece(37, memoryview(bytearray(10_000)), "w")], 1000))
        assert sum(p.into.nbytes for p in parts) == 10_000
        assert all(0 < p.into.nbytes <= 5096 for p in parts)
