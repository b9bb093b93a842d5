"""The memory behind a cache: one arena of fixed slots, in host memory or on a GPU.

A host arena is read into directly. A device arena is filled through a ring of page-locked buffers: a reader thread
fills a buffer and queues one copy an expert, on the stream of demand or on that of what is read ahead, so that a copy
neither waits for the caller's kernels nor stands before an urgent one. Order between streams is kept with events: a
slot is not overwritten before the work that read it, a buffer not before the copy out of it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab.stream.memory import LockedBlock, available_host_bytes, host_block, whole_pages
from moe_lab.stream.streams import running_on


@dataclass(slots=True, eq=False)
class Stage:
    """Where a reader puts one expert's bytes: the slot itself on the host, a ring buffer for a device."""

    view: memoryview
    tensor: Tensor | None = None
    copied: Any = None  # event of the last copy out of this buffer, None before the first
    borrowed: bool = False  # the source's own memory, which no ring takes back

    def wait_writable(self) -> None:
        """Block the reader thread until the last copy out of this buffer has ended."""
        if self.copied is not None:
            self.copied.synchronize()


class HostArena:
    """Slots in ordinary memory, uint8 [S, slot_bytes]. Readers write into them: nothing to copy, nothing to order."""

    staged = False

    def __init__(self, slots: int, slot_bytes: int) -> None:
        wanted = slots * slot_bytes
        _preflight(wanted, available_host_bytes(), "host memory", slots, slot_bytes)
        self.tensor = _allocate(wanted, torch.device("cpu"), slots, slot_bytes).view(slots, slot_bytes)
        self._bytes = self.tensor.view(-1).numpy().data
        self._slot_bytes = slot_bytes

    def stage(self, slot: int) -> Stage | None:
        """The slot's own memory."""
        start = slot * self._slot_bytes
        return Stage(self._bytes[start : start + self._slot_bytes])

    def publish(self, slot: int, stage: Stage, nbytes: int, *, ahead: bool = False) -> None:
        """The bytes are in place already."""

    def recycle(self, stage: Stage) -> None:
        """Nothing to give back."""

    def reclaim(self, in_use: Collection[Stage]) -> None:
        """Nothing can have been lost."""

    def drop(self) -> None:
        """Give the memory back once the last view of it is gone."""
        self.tensor, self._bytes = self.tensor.new_empty(0, self._slot_bytes), memoryview(b"")

    def arrived(self, slot: int) -> bool:
        """What was read is there."""
        return True

    def enter(self, slots: list[int]) -> None:
        """Reads ended before the caller was woken."""

    def leave(self, slots: list[int]) -> None:
        """Work on the host is over when the lease ends."""


@dataclass(slots=True)
class _SlotOrder:
    """Events of one slot: of its copy (None: that is over) and, per stream, of the last work that read it."""

    arrived: Any = None
    readers: dict[int, Any] = field(default_factory=dict)


class DeviceArena:
    """Slots on a CUDA device, filled from `buffers` host buffers of one expert each.

    All methods are called under the cache's lock; `Stage.wait_writable` alone runs in a reader thread, without it.
    `cuda` stands in for `torch.cuda` in tests of the event order.
    """

    staged = True

    def __init__(self, slots: int, slot_bytes: int, device: torch.device, buffers: int, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        wanted = slots * slot_bytes
        _preflight(wanted, cuda.mem_get_info(device)[0], f"memory on {device}", slots, slot_bytes)
        self.tensor = _allocate(wanted, device, slots, slot_bytes).view(slots, slot_bytes)
        self._order = [_SlotOrder() for _ in range(slots)]
        stride = whole_pages(slot_bytes)  # direct reads can be pointed at a page
        self._block = LockedBlock(buffers * stride, cuda)
        rows = self._block.tensor.view(buffers, stride)[:, :slot_bytes]
        self._stages = [Stage(row.numpy().data, row) for row in rows]
        self._targets: dict[tuple[int, int], Tensor] = {}  # by slot and bytes: a view costs as much as queuing a copy
        self._streams: dict[bool, Any] = {}  # of copies on demand and ahead of it, each made with its first copy
        self._free: dict[int, Stage] = {}  # by id, oldest first: giving a buffer back twice is giving it back once
        self.reclaim(())

    def stage(self, slot: int) -> Stage | None:
        """The free buffer given back first; None while all are being filled or wait to be copied."""
        return self._free.pop(next(iter(self._free))) if self._free else None

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of the ring."""
        return self._block.locked_bytes

    def publish(self, slot: int, stage: Stage, nbytes: int, *, ahead: bool = False) -> None:
        """Queue the copy of a filled buffer into `slot` on the stream of demand or, `ahead` of it, on another, behind
        all work that reads the slot.
        """
        if ahead not in self._streams:
            self._streams[ahead] = self._cuda.Stream(self._device)
        stream = self._streams[ahead]
        with running_on(stream, self._cuda):
            self._publish(slot, stage, nbytes, stream)

    def _publish(self, slot: int, stage: Stage, nbytes: int, stream: Any) -> None:
        order = self._order[slot]
        for other, event in order.readers.items():
            if other != stream.cuda_stream and not event.query():
                stream.wait_event(event)
        try:
            self._copy(slot, stage, nbytes, stream)
            event = self._event(stream)
        except BaseException:
            stream.synchronize()  # the buffer may be reused without an event: nothing may still be reading it
            raise
        order.arrived = event
        order.readers = {stream.cuda_stream: event}
        stage.copied = event

    def recycle(self, stage: Stage) -> None:
        """Give the buffer back; its next reader waits for the last copy out of it."""
        if not stage.borrowed:
            self._free[id(stage)] = stage

    def reclaim(self, in_use: Collection[Stage]) -> None:
        """Give back every buffer that is not `in_use`: an interrupted caller may have lost one."""
        busy = {id(stage) for stage in in_use}
        for stage in self._stages:
            if id(stage) not in busy:
                self.recycle(stage)

    def drop(self) -> None:
        """Give slots and ring back once the last view of them is gone."""
        self._cuda.synchronize(self._device)  # work on any stream may still read the slots
        self.tensor = self.tensor.new_empty(0, self.tensor.shape[1])
        self._targets.clear()
        self._stages.clear()
        self._free.clear()
        self._block.close()

    def arrived(self, slot: int) -> bool:
        """Whether the copy into `slot` is over: work that reads it then waits for nothing."""
        order = self._order[slot]
        if order.arrived is not None and order.arrived.query():
            order.arrived = None  # asked once: a hit that is years old costs no look at the device
        return order.arrived is None

    def enter(self, slots: list[int]) -> None:
        """Make the current stream wait for bytes that are still being copied."""
        waiting = [self._order[slot].arrived for slot in slots if self._order[slot].arrived is not None]
        if waiting:
            stream = self._cuda.current_stream(self._device)
            for event in waiting:
                stream.wait_event(event)

    def leave(self, slots: list[int]) -> None:
        """Remember the work queued so far on the current stream: it may still read these slots."""
        if not slots:
            return
        stream = self._cuda.current_stream(self._device)
        event = self._event(stream)
        for slot in slots:
            self._order[slot].readers[stream.cuda_stream] = event

    def _copy(self, slot: int, stage: Stage, nbytes: int, stream: Any) -> None:
        """Queue the copy on the current stream, which is `stream`."""
        assert stage.tensor is not None
        if (target := self._targets.get((slot, nbytes))) is None:
            target = self._targets[slot, nbytes] = self.tensor[slot, :nbytes]
        source = stage.tensor if len(stage.tensor) == nbytes else stage.tensor[:nbytes]
        target.copy_(source, non_blocking=True)

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(blocking=True)  # a reader thread that waits for it sleeps instead of spinning
        event.record(stream)
        return event


def _allocate(wanted: int, device: torch.device, slots: int, slot_bytes: int) -> UInt8[Tensor, " wanted"]:
    try:
        if device.type == "cpu":
            return host_block(wanted)
        return torch.empty(wanted, dtype=torch.uint8, device=device)
    except (MemoryError, OSError, RuntimeError) as error:  # torch's own out-of-memory errors are RuntimeErrors
        raise LabError(_too_big(wanted, f"{device} refused it", slots, slot_bytes)) from error


def _preflight(wanted: int, available: int | None, where: str, slots: int, slot_bytes: int) -> None:
    """Refuse before allocating: an overcommitted arena would end the process at its first touch, minutes later."""
    if available is not None and wanted > available:
        raise LabError(_too_big(wanted, f"only {available:,} bytes of {where} are free", slots, slot_bytes))


def _too_big(wanted: int, why: str, slots: int, slot_bytes: int) -> str:
    return (
        f"an expert cache of slots={slots} x {slot_bytes:,} bytes wants {wanted:,} bytes, but {why}. "
        "Lower slots or gib."
    )
