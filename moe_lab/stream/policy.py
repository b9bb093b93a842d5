"""Which resident expert leaves when a slot is needed: eviction policies as small objects.

One policy object drives the live cache and the simulator alike; both call it from one thread at a time. A policy knows
keys (layer, expert) and nothing about bytes, slots or threads. Your own class works wherever a name does.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

from moe_lab.errors import LabError, LabTypeError
from moe_lab.protocols import check_object

Key = tuple[int, int]
PolicyFactory = Callable[[], "Policy"]

_HOOKS = ("on_hit", "on_insert", "on_evict", "victim")


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

    Raises LabError for an unknown name, LabTypeError for an object that lacks a hook, or has one that cannot be called
    as a cache calls it.
    """
    if isinstance(policy, str):
        if policy not in POLICIES:
            raise LabError(f"unknown eviction policy {policy!r}; wanted {', '.join(POLICIES)} or your own object.")
        return POLICIES[policy]
    if _is_maker(policy):
        return lambda: _made(policy)
    checked = _checked(policy)
    return lambda: copy.deepcopy(checked)


def make_policy(policy: str | object) -> Policy:
    """One policy: an object of the caller's is used as it is, so that its state can be looked at afterwards."""
    return policy_factory(policy)() if isinstance(policy, str) or _is_maker(policy) else _checked(policy)


def _is_maker(policy: object) -> bool:
    """Whether it makes policies instead of being one: a class, or a callable without any of the hooks."""
    return isinstance(policy, type) or (callable(policy) and not any(hasattr(policy, hook) for hook in _HOOKS))


def _made(maker: object) -> Policy:
    try:
        policy = maker()  # type: ignore[operator]
    except TypeError as error:
        raise LabTypeError(
            f"eviction policy {policy_name(maker)!r} cannot be made by calling it without arguments ({error}); pass an "
            "object of it, or a function that makes one."
        ) from error
    return _checked(policy)


def _checked(policy: object) -> Policy:
    if type(policy) not in POLICIES.values():
        check_object(policy, Policy, "eviction policy", POLICIES, optional=PolicyExtras)
    return policy  # type: ignore[return-value]
