"""Fitted score: the expert leaves that a regression, fitted on a recorded trace, expects back latest.

For expert j of a layer, after the layer's request for a token,
    goal_j  = exp(-(tokens until j is asked for again) / REACH)
    told_j  = b_j + sum of W_ij over what was picked last: by this layer for this token and the one before (two groups),
              by the two layers before it, and by the layer after it (for the token before, as its turn is to come)
    score_j = sum over half-lives of (a r_j + c sqrt(r_j)) + d told_j,  r: weighted share of the requests so far
b, W are one ridge regression of the goal, a, c, d another. The layers' picks are heard of even where each layer has
slots of its own (`PolicyExtras.on_request_elsewhere`). What it learnt is another text than the one it serves: fit it on
a recording of your own prompts, and judge it on others (`tests/unit/test_policy_study.py` does).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_lab.checks import wants
from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.scored import AMONG, Scored
from moe_lab.trace import RoutingTrace

HALF_LIVES = (1, 2, 4, 8, 16, 32, 69, 140, 300)  # tokens
REACH = 8.0  # tokens: about how long an expert stays unused in a cache of a quarter of them
AROUND = (-1, -2, 1)  # layers whose last picks are looked at besides; two more each way gave 0.2 points of the gap
PENALTIES = 100.0, 1e-3
BLOCK = 4096  # tokens at a time: bounds the memory that fitting takes
_KEEP = 2.0 ** (-1.0 / np.array(HALF_LIVES))[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """What was learnt for one layer: `told` [G E + 1, E] for G groups of picks and a constant, `mix` [2 H + 1] for H
    half-lives, their roots and told; `around`: the layers of groups 2 and on. Shared by copies of the policy."""

    told: np.ndarray
    mix: np.ndarray
    around: tuple[int, ...]

    def __deepcopy__(self, memo: object) -> "Fit":
        return self

    @property
    def experts(self) -> int:
        """E."""
        return self.told.shape[1]

    def score(self, rates: np.ndarray, picks: Sequence[Sequence[int]]) -> np.ndarray:
        """Scores [E] after a request: `rates` [H, E], picks by group."""
        rows = [group * self.experts + e for group, found in enumerate(picks) for e in found]
        told = self.told[rows].sum(0) + self.told[-1]
        h = len(rates)
        return self.mix[:h] @ rates + self.mix[h:-1] @ np.sqrt(rates) + self.mix[-1] * told


class Fitted(Scored):
    """Eviction by `fits`, one for each layer: `Fitted.of(trace)` makes them. `among`: as `Scored`. LabError for a
    request of a layer or an expert that the trace did not have.
    """

    name = "fitted"

    def __init__(self, fits: Mapping[int, Fit], among: int = AMONG) -> None:
        super().__init__(among)
        self.fits = dict(fits)
        self._rates = {layer: np.zeros((len(HALF_LIVES), fit.experts)) for layer, fit in self.fits.items()}
        self._scores = {layer: np.zeros(fit.experts) for layer, fit in self.fits.items()}
        self._last: dict[int, list[int]] = {layer: [] for layer in self.fits}

    @classmethod
    def of(cls, trace: RoutingTrace) -> "Fitted":
        """Learnt from a recorded trace, one token a request: about a second for a layer of 32 experts and 32,768
        tokens. LabError for a trace without tokens."""
        wants("the trace to fit", trace, RoutingTrace, "a RoutingTrace")
        if not trace.tokens:
            raise LabError("the trace to fit holds no token.")
        used = [_used(trace, layer) for layer in trace.layers]
        fits = {}
        for place, layer in enumerate(trace.layers):
            around = [place + away for away in AROUND if 0 <= place + away < len(used)]
            mine = (used[place], _before(used[place]))
            groups = [*mine, *(used[n] if n < place else _before(used[n]) for n in around)]
            fits[layer] = _fit(groups, tuple(trace.layers[n] for n in around))
        return cls(fits)

    def on_request(self, keys: Sequence[Key]) -> None:
        for layer in {layer for layer, _ in keys}:
            fit, before = self._fit(layer), self._last[layer]
            now = self._picked(keys, layer)
            _step(self._rates[layer], now)
            around = [self._last[other] for other in fit.around]
            self._scores[layer] = fit.score(self._rates[layer], [now, before, *around])

    def on_request_elsewhere(self, keys: Sequence[Key]) -> None:
        for layer in {layer for layer, _ in keys}:
            self._picked(keys, layer)

    def score(self, key: Key) -> float:
        return float(self._scores[key[0]][key[1]])

    def _picked(self, keys: Sequence[Key], layer: int) -> list[int]:
        now = [expert for at, expert in keys if at == layer]
        if now and max(now) >= (experts := self._fit(layer).experts):
            raise LabError(f"fitted: layer {layer} asks for expert {max(now)} of the {experts} it was fitted on.")
        self._last[layer] = now
        return now

    def _fit(self, layer: int) -> Fit:
        if layer not in self.fits:
            known = ", ".join(map(str, self.fits))
            raise LabError(f"fitted: layer {layer} is asked for; it was fitted on layers {known}.")
        return self.fits[layer]


def _step(rates: np.ndarray, now: Sequence[int] | np.ndarray) -> None:
    """One request more, in place."""
    rates *= _KEEP
    rates[:, now] += 1 - _KEEP


def _used(trace: RoutingTrace, layer: int) -> np.ndarray:
    """Which experts each token asks for, bool [T, E]."""
    ids = trace.layer(layer)
    found = np.zeros((len(ids), trace.num_experts + 1), bool)
    np.put_along_axis(found, np.minimum(ids, trace.num_experts).astype(np.int64), True, axis=1)
    return found[:, :-1]  # the last column took what is no pick


def _before(used: np.ndarray) -> np.ndarray:
    """The same of the token before; of the first one nothing."""
    return np.concatenate([np.zeros_like(used[:1]), used[:-1]])


def _goal(used: np.ndarray) -> np.ndarray:
    """exp(-tokens until the next use / REACH), float64 [T, E]; 0 where there is none."""
    found, now = np.zeros(used.shape), np.zeros(used.shape[1])
    for t in range(len(used) - 1, 0, -1):
        now = np.exp(-1 / REACH) * np.where(used[t], 1.0, now)
        found[t - 1] = now
    return found


def _fit(groups: Sequence[np.ndarray], around: tuple[int, ...]) -> Fit:
    used = groups[0]
    goal = _goal(used)
    blocks = [slice(at, at + BLOCK) for at in range(0, len(used), BLOCK)]
    told = _ridge(((_seen(groups, at), goal[at]) for at in blocks), PENALTIES[0])
    seen = _rates(used, blocks)
    mixed = (np.concatenate([r, np.sqrt(r), (_seen(groups, at) @ told)[..., None]], -1) for r, at in seen)
    goals = (goal[at].reshape(-1, 1) for at in blocks)
    pairs = ((x.reshape(-1, x.shape[-1]), y) for x, y in zip(mixed, goals, strict=True))
    return Fit(told, _ridge(pairs, PENALTIES[1])[:, 0], around)


def _rates(used: np.ndarray, blocks: Iterable[slice]) -> Iterator[tuple[np.ndarray, slice]]:
    """Weighted shares of the requests after each token, [T, E, H], block by block."""
    rates = np.zeros((len(HALF_LIVES), used.shape[1]))
    for at in blocks:
        found = np.empty((len(used[at]), used.shape[1], len(rates)))
        for t, row in enumerate(used[at]):
            _step(rates, np.flatnonzero(row))
            found[t] = rates.T
        yield found, at


def _seen(groups: Sequence[np.ndarray], at: slice) -> np.ndarray:
    """Picks by group and a constant, float64 [T, G E + 1]."""
    return np.concatenate([*(group[at] for group in groups), np.ones((len(groups[0][at]), 1))], 1, dtype=np.float64)


def _ridge(parts: Iterable[tuple[np.ndarray, np.ndarray]], penalty: float) -> np.ndarray:
    """Weights [F, G] of the least squares fit of y [n, G] by x [n, F], given in parts, + penalty |weights|^2."""
    sums = [(x.T @ x, x.T @ y) for x, y in parts]
    xx, xy = (np.sum(each, axis=0) for each in zip(*sums, strict=True))
    return np.linalg.solve(xx + penalty * np.eye(len(xx)), xy)
