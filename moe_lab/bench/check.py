"""Is the arm right? Asked before the clock starts and again after it stopped: a wrong result has no speed.

Every input is fresh: the rows given, each times a number of random sign and size, so that nothing computed before can
be the answer; then single rows change among old ones, which an arm that looks at some of its rows would miss. The truth
is the reference arm in fp32, on all rows or, where decoding every expert would not fit, on a random few of them.
T tokens, D model width, K picks.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import Arm, ExpertStack
from moe_lab.bench.watch import WATCHED, Layout, Watched, as_given, by_columns, expanded, fingerprint, poison, with_gaps
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer, MoEOutput, Options
from moe_lab.parity import bits
from moe_lab.routing import Routing
from moe_lab.stream.provider import ResidentExperts
from moe_lab.tolerances import tol

MEASURE = "NMSE against reference (fp32)"
DECODED_BYTES = {"cpu": 2**30, "cuda": 2**32}  # fp32 weights that a check may hold at once
MOST_ROWS = 64
LATER_ROWS = 3  # changed one at a time: the last row and random ones, never the first
LAYOUT_ROWS = 16  # how an arm walks its rows does not hang on their number


@dataclass(frozen=True, slots=True)
class Verdict:
    """`error`: the largest NMSE of the trials. `reason`: why the arm is wrong, or None. What one call moved and started
    as it counts itself (NaN bytes: it counts none), for predictions; the shared expert's arm; and its kernels with
    their launch parameters."""

    error: float
    reason: str | None
    weight_bytes: int | float = 0
    launches: int = 0
    shared_arm: str = ""
    tiles: str = ""


def fresh(x: Float[Tensor, "*n T D"], draw: torch.Generator, sign: int = 0) -> Float[Tensor, "*n T D"]:
    """Each row times +-[0.5, 1), each column times (0.9, 1], drawn on the CPU; `sign` +1 or -1 fixes it. Columns too,
    because one factor of a row in bf16 soon comes again."""
    size = torch.rand(*x.shape[:-1], 1, generator=draw) * 0.5 + 0.5
    signs = torch.randint(2, size.shape, generator=draw) * 2 - 1 if sign == 0 else sign
    columns = 1 - 0.1 * torch.rand(*x.shape[:-2], 1, x.shape[-1], generator=draw)
    return (x * (size * signs).to(x.device) * columns.to(x.device)).to(x.dtype)


def truth(layer: MoELayer, x: Float[Tensor, "r D"], routing: Routing) -> Float[Tensor, "r D"]:
    """The reference arm in fp32 with fp32 store points. Nothing it decodes outlives the call."""
    held = layer.experts
    if isinstance(held, ResidentExperts):
        layer, stack = copy.copy(layer), held.stack
        own = ExpertStack(stack.parts.get("gate"), stack.up, stack.down, stack.slot_of, stack.biases)
        layer.experts = ResidentExperts(own)
    return layer(x.float(), "reference", routing=routing, options=Options(stores="fp32")).out


def pick_rows(layer: MoELayer, tokens: int, draw: torch.Generator) -> Tensor:
    """Rows to compare, ascending: all, or a random few (the last among them) whose experts fit DECODED_BYTES."""
    spec = layer.spec
    expert = 4 * (3 if spec.gated else 2) * spec.d_expert * spec.d_routed
    most = DECODED_BYTES[layer.device.type] // expert
    if most >= spec.num_experts:
        return torch.arange(tokens, device=layer.device)
    few = min(tokens, MOST_ROWS, max(1, most // spec.top_k))
    drawn = torch.randperm(tokens - 1, generator=draw)[: few - 1] if tokens > 1 else torch.zeros(0, dtype=torch.long)
    return torch.cat([drawn, torch.tensor([tokens - 1])]).sort().values.to(layer.device)


def errors(out: Tensor, want: Tensor) -> tuple[float, float]:
    """NMSE of all rows, and the worst row's. Both in float64."""
    off, power = (out.double() - want.double()).square().sum(-1), want.double().square().sum(-1)
    rows = torch.where(off == 0, 0.0, off / power)
    whole = float(off.sum() / power.sum()) if float(off.sum()) else 0.0
    return whole, float(rows.max()) if len(rows) else 0.0


def too_far(out: Tensor, want: Tensor, tolerance: str) -> tuple[float, str | None]:
    """(NMSE, what is wrong or None) by the row `tolerance` of the tolerance table and the one for a row of activations
    that goes with it. LabError when the truth is not finite."""
    if not want.isfinite().all():
        raise LabError("the reference itself gives values that are not finite: look at the weights and at x.")
    whole, worst = errors(out, want)
    if not whole <= tol(tolerance):
        return whole, f"NMSE {whole:.2g} is above {tol(tolerance):.2g}, the bound {tolerance!r}"
    of_row = "mmq/row" if tolerance == "mmq/layer" else "bench/row"
    if not worst <= tol(of_row):
        return whole, f"its worst row's NMSE {worst:.2g} is above {tol(of_row):.2g}, the bound {of_row!r}"
    return whole, None


class Judge:
    """Tries one arm on one layer with given picks. `check()` before the clock, `confirm(...)` after it."""

    def __init__(
        self, layer: MoELayer, arm: Arm, x: Tensor, routing: Routing, options: Options, tolerance: str, seed: int
    ) -> None:
        self._layer, self._arm, self._x, self._routing = layer, arm, x, routing
        self._options, self._tolerance, self._draw = options, tolerance, torch.Generator().manual_seed(seed)

    def check(self) -> Verdict:
        """Fresh input; then other values in the same memory, of all rows and of one; then rows in other layouts.

        Raises what the arm raises on plain rows; a layout refused by an exception is refused, not wrong."""
        weights = self._weights()
        x = fresh(self._x, self._draw, sign=1)
        one, problems = self._call(x)
        kept = one.out.clone()
        error, wrong = self._compare(kept, x, self._routing)
        shared = (one.timing.shared_arm or "").removesuffix(WATCHED)
        counted = (one.timing.weight_bytes, one.timing.launches, shared, one.timing.tiles)
        if problems or wrong:
            return Verdict(error, _joined(problems, wrong), *counted)
        x.copy_(fresh(self._x, self._draw, sign=-1))
        again, reason = self._second(x, one.out, kept)
        error = max(error, again)
        for trial in (lambda: self._later_rows(x), self._layouts):
            if reason is None:
                odd, reason = trial()
                error = max(error, odd) if reason is None else odd
        if reason is None and weights != self._weights():
            reason = "it changed the weights"
        return Verdict(error, reason, *counted)

    def _second(self, x: Tensor, first: Tensor, kept: Tensor) -> tuple[float, str | None]:
        """The same storage with new values: what the last call gave must neither come again nor change."""
        two, problems = self._call(x)
        if not torch.equal(bits(first), bits(kept)):
            return 0.0, "the second call overwrote the first call's output: results share storage"
        error, wrong = self._compare(two.out, x, self._routing)
        if wrong and torch.equal(bits(two.out), bits(kept)):
            wrong = "it gave the last call's output for new input: the result is cached"
        return error, _joined(problems, wrong) if problems or wrong else None

    def _later_rows(self, x: Tensor) -> tuple[float, str | None]:
        """One row after the first takes another sign and size in place, the others stay: it alone is compared."""
        error, last = 0.0, len(x) - 1
        drawn = torch.randperm(max(0, last - 1), generator=self._draw)[: LATER_ROWS - 1] + 1
        for r in [*drawn.tolist(), last] if last > 0 else []:
            one = torch.tensor([r], device=x.device)
            x[one] = fresh(self._x[one], self._draw, sign=1)
            y, problems = self._call(x)
            want = truth(self._layer, x[one], rows_of(self._routing, one))
            off, wrong = too_far(y.out[one], want, self._tolerance)
            if problems or wrong:
                return off, f"wrong in row {r} when that row alone had changed: {_joined(problems, wrong)}"
            error = max(error, off)
        return error, None

    def _layouts(self) -> tuple[float, str | None]:
        """Rows with gaps between them, stored by columns, and one row expanded: right for all, or refused. The error is
        the first wrong one's."""
        error = 0.0
        some = slice(0, LAYOUT_ROWS)
        x, routing = fresh(self._x[some], self._draw), rows_of(self._routing, some)
        trials: list[tuple[str, Layout, Tensor, Routing]] = [("rows with gaps between them", with_gaps, x, routing)]
        if len(x) > 1:
            first = torch.zeros(len(x), dtype=torch.long, device=x.device)
            trials.append(("rows stored by columns", by_columns, x, routing))
            trials.append(("one row expanded (stride 0)", expanded, x[first], rows_of(routing, first)))
        for name, layout, values, picks in trials:
            try:
                y, problems = self._call(values, picks, layout)
            except Exception:
                continue  # refused: the layer's own rows are contiguous, and an error cannot be taken for a result
            odd, wrong = too_far(y.out, truth(self._layer, values, picks), self._tolerance)
            if problems or wrong:
                return odd, f"right for contiguous rows only; {name}: {_joined(problems, wrong)}"
            error = max(error, odd)
        return error, None

    def confirm(self, out: Tensor, x: Tensor, routing: Routing) -> tuple[float, str | None]:
        """(NMSE, what is wrong or None) of an output made while the clock ran."""
        if not out.isfinite().all():
            return float("nan"), "its output is not finite"
        return self._compare(out, x, routing)

    def _call(
        self, x: Tensor, routing: Routing | None = None, layout: Layout = as_given
    ) -> tuple[MoEOutput, list[str]]:
        routing = self._routing if routing is None else routing
        held = {"x": (x, x.clone()), "ids": (routing.ids, routing.ids.clone())}
        held["weights"] = (routing.weights, routing.weights.clone())
        watched = Watched(self._arm, layout)
        poison(x.device)
        y = self._layer(x, watched, routing=routing, options=self._options)
        changed = [f"it changed its input {name}" for name, (t, was) in held.items() if not torch.equal(t, was)]
        problems = watched.problems or changed
        if not problems and not y.out.isfinite().all():
            problems = ["its output is not finite"]
        return y, problems

    def _compare(self, out: Tensor, x: Tensor, routing: Routing) -> tuple[float, str | None]:
        rows = pick_rows(self._layer, len(x), self._draw)
        return too_far(out[rows], truth(self._layer, x[rows], rows_of(routing, rows)), self._tolerance)

    def _weights(self) -> Any:
        held = self._layer.experts
        return fingerprint(held.stack) if isinstance(held, ResidentExperts) else None


def rows_of(routing: Routing, rows: Any) -> Routing:
    """The picks of some rows."""
    return Routing(routing.ids[rows], routing.weights[rows], width=routing.width)


def _joined(problems: list[str], wrong: str | None) -> str:
    return "; ".join(dict.fromkeys([*problems, *([wrong] if wrong else [])]))
