"""How much of a replay is noted: the levels, each as a context around the steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.events import EventLog
from moe_lab.system.devices import current_stream
from moe_lab.timing import EVENTS, LEVEL, EventPool

Level = Literal[0, 1, 2, 3, "S"]
LEVELS: tuple[Level, ...] = (0, 1, 2, 3, "S")
TIMED: tuple[Level, ...] = (2, 3, "S")  # those that take a device's own times


@contextmanager
def watching(level: Level, cache: ExpertCache | None, log: EventLog) -> Iterator[Any]:
    """Calls inside the block are noted at `level`, and what `cache` does goes to `log`. Gives torch's profiler at level
    3, else None. Waiting for the device at level "S" is an option of the call, not of the clock.
    """
    with _noted(level), _recorded(cache, None if level == 0 else log), _profiled(level) as profile:
        yield profile


@contextmanager
def _noted(level: Level) -> Iterator[None]:
    noted = LEVEL.set(2 if level in (3, "S") else level)
    events = EVENTS.set(EventPool() if level in TIMED else None)
    try:
        yield
    finally:
        EVENTS.reset(events)
        LEVEL.reset(noted)


@contextmanager
def _recorded(cache: ExpertCache | None, log: EventLog | None) -> Iterator[None]:
    """The cache writes to `log` inside the block."""
    if cache is None:
        yield
        return
    before = cache.events
    cache.record(log)
    try:
        yield
    finally:
        cache.record(before)


@contextmanager
def _profiled(level: Level) -> Iterator[Any]:
    """torch's profiler at level 3."""
    if level != 3:
        yield None
        return
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as found:
        yield found


def anchor_on(device: torch.device) -> tuple[Any, int] | None:
    """An event and the host's time when it had happened: where the two clocks meet."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(current_stream(device))
    event.synchronize()
    return event, time.perf_counter_ns()
