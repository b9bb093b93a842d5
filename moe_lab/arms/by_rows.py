"""Arms made of arms: which of them takes a group is a matter of how many rows the group has, and is written as data.

The seed's policy is two ranges: up to 8 rows of an expert go through the decode GEMV, more to the tensor cores.
`table` adds a bound to gemv and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import Arm, ArmContext
from moe_lab.arms.gemv import Gemv
from moe_lab.arms.guard import unread
from moe_lab.arms.lists import closed_up
from moe_lab.arms.schedule import Group, PlannedWork, Schedule
from moe_lab.arms.stack import ExpertStack
from moe_lab.errors import LabError
from moe_lab.spec import MoESpec
from moe_lab.tolerances import tol


@dataclass(frozen=True, slots=True)
class Range:
    """Groups of at most `rows` rows (None: of any number) go to `arm`."""

    rows: int | None
    arm: Arm


class ByRows:
    """An arm that hands each group to the first of `ranges` that takes its rows. LabError for ranges out of order."""

    per_token = False

    def __init__(self, name: str, ranges: Sequence[Range]) -> None:
        bounds = [r.rows for r in ranges]
        finite = [b for b in bounds if b is not None]
        if not bounds or bounds[-1] is not None or len(finite) != len(bounds) - 1 or finite != sorted(set(finite)):
            raise LabError(
                f"arm {name!r}: rows up to {bounds}; wanted rising bounds with None, for the rest, as the last."
            )
        if finite and finite[0] < 1:
            raise LabError(f"arm {name!r}: rows up to {finite[0]} take no group; wanted at least 1.")
        self.name, self.ranges = name, tuple(ranges)
        if all(getattr(r.arm, "experts_of_plan", None) is not None for r in ranges):
            self.experts_of_plan = self._experts_of_plan  # see `ArmExtras`; not there where a part has none

    def taker(self, rows: int) -> Arm:
        """The arm of a group of so many rows."""
        return next(r.arm for r in self.ranges if r.rows is None or rows <= r.rows)

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """What every part serves."""
        return self._first(lambda arm: arm.supports(formats, backend))

    def lacks(self, spec: MoESpec) -> str | None:
        """What any part lacks."""
        return self._first(lambda arm: arm.lacks(spec) if hasattr(arm, "lacks") else None)  # type: ignore[attr-defined]

    def reads(self, layout: str, activation: str | None) -> str | None:
        """What every part reads."""
        return self._first(lambda arm: unread(arm, layout, activation))

    def tolerance(self, formats: Sequence[str]) -> str:
        """The widest of the parts'."""
        named = [part.tolerance(formats) for r in self.ranges if hasattr(part := r.arm, "tolerance")]  # type: ignore[attr-defined]
        return max(("bench/layer", *named), key=tol)

    def _first(self, ask) -> str | None:
        found = ((r.arm.name, ask(r.arm)) for r in self.ranges)
        return next((f"its part {name!r}: {why}" for name, why in found if why is not None), None)

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`: each part gets its groups in one go."""
        for r in self.ranges:
            mine = [g for g in groups if self.taker(g.rows) is r.arm]
            if mine:
                with ctx.phase(r.arm.name) as own:
                    r.arm.experts(x, stack, part_of(schedule, mine), closed_up(mine), y, own)

    def _experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        above = 0
        for r in self.ranges:
            mine = plan.counts > above
            mine = mine if r.rows is None else mine & (plan.counts <= r.rows)
            with ctx.phase(r.arm.name) as own:
                part = replace(plan, counts=torch.where(mine, plan.counts, 0))
                r.arm.experts_of_plan(x, stack, part, y, own)  # type: ignore[attr-defined]
            above = r.rows or 0

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert's rows are one group."""
        return self.taker(len(x)).shared(x, stack, ctx)  # type: ignore[attr-defined]


def part_of(schedule: Schedule, groups: Sequence[Group]) -> Schedule:
    """The schedule of these groups alone, one after another, in one step."""
    pairs = [slice(g.first, g.first + g.rows) for g in groups]
    token, slot, weight = (torch.cat([t[p] for p in pairs]) for t in (schedule.token, schedule.slot, schedule.weight))
    return Schedule(token, slot, weight, (tuple(closed_up(groups)),))


class Table(Gemv):
    """One token: a launch a projection over its K experts, found by slot. The arithmetic is gemv's, and so are the
    bits; what it adds is the refusal of more than one token."""

    name = "table"
    most_tokens = 1
    experts_of_plan = None  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
