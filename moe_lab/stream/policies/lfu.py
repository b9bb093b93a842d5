"""Frequency: the expert asked for least often leaves, in three readings of "often"."""

import math
from collections.abc import Collection, Sequence

from moe_lab.checks import wants_number
from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.ranking import Ranking

HALF_LIFE = 69.0  # requests of a layer: a weight of 0.99 a token, ln 2 / -ln 0.99


class _Ranked:
    """Evicts the lowest of a ranking."""

    def __init__(self) -> None:
        self._ranking = Ranking()

    def on_evict(self, key: Key) -> None:
        self._ranking.drop(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        return self._ranking.lowest(candidates)


class LFU(_Ranked):
    """Fewest requests since it was read; among equals the longest unused. What left is counted anew from 1."""

    name = "lfu"

    def on_hit(self, key: Key) -> None:
        self._ranking.put(key, self._ranking[key] + 1)

    def on_insert(self, key: Key) -> None:
        self._ranking.put(key, 1)


class LFUDA(_Ranked):
    """LFU with dynamic ageing: value = requests since it was read + the value of the last victim.

    What is read late starts as high as the lowest that stays, so yesterday's favourites do not stay for ever (Arlitt,
    Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches", 2000).
    """

    name = "lfuda"

    def __init__(self) -> None:
        super().__init__()
        self._count: dict[Key, int] = {}
        self._age = 0

    def on_hit(self, key: Key) -> None:
        self._count[key] += 1
        self._ranking.put(key, self._count[key] + self._age)

    def on_insert(self, key: Key) -> None:
        self._count[key] = 1
        self._ranking.put(key, 1 + self._age)

    def on_evict(self, key: Key) -> None:
        self._count.pop(key, None)
        super().on_evict(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        key = super().victim(candidates)
        self._age = max(self._age, self._ranking[key])
        return key


class LFUDecay(_Ranked):
    """Fewest requests, each weighing half after `half_life` requests of a layer. Counts outlive eviction.

    weight = sum over the key's requests of 2^((t_i - now) / half_life). Its order does not depend on `now`, so
    log2 sum 2^(t_i / half_life) is kept, and nothing has to be aged. t counts the requests of the busiest layer: a
    token, in decoding. LabError unless half_life > 0.
    """

    name = "lfu_decay"

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        super().__init__()
        wants_number("half_life (of lfu_decay)", half_life)
        if not 0 < half_life < math.inf:
            raise LabError(f"lfu_decay: half_life is {half_life}; wanted above 0 and finite.")
        self.half_life = half_life
        self._weight: dict[Key, float] = {}  # log2, of every key ever asked for
        self._requests: dict[int, int] = {}
        self._now = 0

    def on_request(self, keys: Sequence[Key]) -> None:
        for layer in {layer for layer, _ in keys}:
            self._requests[layer] = self._requests.get(layer, 0) + 1
            self._now = max(self._now, self._requests[layer])

    def on_hit(self, key: Key) -> None:
        one, old = self._now / self.half_life, self._weight.get(key, -math.inf)
        # log2(2^one + 2^old); old is at most log2 of all requests above one
        self._weight[key] = one + math.log2(1 + 2.0 ** (old - one))
        self._ranking.put(key, self._weight[key])

    def on_insert(self, key: Key) -> None:
        self.on_hit(key)
