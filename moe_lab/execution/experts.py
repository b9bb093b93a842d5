"""The routed experts of a call whose groups the host knows, or whose arm takes the plan itself."""

from collections.abc import Sequence

from moe_lab.arms import ARMS, Group, PlannedWork, Schedule, waves
from moe_lab.arms.fused import EVERYONE
from moe_lab.arms.guard import blaming, counting, expect_nothing
from moe_lab.execution.state import CallState
from moe_lab.execution.two_phase import phases, worth_two
from moe_lab.routing import ExpertPlan
from moe_lab.stream.provider import Fetched, ResidentExperts


def run_schedule(run: CallState, schedule: Schedule) -> None:
    """Fetch and compute every step, in waves of at most as many experts as fit."""
    run.settle_picks({g.expert for step in schedule.steps for g in step})
    for number, step in enumerate(schedule.steps, 1):
        everyone = [g for g in step if g.expert == EVERYONE]
        cut = [*waves(step[: len(step) - len(everyone)], run.layer.experts.slots)] or [()]
        cut[-1] = (*cut[-1], *everyone)
        for wave in cut:
            last = number == len(schedule.steps) and wave is cut[-1]
            with run.begun([g.expert for g in wave if g.expert != EVERYONE], last) as fetched:
                _compute(run, schedule, wave, fetched)


def _compute(run: CallState, schedule: Schedule, wave: Sequence[Group], fetched: Fetched) -> None:
    """The wave's groups whose weights are at hand, then, once they have landed, the others."""
    stack = run.layer.fused_stack(fetched.stack, EVERYONE) if run.fused else fetched.stack
    awaited = fetched.awaited
    if awaited and not worth_two(fetched.blocked, run.tokens):
        run.landed(fetched)
        awaited = frozenset()
    for part, groups, late in phases(schedule, wave, awaited):
        if late:
            run.landed(fetched)
        with run.submission() as ctx:
            with counting(run.work), blaming(run.arm, "experts", ARMS):
                given = run.arm.experts(run.rows, stack, part, groups, run.y, ctx)
            expect_nothing(run.arm, given, run.y)


def run_plan(run: CallState, plan: ExpertPlan) -> None:
    """Hand the plan over to an arm that takes it, with all experts resident."""
    if not run.tokens:
        return
    experts = run.layer.experts
    assert isinstance(experts, ResidentExperts)
    planned = PlannedWork(plan.token, plan.slot, plan.weight, plan.counts, plan.offsets)
    with run.submission() as ctx, counting(run.work), blaming(run.arm, "experts_of_plan", ARMS):
        run.arm.experts_of_plan(run.rows, experts.stack, planned, run.y, ctx)  # type: ignore[attr-defined]
