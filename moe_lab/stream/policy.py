"""Which resident expert leaves when a slot is needed: eviction policies by name, or your own object.

One policy object drives the live cache and the simulator alike; both call it from one thread at a time. A policy knows
keys (layer, expert) and nothing about bytes, slots or threads. Your own class works wherever a name does.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from moe_lab.errors import LabError, LabTypeError
from moe_lab.protocols import check_new_name, check_object
from moe_lab.stream.policies.base import Key, Policy, PolicyExtras
from moe_lab.stream.policies.fitted import Fitted
from moe_lab.stream.policies.lfu import LFU, LFUDA, LFUDecay
from moe_lab.stream.policies.lru import LRU
from moe_lab.stream.policies.predicted import Predicted
from moe_lab.stream.policies.random_oldest import RandomOldest
from moe_lab.stream.policies.s3fifo import S3FIFO
from moe_lab.stream.policies.static import Static

PolicyFactory = Callable[[], Policy]

POLICIES: dict[str, type] = {
    kind.name: kind for kind in (LRU, RandomOldest, LFU, LFUDecay, LFUDA, S3FIFO, Static, Predicted)
}
_HOOKS = ("on_hit", "on_insert", "on_evict", "victim")


def policy_name(policy: object) -> str:
    """The label of a name, object, class or factory in tables and plots."""
    if isinstance(policy, str):
        return policy
    named = getattr(policy, "name", None)
    return named if isinstance(named, str) else getattr(policy, "__name__", type(policy).__name__)


def policy_factory(policy: str | object) -> PolicyFactory:
    """A maker of fresh policies from a name, a class or factory, or an object (copied, so that each cache has its own).

    Raises LabError for an unknown name or an object with the name of one of the lab's, LabTypeError for an object that
    lacks a hook, has one that cannot be called as a cache calls it, or cannot be copied.
    """
    if isinstance(policy, str):
        return _named(policy)
    if _is_maker(policy):
        return lambda: _made(policy)
    checked = _checked(policy)
    return lambda: _copied(checked)


def make_policy(policy: str | object, **options: Any) -> Policy:
    """One policy. A name takes the options of its class, as in make_policy("random_oldest", percent=5); such a policy
    is called "random_oldest(percent=5)" in tables. An object of the caller's is used as it is, so that its state can be
    looked at afterwards. LabError for an option that the policy does not have.
    """
    if not options:
        return policy_factory(policy)() if isinstance(policy, str) or _is_maker(policy) else _checked(policy)
    if not isinstance(policy, str):
        raise LabTypeError(f"options ({', '.join(options)}) go with a policy's name; set them on your own object.")
    kind = _named(policy)
    known = list(inspect.signature(kind).parameters)
    if unknown := [name for name in options if name not in known]:
        raise LabError(
            f"eviction policy {policy!r} has no option {unknown[0]!r}; it has {', '.join(known) or 'no options'}."
        )
    made: Any = kind(**options)
    made.name = f"{policy}({', '.join(f'{name}={_short(value)}' for name, value in options.items())})"
    return made


def policy_of(text: str) -> str | Policy:
    """A policy as a command line writes it: a name, or a name and options, "random_oldest:percent=5:seed=1". The first
    option needs no name, and a percent may say so: "random_oldest:5%". LabError for what is none of this.
    """
    name, *given = text.strip().split(":")
    if not given:
        return name
    known = list(inspect.signature(_named(name)).parameters)
    options: dict[str, Any] = {}
    for place, one in enumerate(given):
        option, equals, value = one.rpartition("=")
        if not equals and place == 0 and known:
            option = known[0]
        options[option] = number = _number(value)
        if number is None or not option:
            wanted = ":".join(f"{each}=.." for each in known) or "no options"
            raise LabError(f"eviction policy {text!r}: {one!r} is no option=number; {name} takes {wanted}.")
    return make_policy(name, **options)


def _number(text: str) -> int | float | None:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def unknown_policy(name: str, known: Iterable[str] = POLICIES) -> LabError:
    """The error for a name that is none of `known`; with options behind it, it says who reads those."""
    if name.partition(":")[0] in POLICIES:
        fix = f"options come with an object: lab.caching.policy_of({name!r})."
        return LabError(f"unknown eviction policy {name!r}; {fix}")
    return LabError(f"unknown eviction policy {name!r}; wanted {', '.join(known)} or an object of your own.")


def _named(name: str) -> type:
    if name not in POLICIES:
        raise unknown_policy(name)
    return POLICIES[name]


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) else type(value).__name__


def _is_maker(policy: object) -> bool:
    """Whether it makes policies instead of being one: a class, or a callable without any of the hooks."""
    return isinstance(policy, type) or (callable(policy) and not any(hasattr(policy, hook) for hook in _HOOKS))


def _made(maker: object) -> Policy:
    try:
        policy = maker()  # type: ignore[operator]
    except Exception as error:
        raise LabTypeError(
            f"eviction policy {policy_name(maker)!r} cannot be made by calling it without arguments "
            f"({type(error).__name__}: {error}); pass an object of it, or a function that makes one."
        ) from error
    return _checked(policy)


def _copied(policy: Policy) -> Policy:
    try:
        return copy.deepcopy(policy)
    except Exception as error:  # a lock inside, or a subclass of dict whose __init__ takes other arguments
        raise LabTypeError(
            f"eviction policy {policy_name(policy)!r} cannot be copied ({type(error).__name__}: {error}), and each "
            "simulation, and each layer of a cache with per_layer=True, has a copy of the object; pass its class, or a "
            "function that makes one."
        ) from error


def _checked(policy: object) -> Policy:
    if type(policy) not in POLICIES.values():
        check_object(policy, Policy, "eviction policy", POLICIES, optional=PolicyExtras)
        check_new_name(policy_name(policy), "eviction policy", POLICIES)
    return policy  # type: ignore[return-value]


def blame(policy: Policy, error: Exception) -> None:
    """Raise what a policy of the user's raised as a LabError with its name; the lab's errors and MemoryError pass."""
    if type(policy) in POLICIES.values() or isinstance(error, LabError | MemoryError):
        return
    raise LabError(f"eviction policy {policy_name(policy)!r} raised {type(error).__name__}: {error}") from error


__all__ = [
    "LFU",
    "LFUDA",
    "LRU",
    "POLICIES",
    "S3FIFO",
    "Fitted",
    "Key",
    "LFUDecay",
    "Policy",
    "PolicyExtras",
    "PolicyFactory",
    "Predicted",
    "RandomOldest",
    "Static",
    "blame",
    "make_policy",
    "policy_factory",
    "policy_name",
    "policy_of",
    "unknown_policy",
]
