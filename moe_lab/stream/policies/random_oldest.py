"""A random victim among the oldest p %: LRU without its cliff.

A working set that outgrows the cache by a little makes LRU evict exactly the expert needed next, every time. Drawing
among the oldest few percent leaves most of that set resident and still spares what was used lately. Published for one
machine and 8,381 slots (misses a step): LRU 5.5, oldest 5 % 1.1, oldest 8 % 0.8, oldest 10 % 0.7, the optimum 0.1.
"""

import random
from collections.abc import Collection

from moe_lab.checks import wants_number, wants_whole
from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.recency import InOrder

PERCENT = 8.0


class RandomOldest(InOrder):
    """The victim is drawn evenly from the oldest `percent` % of the candidates (at least one; so LRU in small caches).

    Where the drawn key is in use the next older-to-newer candidate leaves. Equal `seed` and requests, equal victims.
    LabError unless 0 < percent <= 100.
    """

    name = "random_oldest"

    def __init__(self, percent: float = PERCENT, seed: int = 0) -> None:
        wants_number("percent (of random_oldest)", percent)
        if not 0 < percent <= 100:
            raise LabError(f"random_oldest: percent is {percent}; wanted above 0 and at most 100.")
        self.percent, self.seed = percent, wants_whole("seed (of random_oldest)", seed)
        super().__init__()
        self._random = random.Random(self.seed)

    def victim(self, candidates: Collection[Key]) -> Key:
        rank = self._random.randrange(max(1, int(len(candidates) * self.percent / 100)))
        for start in (rank, 0):
            for key in self._order.since(start):
                if key in candidates:
                    return key
        raise LabError(f"random_oldest: none of {len(candidates)} candidates was ever inserted.")
