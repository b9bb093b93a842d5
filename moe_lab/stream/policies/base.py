"""What a cache asks of an eviction policy. Nothing here knows bytes, slots or threads."""

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

Key = tuple[int, int]
"""(layer, expert)"""


@runtime_checkable
class Policy(Protocol):
    """What a cache asks of an eviction policy; `PolicyExtras` are optional. Keys are (layer, expert)."""

    def on_hit(self, key: Key) -> None:
        """`key` was asked for and is resident (or on its way)."""

    def on_insert(self, key: Key) -> None:
        """`key` was asked for, was absent and has got a slot."""

    def on_evict(self, key: Key) -> None:
        """`key` lost its slot: it was the victim, or its read failed."""

    def victim(self, candidates: Collection[Key]) -> Key:
        """One of `candidates`: the resident keys nobody uses, longest unused first.

        `candidates` is a live view with cheap `in`, `len` and iteration; it is never empty. It lacks the keys that the
        present call or another one holds, so a policy's own first choice may be missing from it.
        """
        ...


class PolicyExtras(Protocol):
    """What a policy may have besides."""

    name: str
    """Its label in tables and plots; without one the class's name is."""

    def on_request(self, keys: Sequence[Key]) -> None:
        """A request for these distinct keys of one layer begins: their on_hit and on_insert follow, in this order."""

    def on_request_elsewhere(self, keys: Sequence[Key]) -> None:
        """The same of a layer whose slots another policy of the cache looks after: nothing follows."""
