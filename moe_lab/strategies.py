"""How a prompt's rows pass through a layer: strategies as data, and one driver for all of them.

A strategy is an arm and how many rows are handed over at once. That covers a loop over tokens (one row a call), a
router product for the whole prompt with experts token by token (all rows, arm `per_token`), micro-batches (so many rows
a call, each one submission), and everything at once. With arms of one arithmetic all of them give the same bits.

T tokens, D model width.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from moe_lab._types import Float, Int, Tensor
from moe_lab.arms import Arm
from moe_lab.card import card
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.layer import MoELayer, MoEOutput, Options
from moe_lab.routing import Routing
from moe_lab.timing import Timing


@dataclass(frozen=True, slots=True)
class Strategy:
    """`rows` of the prompt a call (None: all of them), each call through `arm` (a name or an object)."""

    name: str
    arm: str | Arm
    rows: int | None = None

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise LabError(f"a strategy's name is {self.name!r}; tables and plots need a text to call it by.")
        if self.rows is not None and wants_whole("Strategy.rows", self.rows) < 1:
            raise LabError(f"Strategy.rows is {self.rows}; wanted at least 1 row a call, or None for all at once.")


MICRO_BATCH = 16

STRATEGIES = {
    s.name: s
    for s in (
        Strategy("token_loop", "gemv", 1),  # router and experts token by token: T calls
        Strategy("router_batched", "per_token"),  # the router's product once, experts token by token
        Strategy("micro_batch", "gemv", MICRO_BATCH),  # a few rows a submission
        Strategy("batched", "gemv"),  # chunks of 8 rows share a weight read: prefill-GEMV
        Strategy("grouped", "grouped"),  # tensor cores, a whole group of rows a weight read
    )
}


@dataclass(frozen=True, slots=True, eq=False)
class Prefilled:
    """`out` [T, D] in x's dtype, the picks of all rows, and a timing record for each call."""

    out: Tensor
    routing: Routing
    timings: tuple[Timing, ...]
    strategy: str

    @property
    def wall_ms(self) -> float:
        """All calls together."""
        return self.total("wall_ms")

    @property
    def submissions(self) -> int:
        """Times work was handed over, in all calls."""
        return int(self.total("submissions"))

    def __repr__(self) -> str:
        return f"Prefilled({self.strategy!r}, rows {list(self.out.shape)}, {len(self.timings)} calls)"

    def _repr_html_(self) -> str:
        facts = {"rows": list(self.out.shape), "calls": len(self.timings), "submissions": self.submissions}
        return card(f"Prefilled: {self.strategy}", {**facts, "wall (ms)": self.wall_ms})

    def total(self, column: str) -> float:
        """The sum of a column of numbers of `Timing.row` over the calls. LabError for another column."""
        rows = [t.row() for t in self.timings]
        numbers = [name for name, value in rows[0].items() if isinstance(value, int | float) and name != "layer"]
        if column not in numbers:
            raise LabError(f"Prefilled.total has no column {column!r} to add up; it has {', '.join(numbers)}.")
        return sum(row[column] for row in rows)


def prefill(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    strategy: "str | Arm | Strategy" = "batched",
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    token_ids: Int[Tensor, " T"] | None = None,
) -> Prefilled:
    """Run rows x [T, D] through `layer` as `strategy` says: one of `STRATEGIES`, a Strategy, or an arm (all rows at
    once). `routing`, `token_ids`: of all T rows. LabError for an unknown name.
    """
    how = as_strategy(strategy)
    outputs: list[MoEOutput] = []
    for rows in _slices(len(x), how.rows):
        own = None if routing is None else Routing(routing.ids[rows], routing.weights[rows])
        ids = None if token_ids is None else token_ids[rows]
        outputs.append(layer(x[rows], how.arm, routing=own, options=options, token_ids=ids))
    picks = Routing(torch.cat([y.routing.ids for y in outputs]), torch.cat([y.routing.weights for y in outputs]))
    return Prefilled(torch.cat([y.out for y in outputs]), picks, tuple(y.timing for y in outputs), how.name)


def as_strategy(given: "str | Arm | Strategy") -> Strategy:
    """A strategy by its name, itself, or one that hands all rows to an arm."""
    if isinstance(given, Strategy):
        return given
    if isinstance(given, str):
        from moe_lab.arms import ARMS

        if given in STRATEGIES:
            return STRATEGIES[given]
        if given not in ARMS and given != "auto":
            raise LabError(
                f"no strategy or arm is called {given!r}; known: {', '.join(STRATEGIES)}, {', '.join(ARMS)}."
            )
        return Strategy(given, given)
    name = getattr(given, "name", None)
    if not isinstance(name, str):
        raise LabTypeError(f"strategy is a {type(given).__name__}; wanted a name, a Strategy or an arm.")
    return Strategy(name, given)


def _slices(tokens: int, rows: int | None) -> Iterator[slice]:
    step = rows or max(1, tokens)
    yield from (slice(i, min(i + step, tokens)) for i in range(0, max(1, tokens), step))


__all__ = ["MICRO_BATCH", "STRATEGIES", "Prefilled", "Strategy", "as_strategy", "prefill"]
