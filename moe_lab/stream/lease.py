"""A lease: experts that stay in their slots while somebody computes with them."""

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from moe_lab._types import Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab.stream.entry import Entry, Hold
from moe_lab.stream.source import Part

_NONE = torch.empty(0, dtype=torch.int32)


class Lease:
    """Experts of one layer held in their slots until the `with` block ends; made by `ExpertCache.lease`.

    slots: int32 [n] on the host, the slot of each expert in the order asked for (asked for twice, still one slot).
    hits + misses = distinct experts; late_hits: hits that were still on their way; bytes_read: file bytes of the
    misses; wait_ms: time the caller was blocked; `awaited`: experts whose bytes are still on their way, until `wait`.
    """

    def __init__(
        self,
        layer: int,
        experts: Sequence[int],
        end: Callable[["Lease"], None],
        dropped: "deque[Lease]",
        finish: Callable[["Lease"], None],
    ) -> None:
        self._end, self._dropped, self._finish = end, dropped, finish
        self._arena: Tensor | None = None
        self._parts: tuple[Part, ...] = ()
        self.entries: list[Entry] = []
        self.pending: list[Entry] = []
        self.spread = True
        self.hold = Hold(threading.get_ident())
        self.layer, self.experts = layer, tuple(experts)
        self.slots: Int32[Tensor, " n"] = _NONE
        self.hits = self.misses = self.late_hits = self.bytes_read = 0
        self.wait_ms = 0.0

    def open(self, arena: UInt8[Tensor, "S slot_bytes"], parts: tuple[Part, ...]) -> None:
        """The cache says: every expert has its slot; all but the pending ones' bytes are in place."""
        slot_of = {entry.key[1]: entry.slot for entry in self.entries}
        self.slots = torch.tensor([slot_of[expert] for expert in self.experts], dtype=torch.int32)
        self._arena, self._parts = arena, parts

    def shut(self) -> None:
        """The cache says: nothing is held any more."""
        self._arena = None
        self.entries, self.pending = [], []

    @property
    def awaited(self) -> frozenset[int]:
        """Experts that may not be computed with before `wait`."""
        return frozenset(entry.key[1] for entry in self.pending)

    @property
    def blocked(self) -> bool:
        """Whether `wait` would block the caller now; else what is awaited is being copied: a device alone waits."""
        return any(not entry.ready for entry in self.pending)

    def wait(self) -> None:
        """Block until all bytes are in place: the second phase of a lease that was taken with wait=False. A second call
        does nothing. Raises as `ExpertCache.lease` does, and the lease is over then."""
        if self.pending:
            self._finish(self)

    def views(self, part: Part | str) -> UInt8[Tensor, "S ..."]:
        """One part of every slot of the arena, not copied: raw rows [S, N, row_bytes], or `Part.room` of another
        layout. Index it by `slots`; other slots' bytes are undefined."""
        if self._arena is None:
            raise LabError(f"the lease on layer {self.layer} has ended: its slots may hold other experts by now.")
        if isinstance(part, str):
            named = {p.name: p for p in self._parts}
            if part not in named:
                raise LabError(f"layer {self.layer} has no part {part!r}; it has {', '.join(named)}.")
            part = named[part]
        arena, room = self._arena, part.room
        strides = (arena.stride(0), *((room[1],) if len(room) > 1 else ()), 1)
        return arena.as_strided((arena.shape[0], *room), strides, arena.storage_offset() + part.slot_offset)

    def release(self) -> None:
        """End the lease; a second call does nothing. Work queued so far on the current CUDA stream may still read."""
        if self._arena is not None:
            self._end(self)

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        # Taking the lock here could deadlock (a collector may run this anywhere): the cache does it on its next call.
        if self._arena is not None:
            self._dropped.append(self)
