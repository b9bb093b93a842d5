"""Background threads that read file pieces into memory the caller owns.

One descriptor a thread. Two lanes: what somebody waits for (urgent) goes before what somebody may want (background).
At most `background` threads read for the second at once, none begins while an urgent job is read, and one that reads
already lays its job aside at the next piece: guesses get the disk's spare time and no other. A background job that
turns out to be wanted is promoted, never read twice; one that is not is given up, at the next piece if it was begun.
The pool knows nothing about slots, policies or devices.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from queue import SimpleQueue

from moe_lab.errors import LabError
from moe_lab.stream.interval import short_switches
from moe_lab.stream.jobs import GivenUp, Job, give_up, read_piece
from moe_lab.stream.joined import Readable

MAX_THREADS = 64
_CLOSE_S = 2.0
_LATER = GivenUp()  # a job that was laid aside: it is neither done nor over


class ReaderPool:
    """A daemon thread for each of `files`, which the pool owns and closes: a thread's own, or one shared by several.

    `background`: threads that may read for the background lane at once; None: half of them, at least one.
    """

    def __init__(self, files: Sequence[Readable], background: int | None = None) -> None:
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._lock = threading.Lock()
        self._urgent: deque[Job] = deque()
        self._background: deque[Job] = deque()
        self._ahead: set[Job] = set()  # background jobs being read
        self._wanted: set[Job] = set()  # urgent ones being read
        self.background = max(1, len(files) // 2) if background is None else background
        self._closing = False
        self._users = {id(file): sum(other is file for other in files) for file in files}
        self._threads = [
            threading.Thread(target=self._work, args=(file,), name=f"moe-lab-reader-{i}", daemon=True)
            for i, file in enumerate(files)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """The reading threads, whose processor time is the pool's."""
        return tuple(self._threads)

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs in their lanes; one that was queued before is still done only once. LabError after `close`.

        A caller whose submission was torn by an interrupt cannot know how far it came: it simply submits again.
        """
        with self._lock:  # so that no job can be queued behind the last wake-ups, where nobody would report it
            if self._closing:
                raise LabError("the reader pool is closed.")
            for job in jobs:
                (self._background if job.background else self._urgent).append(job)
                self._wake.put(True)

    def promote(self, jobs: Iterable[Job]) -> None:
        """Somebody waits for these now: those that are still queued change lanes, those being read go on to the end."""
        with self._lock:
            for job in jobs:
                if not job.background:
                    continue
                job.background = job.stop = False
                if job in self._ahead:
                    self._ahead.discard(job)
                    self._wanted.add(job)
                elif job.free:
                    self._urgent.append(job)  # its old place is passed over, as it will be claimed by then
                    self._wake.put(True)

    def give_up(self, jobs: Iterable[Job]) -> None:
        """Nobody wants these any more. Those that no thread reads are never done nor reported; the others end with
        GivenUp at their next piece, or as ever if that was the last.
        """
        with self._lock:
            give_up(jobs)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End the threads: queued jobs are reported as failed, reads under way end. A second call does nothing.

        Waits at most `timeout_s`: a read that the system never ends keeps its daemon thread and the descriptor.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for _ in self._threads:
                self._wake.put(False)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, file: Readable) -> None:
        while self._wake.get():
            if (job := self._take()) is not None:  # None: another thread, or the lane's limit, was faster
                with short_switches():
                    while job is not None:
                        job = self._take(self._do(file, job))
        with self._lock:
            self._users[id(file)] -= 1
            last = self._users[id(file)] == 0
        if last:
            file.close()

    def _do(self, file: Readable, job: Job) -> Job | None:
        """The job, once it is over; None where it was laid aside: another thread may have it by now."""
        try:
            ended = self._run(file, job)
            if ended is _LATER:
                return None
            job.done(ended)
        except Exception:
            # A broken callback must not cost a thread: the next jobs would wait for ever.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        return job

    def _take(self, ended: Job | None = None) -> Job | None:
        """The next job to do, urgent ones first; None where there is none that may be done now."""
        with self._lock:
            if ended is not None:
                self._let_go(ended)
            while self._urgent:
                job = self._urgent.popleft()
                if job.free:
                    job.claimed = True
                    self._wanted.add(job)
                    return job
            while self._background and (self._idle() or self._closing):
                job = self._background.popleft()
                if job.free:
                    job.claimed = True
                    self._ahead.add(job)
                    return job
        return None

    def _idle(self) -> bool:
        """Whether another background job may be read."""
        return not self._wanted and len(self._ahead) < self.background

    def _let_go(self, job: Job) -> None:
        """A thread is done with `job`; behind the last urgent one those wake up who stood back for it."""
        self._ahead.discard(job)
        if job in self._wanted:
            self._wanted.discard(job)
            if not self._wanted and not self._urgent:
                for _ in range(min(self.background, len(self._background))):
                    self._wake.put(True)

    def _lays_aside(self, job: Job) -> bool:
        """Put a background job back to the head of its lane where somebody waits for other reads."""
        if not self._urgent and not self._wanted:  # asked without the lock, as mostly nobody does
            return False
        with self._lock:
            if not job.background or job.stop or self._closing or not (self._urgent or self._wanted):
                return False
            self._ahead.discard(job)
            job.claimed = False
            self._background.appendleft(job)
            return True

    def _run(self, file: Readable, job: Job) -> Exception | None:
        if self._closing:
            return LabError("the expert cache was closed before this read began.")
        try:
            job.writable()
            while job.at < len(job.pieces):
                if job.stop:
                    return GivenUp()
                if job.background and self._lays_aside(job):
                    return _LATER
                read_piece(file, job.next_piece())
                job.at += 1
        except Exception as error:
            return error
        return None
