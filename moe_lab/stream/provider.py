"""Where a layer's expert weights come from: resident tensors, or slots filled from a file.

Both hand out, for a run of experts, an `ExpertStack` to compute with; only the streamed one reads, counts and waits.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moe_lab.arms import ExpertBiases, ExpertStack
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import REPACKED, Laid
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.device_table import DeviceTable
from moe_lab.stream.lease import Lease
from moe_lab.stream.source import ExpertSource, Part


class Fetched(NamedTuple):
    """A stack to compute with and what it cost: cache hits and misses (distinct experts), bytes read for this call.
    Experts in `awaited` are on their way and may be computed with after `wait()`, which blocks the host where `blocked`
    (else the device alone waits, for copies)."""

    stack: ExpertStack
    hits: int
    misses: int
    bytes_read: int
    awaited: frozenset[int] = frozenset()
    wait: Callable[[], None] = lambda: None
    blocked: bool = False


class InStack:
    """Experts in the slots of one stack [S, ..] that stays: what follows from it."""

    __slots__ = ()
    stack: ExpertStack

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of gate (where there is one), up and down."""
        return tuple(q.format for q in self.stack.parts.values())

    @property
    def layout(self) -> str:
        """How the experts are kept: a name of `formats.layouts`."""
        return self.stack.layout

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.stack.up.device

    @property
    def slots(self) -> int:
        """Experts that fit at once: S."""
        return len(self.stack.up)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentExperts(InStack):
    """All E experts in memory; slot = expert id. Fetching is free and counts nothing."""

    stack: ExpertStack
    table: DeviceTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", DeviceTable.identity(len(self.stack.up), self.stack.up.device))

    @classmethod
    def of(cls, gate: Laid | None, up: Laid, down: Laid, biases: ExpertBiases | None = None) -> "ResidentExperts":
        """Stack [E, F, D] (None: experts without a gate), [E, F, D], [E, D, F], all in one layout."""
        return cls(ExpertStack(gate, up, down, {e: e for e in range(len(up))}, biases))

    @property
    def complete(self) -> bool:
        """Whether every expert is at hand for ever."""
        return True

    @property
    def by_slot(self) -> ExpertStack:
        """The stack with slots under their own numbers, which are the experts'."""
        return self.stack

    @contextmanager
    def lease(self, experts: Sequence[int], *, wait: bool = True) -> Iterator[Fetched]:
        """The stack, as it stands."""
        yield Fetched(self.stack, 0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedExperts:
    """Experts of one layer of a file, held in the slots of a shared cache while they are leased."""

    source: ExpertSource
    layer: int
    cache: ExpertCache
    device: torch.device
    biases: ExpertBiases | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of gate, up and down."""
        return tuple(part.format for part in self.source.parts(self.layer))

    @property
    def layout(self) -> str:
        """How the cache's slots keep them: a name of `formats.layouts`."""
        return self.source.layout

    @property
    def slots(self) -> int:
        """Experts that fit at once."""
        return self.cache.slots_for(self.layer)

    @property
    def io_mode(self) -> str | None:
        """How the cache reads the file."""
        return self.cache.io_mode

    def device_table(self, only: Mapping[int, int] | None = None) -> DeviceTable:
        """Where the cache's experts of this layer lie, as the device looks it up, all that is known queued on the
        current stream; `only`: these experts in these slots, and no other."""
        live = self.cache.live_table()
        return live.of(self.layer) if only is None else live.only(self.layer, only)

    def check_table(self) -> None:
        """LabError where the device's table is not what the cache has told; waits for the device."""
        self.cache.live_table().check()

    @contextmanager
    def lease(self, experts: Sequence[int], *, wait: bool = True) -> Iterator[Fetched]:
        """Hold `experts` in slots while the block runs; without `wait` it may begin while some are still being read.
        Errors name file, layer and expert."""
        with self.cache.lease(self.source, self.layer, list(experts), wait=wait) as lease:
            gate, up, down = (_stack(part, lease) for part in self.source.slot_parts(self.layer))
            slot_of = dict(zip(experts, lease.slots.tolist(), strict=True))
            stack = ExpertStack(gate, up, down, slot_of, self.biases)
            counts = lease.hits, lease.misses, lease.bytes_read
            yield Fetched(stack, *counts, lease.awaited, lease.wait, lease.blocked)

    def settle(self, experts: Iterable[int]) -> None:
        """These are the layer's picks: other guesses for it are given up."""
        self.cache.settle(self.layer, experts)

    def prefetch(self, experts: Iterable[int], layer: int | None = None) -> int:
        """Ask for experts of `layer` (this one) to be read in the background, likeliest first; how many were absent."""
        layer = self.layer if layer is None else layer
        return self.cache.absent(self.source, layer, experts)


def _stack(part: Part, lease: Lease) -> Laid:
    """A part of every slot as one tensor, nothing copied; scales as its format holds them."""
    views = {p.field: lease.views(p).view(p.dtype) for p in part.all}
    slots = len(views["data"])
    if part.layout in REPACKED:
        return REPACKED[part.layout](views["data"], part.format, (slots, *part.shape))
    if "global_scale" in views:
        views["global_scale"] = views["global_scale"].float().reshape(slots)
    return QuantTensor(shape=(slots, *part.shape), format=part.format, codec=part.codec, **views)
