"""Scratch memory of a layer call: one workspace whose buffers have names, lanes and lifetimes.

A buffer is taken by name within a phase and given back when the phase closes. While it is live the name is refused to
everybody else, with both users in the message; afterwards its memory serves other names of the same lane. A lane is
one queue of work (a stream): memory given back is reused in the queue that used it, never in another, because "given
back" is when the host let go and the device may still be writing. Blocks come in size classes, so a call that repeats
a shape allocates nothing. `poisoned()` overwrites memory when it is handed out and when it comes back: every float
reads NaN then, so that a missing write or a late reader shows.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.system.devices import current_stream

SMALLEST = 512
KEEP_BYTES = 64 << 20
MOST_IDLE = 2
MOST_VIEWS = 32
POISON = 0xFF  # NaN in every float format, -1 in every integer
_POISONED: ContextVar[bool] = ContextVar("moe_lab_poisoned", default=False)


class _Block:
    """A piece of memory, the free list it belongs to, and the views of it handed out before: a decode step asks for the
    same ones again and again."""

    __slots__ = ("memory", "nbytes", "pool", "views")

    def __init__(self, nbytes: int, pool: str, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.nbytes, self.pool = nbytes, pool
        self.views: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    def view(self, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The first `nbytes` as a new tensor, kept in `views`."""
        if len(self.views) >= MOST_VIEWS:
            self.views.clear()
        made = self.views[dtype, shape] = self.memory[:nbytes].view(dtype).view(shape)
        return made

    def poison(self) -> None:
        self.memory.fill_(POISON)


class Scratch:
    """Buffers of one phase in one lane; they live until it closes, those of a nested phase until that one does."""

    def __init__(self, workspace: "Workspace", user: str, lane: str) -> None:
        self._workspace, self.user, self.lane = workspace, user, lane
        self._names: list[str] = []
        self.closed = False

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor. LabError when `name` is live in this lane, or the phase is over."""
        if self.closed:
            raise LabError(f"workspace: {name!r} was asked for in phase {self.user!r}, which has ended.")
        tensor = self._workspace.take(name, shape, dtype, self.user, self.lane)
        self._names.append(name)
        return tensor

    @contextmanager
    def phase(self, name: str) -> Iterator["Scratch"]:
        """A phase inside this one, in the same lane."""
        inner = Scratch(self._workspace, f"{self.user}/{name}", self.lane)
        try:
            yield inner
        finally:
            inner.close()

    def close(self) -> None:
        """Give every buffer back; a second call does nothing."""
        self.closed = True
        while self._names:
            self._workspace.give(self._names.pop(), self.lane)


class Workspace:
    """Named buffers on one device. Not for two threads at once: each call borrows its own (`borrowed`)."""

    def __init__(self, device: torch.device, *, poison: bool = False, keep_bytes: int = KEEP_BYTES) -> None:
        self.device, self.poison, self.keep_bytes = device, poison, keep_bytes
        self.allocations = 0
        self._live: dict[tuple[str, str], tuple[str, _Block]] = {}  # (lane, name) -> user, memory
        self._free: dict[tuple[str, int], list[_Block]] = defaultdict(list)  # (pool, bytes)
        self._kept = 0

    @property
    def live(self) -> tuple[str, ...]:
        """Names taken and not given back, as lane/name."""
        return tuple(f"{lane}/{name}" for lane, name in self._live)

    def open(self, user: str, lane: str = "main") -> Scratch:
        """A phase; close it when nobody on the host needs its buffers any more."""
        return Scratch(self, user, lane)

    def pool(self, lane: str) -> str:
        """Which free list serves a lane: its own."""
        return lane

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, user: str, lane: str) -> Tensor:
        """See `Scratch.take`."""
        held = self._live.get((lane, name))  # some twenty times a decode step: kept short
        if held is not None:
            raise LabError(
                f"workspace: {user!r} asks for buffer {name!r} of lane {lane!r}, which {held[0]!r} still uses. "
                f"Close {held[0]!r} first, or take another name."
            )
        shape = tuple(shape)
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._block(size_class(nbytes), self.pool(lane))
        if self.poison:
            block.poison()
        self._live[lane, name] = user, block
        made = block.views.get((dtype, shape))
        return block.view(nbytes, dtype, shape) if made is None else made

    def give(self, name: str, lane: str) -> None:
        """Give a buffer back. LabError for a name that is not live."""
        held = self._live.pop((lane, name), None)
        if held is None:
            raise LabError(f"workspace: buffer {name!r} of lane {lane!r} is given back, but nobody took it.")
        block = held[1]
        if self.poison:
            block.poison()
        if self._kept + block.nbytes <= self.keep_bytes:
            self._kept += block.nbytes
            self._free[block.pool, block.nbytes].append(block)

    def _block(self, nbytes: int, pool: str) -> _Block:
        free = self._free[pool, nbytes]
        if free:
            self._kept -= nbytes
            return free.pop()
        self.allocations += 1
        return _Block(nbytes, pool, self.device)


@lru_cache(4096)
def size_class(nbytes: int) -> int:
    """Bytes of the block that serves a buffer: an eighth of a power of two upwards, at most 1/8 wasted."""
    if nbytes <= SMALLEST:
        return SMALLEST
    step = max(SMALLEST, 1 << (nbytes - 1).bit_length() >> 4)
    return -(-nbytes // step) * step


_IDLE: dict[tuple[object, ...], list[Workspace]] = defaultdict(list)
_LOCK = threading.Lock()


@contextmanager
def borrowed(device: torch.device) -> Iterator[Workspace]:
    """A workspace nobody else uses, given back when the block ends; after an exception it is dropped, since work
    queued before may still write to it. Kept per device and stream: what a call left queued is over before the next
    one's work begins."""
    stream = current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (device, stream)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        yield Workspace(device, poison=_POISONED.get())  # memory taken while a graph is captured is the graph's own
        return
    with _LOCK:
        workspace = _IDLE[key].pop() if _IDLE[key] else Workspace(device)
    workspace.poison = _POISONED.get()
    yield workspace
    if workspace.live:
        raise LabError(f"workspace: the call ended, but these buffers are still live: {', '.join(workspace.live)}.")
    with _LOCK:
        if len(_IDLE[key]) < MOST_IDLE:
            _IDLE[key].append(workspace)


def release_idle() -> None:
    """Give the memory of all idle workspaces back to torch."""
    with _LOCK:
        _IDLE.clear()


@contextmanager
def poisoned() -> Iterator[None]:
    """Layer calls inside the block overwrite scratch when it is handed out and when it comes back."""
    token = _POISONED.set(True)
    try:
        yield
    finally:
        _POISONED.reset(token)
