"""Which groups of a wave can be computed while others' weights are still on their way.

Rows go to their own places of [T, K, D] and are added up at the end, so the order changes no bit.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from moe_lab.arms import Group, Schedule
from moe_lab.arms.by_rows import part_of
from moe_lab.arms.gemv import closed_up

FEW_TOKENS = 8


def worth_two(blocked: bool, tokens: int) -> bool:
    """Whether to hand a wave over in two parts: where the host would stand still otherwise, and where there is much to
    compute. Where only a device waits for copies, a further submission costs a decode step more host time than the
    copies take (H200, 12 MiB experts page-locked, a quarter at hand: 11.0 ms a step of 4 layers in two, 9.8 in one).
    """
    return blocked or tokens > FEW_TOKENS


def phases(
    schedule: Schedule, wave: Sequence[Group], awaited: Collection[int]
) -> Iterator[tuple[Schedule, Sequence[Group], bool]]:
    """What to hand over, in order: schedule, groups, and whether their bytes must be waited for first. Two parts at
    most; one where all experts are at hand, or none."""
    for late in (False, True):
        groups = [g for g in wave if (g.expert in awaited) is late]
        if groups:
            yield (*_apart(schedule, groups), late)


def _apart(schedule: Schedule, groups: Sequence[Group]) -> tuple[Schedule, Sequence[Group]]:
    """These groups alone; arms want their pairs one after another, as they mostly are."""
    gaps = any(a.first + a.rows != b.first for a, b in pairwise(groups))
    return (part_of(schedule, groups), closed_up(groups)) if gaps else (schedule, groups)
