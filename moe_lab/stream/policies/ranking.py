"""Resident keys by a value, lowest first: the one data structure behind every policy that counts.

A heap with stale entries: setting a value is a push, an entry that a later value contradicts is dropped when it comes
up. So a request costs O(log n) whatever the capacity, and memory follows the cache, not the trace.
"""

import heapq
from collections.abc import Collection
from typing import Any

from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key

Entry = tuple[Any, int, Key]  # value, when it was set, key: among equal values the one set first comes first


class Ranking:
    """Keys with a value each; `lowest` names the smallest one that may leave."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._heap: list[Entry] = []
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, key: Key) -> Any:
        """The key's value. KeyError for a key that is not ranked."""
        return self._entries[key][0]

    def put(self, key: Key, value: Any) -> None:
        """Rank `key`, anew if it is ranked already."""
        self._clock += 1
        entry = (value, self._clock, key)
        self._entries[key] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """Forget `key`; one that is not ranked is no error."""
        self._entries.pop(key, None)

    def lowest(self, candidates: Collection[Key]) -> Key:
        """The candidate of the smallest value, the longest unchanged among equals. It stays ranked until dropped."""
        held: list[Entry] = []  # smaller ones that somebody uses
        heap = self._heap
        try:
            while heap:
                entry = heap[0]
                key = entry[2]
                if self._entries.get(key) is entry and key in candidates:
                    return key
                heapq.heappop(heap)
                if self._entries.get(key) is entry:
                    held.append(entry)
        finally:
            for entry in held:
                heapq.heappush(heap, entry)
        raise LabError(f"none of the {len(candidates)} candidates was ever inserted.")
