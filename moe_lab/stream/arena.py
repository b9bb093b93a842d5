"""The memory behind a cache: one arena of fixed slots, in host memory or on a GPU.

A host arena is read into directly. A device arena is filled through a ring of page-locked buffers: a reader thread
fills a buffer and queues one copy an expert, on the stream of demand or on that of what is read ahead, so that a copy
neither waits for the caller's kernels nor stands before an urgent one. Order between streams is kept with events: a
slot is not overwritten before the work that read it, a buffer not before the copy out of it.

Slots may keep experts in another layout than files (`packing`): on the host the reader packs them, on a device the
stream of the copy, behind it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.devices import current_stream
from moe_lab.errors import LabError
from moe_lab.stream.memory import LockedBlock, available_host_bytes, host_block, whole_pages
from moe_lab.stream.packing import Packing
from moe_lab.stream.stages import Stage, Stages
from moe_lab.stream.streams import running_on


class HostArena:
    """Slots in ordinary memory, uint8 [S, slot_bytes]. Readers write into them: nothing to copy, nothing to order."""

    staged = False
    packs = False  # whether reader threads bring what they read into the slot's layout

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
        super().__init__(slots, slot_bytes)
        self.stages = Stages(_rows(host_block(buffers * whole_pages(stage_bytes)), buffers, stage_bytes))

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


class DeviceArena:
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
        wanted = slots * slot_bytes
        _preflight(wanted, cuda.mem_get_info(device)[0], f"memory on {device}", slots, slot_bytes)
        self.tensor = _allocate(wanted, device, slots, slot_bytes).view(slots, slot_bytes)
        # raw rows on the device, one for each stream of copies, where slots keep experts in a layout of their own
        self._raw = {} if stage_bytes is None else {a: self.tensor.new_empty(stage_bytes) for a in (False, True)}
        self._order = [_SlotOrder() for _ in range(slots)]
        stage_bytes = slot_bytes if stage_bytes is None else stage_bytes
        self._block = LockedBlock(buffers * whole_pages(stage_bytes), cuda)
        self.stages = Stages(_rows(self._block.tensor, buffers, stage_bytes))
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
        if ahead not in self._streams:
            self._streams[ahead] = self._cuda.Stream(self._device)
        stream = self._streams[ahead]
        with running_on(stream, self._cuda):
            if packing is None:
                self._publish(slot, stage, stream, lambda: self._copy(slot, stage, nbytes, stream))
            else:
                self._publish(slot, stage, stream, lambda: self._pack(slot, stage, nbytes, self._raw[ahead], packing))

    def _publish(self, slot: int, stage: Stage, stream: Any, bring: Callable[[], None]) -> None:
        order = self._order[slot]
        for other, event in order.readers.items():
            if other != stream.cuda_stream and not event.query():
                stream.wait_event(event)
        try:
            bring()
            event = self._event(stream)
        except BaseException:
            stream.synchronize()  # the buffer may be reused without an event: nothing may still be reading it
            raise
        order.arrived = event
        order.readers = {stream.cuda_stream: event}
        stage.copied = event

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
        event = self._cuda.Event(blocking=True)  # a reader thread that waits for it sleeps instead of spinning
        event.record(stream)
        return event


def _rows(block: Tensor, rows: int, nbytes: int) -> Tensor:
    """Buffers that each start on a page: direct reads can be pointed there."""
    return block.view(rows, whole_pages(nbytes))[:, :nbytes]


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
