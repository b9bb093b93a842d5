"""An arm under watch: what it does to memory that is not its own, and what it leaves undone.

`Watched` stands before an arm during the checks (never while the clock runs). It hands over rows in a layout of the
harness's choosing, fills the pairs that the arm has to write with NaN, and looks afterwards at everything the arm could
have touched. T tokens, D width of the experts' rows, K slots.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ARMS, Arm, ArmContext, ExpertStack, Group, Schedule
from moe_lab.arms.guard import is_own

Layout = Callable[[Tensor], Tensor]
WATCHED = " (watched)"
GAP = 8  # columns of NaN beside the rows: a reader that ignores the row stride meets them


def as_given(x: Tensor) -> Tensor:
    """The rows as the layer has them."""
    return x


def with_gaps(x: Tensor) -> Tensor:
    """The same rows [T, D] as a slice of wider ones, NaN between them."""
    wide = x.new_full((x.shape[0], x.shape[1] + GAP), float("nan"))
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def by_columns(x: Tensor) -> Tensor:
    """The same rows stored column after column."""
    return x.T.contiguous().T


def expanded(x: Tensor) -> Tensor:
    """Equal rows as one row with stride 0."""
    return x[:1].expand(*x.shape)


class Watched:
    """The arm, seen through the harness's eyes; `problems` fills as it runs. Lends every other attribute of the arm,
    but those that are None: with them an arm says that it has no such member."""

    def __init__(self, arm: Arm, layout: Layout = as_given) -> None:
        self._arm, self._layout = arm, layout
        # A name of the lab's is the lab's arm's alone; an arm of the user's keeps its own, which its errors then name.
        self.name = arm.name + WATCHED if is_own(arm, ARMS) else arm.name
        self.problems: list[str] = []
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        lent = getattr(self._arm, name)
        if lent is None:
            raise AttributeError(f"arm {self._arm.name!r} has no {name}")
        return lent

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """As the arm says."""
        return self._arm.supports(formats, backend)

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> Any:
        """Let the arm write into poisoned pairs, then look."""
        pairs = torch.cat([torch.arange(g.first, g.first + g.rows, device=y.device) for g in groups])
        own = schedule.token[pairs], schedule.slot[pairs]
        y[own] = float("nan")
        rows = self._layout(x)
        kept = {"x": (rows, rows.clone()), **{n: (t, t.clone()) for n, t in _schedule(schedule).items()}}
        self._calls += 1
        # All of y in every step would be quadratic in the steps of arms that take token after token.
        before = y.clone() if self._calls.bit_count() == 1 else None
        given = self._arm.experts(rows, stack, schedule, groups, y, ctx)
        self.problems += [f"it changed its input {name}" for name, (t, was) in kept.items() if not torch.equal(t, was)]
        bad = ~y[own].isfinite().all(-1)
        if bad.any():
            first = int(bad.nonzero()[0, 0])
            where = f"token {int(own[0][first])}, slot {int(own[1][first])}"
            self.problems.append(
                f"it left {int(bad.sum())} of {len(pairs)} rows of y unwritten or not finite ({where})"
            )
        if before is not None:
            before[own] = y[own]
            if not torch.equal(before.nan_to_num(), y.nan_to_num()):
                self.problems.append("it wrote rows of y that were not its own")
        return given


def _schedule(schedule: Schedule) -> dict[str, Tensor]:
    return {"schedule.token": schedule.token, "schedule.slot": schedule.slot, "schedule.weight": schedule.weight}


def fingerprint(stack: ExpertStack) -> tuple[int, ...]:
    """A sum over every byte of each tensor of the weights: another one when an arm changed any of them."""
    tensors = [t.contiguous().reshape(-1) for q in stack.parts.values() for t in q.tensors.values()]
    return tuple(int(t.view(torch.uint8).sum(dtype=torch.int64)) for t in tensors)


def poison(device: torch.device) -> None:
    """Leave freed memory full of NaN, in the sizes an allocator hands out again: an arm that trusts it gets caught."""
    mib = 2**18  # fp32 values
    large, small = (4, mib), (32, mib // 64)
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] // 2**20  # MiB; half of it is the arm's to fail on
        large, small = (min(8, free // 512), 256 * mib), (64, mib // 8)
    held = [torch.full((n,), float("nan"), device=device) for times, n in (large, small) for _ in range(times)]
    del held
