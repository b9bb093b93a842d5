"""Predicted score: the expert least likely to be asked for soon leaves.

For each layer two things are learnt while the policy runs, from nothing but requests:
    recent_j      share of the last requests that asked for j, each weighing `memory` times the one after it
    follows_ij    how many tokens picked j right after a token that picked i
    score_j = recent_j + weight x mean over the picks i of the last token of follows_ij / sum_j follows_ij
The first term says what this text is about, the second what comes next. A predictor of your own goes in by overriding
`predict`.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from moe_lab.checks import wants_number
from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.scored import AMONG, Scored

# On the shipped trace at 25 % of the experts memory 0.97 and weight 3 hit 0.7 points more often than decayed LFU; the
# recent share alone (weight 0) 0.3 points more, the followers alone 2 points less.
MEMORY, WEIGHT = 0.97, 3.0


class Predicted(Scored):
    """Eviction by that score; `among`: as `Scored`. LabError unless 0 <= memory < 1 and weight >= 0."""

    name = "predicted"

    def __init__(self, memory: float = MEMORY, weight: float = WEIGHT, among: int = AMONG) -> None:
        wants_number("memory (of predicted)", memory)
        wants_number("weight (of predicted)", weight)
        if not 0 <= memory < 1 or not 0 <= weight < float("inf"):
            raise LabError(f"predicted: memory={memory}, weight={weight}; wanted 0 <= memory < 1 and weight >= 0.")
        super().__init__(among)
        self.memory, self.weight = memory, weight
        self._layers: dict[int, _Seen] = defaultdict(_Seen)

    def predict(self, layer: int, experts: Sequence[int]) -> np.ndarray:
        """How likely each expert of `layer` is asked for next, float64 [E so far], after a request for `experts`."""
        seen, now = self._layers[layer], list(experts)
        share = 1.0 / (len(now) * (seen.followers[now] + 1.0))  # popularity counts as one token
        return share @ seen.follows[now] + share.sum() * (seen.popular / seen.popular.sum())

    def on_request(self, keys: Sequence[Key]) -> None:
        for layer in {layer for layer, _ in keys}:
            now = [expert for at, expert in keys if at == layer]
            seen = self._layers[layer]
            seen.learn(now, self.memory)
            seen.score = seen.recent + self.weight * self.predict(layer, now)

    def score(self, key: Key) -> float:
        """0 for an expert that was only guessed and that no request has named yet."""
        scores = self._layers[key[0]].score
        return float(scores[key[1]]) if key[1] < len(scores) else 0.0


class _Seen:
    """What one layer asked for so far; arrays grow by doubling, as nobody tells a policy E."""

    def __init__(self) -> None:
        self.recent, self.score = np.zeros(0), np.zeros(0)
        self.follows = np.zeros((0, 0))  # and its sums over rows (from 1 on, so that nobody is impossible) and columns
        self.popular, self.followers = np.zeros(0), np.zeros(0)
        self._last: list[int] = []

    def learn(self, now: list[int], memory: float) -> None:
        """One more request, for the experts `now`."""
        self._grow(max(now) + 1)
        for before in self._last:
            self.follows[before, now] += 1
        self.followers[self._last] += len(now)
        self.popular[now] += len(self._last)
        self.recent *= memory
        self.recent[now] += 1 - memory
        self._last = now

    def _grow(self, experts: int) -> None:
        have = len(self.recent)
        if experts > have:
            more = (0, max(16, 1 << (experts - 1).bit_length()) - have)
            self.recent, self.followers = np.pad(self.recent, more), np.pad(self.followers, more)
            self.popular = np.pad(self.popular, more, constant_values=1.0)
            self.follows = np.pad(self.follows, (more, more))
