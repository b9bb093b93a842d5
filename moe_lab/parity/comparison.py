"""Do two arms agree? The same rows and the same picks through each, compared value by value.

Routing is fixed first, so a difference is the arithmetic's and never a flipped expert. Errors are taken against the
layer's formula in float64 with unquantised activations. Arms may get the same experts in another format (`stored`).
"""

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from moe_lab._types import Float, Tensor
from moe_lab.arms import ARMS, Arm, layer_tolerance
from moe_lab.arms.guard import is_own
from moe_lab.arms.names import split_layout
from moe_lab.bench.laid import laid
from moe_lab.checks import wants_tensor
from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.layer import MoELayer, MoEOutput, Options
from moe_lab.numerics.distance import bits, nmse, ulp_distance
from moe_lab.parity.exact import exact_layer
from moe_lab.parity.layer_attribution import side
from moe_lab.parity.next_layer import NextLayer
from moe_lab.parity.operands import Operands, first_operands
from moe_lab.parity.report import Compared, Difference, ParityReport
from moe_lab.parity.setting import known
from moe_lab.parity.stored import Asked, check_same, named, split_weights, stored_as, with_weights
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
    other: MoELayer | None = None,
    truth: MoELayer | None = None,
) -> ParityReport:
    """Run `arms` (at least two; names or objects) on the same rows and picks, each once; a name may say in which layout
    the experts are to lie, as "gemv@tiles" (without: as they do). LabError for fewer, for names twice or unknown, and
    where every arm fails. `after`: the next layer, to count the tokens whose picks there differ.

    Formats: "gemv:q4_k" runs on the layer's experts quantised to q4_k, "gemv:other" on those of `other`, the same layer
    of another file; with an `other` that no name asks for, every arm runs on both (and one arm is enough). Errors are
    against each side's own weights, decoded, or for all sides against those of `truth`, a layer of unquantised ones
    (`truth=layer`: against the layer's). LabError where either holds other experts, or the layer's formula differs.

    An arm that refuses the layer, raises or runs out of memory has a row in `checks` (UNSUPPORTED, ERROR, OOM) with the
    reason, and none in `table`; the others are compared.

    An arm of the user's is watched: what it must write is NaN before it starts, and a row left so, a row written that
    is not its own, or an input changed is INCORRECT in `checks`, however small the error.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "lab.compare") from e
    wants_tensor("x", x)
    asked = _asked(layer, arms, other, truth)
    routing = layer.route(x) if routing is None else routing
    layers: dict[str, MoELayer] = {}
    ran, ended = _run_all(layer, x, asked, routing, options, other, layers)
    outputs = {name: y.out for name, (y, _) in ran.items()}
    given = Compared(layer, x, routing, options or Options(), layers, truth)
    own = _formulas(outputs, given)
    true = None if truth is None else exact_layer(truth, x, routing)
    against = own if true is None else dict.fromkeys(outputs, true)
    pairs = list(combinations(outputs, 2))
    flipped = None if after is None else {p: after.flips(outputs[p[0]], outputs[p[1]]) for p in pairs}
    table = pd.DataFrame([_pair(p, outputs, against, flipped) for p in pairs], columns=list(COLUMNS))
    checked = [row or _check(name, *ran[name], own[name], given.of(name)) for name, row in ended.items()]
    flips = _stacked(flipped) if flipped else None
    backend = next(reversed(ran.values()))[0].timing.backend
    first, reference = _first_of(pairs, outputs, given), next(iter(against.values()))
    return ParityReport(table, outputs, reference, first, backend, pd.DataFrame(checked), given, flips, against)


def _asked(layer: MoELayer, arms: Sequence[str | Arm], other: MoELayer | None, truth: MoELayer | None) -> list[Asked]:
    """Arms and whose experts each gets, checked before anything runs."""
    from moe_lab.bench.measure_arm import expect_arms

    if isinstance(arms, str) or (len(arms) < 2 and other is None):
        raise LabError(f"compare wants at least two arms, got {arms if isinstance(arms, str) else len(arms)}.")
    for name, second in (("other", other), ("truth", truth)):
        if second is not None:
            check_same(layer, second, name)
    asked = named(arms, other)
    # an arm on two kinds of weights is one arm: whatever is no text is told apart by what it is
    expect_arms(list({one.arm if isinstance(one.arm, str) else id(one.arm): one.arm for one in asked}.values()))
    names = [one.name for one in asked]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise LabError(f"arm {twice[0]!r} was named twice; name each arm once.")
    return asked


def _run_all(
    layer: MoELayer,
    x: Tensor,
    asked: Sequence[Asked],
    routing: Routing,
    options: Options | None,
    other: MoELayer | None,
    layers: dict[str, MoELayer],
) -> tuple[dict[str, Ran], dict[str, Any]]:
    """Those that ran, by name; and every arm in order, with its row of `checks` where it failed, else None. Raises the
    first arm's error where all fail. `layers` receives those that are not the layer's own, by name."""
    ran: dict[str, Ran] = {}
    ended: dict[str, Any] = {}
    errors: list[Exception] = []
    for one in asked:
        try:
            stored = stored_as(layer, one.weights, other)
            own, plain = laid(stored, one.arm)
            y, found = _run(own, x, plain, routing, options)
        except Exception as error:
            errors.append(error)
            ended[one.name] = _failed(one.name, error)
            continue
        # not `with_layout`: on a layer of planes, raw is a layout to be named
        name = with_weights(y.arm if own is stored else f"{y.arm}@{own.experts.layout}", one.weights)
        if name in ended:
            raise LabError(f"arm {name!r} was named twice; name each arm once.")
        ran[name], ended[name] = (y, found), None
        if stored is not layer:
            layers[name] = stored
    if not ran:
        raise errors[0]
    return ran, ended


def _formulas(names: Iterable[str], given: Compared) -> dict[str, Tensor]:
    """By arm the float64 formula with the weights that it got; each layer's once."""
    made: dict[int, Tensor] = {}
    for name in names:
        own = given.of(name)
        if id(own) not in made:
            made[id(own)] = exact_layer(own, given.x, given.routing)
    return {name: made[id(given.of(name))] for name in names}


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


def _check(name: str, y: MoEOutput, problems: list[str], reference: Tensor, layer: MoELayer) -> dict[str, object]:
    """A row of `checks`. Rows in which the reference itself is not finite are not judged."""
    from moe_lab.bench.check import too_far

    finite = reference.isfinite().all(-1)
    bound = layer_tolerance(split_layout(split_weights(name)[0])[0], layer.experts.formats)
    error, wrong = too_far(y.out[finite], reference[finite], bound)
    reasons = problems or ([wrong] if wrong else [])
    status = Status.INCORRECT if reasons else Status.PASSED
    about = {"arm": name, "status": status.value, "nmse": error, "reason": "; ".join(reasons)}
    return {**about, "shared_arm": y.timing.shared_arm}


def _pair(
    pair: tuple[str, str], outputs: dict[str, Tensor], against: dict[str, Tensor], flipped: dict[Any, Any] | None
) -> dict[str, object]:
    a, b = (outputs[name] for name in pair)
    ulp, same = ulp_distance(a, b), bits(a) == bits(b)
    return {
        "arm_a": pair[0], "arm_b": pair[1], "bit_equal": bool(same.all()),
        "equal_share": float(same.double().mean()) if same.numel() else 1.0,
        "max_ulp": int(ulp.max(initial=0)), "p999_ulp": float(np.quantile(ulp, 0.999)) if ulp.size else 0.0,
        "nmse_ab": nmse(a, b), "nmse_a": nmse(a, against[pair[0]]), "nmse_b": nmse(b, against[pair[1]]),
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
    _, x, routing, options, *_ = given
    sides = side(a, x, options), side(b, x, options)
    return first_operands((given.of(a), given.of(b)), x, routing, options, sides, token, column)
