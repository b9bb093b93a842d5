"""Which arena slot holds which expert, as the device looks it up.

E experts, S slots. `slot_of` and `owner` say the same thing from both ends, and every lookup checks one against the
other: a table that was not brought up to date when a slot changed hands cannot go unnoticed. Where layers share the
slots, `owner` counts the experts of all of them, this layer's from `base` on.
"""

from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError, LabTypeError


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTable:
    """slot_of int32 [E]: the arena slot that holds an expert, -1 for none; owner int32 [S]: the expert a slot holds, as
    `base` + its number. LabTypeError for other dtypes, LabError for other shapes or devices."""

    slot_of: Tensor
    owner: Tensor
    base: int = 0

    def __post_init__(self) -> None:
        for name, t in (("slot_of", self.slot_of), ("owner", self.owner)):
            if t.dtype != torch.int32:
                raise LabTypeError(f"DeviceTable.{name} is {t.dtype}; wanted int32.")
            if t.ndim != 1 or not t.is_contiguous() or not len(t):
                raise LabError(f"DeviceTable.{name} has shape {list(t.shape)}; wanted a contiguous vector.")
        if self.slot_of.device != self.owner.device:
            raise LabError(
                f"DeviceTable.slot_of lives on {self.slot_of.device} but owner on {self.owner.device}: move one."
            )

    @classmethod
    def identity(cls, experts: int, device: torch.device) -> "DeviceTable":
        """Expert e in slot e: everything resident."""
        every = torch.arange(experts, dtype=torch.int32, device=device)
        return cls(every, every)

    @classmethod
    def of(cls, slots: dict[int, int], experts: int, count: int, device: torch.device) -> "DeviceTable":
        """The table of `slots` (expert -> slot) over `experts` experts and `count` slots."""
        slot_of, owner = torch.full((experts,), -1, dtype=torch.int32), torch.full((count,), -1, dtype=torch.int32)
        for expert, slot in slots.items():
            slot_of[expert], owner[slot] = slot, expert
        return cls(slot_of.to(device), owner.to(device))


def absent(expert: int, where: str, slot: int, table: DeviceTable) -> str:
    """What to say of an expert that the table does not find; `where` names the pick."""
    who = f"expert {expert}{where}"
    if slot < 0:
        return f"{who} is in no slot of the arena (S={len(table.owner)}): fetch it before the call."
    if slot >= len(table.owner):
        return f"the slot table sends {who} to slot {slot}, but the arena has S={len(table.owner)} slots."
    return (
        f"the slot table is out of date: it sends {who} to slot {slot}, which holds "
        f"{int(table.owner[slot]) - table.base}. Bring slot_of and owner up to date together."
    )
