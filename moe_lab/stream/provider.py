"""Where a layer's expert weights come from: resident tensors, or slots filled from a file.

Both hand out, for a run of experts, an `ExpertStack` to compute with; only the streamed one reads, counts and waits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moe_lab.arms import ExpertBiases, ExpertStack
from moe_lab.formats import QuantTensor
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.device_table import DeviceTable
from moe_lab.stream.lease import Lease
from moe_lab.stream.source import ExpertSource, Part


class Fetched(NamedTuple):
    """A stack to compute with and what it cost: cache hits and misses (distinct experts), bytes read for this call."""

    stack: ExpertStack
    hits: int
    misses: int
    bytes_read: int


@dataclass(frozen=True, slots=True, eq=False)
class ResidentExperts:
    """All E experts in memory; slot = expert id. Fetching is free and counts nothing."""

    stack: ExpertStack
    table: DeviceTable = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", DeviceTable.identity(len(self.stack.up), self.stack.up.device))

    @classmethod
    def of(
        cls, gate: QuantTensor | None, up: QuantTensor, down: QuantTensor, biases: ExpertBiases | None = None
    ) -> "ResidentExperts":
        """Stack [E, F, D] (None: experts without a gate), [E, F, D], [E, D, F]."""
        return cls(ExpertStack(gate, up, down, {e: e for e in range(len(up))}, biases))

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of gate (where there is one), up and down."""
        return tuple(q.format for q in self.stack.parts.values())

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.stack.up.device

    @property
    def slots(self) -> int:
        """Experts that fit at once: all of them."""
        return len(self.stack.up)

    @property
    def complete(self) -> bool:
        """Whether every expert is at hand for ever."""
        return True

    @property
    def by_slot(self) -> ExpertStack:
        """The stack with slots under their own numbers, which are the experts'."""
        return self.stack

    @contextmanager
    def lease(self, experts: Sequence[int]) -> Iterator[Fetched]:
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
    def slots(self) -> int:
        """Experts that fit at once."""
        return self.cache.slots_for(self.layer)

    @property
    def io_mode(self) -> str | None:
        """How the cache reads the file."""
        return self.cache.io_mode

    @contextmanager
    def lease(self, experts: Sequence[int]) -> Iterator[Fetched]:
        """Hold `experts` in slots while the block runs. Reads what is missing; errors name file, layer and expert."""
        with self.cache.lease(self.source, self.layer, list(experts)) as lease:
            gate, up, down = (_stack(part, lease) for part in self.source.parts(self.layer))
            slot_of = dict(zip(experts, lease.slots.tolist(), strict=True))
            yield Fetched(ExpertStack(gate, up, down, slot_of, self.biases), lease.hits, lease.misses, lease.bytes_read)


def _stack(part: Part, lease: Lease) -> QuantTensor:
    """A part of every slot as one tensor, nothing copied; scales as its format holds them."""
    views = {p.field: lease.views(p).view(p.dtype) for p in part.all}
    slots = len(views["data"])
    if "global_scale" in views:
        views["global_scale"] = views["global_scale"].float().reshape(slots)
    return QuantTensor(shape=(slots, *part.shape), format=part.format, codec=part.codec, **views)
