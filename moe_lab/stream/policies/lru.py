"""Least recently used: the expert whose last request is oldest leaves.

The strong baseline wherever the same experts come back soon, and the worst choice for a working set a little larger
than the cache: it then evicts exactly the one that is needed next.
"""

from collections import OrderedDict
from collections.abc import Collection

from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key


class LRU:
    """The key whose last request is oldest leaves. O(1) a call, plus one step for each older key that is in use."""

    name = "lru"

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def on_hit(self, key: Key) -> None:
        self._order.move_to_end(key)

    def on_insert(self, key: Key) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def on_evict(self, key: Key) -> None:
        self._order.pop(key, None)

    def victim(self, candidates: Collection[Key]) -> Key:
        for key in self._order:
            if key in candidates:
                return key
        raise LabError(f"lru: none of {len(candidates)} candidates was ever inserted.")
