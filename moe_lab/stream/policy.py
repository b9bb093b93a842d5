"""Which resident expert leaves when a slot is needed: eviction policies as small objects.

One policy object drives the live cache and the simulator alike; both call it from one thread at a time. A policy knows
keys (layer, expert) and nothing about bytes, slots or threads. Your own class works wherever a name does.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

from moe_lab.errors import LabError, LabTypeError

Key = tuple[int, int]
PolicyFactory = Callable[[], "Policy"]

_HOOKS = ("on_hit", "on_insert", "on_evict", "victim")


@runtime_checkable
class Policy(Protocol):
    """What a cache asks of an eviction policy. Keys are (layer, expert).

    An optional attribute `name` labels tables and plots; without one the class's name does.
    """

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


POLICIES: dict[str, PolicyFactory] = {"lru": LRU}


def policy_name(policy: object) -> str:
    """The label of a name, object, class or factory in tables and plots."""
    if isinstance(policy, str):
        return policy
    named = getattr(policy, "name", None)
    return named if isinstance(named, str) else getattr(policy, "__name__", type(policy).__name__)


def policy_factory(policy: str | object) -> PolicyFactory:
    """A maker of fresh policies from a name, a class or factory, or an object (copied, so that each cache has its own).

    Raises LabError for an unknown name and LabTypeError for an object without the four hooks.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise LabError(f"unknown eviction policy {policy!r}; wanted {', '.join(POLICIES)} or your own object.")
        return POLICIES[policy]
    if _has_hooks(policy) and not isinstance(policy, type):
        return lambda: copy.deepcopy(policy)  # type: ignore[return-value]
    if not callable(policy):
        raise _no_policy(policy, policy)
    return lambda: _checked(policy(), policy)


def make_policy(policy: str | object) -> Policy:
    """One policy: an object of the caller's is used as it is, so that its state can be looked at afterwards."""
    if _has_hooks(policy) and not isinstance(policy, type):
        return policy  # type: ignore[return-value]
    return policy_factory(policy)()


def _has_hooks(policy: object) -> bool:
    return all(callable(getattr(policy, hook, None)) for hook in _HOOKS)


def _checked(made: object, source: object) -> Policy:
    if not _has_hooks(made):
        raise _no_policy(made, source)
    return made  # type: ignore[return-value]


def _no_policy(made: object, source: object) -> LabTypeError:
    missing = ", ".join(hook for hook in _HOOKS if not callable(getattr(made, hook, None)))
    return LabTypeError(
        f"eviction policy {policy_name(source)!r} lacks {missing}; wanted a name ({', '.join(POLICIES)}) or an object "
        f"with {', '.join(_HOOKS)}."
    )
