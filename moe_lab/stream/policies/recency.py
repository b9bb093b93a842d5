"""Keys in order of last use, with access by rank: which key is the i-th longest unused?

A list of blocks, oldest first; a use moves the key to the newest one. Walking to rank i steps over whole blocks, about
i / 256 of them; blocks that have thinned out are joined once they are twice as many as needed, which is O(1) a use.
"""

from collections.abc import Iterator
from itertools import islice

from moe_lab.stream.policies.base import Key

BLOCK = 256


class Recency:
    """Distinct keys, longest unused first. `touch` and `drop` are O(1) (amortised)."""

    def __init__(self, block: int = BLOCK) -> None:
        self._block = block
        self._blocks: list[dict[Key, None]] = [{}]
        self._block_of: dict[Key, dict[Key, None]] = {}
        self._added = 0  # keys that the newest block has taken so far, gone ones included

    def __len__(self) -> int:
        return len(self._block_of)

    def __iter__(self) -> Iterator[Key]:
        for block in self._blocks:
            yield from block

    def touch(self, key: Key) -> None:
        """`key` is used now: it becomes the newest."""
        self.drop(key)
        if self._added >= self._block:
            self._blocks.append({})
            self._added = 0
            if len(self._blocks) > 8 + 2 * len(self._block_of) // self._block:
                self._join()
        self._blocks[-1][key] = None
        self._block_of[key] = self._blocks[-1]
        self._added += 1

    def drop(self, key: Key) -> None:
        """Forget `key`; an unknown one is no error."""
        block = self._block_of.pop(key, None)
        if block is not None:
            del block[key]

    def since(self, rank: int) -> Iterator[Key]:
        """Keys from the `rank`-th longest unused on (0 = the longest unused)."""
        for block in self._blocks:
            if rank < len(block):
                yield from islice(block, rank, None)
                rank = 0
            else:
                rank -= len(block)

    def _join(self) -> None:
        keys = list(self)
        self._blocks = [dict.fromkeys(keys[i : i + self._block]) for i in range(0, len(keys), self._block)]
        self._block_of = {key: block for block in self._blocks for key in block}
        self._blocks.append({})


class InOrder:
    """The hooks of a policy that only wants to know who is there, in order of last use: `_order`."""

    def __init__(self) -> None:
        self._order = Recency()

    def on_hit(self, key: Key) -> None:
        self._order.touch(key)

    def on_insert(self, key: Key) -> None:
        self._order.touch(key)

    def on_evict(self, key: Key) -> None:
        self._order.drop(key)
