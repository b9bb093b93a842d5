"""Experts in an arena, found through a slot table that somebody else keeps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from moe_lab.arms import ExpertStack
from moe_lab.errors import LabError
from moe_lab.stream.device_table import DeviceTable, absent
from moe_lab.stream.provider import Fetched, InStack

Fetch = Callable[[Sequence[int]], int]
"""Brings experts into slots and both ends of the table up to date; returns the bytes it read."""


@dataclass(frozen=True, slots=True, eq=False)
class TableExperts(InStack):
    """Experts in the slots of `stack` [S, ..], found through `table`. `fetch` is called with experts that are in no
    slot; without it they are an error. LabError when table and stack disagree about slots or device."""

    stack: ExpertStack
    table: DeviceTable
    fetch: Fetch | None = None
    by_slot: ExpertStack = field(init=False)
    """The arena with slots under their own numbers, for work that the table has looked up already."""

    def __post_init__(self) -> None:
        slots = len(self.stack.up)
        object.__setattr__(self, "by_slot", _renumbered(self.stack, {s: s for s in range(slots)}))
        if len(self.table.owner) != slots:
            raise LabError(f"the slot table speaks of S={len(self.table.owner)} slots, the arena holds S={slots}.")
        if self.table.owner.device != self.device:
            raise LabError(
                f"the slot table lives on {self.table.owner.device} but the arena on {self.device}: move one of them."
            )
        if self.stack.biases is not None:
            raise LabError("experts with biases are served resident or streamed, not through a hand-made slot table.")

    @property
    def complete(self) -> bool:
        """Whether every expert is at hand for ever: what a slot table cannot promise."""
        return False

    @contextmanager
    def lease(self, experts: Sequence[int], *, wait: bool = True) -> Iterator[Fetched]:
        """The arena with the slots of `experts`, looked up on the host. LabError naming one that is not at hand."""
        missing = [e for e in experts if self._slot(e) is None]
        read = self.fetch(missing) if missing and self.fetch is not None else 0
        slot_of = {}
        for e in experts:
            slot = self._slot(e)
            if slot is None:
                raise LabError(absent(e, "", int(self.table.slot_of[e]), self.table))
            slot_of[e] = slot
        yield Fetched(_renumbered(self.stack, slot_of), len(experts) - len(missing), len(missing), read)

    def _slot(self, expert: int) -> int | None:
        slot = int(self.table.slot_of[expert])
        return slot if 0 <= slot < self.slots and int(self.table.owner[slot]) == expert else None


def _renumbered(stack: ExpertStack, slot_of: dict[int, int]) -> ExpertStack:
    """The same arena under another table."""
    return ExpertStack(stack.parts.get("gate"), stack.up, stack.down, slot_of)
