"""Do two arms agree? The same rows and the same picks through each, compared value by value.

Routing is fixed first, so a difference is the arithmetic's and never a flipped expert. Errors are taken against the
reference arm in fp32 with fp32 store points.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import ARMS, Arm
from moe_lab.arms.guard import check_arm, is_own
from moe_lab.card import card
from moe_lab.distance import Kind, error_bins, ulp_distance
from moe_lab.errors import LabError, MissingExtra
from moe_lab.layer import MoELayer, MoEOutput, Options
from moe_lab.routing import Routing
from moe_lab.runs.record import Status

if TYPE_CHECKING:
    import pandas as pd


class Difference(NamedTuple):
    """The first value, in row-major order, in which two arms differ."""

    arm_a: str
    arm_b: str
    token: int
    column: int
    value_a: float
    value_b: float


@dataclass(frozen=True, slots=True, eq=False)
class ParityReport:
    """Outputs of several arms on the same rows and picks.

    `table`: a row a pair with arm_a, arm_b, bit_equal, max_ulp, p999_ulp (in the output's dtype), nmse_ab (a against
    b), nmse_a and nmse_b (each against the fp32 reference). `first_difference` is None when every pair is bit-equal.
    `checks`: a row an arm with arm, status (PASSED or INCORRECT, by the bounds that a benchmark goes by), nmse, reason.
    """

    table: "pd.DataFrame"
    outputs: dict[str, Tensor]
    reference: Tensor
    first_difference: Difference | None
    backend: str
    checks: "pd.DataFrame"

    def _repr_html_(self) -> str:
        f = self.first_difference
        where = f"{f.arm_a} {f.value_a:.6g}, {f.arm_b} {f.value_b:.6g} at [{f.token}, {f.column}]" if f else "none"
        facts = {
            "arms": ", ".join(f"{a} {s}" for a, s in zip(self.checks["arm"], self.checks["status"], strict=True)),
            "rows": list(self.reference.shape),
            "backend": self.backend,
            "first difference": where,
        }
        head = ("arm_a", "arm_b", "bit_equal", "max_ulp", "nmse_ab", "nmse_a", "nmse_b")
        return card("ParityReport", facts, head=head, rows=self.table[list(head)].itertuples(index=False))

    def bins(self, kind: Kind = "relative") -> "pd.DataFrame":
        """Histogram of the distances of every pair, for `lab.plot.parity`."""
        import pandas as pd

        pairs = combinations(self.outputs, 2)
        return pd.concat(
            [error_bins(self.outputs[a], self.outputs[b], arm_a=a, arm_b=b, kind=kind) for a, b in pairs],
            ignore_index=True,
        )


def bits(t: Tensor) -> Tensor:
    """The bit patterns as integers, so that NaN equals the same NaN; -0 counts as 0."""
    whole = {4: torch.int32, 2: torch.int16, 8: torch.int64}[t.element_size()]
    return (t + 0.0).contiguous().view(whole)


def nmse(a: Tensor, b: Tensor) -> float:
    """sum (a - b)^2 / sum b^2 in float64; 0 for two empty or two zero tensors."""
    a, b = a.detach().double(), b.detach().double()
    error, power = float((a - b).square().sum()), float(b.square().sum())
    return 0.0 if error == 0 else error / power if power else float("inf")


def compare(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arms: Sequence[str | Arm],
    *,
    routing: Routing | None = None,
    options: Options | None = None,
) -> ParityReport:
    """Run `arms` (at least two; names or objects) on the same rows and picks. LabError for fewer, or for names
    twice.

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
    outputs: dict[str, Tensor] = {}
    problems: dict[str, list[str]] = {}
    backend = ""
    for arm in arms:
        y, found = _run(layer, x, arm, routing, options)
        if y.arm in outputs:
            raise LabError(f"arm {y.arm!r} was named twice; name each arm once.")
        outputs[y.arm], problems[y.arm], backend = y.out, found, y.timing.backend
    reference = layer(x.float(), "reference", routing=routing, options=Options(stores="fp32")).out
    rows = [_pair(a, b, outputs[a], outputs[b], reference) for a, b in combinations(outputs, 2)]
    firsts = (_first(a, b, outputs[a], outputs[b]) for a, b in combinations(outputs, 2))
    checks = pd.DataFrame([_check(name, outputs[name], reference, problems[name]) for name in outputs])
    return ParityReport(pd.DataFrame(rows), outputs, reference, next((f for f in firsts if f), None), backend, checks)


def _run(
    layer: MoELayer, x: Tensor, arm: str | Arm, routing: Routing, options: Options | None
) -> tuple[MoEOutput, list[str]]:
    """One arm's output, and what a user's arm did that it must not."""
    from moe_lab.bench.watch import Watched  # bench goes by this module's `bits`

    if isinstance(arm, str) or is_own(arm, ARMS):
        return layer(x, arm, routing=routing, options=options), []
    check_arm(arm, ARMS)
    watched = Watched(arm)
    watched.name = arm.name
    y = layer(x.clone(), watched, routing=routing, options=options)  # the other arms get the rows as they were
    return y, list(dict.fromkeys(watched.problems))


def _check(name: str, out: Tensor, reference: Tensor, problems: list[str]) -> dict[str, object]:
    """A row of `checks`. Rows in which the reference itself is not finite are not judged."""
    from moe_lab.bench.check import too_far

    known = reference.isfinite().all(-1)
    error, wrong = too_far(out[known], reference[known], "bench/layer")
    reasons = problems or ([wrong] if wrong else [])
    status = Status.INCORRECT if reasons else Status.PASSED
    return {"arm": name, "status": status.value, "nmse": error, "reason": "; ".join(reasons)}


def _pair(name_a: str, name_b: str, a: Tensor, b: Tensor, reference: Tensor) -> dict[str, object]:
    ulp = ulp_distance(a, b)
    return {
        "arm_a": name_a, "arm_b": name_b, "bit_equal": bool(torch.equal(bits(a), bits(b))),
        "max_ulp": int(ulp.max(initial=0)), "p999_ulp": float(np.quantile(ulp, 0.999)) if ulp.size else 0.0,
        "nmse_ab": nmse(a, b), "nmse_a": nmse(a, reference), "nmse_b": nmse(b, reference),
    }  # fmt: skip


def _first(name_a: str, name_b: str, a: Tensor, b: Tensor) -> Difference | None:
    differs = (bits(a) != bits(b)).nonzero()
    if not len(differs):
        return None
    token, column = (int(v) for v in differs[0])
    return Difference(name_a, name_b, token, column, float(a[token, column]), float(b[token, column]))
