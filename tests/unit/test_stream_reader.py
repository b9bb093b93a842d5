"""The reader pool and its short-read loop."""

import errno
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.jobs import Job, Piece, read_piece, split_jobs
from moe_lab.stream.reader import ReaderPool

DATA = np.random.default_rng(7).bytes(96)
GIB = 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.bin"
    file.write_bytes(DATA)
    return file


def piece(nbytes: int = 96, offset: int = 0) -> Piece:
    return Piece(offset, memoryview(bytearray(nbytes)), "w")


class Done:
    """Collects what jobs report."""

    def __init__(self) -> None:
        self.errors: list[Exception | None] = []
        self.came = threading.Semaphore(0)

    def __call__(self, error: Exception | None) -> None:
        self.errors.append(error)
        self.came.release()

    def wait(self, jobs: int = 1) -> None:
        for _ in range(jobs):
            assert self.came.acquire(timeout=10), "a job was never reported"


def job(done: Done, *pieces: Piece) -> Job:
    return Job(pieces, done, lambda: None)


def failing(times: int, code: int):
    """A read call whose first `times` calls fail with `code`."""
    left = [times]

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return os.preadv(fd, buffers, offset)

    return read


class TestReadPiece:
    @pytest.mark.parametrize("cap", [1, 5, 7, 95, 96], ids="cap{}".format)
    def test_short_reads_are_continued_to_the_exact_bytes(self, path: Path, cap: int):
        calls = []

        def capped(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            calls.append(offset)
            return os.preadv(fd, [buffers[0][:cap]], offset)

        got = piece()
        read_piece(RawFile(path, capped), got)
        assert bytes(got.into) == DATA
        assert calls == list(range(0, 96, cap))

    def test_no_call_asks_for_more_than_1_gib(self, path: Path):
        asked = []

        def pretend(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            asked.append(len(buffers[0]))
            return len(buffers[0])

        untouched = memoryview(np.empty(2 * GIB + 12_345, np.uint8))  # never written: costs no memory
        read_piece(RawFile(path, pretend), Piece(0, untouched, "w"))
        assert sum(asked) == len(untouched)
        assert max(asked) <= GIB

    def test_the_end_of_the_file_is_an_error_with_the_numbers(self, path: Path):
        with pytest.raises(CheckpointError, match=r"96.*100 bytes wanted") as info:
            read_piece(RawFile(path), piece(100))
        assert (info.value.reason, info.value.seen, info.value.wanted) == ("truncated", 96, 100)

    def test_one_device_error_is_retried(self, path: Path):
        got = piece()
        read_piece(RawFile(path, failing(1, errno.EIO)), got)
        assert bytes(got.into) == DATA

    def test_two_device_errors_are_not(self, path: Path):
        with pytest.raises(CheckpointError, match="Input/output error"):
            read_piece(RawFile(path, failing(2, errno.EIO)), piece())

    def test_other_errors_are_not_retried(self, path: Path):
        with pytest.raises(CheckpointError, match="Stale file handle"):
            read_piece(RawFile(path, failing(1, errno.ESTALE)), piece())


class TestSplitJobs:
    def test_small_neighbours_travel_together(self):
        pieces = [piece(60), piece(60), piece(60), piece(10)]
        assert [[len(p.into) for p in group] for group in split_jobs(pieces, at_least=100)] == [[60, 60], [60, 10]]

    def test_large_pieces_travel_alone(self):
        assert [len(group) for group in split_jobs([piece(200), piece(200), piece(200)], at_least=100)] == [1, 1, 1]


class TestPool:
    def test_every_job_is_read_and_reported(self, path: Path):
        pool, done = ReaderPool([RawFile(path) for _ in range(3)]), Done()
        pieces = [piece(8, offset) for offset in range(0, 96, 8)]
        pool.submit([job(done, p) for p in pieces])
        done.wait(len(pieces))
        pool.close()
        assert b"".join(p.into for p in pieces) == DATA
        assert done.errors == [None] * len(pieces)

    def test_a_job_submitted_twice_is_done_once(self, path: Path):
        pool, done = ReaderPool([RawFile(path), RawFile(path)]), Done()
        twice = job(done, piece())
        pool.submit([twice, twice])
        pool.submit([twice])
        done.wait()
        pool.close()
        assert done.errors == [None]

    def test_an_error_is_reported_and_the_thread_goes_on(self, path: Path):
        pool, done = ReaderPool([RawFile(path)]), Done()
        pool.submit([job(done, piece(97)), job(done, piece(96))])
        done.wait(2)
        pool.close()
        assert [type(error) for error in done.errors] == [CheckpointError, type(None)]

    def test_a_broken_callback_costs_no_thread(self, path: Path, monkeypatch: pytest.MonkeyPatch):
        shown = []
        monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value))
        pool, done = ReaderPool([RawFile(path)]), Done()

        def broken(error: Exception | None) -> None:
            raise ZeroDivisionError("callback")

        pool.submit([Job([piece()], broken, lambda: None), job(done, piece())])
        done.wait()
        pool.close()
        assert [str(error) for error in shown] == ["callback"]

    def test_closing_reports_what_was_queued_and_ends_what_was_begun(self, path: Path):
        begun, go = threading.Event(), threading.Event()

        def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            begun.set()
            assert go.wait(10)
            return os.preadv(fd, buffers, offset)

        file = RawFile(path, slow)
        descriptor = file.fd
        pool, done = ReaderPool([file]), Done()
        pool.submit([job(done, piece()), job(done, piece())])
        assert begun.wait(10)
        closer = threading.Thread(target=pool.close)
        closer.start()
        time.sleep(0.02)
        assert closer.is_alive(), "close returned while a read was under way"
        go.set()
        closer.join(10)
        assert done.errors[0] is None
        assert isinstance(done.errors[1], LabError)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    def test_close_returns_although_a_read_never_ends(self, path: Path):
        begun, go = threading.Event(), threading.Event()

        def stuck(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            begun.set()
            go.wait(60)
            return 0

        file = RawFile(path, stuck)
        pool = ReaderPool([file, file])
        pool.submit([job(Done(), piece())])
        assert begun.wait(10)
        pool.close(timeout_s=0.05)
        os.fstat(file.fd)  # still open: a thread reads from it
        go.set()

    def test_close_twice_and_submit_after(self, path: Path):
        pool = ReaderPool([RawFile(path), RawFile(path)])
        pool.close()
        pool.close()
        with pytest.raises(LabError, match="closed"):
            pool.submit([job(Done(), piece())])
