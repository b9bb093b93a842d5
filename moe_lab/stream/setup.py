"""What stands behind a cache once it is bound: slots, memory, readers and checks, built together or not at all."""

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moe_lab.stream.access import IoMode
from moe_lab.stream.arena import DeviceArena, HostArena
from moe_lab.stream.direct import SCRATCH_BYTES
from moe_lab.stream.entry import Entry
from moe_lab.stream.fills import Partition
from moe_lab.stream.joined import Readable
from moe_lab.stream.journal import Journal
from moe_lab.stream.memory import whole_pages
from moe_lab.stream.policy import Policy
from moe_lab.stream.reader import ReaderPool
from moe_lab.stream.slots import SlotTable
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.verify import Verifier

SPARE_BUFFERS = 2  # buffers of a device's ring beyond one a thread: being copied out while the next are read into


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes a cache takes: `slot_bytes` each in `slots`, on the device or the host, page-locked buffers of a GPU's, and
    what direct readers widen unaligned reads in (`scratch_bytes`, at most).

    Exact to a page. What Python and torch take themselves is not in it.
    """

    slots: int
    slot_bytes: int
    arena_bytes: int
    locked_bytes: int
    scratch_bytes: int
    on_host: bool

    @property
    def host_bytes(self) -> int:
        """Host memory: the arena of a CPU cache, or the ring of a GPU's, and the scratch."""
        return (self.arena_bytes if self.on_host else 0) + self.locked_bytes + self.scratch_bytes


def plan_memory(
    source: ExpertSource, slots: int, threads: int, device: torch.device, io_mode: str = "direct"
) -> MemoryPlan:
    """The plan for `slots` slots of `source` on `device`, read by `threads` as `io_mode` says."""
    on_host = device.type == "cpu"
    ring = 0 if on_host else (threads + SPARE_BUFFERS) * whole_pages(source.slot_bytes)
    scratch = threads * SCRATCH_BYTES if "direct" in io_mode else 0
    return MemoryPlan(slots, source.slot_bytes, slots * source.slot_bytes, ring, scratch, on_host)


def make_arena(source: ExpertSource, slots: int, threads: int, device: torch.device) -> HostArena | DeviceArena:
    """Memory for the slots. LabError when it cannot be had."""
    if device.type == "cpu":
        return HostArena(slots, source.slot_bytes)
    return DeviceArena(slots, source.slot_bytes, device, buffers=threads + SPARE_BUFFERS)


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
            withdraw=pool.withdraw, request_bytes=request_bytes, verifier=verifier, journal=journal,
        )
        for share in dict.fromkeys(shares)
    }  # fmt: skip
