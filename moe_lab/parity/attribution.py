"""Which of several choices makes a difference, and how much of it: each alone, each last, and its Shapley share.

Choices interact (a coarser block costs more once the sums are raw), so "one at a time" does not add up. A choice's
Shapley share is what switching it adds, averaged over every order in which the choices could be switched; the shares
add up to the whole. n choices have 2^n subsets: all of them while that is at most `most`, else random orders, each
together with its reverse, and the standard error of their mean. Knows nothing of arms or numbers: a function says what
a set of switched choices gives.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from math import factorial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moe_lab._types import Tensor
from moe_lab.errors import MissingExtra
from moe_lab.numerics.distance import nmse

if TYPE_CHECKING:
    import pandas as pd

Run = Callable[[frozenset[str]], Tensor]
Exact = Tensor | Callable[[frozenset[str]], Tensor]
Values = Callable[[frozenset[str]], np.ndarray]
MOST = 256


class Choice(NamedTuple):
    """A choice by its letter, its name, and what either side chose."""

    letter: str
    name: str
    value_a: str
    value_b: str

    @property
    def differs(self) -> bool:
        """Whether switching it changes anything."""
        return self.value_a != self.value_b


class Shares(NamedTuple):
    """share, standard error [n, V] of n choices for V values; how many subsets were evaluated; how they were taken."""

    share: np.ndarray
    error: np.ndarray
    evaluated: int
    method: str


def shapley(value: Values, players: Sequence[str], *, most: int = MOST, seed: int = 0) -> Shares:
    """Shares of `players` in value(all) - value(none); `value` of a subset is a vector [V], asked for once each."""
    seen: dict[frozenset[str], np.ndarray] = {}

    def known(subset: frozenset[str]) -> np.ndarray:
        if subset not in seen:
            seen[subset] = value(subset)
        return seen[subset]

    n, width = len(players), len(known(frozenset()))
    if n == 0:
        return Shares(np.zeros((0, width)), np.zeros((0, width)), 1, "no choice differs")
    if 2**n <= most:
        return Shares(_exact(known, players), np.zeros((n, width)), len(seen), f"exact, {2**n} subsets")
    draws, orders = np.random.default_rng(seed), []
    while len(seen) + 2 * n <= most or len(orders) < 2:
        order = [players[int(i)] for i in draws.permutation(n)]
        # an order and its reverse: what the one overrates as first the other has last
        orders.append((_along(known, order, players) + _along(known, order[::-1], players)) / 2)
    found = np.stack(orders)
    error = found.std(0, ddof=1) / len(orders) ** 0.5
    return Shares(found.mean(0), error, len(seen), f"{2 * len(orders)} of {factorial(n):,} orders")


def _exact(known: Values, players: Sequence[str]) -> np.ndarray:
    n, rows = len(players), []
    for one in players:
        others = [p for p in players if p != one]
        total: np.ndarray | float = 0.0
        for size in range(n):
            weight = factorial(size) * factorial(n - size - 1) / factorial(n)
            for group in combinations(others, size):
                total = total + weight * (known(frozenset((*group, one))) - known(frozenset(group)))
        rows.append(total)
    return np.array(rows)


def _along(known: Values, order: Sequence[str], players: Sequence[str]) -> np.ndarray:
    """What each player adds when they join in this order."""
    added, so_far = {}, frozenset()
    for one in order:
        joined = so_far | {one}
        added[one] = known(joined) - known(so_far)
        so_far = joined
    return np.stack([added[p] for p in players])


NUMBERS = ("first", "last", "share", "share_se", "error_first", "error_share", "error_share_se")
COLUMNS = ("choice", "name", "value_a", "value_b", "differs", *NUMBERS)


class _Runs:
    """Outputs of `run` as (NMSE against a's output, NMSE against exact), each subset run once."""

    def __init__(self, run: Run, exact: Exact, everything: frozenset[str]) -> None:
        self._run, self._exact = run, exact
        self.base = run(frozenset())
        self.whole = self.base if not everything else run(everything)
        none = frozenset[str]()
        self._kept = {none: self._of(self.base, none), everything: self._of(self.whole, everything)}

    def __call__(self, subset: frozenset[str]) -> np.ndarray:
        if subset not in self._kept:
            self._kept[subset] = self._of(self._run(subset), subset)
        return self._kept[subset]

    def __len__(self) -> int:
        return len(self._kept)

    def _of(self, out: Tensor, subset: frozenset[str]) -> np.ndarray:
        exact = self._exact if isinstance(self._exact, Tensor) else self._exact(subset)
        return np.array([nmse(out, self.base), nmse(out, exact)])


def attribute(
    run: Run,
    choices: Sequence[Choice],
    exact: Exact,
    *,
    outputs: tuple[Tensor, Tensor] | None = None,
    most: int = MOST,
    seed: int = 0,
) -> "pd.DataFrame":
    """A row a choice: choice, name, value_a, value_b, differs, and two readings of what switching it from a to b does.

    Distance: `first` = NMSE against a's output with this choice alone switched, `last` = what is missing from b's when
    it alone is not, `share` (standard error `share_se`) = its Shapley share of `nmse_ab`. Error: `error_first` = NMSE
    against `exact` with this choice alone, `error_share`, `error_share_se` = its share of b's error minus a's; negative
    where the choice makes b better. attrs: nmse_ab, error_a, error_b, evaluated, method, and for `outputs` of the sides
    themselves apart_a and apart_b, the NMSE of what was run against them, and outputs_ab, of b's against a's.
    `run` gives the output with a set of letters switched, `exact` the truth for all of them, or what is true for each
    set. Choices that do not differ have zeros, and are not run.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "An attribution") from e
    players = [c.letter for c in choices if c.differs]
    everything = frozenset(players)
    runs = _Runs(run, exact, everything)
    shares = shapley(runs, players, most=most, seed=seed)
    none, whole, rows = runs(frozenset()), runs(everything), []
    for c in choices:
        row = {"choice": c.letter, "name": c.name, "value_a": c.value_a, "value_b": c.value_b, "differs": c.differs}
        numbers = [0.0, 0.0, 0.0, 0.0, none[1], 0.0, 0.0]
        if c.differs:
            i = players.index(c.letter)
            alone, rest = runs(frozenset(c.letter)), runs(everything - {c.letter})
            numbers = [alone[0], whole[0] - rest[0], shares.share[i, 0], shares.error[i, 0]]
            numbers += [alone[1], shares.share[i, 1], shares.error[i, 1]]
        rows.append(row | dict(zip(NUMBERS, map(float, numbers), strict=True)))
    frame = pd.DataFrame(rows)
    frame.attrs = {"nmse_ab": float(whole[0]), "error_a": float(none[1]), "error_b": float(whole[1])}
    frame.attrs |= {"evaluated": len(runs), "method": shares.method}
    if outputs is not None:
        frame.attrs |= {"apart_a": nmse(runs.base, outputs[0]), "apart_b": nmse(runs.whole, outputs[1])}
        frame.attrs["outputs_ab"] = nmse(outputs[1], outputs[0])
    return frame
