"""Arms by name; a user's own object is accepted wherever a name is."""

from collections.abc import Sequence

from moe_lab.arms.base import (
    Arm,
    ArmContext,
    ExpertBiases,
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
from moe_lab.spec import MoESpec

ARMS: dict[str, Arm] = {a.name: a for a in (Reference(), PerToken(), Gemv())}
AUTO_ORDER = ("gemv", "reference")


def get_arm(arm: str | Arm, formats: Sequence[str], backend: str, spec: MoESpec | None = None) -> Arm:
    """The arm that will run, checked against the weights' formats, the backend and, where given, the expert formula of
    `spec`. LabError says why one cannot.

    "auto" takes the first of gemv, reference that serves them.
    """
    if isinstance(arm, str) and arm == "auto":
        return next(ARMS[n] for n in AUTO_ORDER if refusal(ARMS[n], formats, backend, spec) is None)
    if isinstance(arm, str):
        if arm not in ARMS:
            raise LabError(f"no arm is called {arm!r}; known: auto, {', '.join(ARMS)}.")
        arm = ARMS[arm]
    if not isinstance(arm, Arm):
        raise LabTypeError(f"an arm is a name or an object with name, supports and experts, got {type(arm).__name__}.")
    reason = refusal(arm, formats, backend, spec)
    if reason is not None:
        raise LabError(f"arm {arm.name!r} cannot run this layer on {backend}: {reason}.")
    return arm


def refusal(arm: Arm, formats: Sequence[str], backend: str, spec: MoESpec | None) -> str | None:
    """Why the arm cannot serve; None when it can."""
    reason = arm.supports(formats, backend)
    lacks = getattr(arm, "lacks", None)
    if reason is None and lacks is not None and spec is not None:
        missing = lacks(spec)
        reason = None if missing is None else f"it has no {missing}; arm 'reference' has"
    return reason


__all__ = [
    "ARMS", "Arm", "ArmContext", "ExpertBiases", "ExpertStack", "Group", "Schedule", "Work", "batched_schedule",
    "get_arm", "per_token_schedule", "refusal", "waves",
]  # fmt: skip
