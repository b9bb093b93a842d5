"""A disk with faults, callers that must not hang, and what has to be true of a cache afterwards."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import held, wanted


class Disk:
    """`os.preadv` with faults that a test switches on."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.most_bytes: int | None = None
        self.errors: list[int] = []  # errno of the next calls
        self.delay_s = 0.0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append(offset)
        assert self.open.wait(20)
        time.sleep(self.delay_s)
        if self.errors:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        return os.preadv(fd, [buffers[0][: self.most_bytes]], offset)


@contextmanager
def bound(source: ExpertSource, **how) -> Iterator[ExpertCache]:
    """A cache on the host whose freed slots hold NaN bytes, unless told otherwise."""
    with ExpertCache(**{"poison": True, **how}) as cache:
        cache.bind(source, "cpu")
        yield cache


def together(count: int, work: Callable[[int], object], within_s: float = 20.0) -> list[object]:
    """Run `work(i)` in threads; each one's result or exception. Fails when one does not end."""
    results: list[object] = [None] * count

    def run(i: int) -> None:
        try:
            results[i] = work(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return results


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.002)


def waiting(cache: ExpertCache) -> int:
    """Threads blocked in the cache."""
    return len(cache._changed._waiters)  # type: ignore[attr-defined]


def usable(cache: ExpertCache, source: ExpertSource) -> None:
    """No slot is lost, and every expert comes in right."""
    for layer in source.layers:
        for wave in cache.waves(range(source.num_experts(layer))):
            with cache.lease(source, layer, wave, timeout_s=5) as lease:
                assert held(lease) == wanted(source, layer, wave)
    for part in cache._partitions:
        assert part.held == 0
        assert len(part.table.free) + len(part.table.idle) == len(part.table.slots)


def slices_of(source: ExpertSource) -> dict[int, list[tuple]]:
    """The plain slices that `write_experts` made, for a second source on the same file."""
    return {
        layer: [
            (s.tensor, p.format, s.file_offset, p.nbytes, (source.num_experts(layer), *p.shape))
            for p, s in zip(source.parts(layer), source.segments(layer, 0), strict=True)
        ]
        for layer in source.layers
    }
