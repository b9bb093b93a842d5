"""Do two arms agree? The same rows and the same picks through each, compared value by value.

Routing is fixed first, so a difference is the arithmetic's and never a flipped expert. Errors are taken against the
layer's formula in float64 with unquantised activations.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from moe_lab._types import Float, Tensor
from moe_lab.arms import ARMS, Arm, layer_tolerance
from moe_lab.arms.guard import is_own
from moe_lab.arms.table import split_layout
from moe_lab.bench.laid import laid
from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.layer import MoELayer, MoEOutput, Options
from moe_lab.numerics.distance import bits, nmse, ulp_distance
from moe_lab.parity.exact import exact_layer
from moe_lab.parity.layer_attribution import side
from moe_lab.parity.next_layer import NextLayer
from moe_lab.parity.operands import Operands, first_operands
from moe_lab.parity.report import Compared, Difference, ParityReport
from moe_lab.parity.setting import known
from moe_lab.routing import Routing
from moe_lab.runs.record import Status

COLUMNS = (
    "arm_a", "arm_b", "bit_equal", "equal_share", "max_ulp", "p999_ulp", "nmse_ab", "nmse_a", "nmse_b", "flip_share",
)  # fmt: skip
Ran = tuple[MoEOutput, list[str]]  # what an arm made, and what it did that it must not


def compare(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arms: Sequence[str | Arm],
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    after: NextLayer | None = None,
) -> ParityReport:
    """Run `arms` (at least two; names or objects) on the same rows and picks, each once; a name may say in which layout
    the experts are to lie, as "gemv@tiles" (without: as they do). LabError for fewer, for names twice or unknown, and
    where every arm fails. `after`: the next layer, to count the tokens whose picks there differ.

    An arm that refuses the layer, raises or runs out of memory has a row in `checks` (UNSUPPORTED, ERROR, OOM) with the
    reason, and none in `table`; the others are compared.

    An arm of the user's is watched: what it must write is NaN before it starts, and a row left so, a row written that
    is not its own, or an input changed is INCORRECT in `checks`, however small the error.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "lab.compare") from e
    if len(arms) < 2:
        raise LabError(f"compare wants at least two arms, got {len(arms)}.")
    routing = layer.route(x) if routing is None else routing
    ran, ended = _run_all(layer, x, arms, routing, options)
    outputs = {name: y.out for name, (y, _) in ran.items()}
    reference = exact_layer(layer, x, routing)
    given = Compared(layer, x, routing, options or Options())
    pairs = list(combinations(outputs, 2))
    flipped = None if after is None else {p: after.flips(outputs[p[0]], outputs[p[1]]) for p in pairs}
    table = pd.DataFrame([_pair(p, outputs, reference, flipped) for p in pairs], columns=list(COLUMNS))
    formats = layer.experts.formats
    checks = pd.DataFrame([row or _check(name, *ran[name], reference, formats) for name, row in ended.items()])
    flips = _stacked(flipped) if flipped else None
    backend = next(reversed(ran.values()))[0].timing.backend
    return ParityReport(table, outputs, reference, _first_of(pairs, outputs, given), backend, checks, given, flips)


def _run_all(
    layer: MoELayer, x: Tensor, arms: Sequence[str | Arm], routing: Routing, options: Options | None
) -> tuple[dict[str, Ran], dict[str, Any]]:
    """Those that ran, by name; and every arm in order, with its row of `checks` where it failed, else None. Raises the
    first arm's error where all fail."""
    from moe_lab.bench.measure_arm import arm_name, expect_arms

    expect_arms(arms)
    ran: dict[str, Ran] = {}
    ended: dict[str, Any] = {}
    errors: list[Exception] = []
    for arm in arms:
        try:
            own, plain = laid(layer, arm)
            y, found = _run(own, x, plain, routing, options)
        except Exception as error:
            errors.append(error)
            ended[arm_name(arm)] = _failed(arm_name(arm), error)
            continue
        # not `with_layout`: on a layer of planes, raw is a layout to be named
        name = y.arm if own is layer else f"{y.arm}@{own.experts.layout}"
        if name in ended:
            raise LabError(f"arm {name!r} was named twice; name each arm once.")
        ran[name], ended[name] = (y, found), None
    if not ran:
        raise errors[0]
    return ran, ended


def _failed(name: str, error: Exception) -> dict[str, object]:
    """A row of `checks`. What the lab refuses is unsupported; what an arm raised, or did as no arm may, is an error."""
    from moe_lab.bench.failures import status_of

    status, reason = status_of(error)
    if isinstance(error, LabError) and not isinstance(error, LabTypeError) and error.__cause__ is None:
        status, reason = Status.UNSUPPORTED, " ".join(str(error).split())
    return {"arm": name, "status": status.value, "nmse": float("nan"), "reason": reason, "shared_arm": None}


def _run(layer: MoELayer, x: Tensor, arm: str | Arm, routing: Routing, options: Options | None) -> Ran:
    """One arm's output, and what a user's arm did that it must not."""
    from moe_lab.bench.watch import Watched  # bench goes by this room's `bits`

    if isinstance(arm, str) or is_own(arm, ARMS):
        return layer(x, arm, routing=routing, options=options), []
    watched = Watched(arm)
    y = layer(x.clone(), watched, routing=routing, options=options)  # the other arms get the rows as they were
    return y, list(dict.fromkeys(watched.problems))


def _check(
    name: str, y: MoEOutput, problems: list[str], reference: Tensor, formats: Sequence[str]
) -> dict[str, object]:
    """A row of `checks`. Rows in which the reference itself is not finite are not judged."""
    from moe_lab.bench.check import too_far

    finite = reference.isfinite().all(-1)
    error, wrong = too_far(y.out[finite], reference[finite], layer_tolerance(split_layout(name)[0], formats))
    reasons = problems or ([wrong] if wrong else [])
    status = Status.INCORRECT if reasons else Status.PASSED
    about = {"arm": name, "status": status.value, "nmse": error, "reason": "; ".join(reasons)}
    return {**about, "shared_arm": y.timing.shared_arm}


def _pair(
    pair: tuple[str, str], outputs: dict[str, Tensor], reference: Tensor, flipped: dict[Any, Any] | None
) -> dict[str, object]:
    a, b = (outputs[name] for name in pair)
    ulp, same = ulp_distance(a, b), bits(a) == bits(b)
    return {
        "arm_a": pair[0], "arm_b": pair[1], "bit_equal": bool(same.all()),
        "equal_share": float(same.double().mean()) if same.numel() else 1.0,
        "max_ulp": int(ulp.max(initial=0)), "p999_ulp": float(np.quantile(ulp, 0.999)) if ulp.size else 0.0,
        "nmse_ab": nmse(a, b), "nmse_a": nmse(a, reference), "nmse_b": nmse(b, reference),
        "flip_share": float("nan") if flipped is None else float(flipped[pair]["flipped"].mean()),
    }  # fmt: skip


def _stacked(flipped: dict[Any, Any]) -> Any:
    import pandas as pd

    return pd.concat([df.assign(arm_a=a, arm_b=b) for (a, b), df in flipped.items()], ignore_index=True)


def _first_of(pairs: list[tuple[str, str]], outputs: dict[str, Tensor], given: Compared) -> Difference | None:
    """The first difference of the first pair that differs, and its operands where both arms' arithmetic is known."""
    for a, b in pairs:
        differs = (bits(outputs[a]) != bits(outputs[b])).nonzero()
        if len(differs):
            token, column = (int(v) for v in differs[0])
            values = float(outputs[a][token, column]), float(outputs[b][token, column])
            return Difference(a, b, token, column, *values, _operands(a, b, given, token, column))
    return None


def _operands(a: str, b: str, given: Compared, token: int, column: int) -> Operands | None:
    if not (known(a) and known(b)):
        return None
    layer, x, routing, options = given
    sides = side(a, x, options), side(b, x, options)
    return first_operands(layer, x, routing, options, sides, token, column)
