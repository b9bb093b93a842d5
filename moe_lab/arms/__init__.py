"""Arms by name; a user's own object is accepted wherever a name is."""

from collections.abc import Sequence

from moe_lab.arms.base import Arm, ArmContext, ArmExtras, Work
from moe_lab.arms.by_rows import ByRows, Range, Table
from moe_lab.arms.gemv import Gemv, PerToken
from moe_lab.arms.gemv_float import has_float_products
from moe_lab.arms.grouped import Grouped
from moe_lab.arms.guard import blaming, check_arm, expect_reason, is_own, unread
from moe_lab.arms.mmq import Mmq, MmqFolded
from moe_lab.arms.names import split_layout
from moe_lab.arms.reference import Reference
from moe_lab.arms.schedule import DeviceWork, Group, PlannedWork, Schedule, batched_schedule, per_token_schedule, waves
from moe_lab.arms.stack import ExpertBiases, ExpertStack
from moe_lab.arms.table import in_layout, ranked
from moe_lab.errors import LabError
from moe_lab.formats.layouts import RAW
from moe_lab.formats.layouts import refusal as no_layout
from moe_lab.spec import MoESpec

ARMS: dict[str, Arm] = {a.name: a for a in (Reference(), PerToken(), Table(), Gemv(), Grouped(), Mmq(), MmqFolded())}
# Which arm takes a group, by its rows. gemv_mmq: decode's arithmetic up to 8 rows, the tensor cores above.
POLICIES: dict[str, tuple[tuple[int | None, str], ...]] = {"gemv_mmq": ((8, "gemv"), (None, "mmq"))}
ARMS |= {name: ByRows(name, [Range(rows, ARMS[arm]) for rows, arm in row]) for name, row in POLICIES.items()}
AUTO_ORDER = ("gemv", "reference")


def get_arm(
    arm: str | Arm,
    formats: Sequence[str],
    backend: str,
    spec: MoESpec | None = None,
    tokens: int | None = None,
    layout: str = RAW,
) -> Arm:
    """The arm that will run, checked against the weights' formats and layout, the backend and, where given, the expert
    formula of `spec`. LabError says why one cannot.

    "auto" takes the first that serves them: in the order of the device's table (`arms.table`) for this layer and T,
    where there is one, then gemv, reference.
    """
    if isinstance(arm, str) and arm == "auto":
        order = (*in_layout(ranked(backend, formats, spec, tokens), layout), *_untabled(formats, backend))
        fit = (
            ARMS[n] for n in order if n in ARMS and _takes(ARMS[n], tokens)
        )  # the nearest row may be of fewer tokens
        return next(arm for arm in fit if refusal(arm, formats, backend, spec, layout) is None)
    if isinstance(arm, str):
        if arm not in ARMS:
            laid = (
                " A layer runs in its own layout: layer.repacked(...) or lab.open(..., layout=)." if "@" in arm else ""
            )
            raise LabError(f"no arm is called {arm!r}; known: auto, {', '.join(ARMS)}.{laid}")
        arm = ARMS[arm]
    check_arm(arm, ARMS)
    reason = refusal(arm, formats, backend, spec, layout)
    if reason is not None:
        raise LabError(f"arm {arm.name!r} cannot run this layer on {backend}: {reason}.")
    if not _takes(arm, tokens):
        most = getattr(arm, "most_tokens", None)
        raise LabError(f"arm {arm.name!r} serves T <= {most} tokens, x has T={tokens}; arm 'gemv' has the same bits.")
    return arm


def best_layout(backend: str, formats: Sequence[str], spec: MoESpec) -> str:
    """The layout in which a layer is quickest at one token, by the device's table: of the first arm in it that can run
    there. Raw where no table knows the layer, or none of its arms can."""
    for name, layout in map(split_layout, ranked(backend, formats, spec, 1)):
        arm = ARMS.get(name)
        if arm is None or not _takes(arm, 1) or not _lies(formats, spec, layout):
            continue
        if refusal(arm, formats, backend, spec, layout) is None:
            return layout
    return RAW


def _lies(formats: Sequence[str], spec: MoESpec, layout: str) -> bool:
    """Whether gate (where there is one), up and down of these formats can be kept in a layout."""
    *inner, down = formats
    sizes = [*((f, spec.d_expert, spec.d_routed) for f in inner), (down, spec.d_routed, spec.d_expert)]
    return all(no_layout(layout, *each) is None for each in sizes)


def _takes(arm: Arm, tokens: int | None) -> bool:
    """Whether T is within what the arm says it takes at most."""
    most = getattr(arm, "most_tokens", None)
    return most is None or tokens is None or tokens <= most


def _untabled(formats: Sequence[str], backend: str) -> tuple[str, ...]:
    """The order where no table says one. Off the GPU, products that are not of integers are the reference's: as exact
    as those of gemv, and quicker."""
    return AUTO_ORDER if backend == "cuda" or not has_float_products(formats) else AUTO_ORDER[::-1]


def layer_tolerance(arm: str | Arm, formats: Sequence[str]) -> str:
    """The row of the tolerance table for a whole layer of these weights: of the arm's arithmetic where it has a wider
    one, else "bench/layer", as for every arm of the user's."""
    own = ARMS.get(arm) if isinstance(arm, str) else arm if is_own(arm, ARMS) else None
    named = getattr(own, "tolerance", None)
    return "bench/layer" if named is None else named(formats)


def refusal(arm: Arm, formats: Sequence[str], backend: str, spec: MoESpec | None, layout: str = RAW) -> str | None:
    """Why the arm cannot serve; None when it can."""
    with blaming(arm, "supports", ARMS):
        reason = arm.supports(formats, backend)
    reason = expect_reason(arm, reason, "supports")
    lacks = getattr(arm, "lacks", None)
    if reason is None and lacks is not None and spec is not None:
        with blaming(arm, "lacks", ARMS):
            missing = lacks(spec)
        missing = expect_reason(arm, missing, "lacks")
        reason = None if missing is None else f"it has no {missing}; arm 'reference' has"
    if reason is None:
        with blaming(arm, "reads", ARMS):
            reason = unread(arm, layout)
    return reason


__all__ = [
    "ARMS", "Arm", "ArmContext", "ArmExtras", "DeviceWork", "ExpertBiases", "ExpertStack", "Group", "PlannedWork",
    "Schedule", "Work", "batched_schedule", "best_layout", "get_arm", "layer_tolerance", "per_token_schedule",
    "refusal", "waves",
]  # fmt: skip
