"""Background threads that read file pieces into memory the caller owns.

One descriptor a pool (positional reads need no more), plain buffered `preadv`, one queue. A job is a few pieces that
are reported together. The pool knows nothing about slots, policies or devices.
"""

import errno
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.joined import Readable

MAX_THREADS = 64
# A hand-over to a thread costs 13-20 us (two cores, Python 3.11); for less than this it would rival the read.
JOB_BYTES = 1 << 20
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Fill `into` from byte `offset`; `tensor` names it in errors."""

    offset: int
    into: memoryview
    tensor: str


@dataclass(slots=True, eq=False)
class Job:
    """Pieces read by one thread. `done(error | None)` is called once, from that thread, whatever happens.

    `writable` waits until the memory behind the pieces may be overwritten. `claimed`: a thread has taken the job.
    """

    pieces: Sequence[Piece]
    done: Callable[[Exception | None], None]
    writable: Callable[[], None]
    claimed: bool = False


def split_jobs(pieces: Sequence[Piece], at_least: int = JOB_BYTES) -> list[list[Piece]]:
    """Neighbouring pieces together until they hold `at_least` bytes: one hand-over for many small reads."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if room <= 0:
            groups.append([])
            room = at_least
        groups[-1].append(piece)
        room -= piece.into.nbytes
    return groups


def read_piece(file: Readable, piece: Piece) -> None:
    """Read one piece whole. A device error (EIO) is tried once more, then raised; so is an early end of the file."""
    try:
        file.read_into(piece.offset, piece.into, tensor=piece.tensor)
    except CheckpointError as error:
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EIO):
            raise
        file.read_into(piece.offset, piece.into, tensor=piece.tensor)


class ReaderPool:
    """`threads` daemon threads over a file, or several joined, which the pool owns and closes with its last thread."""

    def __init__(self, file: Readable, threads: int) -> None:
        self._file = file
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closing = False
        self._alive = threads
        self._threads = [
            threading.Thread(target=self._work, name=f"moe-lab-reader-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; one that was queued before is still done only once. LabError after `close`.

        A caller whose submission was torn by an interrupt cannot know how far it came: it simply submits again.
        """
        with self._lock:  # so that no job can be queued behind the sentinels, where nobody would report it
            if self._closing:
                raise LabError("the reader pool is closed.")
            for job in jobs:
                self._jobs.put(job)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the threads: queued jobs are reported as failed, reads under way end. A second call does nothing.

        Waits at most `timeout_s`: a read that the system never ends keeps its daemon thread and the descriptor.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for _ in self._threads:
                self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._claim(job):
                try:
                    job.done(self._run(job))
                except Exception:
                    # A broken callback must not cost a thread: the next jobs would wait for ever.
                    threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        with self._lock:
            self._alive -= 1
            last = self._alive == 0
        if last:
            self._file.close()

    def _claim(self, job: Job) -> bool:
        with self._lock:
            first, job.claimed = not job.claimed, True
        return first

    def _run(self, job: Job) -> Exception | None:
        if self._closing:
            return LabError("the expert cache was closed before this read began.")
        try:
            job.writable()
            for piece in job.pieces:
                read_piece(self._file, piece)
        except Exception as error:
            return error
        return None
