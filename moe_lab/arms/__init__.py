"""Arms by name; a user's own object is accepted wherever a name is."""

from collections.abc import Sequence

from moe_lab.arms.base import (
    Arm,
    ArmContext,
    ExpertStack,
    Group,
    Schedule,
    Work,
    batched_schedule,
    per_token_schedule,
    waves,
)
from moe_lab.arms.gemv import Gemv, PerToken
from moe_lab.arms.reference import Reference
from moe_lab.errors import LabError, LabTypeError

ARMS: dict[str, Arm] = {a.name: a for a in (Reference(), PerToken(), Gemv())}
AUTO_ORDER = ("gemv", "reference")


def get_arm(arm: str | Arm, formats: Sequence[str], backend: str) -> Arm:
    """The arm that will run, checked against the weights' formats and the backend. LabError says why one cannot.

    "auto" takes the first of gemv, reference that serves them.
    """
    if isinstance(arm, str) and arm == "auto":
        return next(ARMS[n] for n in AUTO_ORDER if ARMS[n].supports(formats, backend) is None)
    if isinstance(arm, str):
        if arm not in ARMS:
            raise LabError(f"no arm is called {arm!r}; known: auto, {', '.join(ARMS)}.")
        arm = ARMS[arm]
    if not isinstance(arm, Arm):
        raise LabTypeError(f"an arm is a name or an object with name, supports and experts, got {type(arm).__name__}.")
    reason = arm.supports(formats, backend)
    if reason is not None:
        raise LabError(f"arm {arm.name!r} cannot run these weights on {backend}: {reason}.")
    return arm


__all__ = [
    "ARMS", "Arm", "ArmContext", "ExpertStack", "Group", "Schedule", "Work", "batched_schedule", "get_arm",
    "per_token_schedule", "waves",
]  # fmt: skip
