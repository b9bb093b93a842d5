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
from moe_lab.arms import Arm
from moe_lab.distance import Kind, error_bins, ulp_distance
from moe_lab.errors import LabError, MissingExtra
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing

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
    """

    table: "pd.DataFrame"
    outputs: dict[str, Tensor]
    reference: Tensor
    first_difference: Difference | None
    backend: str

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
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "lab.compare") from e
    if len(arms) < 2:
        raise LabError(f"compare wants at least two arms, got {len(arms)}.")
    routing = layer.route(x) if routing is None else routing
    outputs: dict[str, Tensor] = {}
    backend = ""
    for arm in arms:
        y = layer(x, arm, routing=routing, options=options)
        if y.arm in outputs:
            raise LabError(f"arm {y.arm!r} was named twice; name each arm once.")
        outputs[y.arm], backend = y.out, y.timing.backend
    reference = layer(x.float(), "reference", routing=routing, options=Options(stores="fp32")).out
    rows = [_pair(a, b, outputs[a], outputs[b], reference) for a, b in combinations(outputs, 2)]
    firsts = (_first(a, b, outputs[a], outputs[b]) for a, b in combinations(outputs, 2))
    return ParityReport(pd.DataFrame(rows), outputs, reference, next((f for f in firsts if f), None), backend)


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
