"""Arms that a benchmark has to see through, and an honest one to stand beside them."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_lab.arms import Reference


class Honest:
    """The reference arithmetic under a name of its own."""

    name = "honest"

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        return None

    def experts(self, *step: Any) -> None:
        Reference().experts(*step)


class Named(Honest):
    """An honest arm called after its class."""

    @property
    def name(self) -> str:
        return type(self).__name__


class LastOutput(Named):
    """Computes once and hands that out for ever."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, ...], torch.Tensor] = {}

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        if tuple(y.shape) not in self.kept:
            super().experts(x, stack, schedule, groups, y, ctx)
            self.kept[tuple(y.shape)] = y.clone()
        y.copy_(self.kept[tuple(y.shape)])


class ByAddress(LastOutput):
    """Takes the same storage for the same values."""

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        if (x.data_ptr(),) not in self.kept:
            Honest.experts(self, x, stack, schedule, groups, y, ctx)
            self.kept[(x.data_ptr(),)] = y.clone()
        y.copy_(self.kept[(x.data_ptr(),)])


class ContiguousOnly(Named):
    """Walks memory as if rows followed one another."""

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        t, d = x.shape
        storage = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        flat = x.as_strided((min(t * d, storage),), (1,), x.storage_offset())
        rows = torch.cat([flat, flat.new_zeros(max(0, t * d - storage))]).view(t, d).nan_to_num()
        super().experts(rows, stack, schedule, groups, y, ctx)


class ChangesRows(Named):
    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        x.mul_(2)


class ChangesWeights(Named):
    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        unused = ({*range(len(stack.up))} - {g.expert for g in groups}) or {0}
        stack.up.data[min(unused), 0, 0] += 1


class ChangesSchedule(Named):
    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        schedule.weight.mul_(1.0001)


class LeavesRows(Named):
    """Forgets the last pair, whatever lay there."""

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        mine = torch.full_like(y, float("nan"))
        super().experts(x, stack, schedule, groups, mine, ctx)
        pairs = torch.cat([torch.arange(g.first, g.first + g.rows) for g in groups])[:-1]
        at = schedule.token[pairs], schedule.slot[pairs]
        y[at] = mine[at]


class WritesElsewhere(Named):
    """Writes a pair that a step of its own does not hold."""

    per_token = True

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        y[(int(schedule.token[groups[0].first]) + 1) % len(y)] += 1


class SlowAndWrong(Named):
    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        y.mul_(1.1)


class OneBadRow(Named):
    """Right but for the last row, which a mean over many rows would hide."""

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        super().experts(x, stack, schedule, groups, y, ctx)
        y[-1] *= 1.1


class LazyLater(Named):
    """Right in as many calls as a check takes, then nothing."""

    def __init__(self, right: int = 9) -> None:
        self.left = right

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        self.left -= 1
        if self.left >= 0:
            super().experts(x, stack, schedule, groups, y, ctx)


class ByFirstRow(Named):
    """Remembers results by the values of the first row alone."""

    def __init__(self) -> None:
        self.kept: dict[bytes, torch.Tensor] = {}
        self.hits: list[int] = []  # numbers of the calls that were answered from memory
        self.calls = 0

    def key(self, x: torch.Tensor) -> bytes:
        return x[0].contiguous().view(torch.uint8).numpy().tobytes() + bytes(x.shape[0])

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        key = self.key(x) + schedule.token.numpy().tobytes()
        if key in self.kept:
            self.hits.append(self.calls)
            y.copy_(self.kept[key])
        else:
            super().experts(x, stack, schedule, groups, y, ctx)
            self.kept[key] = y.clone()
        self.calls += 1


class ByAllRows(ByFirstRow):
    """Remembers results by all it was given: right, and as quick as it likes where values come again."""

    def key(self, x: torch.Tensor) -> bytes:
        return x.contiguous().view(torch.uint8).numpy().tobytes()


class Raises(Honest):
    """Raises `error` once it has been right `after` times."""

    def __init__(self, error: Exception, after: int = 0) -> None:
        self.error, self.after, self.name = error, after, f"raises {type(error).__name__}"

    def experts(self, *step: Any) -> None:
        self.after -= 1
        if self.after < 0:
            raise self.error
        super().experts(*step)


class Records(Honest):
    """Keeps every input it sees."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def experts(self, x, *step: Any) -> None:
        self.seen.append(x.clone())
        super().experts(x, *step)
