"""The work of a call: which (token, slot) pairs are whose, known to the host, to the device alone, or as a plan."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.routing import ExpertPlan
from moe_lab_kernels.grouped.tiles import WorkList, tokens_for, work_list


class Group(NamedTuple):
    """One expert's pairs within a step: pairs `first` .. `first + rows - 1` of the schedule."""

    expert: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order of work. token, slot int64 [P]: pair p is slot `slot[p]` of token `token[p]`; weight fp32 [P] is the
    router's, for formulas that need it before the combine.

    `steps`: each a list of groups handed over together (one submission); a group's pairs are contiguous.
    """

    token: Tensor
    slot: Tensor
    weight: Tensor
    steps: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """Work whose groups only the device knows. In the plan's order, 0 for pairs in no chunk: token int32, weight fp32
    and row int32 [P], the row of y as [T * K, D] that a pair writes. `chunks` int32 [C, 3] (slot of the stack, first
    pair, rows), padded with entries that mean nothing. `most_rows` bounds a chunk's rows, as the host knows. `expert`
    int32 [C]: each chunk's expert, for what belongs to an expert and not to a slot (None: slots are experts)."""

    token: Tensor
    weight: Tensor
    row: Tensor
    chunks: Tensor
    most_rows: int
    expert: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A plan as it lies on the device, experts in the slots of their own numbers: token, slot int32 and weight fp32
    [P], pairs by expert; offsets int32 [E + 1]; counts int32 [E], 0 where an expert's pairs are another arm's. Entries
    past offsets[E] mean nothing."""

    token: Tensor
    slot: Tensor
    weight: Tensor
    counts: Tensor
    offsets: Tensor

    def tiles(self, rows: int | None = None) -> WorkList:
        """Tiles of at most `rows` pairs (None: of about as many as an expert has on average), made on the device."""
        pairs, experts = len(self.token), len(self.counts)
        return work_list(self.counts, self.offsets, pairs, rows or tokens_for(pairs, min(pairs, experts)))

    def known(self) -> Schedule:
        """The same on the host, for the torch paths: one step at most, of the experts that have pairs, ascending."""
        pairs: list[int] = []
        groups: list[Group] = []
        for e, (first, n) in enumerate(zip(self.offsets.tolist(), self.counts.tolist(), strict=False)):
            groups += [Group(e, len(pairs), n)] * (n > 0)
            pairs += range(first, first + n)
        token, slot, weight = (t[pairs] for t in (self.token.long(), self.slot.long(), self.weight))
        return Schedule(token, slot, weight, (tuple(groups),) if groups else ())


def batched_schedule(plan: ExpertPlan) -> Schedule:
    """All groups in one step, experts ascending. Reads the plan back to the host, if any token is there."""
    counts = plan.counts.tolist() if len(plan.token) else []
    groups, first = [], 0
    for expert, rows in enumerate(counts):
        if rows:
            groups.append(Group(expert, first, rows))
            first += rows
    steps = (tuple(groups),) if groups else ()
    return Schedule(plan.token[:first].long(), plan.slot[:first].long(), plan.weight[:first], steps)


def per_token_schedule(plan: ExpertPlan) -> Schedule:
    """One step a token, experts ascending within it; tokens without picks have no step."""
    batched = batched_schedule(plan)
    order = torch.sort(batched.token, stable=True).indices
    expert_of = torch.repeat_interleave(torch.arange(len(plan.counts), device=plan.counts.device), plan.counts.long())
    token, slot, expert = batched.token[order], batched.slot[order], expert_of[order]
    steps: dict[int, list[Group]] = {}
    for p, (t, e) in enumerate(zip(token.tolist(), expert.tolist(), strict=True)):
        groups = steps.setdefault(t, [])
        if groups and groups[-1].expert == e:
            groups[-1] = Group(e, groups[-1].first, groups[-1].rows + 1)
        else:
            groups.append(Group(e, p, 1))
    return Schedule(token, slot, batched.weight[order], tuple(tuple(g) for g in steps.values()))


def waves(groups: Sequence[Group], slots: int) -> Iterable[tuple[Group, ...]]:
    """Cut a step on expert boundaries into runs of at most `slots` experts."""
    if slots < 1:
        raise LabError(f"a cache of {slots} slots holds no expert; wanted at least 1.")
    for i in range(0, len(groups), slots):
        yield tuple(groups[i : i + slots])
