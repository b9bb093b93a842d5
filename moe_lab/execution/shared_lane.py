"""The queue in which the shared expert runs: the main one, or one beside it.

Beside: a stream that waits for an event recorded before the router's launch, and that the main stream waits for before
the results meet, or before the call leaves with an error. A device without streams (a CPU) runs the work where it is
queued; the lane then orders nothing and still has scratch of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

MAIN, SIDE = "main", "side"


class SideLane:
    """Fork from the current stream, run beside it, join. `cuda` stands in for `torch.cuda` in tests of the order."""

    def __init__(self, device: torch.device, stream: Any, cuda: Any = torch.cuda) -> None:
        self._device, self._stream, self._cuda = device, stream, cuda
        self._begin: Any = None
        self._done: Any = None

    def fork(self) -> None:
        """What is queued on the current stream so far is what the side may read."""
        self._begin = self._mark(self._cuda.current_stream(self._device))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Work queued inside the block goes to the side stream; what was queued counts even if the block fails."""
        self._stream.wait_event(self._begin)
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            self._done = self._mark(self._stream)

    def join(self) -> None:
        """The current stream waits for the side; a second call does nothing."""
        if self._done is not None:
            self._cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    def _mark(self, stream: Any) -> Any:
        event = self._cuda.Event()
        event.record(stream)
        return event


class NoLane:
    """A device without streams: work is over when it was queued."""

    def fork(self) -> None:
        """Nothing to mark."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run it here."""
        yield

    def join(self) -> None:
        """It is over."""


Lane = SideLane | NoLane


@cache
def side_stream(device: torch.device, main: int) -> Any:
    """The stream beside the main one of that handle. Each main stream has its own: memory that side work used is then
    reused only by work that waits for the same main stream, and eager work cannot enter a graph being captured."""
    return torch.cuda.Stream(device)


def side_lane(device: torch.device) -> Lane:
    """A lane for one call on `device`, beside its current stream."""
    if device.type != "cuda":
        return NoLane()
    return SideLane(device, side_stream(device, torch.cuda.current_stream(device).cuda_stream))
