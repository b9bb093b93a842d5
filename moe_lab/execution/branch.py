"""A layer's dense branch (its shared expert between its norms) and routed tail, each token by token or all at once.

m rows, D model width. The branch writes row `to[t]` of one buffer [most_rows, D] for token t, chosen apart from the row
it reads; the tail reads those rows when all are written. Four combinations, one set of bits: a row's branch and tail
depend on no row beside it. What batching saves shows in two numbers: weight reads, and passes (what the host submits).
Passes carry labels that a profiler's trace shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import Arm
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing

Mode = Literal["per_token", "batched"]
MODES: tuple[Mode, ...] = ("per_token", "batched")


class DenseBranch:
    """The branch of one layer for x of `dtype`, with its buffer `rows` [most_rows, D] of the stored dtype. LabError for
    a layer without a branch."""

    def __init__(
        self,
        layer: MoELayer,
        most_rows: int,
        dtype: torch.dtype,
        arm: str | Arm = "gemv",
        options: Options | None = None,
    ) -> None:
        if layer.shared is None:
            raise LabError("this layer has no shared expert, so no dense branch.")
        self.layer, self.arm, self.options = layer, arm, options or Options()
        shape = (wants_whole("most_rows", most_rows, 1), layer.spec.d_model)
        stored = dtype if self.options.stores == "input" else torch.float32
        self.rows = torch.empty(shape, dtype=stored, device=layer.device)
        self.passes = 0

    def token(self, x: Float[Tensor, "m D"], t: int, to: int) -> None:
        """One token's branch: row t of x to row `to` of the buffer."""
        self.fits(max(to + 1, len(x)))
        self._pass(x[t : t + 1], slice(to, to + 1), f"token {t}")

    def batch(self, x: Float[Tensor, "m D"], to: Tensor | None = None) -> None:
        """All m rows in one pass, row t to row to[t] (t where there is no `to`)."""
        self.fits(len(x))
        self._pass(x, slice(0, len(x)) if to is None else to, f"{len(x)} rows")

    def fits(self, m: int) -> None:
        """LabError, with both numbers, for more rows than the buffer has."""
        if m > len(self.rows):
            raise LabError(
                f"a micro-batch of m={m} rows passes the dense branch's buffer of most_rows={len(self.rows)}: cut it, "
                "or make the branch with more rows."
            )

    def _pass(self, x: Tensor, to: "slice | Tensor", what: str) -> None:
        with torch.profiler.record_function(f"moe_lab: dense branch, {what}"):
            self.rows[to] = self.layer.dense_branch(x, self.arm, self.options)
        self.passes += 1


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """`out` [m, D]; `branch` [m, D], what the dense branch handed over; picks; passes submitted by either half."""

    out: Tensor
    branch: Tensor
    routing: Routing
    branch_passes: int
    tail_passes: int


def run_halves(
    layer: MoELayer,
    x: Float[Tensor, "m D"],
    *,
    branch: Mode = "batched",
    tail: Mode = "batched",
    arm: str | Arm = "gemv",
    most_rows: int = 16,
    to: Sequence[int] | None = None,
    options: Options | None = None,
) -> Halves:
    """The layer on a micro-batch, dense branch first, then the routed tail, each in its own mode.

    `to`: the buffer row of each token (t by default); the tail reads it there. LabError when m passes `most_rows`, for
    another mode, or for rows that repeat.
    """
    for name, mode in (("branch", branch), ("tail", tail)):
        if mode not in MODES:
            raise LabError(f"{name} is {mode!r}; it must be one of {', '.join(MODES)}.")
    m = len(x)
    dense = DenseBranch(layer, most_rows, x.dtype, arm, options)
    dense.fits(m)
    places = list(range(m)) if to is None else [int(row) for row in to]
    if len(places) != m or len(set(places)) != m or any(not 0 <= row < most_rows for row in places):
        raise LabError(f"to = {places}; wanted m={m} different rows below most_rows={most_rows}.")
    if branch == "batched":
        dense.batch(x, torch.tensor(places, dtype=torch.long, device=x.device))
    else:
        for t, row in enumerate(places):
            dense.token(x, t, row)
    spans = [slice(0, m)] if tail == "batched" else [slice(t, t + 1) for t in range(m)]
    outs = []
    for span in spans:
        with torch.profiler.record_function(f"moe_lab: routed tail, rows {span.start}..{span.stop}"):
            outs.append(layer(x[span], arm, options=options, branch=dense.rows[places[span]]))
    picks = Routing(torch.cat([y.routing.ids for y in outs]), torch.cat([y.routing.weights for y in outs]))
    out = torch.cat([y.out for y in outs])
    return Halves(out, dense.rows[places], picks, dense.passes, len(outs))
