"""The memory behind a cache: one arena of fixed slots, in host memory or on a GPU.

A host arena is read into directly. A device arena is filled through a ring of page-locked buffers: a reader thread
fills a buffer and queues one copy an expert, on the stream of demand or on that of what is read ahead, so that a copy
neither waits for the caller's kernels nor stands before an urgent one. Order between streams is kept with events: a
slot is not overwritten before the work that read it, a buffer not before the copy out of it.

Slots may keep experts in another layout than files (`packing`): on the host the reader packs them, on a device the
stream of the copy, behind it.

A poisoned arena fills slots that nobody owns any more with NaN bytes: who reads one after its lease sees it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.stream.memory import available_host_bytes, whole_pages
from moe_lab.stream.packing import Packing
from moe_lab.stream.room import allocate, check_room, locked_ring
from moe_lab.stream.stages import Stage, Stages
from moe_lab.stream.streams import running_on
from moe_lab.system.devices import current_stream, record
from moe_lab.workspace import POISON


class _Slots:
    """What both arenas do with a slot that nobody owns."""

    poisoned = False
    tensor: Tensor

    def poison(self) -> None:
        """Fill every slot, and from now on each that is freed, with POISON; on a device behind work that reads it."""
        self.poisoned = True
        for slot in range(len(self.tensor)):
            self.freed(slot)

    def freed(self, slot: int) -> None:
        """Nobody owns what is in `slot` any more."""
        if self.poisoned and len(self.tensor):  # none of them once it was dropped
            self._overwrite(slot)

    def _overwrite(self, slot: int) -> None:
        self._fill(slot)

    def _fill(self, slot: int) -> None:
        self.tensor[slot].fill_(POISON)


class HostArena(_Slots):
    """Slots in ordinary memory, uint8 [S, slot_bytes]. Readers write into them: nothing to copy, nothing to order."""

    staged = False
    packs = False  # whether reader threads bring what they read into the slot's layout
    buffers = 0  # on the way to the slots

    def __init__(self, slots: int, slot_bytes: int, *, beside: int = 0) -> None:
        """`beside`: bytes that have to be free for other things as well. LabError, nothing taken, for too little."""
        wanted = slots * slot_bytes
        check_room(wanted + beside, available_host_bytes(), "host memory", slots, slot_bytes)
        self.tensor = allocate(wanted, torch.device("cpu"), slots, slot_bytes).view(slots, slot_bytes)
        self._bytes = self.tensor.view(-1).numpy().data
        self._slot_bytes = slot_bytes

    def stage(self, slot: int) -> Stage | None:
        """The slot's own memory."""
        start = slot * self._slot_bytes
        return Stage(self._bytes[start : start + self._slot_bytes])

    def publish(
        self, slot: int, stage: Stage, nbytes: int, *, ahead: bool = False, packing: Packing | None = None
    ) -> None:
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


class PackingHostArena(HostArena):
    """Slots whose layout is not the files': readers fill one of `buffers` buffers of `stage_bytes`, and who reads an
    expert's last bytes packs it into its slot, before anybody is told that it is there."""

    packs = True

    def __init__(self, slots: int, slot_bytes: int, stage_bytes: int, buffers: int) -> None:
        raw = buffers * whole_pages(stage_bytes)
        super().__init__(slots, slot_bytes, beside=raw)
        self.buffers = buffers
        block = allocate(raw, torch.device("cpu"), slots, slot_bytes)
        self.stages = Stages(_rows(block, buffers, stage_bytes))

    def stage(self, slot: int) -> Stage | None:
        """The free buffer given back first; None while all are in use."""
        return self.stages.take()

    def recycle(self, stage: Stage) -> None:
        """Give the buffer back."""
        self.stages.give(stage)

    def reclaim(self, in_use: Collection[Stage]) -> None:
        """Give back every buffer that is not `in_use`."""
        self.stages.reclaim(in_use)

    def drop(self) -> None:
        """Give slots and buffers back once the last view of them is gone."""
        super().drop()
        self.stages.clear()


@dataclass(slots=True)
class _SlotOrder:
    """Events of one slot: of its copy (None: that is over) and, per stream, of the last work that read it."""

    arrived: Any = None
    readers: dict[int, Any] = field(default_factory=dict)


class DeviceArena(_Slots):
    """Slots on a CUDA device, filled from `buffers` host buffers of one expert each.

    All methods are called under the cache's lock; `Stage.wait_writable` alone runs in a reader thread, without it.
    `cuda` stands in for `torch.cuda` in tests of the event order.
    """

    staged = True
    packs = False

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        device: torch.device,
        buffers: int,
        cuda: Any = torch.cuda,
        *,
        stage_bytes: int | None = None,
    ) -> None:
        self._device, self._cuda = device, cuda
        wanted, raw = slots * slot_bytes, stage_bytes or 0
        check_room(wanted + 2 * raw, cuda.mem_get_info(device)[0], f"memory on {device}", slots, slot_bytes)
        self.tensor = allocate(wanted, device, slots, slot_bytes).view(slots, slot_bytes)
        # raw rows on the device, one for each stream of copies, where slots keep experts in a layout of their own
        self._raw = {a: allocate(raw, device, slots, slot_bytes) for a in (False, True)} if raw else {}
        self._order = [_SlotOrder() for _ in range(slots)]
        stage_bytes = slot_bytes if stage_bytes is None else stage_bytes
        self._block, self.buffers = locked_ring(buffers, whole_pages(stage_bytes), cuda)
        self.stages = Stages(_rows(self._block.tensor, self.buffers, stage_bytes))
        self._targets: dict[tuple[int, int], Tensor] = {}  # by slot and bytes: a view costs as much as queuing a copy
        self._streams: dict[bool, Any] = {}  # of copies on demand and ahead of it, each made with its first copy

    def stage(self, slot: int) -> Stage | None:
        """The free buffer given back first; None while all are being filled or wait to be copied."""
        return self.stages.take()

    @property
    def locked_bytes(self) -> int:
        """Page-locked bytes of the ring."""
        return self._block.locked_bytes

    def publish(
        self, slot: int, stage: Stage, nbytes: int, *, ahead: bool = False, packing: Packing | None = None
    ) -> None:
        """Queue the copy of a filled buffer into `slot`, through `packing` where there is one, on the stream of demand
        or, `ahead` of it, on another, behind all work that reads the slot.
        """
        stream = self._stream(ahead)
        with running_on(stream, self._cuda):
            if packing is None:
                self._publish(slot, stage, stream, lambda: self._copy(slot, stage, nbytes, stream))
            else:
                self._publish(slot, stage, stream, lambda: self._pack(slot, stage, nbytes, self._raw[ahead], packing))

    def _stream(self, ahead: bool) -> Any:
        if ahead not in self._streams:
            self._streams[ahead] = self._cuda.Stream(self._device)
        return self._streams[ahead]

    def _publish(self, slot: int, stage: Stage, stream: Any, bring: Callable[[], None]) -> None:
        self._behind_readers(slot, stream)
        try:
            bring()
            event = self._event(stream)
        except BaseException:
            stream.synchronize()  # the buffer may be reused without an event: nothing may still be reading it
            raise
        self._order[slot] = _SlotOrder(event, {stream.cuda_stream: event})
        stage.copied = event

    def _behind_readers(self, slot: int, stream: Any) -> None:
        for other, event in self._order[slot].readers.items():
            if other != stream.cuda_stream and not event.query():
                stream.wait_event(event)

    def _overwrite(self, slot: int) -> None:
        stream = self._stream(False)
        with running_on(stream, self._cuda):
            self._behind_readers(slot, stream)
            self._fill(slot)
            event = self._event(stream)
        self._order[slot] = _SlotOrder(event, {stream.cuda_stream: event})

    def warm(self, packings: Iterable[Packing]) -> None:
        """Pack into a slot that nobody has yet what lies in the raw row: kernels are compiled and tables made, on the
        device to stay, before a copy waits for them."""
        for packing in packings:
            packing(self._raw[False], self.tensor[0])
        self._cuda.synchronize(self._device)

    def recycle(self, stage: Stage) -> None:
        """Give the buffer back; its next reader waits for the last copy out of it."""
        self.stages.give(stage)

    def reclaim(self, in_use: Collection[Stage]) -> None:
        """Give back every buffer that is not `in_use`: an interrupted caller may have lost one."""
        self.stages.reclaim(in_use)

    def drop(self) -> None:
        """Give slots and ring back once the last view of them is gone."""
        self._cuda.synchronize(self._device)  # work on any stream may still read the slots
        self.tensor = self.tensor.new_empty(0, self.tensor.shape[1])
        self._targets.clear()
        self._raw.clear()
        self.stages.clear()
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
            stream = current_stream(self._device, self._cuda)
            for event in waiting:
                stream.wait_event(event)

    def leave(self, slots: list[int]) -> None:
        """Remember the work queued so far on the current stream: it may still read these slots."""
        if not slots:
            return
        stream = current_stream(self._device, self._cuda)
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

    def _pack(self, slot: int, stage: Stage, nbytes: int, raw: Tensor, packing: Packing) -> None:
        """Queue copy and packing on the current stream, whose raw row the pack before has read by then."""
        assert stage.tensor is not None
        raw[:nbytes].copy_(stage.tensor[:nbytes], non_blocking=True)
        packing(raw, self.tensor[slot])

    def _event(self, stream: Any) -> Any:
        # blocking: a reader thread that waits for it sleeps instead of spinning
        return record(self._cuda.Event(blocking=True), stream)


def _rows(block: Tensor, rows: int, nbytes: int) -> Tensor:
    """Buffers that each start on a page: direct reads can be pointed there."""
    return block.view(rows, whole_pages(nbytes))[:, :nbytes]
