"""What a comparison of arms found, and what can be asked of it afterwards.

Tables are made at once; what costs more (attribution, error map, hazards) is made when it is first asked for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_lab._types import Tensor
from moe_lab.card import card
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.layer import MoELayer
from moe_lab.numerics.distance import Kind, error_bins
from moe_lab.parity.operands import Operands
from moe_lab.parity.stored import formats_said
from moe_lab.routing import Routing

if TYPE_CHECKING:
    import pandas as pd


class Difference(NamedTuple):
    """The first value, in row-major order, in which two arms differ; `operands`: the first product behind it that
    differs, with both sides' codes, scales and sums (None where an arm does not multiply 8-bit activations)."""

    arm_a: str
    arm_b: str
    token: int
    column: int
    value_a: float
    value_b: float
    operands: Operands | None = None


class Compared(NamedTuple):
    """What the arms were given: `layers` by an arm's name where its experts are stored otherwise than `layer`'s;
    `truth`, the layer whose weights errors are against, or None: each arm's own."""

    layer: MoELayer
    x: Tensor
    routing: Routing
    options: Options
    layers: Mapping[str, MoELayer] = MappingProxyType({})
    truth: MoELayer | None = None

    def of(self, arm: str) -> MoELayer:
        """The layer that an arm computes with."""
        return self.layers.get(arm, self.layer)

    def pair(self, a: str, b: str) -> tuple[MoELayer, dict[str, Any]]:
        """Side a's layer, and what says that b has another one, or that errors are against a truth."""
        ours, theirs = self.of(a), self.of(b)
        return ours, {"second": None if theirs is ours else theirs, "truth": self.truth}


@dataclass(frozen=True, eq=False)
class ParityReport:
    """Outputs of several arms on the same rows and picks.

    `table`: a row a pair with arm_a, arm_b, bit_equal, equal_share (values with equal bits), max_ulp, p999_ulp (in the
    output's dtype), nmse_ab (a against b), nmse_a and nmse_b (each against the formula in float64 with unquantised
    activations, and with the weights that `against` names), flip_share (tokens whose experts in the next layer differ;
    NaN without `after`). `references`: that formula's output by arm; `reference`: the first arm's.
    `first_difference` is None when every pair is bit-equal. `checks`: a row an arm with arm, status (PASSED or
    INCORRECT, by the bounds that a benchmark goes by; UNSUPPORTED, ERROR or OOM for one that made no output and is in
    no pair), nmse (with the weights that the arm was given, whatever the truth), reason, shared_arm (who took the
    shared expert).
    `flips`: a row a pair and token as `lab.analysis.flips` has them, or None. `attribution`, `error_map` and `hazards`
    are made when first asked for.
    """

    table: "pd.DataFrame"
    outputs: dict[str, Tensor]
    reference: Tensor
    first_difference: Difference | None
    backend: str
    checks: "pd.DataFrame"
    given: Compared
    flips: "pd.DataFrame | None" = None
    references: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def against(self) -> str:
        """Whose weights the formula has that nmse_a and nmse_b are taken against."""
        truth = self.given.truth
        return "each side's own weights" if truth is None else f"truth's weights, {formats_said(truth)}"

    @cached_property
    def attribution(self) -> "pd.DataFrame":
        """How much each numeric choice has in the difference of the first two arms with 8-bit activations: see
        `moe_lab.parity.attribution`. LabError where fewer than two arms have them."""
        from moe_lab.parity.layer_attribution import attribute_layer

        a, b = self._pair("attribution")
        (layer, sides), outputs = self.given.pair(a, b), (self.outputs[a], self.outputs[b])
        return attribute_layer(layer, self.given.x, a, b, **self._how, outputs=outputs, **sides)

    @cached_property
    def error_map(self) -> "pd.DataFrame":
        """Error of the same two arms by part, expert and quant block of a row: see `moe_lab.parity.error_map`."""
        from moe_lab.parity.block_errors import error_map

        pair = self._pair("error_map")
        layer, sides = self.given.pair(*pair)
        return error_map(layer, self.given.x, pair, **self._how, **sides)

    @cached_property
    def hazards(self) -> "pd.DataFrame":
        """What may go wrong in each arm with 8-bit activations on these rows: see `moe_lab.parity.hazards`."""
        from moe_lab.parity.hazard import hazards
        from moe_lab.parity.setting import known

        arms = [a for a in self.outputs if known(a)]
        return hazards(self.given.layer, self.given.x, arms, **self._how, layers=self.given.layers)

    @property
    def _how(self) -> dict[str, Any]:
        return {"routing": self.given.routing, "options": self.given.options}

    def _pair(self, need: str) -> tuple[str, str]:
        from moe_lab.parity.setting import KNOWN, known

        pairs = [p for p in combinations(self.outputs, 2) if known(p[0]) and known(p[1])]
        if not pairs:
            raise LabError(
                f"ParityReport.{need} explains two arms with 8-bit activations ({', '.join(KNOWN)}); this report has "
                f"{', '.join(self.outputs)}."
            )
        return pairs[0]

    def __repr__(self) -> str:
        arms = ", ".join(f"{a} {s}" for a, s in zip(self.checks["arm"], self.checks["status"], strict=True))
        return f"ParityReport({arms}; rows {list(self.reference.shape)}, backend {self.backend!r})"

    def _repr_html_(self) -> str:
        f = self.first_difference
        where = f"{f.arm_a} {f.value_a:.6g}, {f.arm_b} {f.value_b:.6g} at [{f.token}, {f.column}]" if f else "none"
        facts = {
            "arms": ", ".join(f"{a} {s}" for a, s in zip(self.checks["arm"], self.checks["status"], strict=True)),
            "rows": list(self.reference.shape),
            "backend": self.backend,
            "first difference": where,
            "nmse_a, nmse_b": f"against {self.against}",
        }
        head = ("arm_a", "arm_b", "bit_equal", "max_ulp", "nmse_ab", "nmse_a", "nmse_b")
        return card("ParityReport", facts, head=head, rows=self.table[list(head)].itertuples(index=False))

    def bins(self, kind: Kind = "relative") -> "pd.DataFrame":
        """Histogram of the distances of every pair, for `lab.plot.parity`."""
        import pandas as pd

        pairs = list(combinations(self.outputs, 2))
        if not pairs:
            raise LabError(f"ParityReport.bins wants two outputs; only {', '.join(self.outputs)} ran: see .checks.")
        return pd.concat(
            [error_bins(self.outputs[a], self.outputs[b], arm_a=a, arm_b=b, kind=kind) for a, b in pairs],
            ignore_index=True,
        )
