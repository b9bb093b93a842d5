"""What stands behind a cache once it is bound: slots, memory, readers and checks, built together or not at all."""

import resource
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_lab.formats.layouts import RAW
from moe_lab.stream.access import IoMode
from moe_lab.stream.arena import DeviceArena, HostArena, PackingHostArena
from moe_lab.stream.direct import SCRATCH_BYTES
from moe_lab.stream.entry import Entry
from moe_lab.stream.fills import Partition
from moe_lab.stream.joined import Readable
from moe_lab.stream.journal import Journal
from moe_lab.stream.memory import whole_pages
from moe_lab.stream.policy import Policy
from moe_lab.stream.reader import ReaderPool
from moe_lab.stream.room import NoRoom
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import Verifier

SPARE_BUFFERS = 2  # buffers of a device's ring beyond one a thread: being copied out while the next are read into


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a cache takes: `slot_bytes` each in `slots`, on the device or the host, page-locked buffers of a GPU's,
    what direct readers widen unaligned reads in (`scratch_bytes`, at most), and beside the slots, where they keep
    another layout than files, room for raw experts (`raw_bytes`).

    Exact to a page. What Python and torch take themselves is not in it.
    """

    slots: int
    slot_bytes: int
    arena_bytes: int
    locked_bytes: int
    scratch_bytes: int
    on_host: bool
    raw_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Host memory: the arena of a CPU cache with its raw buffers, or the ring of a GPU's, and the scratch."""
        return (self.arena_bytes + self.raw_bytes if self.on_host else 0) + self.locked_bytes + self.scratch_bytes


def plan_memory(
    source: ExpertSource, slots: int, threads: int, buffers: int, device: torch.device, io_mode: str
) -> MemoryPlan:
    """The plan for `slots` slots of `source` on `device`, read by `threads` as `io_mode` says, through `buffers`."""
    on_host = device.type == "cpu"
    staged = buffers * whole_pages(source.stage_bytes)
    ring = 0 if on_host else staged
    raw = 0 if source.layout == RAW else staged if on_host else 2 * source.stage_bytes
    scratch = threads * SCRATCH_BYTES if "direct" in io_mode else 0
    return MemoryPlan(slots, source.slot_bytes, slots * source.slot_bytes, ring, scratch, on_host, raw)


def make_arena(source: ExpertSource, slots: int, threads: int, device: torch.device) -> HostArena | DeviceArena:
    """Memory for the slots, and what packs experts into their layout, ready. LabError when it cannot be had."""
    buffers, size = threads + SPARE_BUFFERS, source.slot_bytes
    if source.layout == RAW:
        return HostArena(slots, size) if device.type == "cpu" else DeviceArena(slots, size, device, buffers=buffers)
    if device.type == "cpu":
        return PackingHostArena(slots, size, source.stage_bytes, buffers)
    arena = DeviceArena(slots, size, device, buffers=buffers, stage_bytes=source.stage_bytes)
    try:
        arena.warm(packing for layer in source.layers if (packing := source.packing(layer)) is not None)
    except BaseException:
        arena.drop()
        raise
    return arena


def make_fitting_arena(
    source: ExpertSource, slots: int, least: int, threads: int, device: torch.device
) -> tuple[HostArena | DeviceArena, int]:
    """Memory for `slots` slots, and how many it is for: where it cannot be had, for half as many and so on, with one
    RuntimeWarning. LabError, nothing taken, when not even `least` fit.
    """
    count, why = slots, ""
    while True:
        try:
            arena = make_arena(source, count, threads, device)
            break
        except NoRoom as error:
            why = why or error.why
        if count <= least:
            told = why if least == slots else f"{why}, and the least, slots={least}, does not fit either"
            raise NoRoom(slots, source.slot_bytes, slots * source.slot_bytes, told)
        count = max(least, count // 2)
    if count < slots:
        size = source.slot_bytes
        wanted, got = (f"slots={n} ({n * size:,} bytes)" for n in (slots, count))
        warnings.warn(f"the expert cache wanted {wanted} and got {got}: {why}.", RuntimeWarning, stacklevel=4)
    return arena, count


def open_readers(source: ExpertSource, threads: int, io: IoMode) -> list[Readable]:
    """A reader a thread, each with descriptors of its own; one for all where a model of many files would take more than
    half of the descriptors that the process may have.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if threads * source.files > most // 2:
        return [source.open(io)] * threads
    opened: list[Readable] = []
    try:
        for _ in range(threads):
            opened.append(source.open(io))
    except BaseException:
        for file in opened:
            file.close()
        raise
    return opened


def make_partitions(
    shares: Sequence[range],
    source: ExpertSource,
    arena: HostArena | DeviceArena,
    pool: ReaderPool,
    report: Callable[[Entry, Exception | None], None],
    make_policy: Callable[[], Policy],
    request_bytes: int,
    verifier: Verifier,
    journal: Journal,
) -> dict[range, Partition]:
    """One partition, with a policy of its own, for each distinct share of the slots."""
    return {
        share: Partition(
            SlotTable(share, make_policy()), source, arena, pool.submit, report, promote=pool.promote,
            give_up=pool.give_up, request_bytes=request_bytes, verifier=verifier, journal=journal,
        )
        for share in dict.fromkeys(shares)
    }  # fmt: skip
