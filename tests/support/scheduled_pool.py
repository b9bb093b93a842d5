"""Readers without threads: a job runs when somebody waits or the schedule says so, in any order; time is made up.

A cache over this pool is deterministic: the order of reads, the failures and the clock all come from one seed. A wait
that no job could end is a deadlock, and is reported as one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from moe_lab.errors import CheckpointError
from moe_lab.stream import cache as cache_module
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.jobs import Job, give_up, read_piece
from moe_lab.stream.joined import Readable
from moe_lab.stream.reader import ReaderPool


class ScheduledPool(ReaderPool):
    """What a cache asks of `ReaderPool`. `now`: virtual nanoseconds. `fails`: the share of reads that end in an error.
    `choose(n)`: which of n jobs runs next."""

    def __init__(self, files: Sequence[Readable], choose: Callable[[int], int], background: int = 2) -> None:
        self._files, self.choose, self.background = list(files), choose, background
        self.jobs: list[Job] = []
        self.now = 0
        self.failing: Callable[[], bool] = lambda: False

    @property
    def threads(self) -> tuple[Any, ...]:
        return tuple(self._files)

    def submit(self, jobs: Iterable[Job]) -> None:
        self.jobs.extend(jobs)

    def promote(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.background = False

    def give_up(self, jobs: Iterable[Job]) -> None:
        give_up(jobs)

    def close(self, timeout_s: float = 0.0) -> None:
        for file in self._files:
            file.close()

    def run_one(self) -> bool:
        """One of the jobs that wait, whichever lane it is in; False where there is none."""
        self.jobs = [job for job in self.jobs if job.free]
        if not self.jobs:
            return False
        job = self.jobs.pop(self.choose(len(self.jobs)))
        job.claimed = True
        self.now += 1000 * (1 + self.choose(1000))
        job.writable()
        if self.failing():
            job.done(CheckpointError("made-up.bin", "truncated", "made up"))
            return True
        while job.at < len(job.pieces):
            read_piece(self._files[0], job.pieces[job.at])
            job.at += 1
        job.done(None)
        return True


class Turnstile:
    """The cache's condition: waiting runs a job."""

    def __init__(self, lock: Any, pool: ScheduledPool) -> None:
        self._lock, self._pool = lock, pool

    def wait(self, timeout: float | None = None) -> None:
        self._lock.release()
        try:
            assert self._pool.run_one(), "a deadlock: somebody waits and nothing is under way"
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        pass


def scheduled(
    source: Any, monkeypatch: pytest.MonkeyPatch, choose: Callable[[int], int], **how: Any
) -> tuple[ExpertCache, ScheduledPool]:
    """A bound cache over such a pool."""
    made: list[ScheduledPool] = []

    def make(files: Sequence[Readable]) -> ScheduledPool:
        made.append(ScheduledPool(files, choose))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "ReaderPool", make)
        cache = ExpertCache(threads=2, **how)
        cache.bind(source, "cpu")
    cache._changed = Turnstile(cache._lock, made[0])  # type: ignore[assignment]
    return cache, made[0]


def chooser(seed: int) -> Callable[[int], int]:
    """Choices from a seed."""
    rng = np.random.default_rng(seed)
    return lambda n: int(rng.integers(n))
