"""A static hot set: which experts stay is settled once, by how often they were asked for.

The baseline of "pin the most popular experts". `Static.of(trace)` knows the popularities beforehand; without a ranking
they are counted while the policy runs and then frozen, as an engine would have to.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from moe_lab.checks import wants, wants_whole
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.ranking import Ranking
from moe_lab.trace import RoutingTrace

LEARN = 1024


class Static:
    """The least popular key leaves; among equally popular ones the longest unused.

    `hot`: keys, the most popular first; keys it lacks are less popular than all it has. Without it the first `learn`
    requests of each layer are counted, and the order of their counts is final.
    """

    name = "static"

    def __init__(self, hot: Iterable[Key] | None = None, learn: int = LEARN) -> None:
        self.learn = wants_whole("learn (of static)", learn, 1)
        self._ranking = Ranking()
        self._counts: Counter[Key] = Counter()
        self._requests: Counter[int] = Counter()
        self._known = hot is not None
        if hot is not None:
            ranked = list(dict.fromkeys((int(layer), int(expert)) for layer, expert in hot))
            self._counts.update({key: len(ranked) - place for place, key in enumerate(ranked)})

    @classmethod
    def of(cls, trace: RoutingTrace) -> "Static":
        """With the popularities of a recorded trace. Of the trace it will serve itself, that is hindsight."""
        wants("the trace of a static hot set", trace, RoutingTrace, "a RoutingTrace")
        counts = {
            (layer, expert): int(n)
            for layer in trace.layers
            for expert, n in enumerate(np.bincount(trace.layer(layer).ravel(), minlength=trace.num_experts))
            if expert < trace.num_experts
        }
        return cls(sorted(counts, key=lambda key: (-counts[key], key)))

    def on_request(self, keys: Sequence[Key]) -> None:
        for layer in {layer for layer, _ in keys}:
            self._requests[layer] += 1

    def on_hit(self, key: Key) -> None:
        if not self._known and self._requests[key[0]] <= self.learn:
            self._counts[key] += 1
        self._ranking.put(key, self._counts[key])

    def on_insert(self, key: Key) -> None:
        self.on_hit(key)

    def on_evict(self, key: Key) -> None:
        self._ranking.drop(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        return self._ranking.lowest(candidates)
