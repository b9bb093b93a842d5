"""Which keys are resident, in which slot, and who may be evicted: the bookkeeping of a cache without bytes or threads.

The live cache and the simulator run this same code, so their counters agree by construction. A request is a group of
distinct keys that must be resident at once: the hits are pinned first, only then are victims chosen among the rest.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import index
from typing import TypeVar

from moe_lab.checks import wants_wholes
from moe_lab.errors import LabError
from moe_lab.stream.policy import Key, Policy, blame, policy_name

_T = TypeVar("_T")


def numbers(experts: Iterable[int]) -> list[int]:
    """The experts' numbers in the order given. LabTypeError for what is none: 2.0 would read expert 2, 2.5 as well."""
    try:
        return [index(expert) for expert in experts]
    except TypeError:
        return wants_wholes("experts", experts)  # says which


def distinct(experts: Iterable[int]) -> list[int]:
    """Each expert once, ascending: the one order in which engine and simulator plan a request."""
    return sorted({int(e) for e in experts})


def split_waves(keys: Sequence[_T], slots: int) -> list[Sequence[_T]]:
    """Groups of at most `slots` keys, in order: each key is in exactly one wave."""
    return [keys] if 0 < len(keys) <= slots else [keys[i : i + slots] for i in range(0, len(keys), slots)]


def split_slots(slots: int, layers: Sequence[int], per_layer: bool) -> dict[int, range]:
    """The slot numbers each layer may use: all of them, or an even share (the first layers get the remainder)."""
    if not per_layer:
        return dict.fromkeys(layers, range(slots))
    share, extra = divmod(slots, len(layers))
    if share < 1:
        raise LabError(
            f"per_layer=True splits slots={slots} over {len(layers)} layers, which leaves some without one. "
            f"Give at least {len(layers)} slots, or per_layer=False."
        )
    starts = [i * share + min(i, extra) for i in range(len(layers) + 1)]
    return {layer: range(starts[i], starts[i + 1]) for i, layer in enumerate(layers)}


class SlotTable:
    """Fixed slots under one policy. `resident` maps keys to slots; `idle` holds the resident keys that nobody pins.

    slots = len(free) + len(resident) at all times. Every operation but `repair` is O(1) a key, whatever the capacity.
    """

    def __init__(self, slots: Iterable[int], policy: Policy) -> None:
        self.slots = tuple(slots)
        self.policy = policy
        self.told: tuple[Callable[[Sequence[Key]], None], ...] = ()  # who hears of requests besides: see `introduce`
        self.resident: dict[Key, int] = {}
        self.idle: dict[Key, None] = {}
        self.free: list[int] = list(reversed(self.slots))  # taken from the end: lowest slot first

    def take(self, keys: Sequence[Key]) -> list[Key] | None:
        """Pin distinct `keys`, admitting the absent ones. Returns the admitted; None (and no change) without room.

        The policy hears of the request as a whole, then of each key in the order given: which keys were hits must not
        decide how recent they are, or a bigger LRU could miss what a smaller one holds. Raises LabError when the policy
        names a victim that is no candidate, or when a policy of the user's raises.
        """
        missing = [key for key in keys if key not in self.resident]
        if len(missing) > len(self.free) + len(self.idle) - sum(key in self.idle for key in keys):
            return None
        for key in keys:
            self.idle.pop(key, None)
        try:
            if (begin := getattr(self.policy, "on_request", None)) is not None:
                begin(keys)
            for tell in self.told:
                tell(keys)
            for key in keys:
                if key in self.resident:
                    self.policy.on_hit(key)
                else:
                    self._enter(key)
        except Exception as error:
            blame(self.policy, error)
            raise
        return missing

    def admit(self, key: Key) -> bool:
        """Pin absent `key` in a slot ahead of any request; False (and no change) without room. To the policy it is an
        insertion but no request: what was only guessed must not tick its clocks.
        """
        if not self.free and not self.idle:
            return False
        try:
            self._enter(key)
        except Exception as error:
            blame(self.policy, error)
            raise
        return True

    def put_back(self, key: Key) -> None:
        """Nobody uses resident `key` any more: it may be evicted."""
        self.idle[key] = None

    def forget(self, key: Key) -> None:
        """`key` never arrived: its slot is free again."""
        self.idle.pop(key, None)
        self.free.append(self.resident.pop(key))
        self.policy.on_evict(key)

    def repair(self, whole: set[Key], idle: set[Key]) -> None:
        """Rebuild the table after `take` was torn by an exception: `whole` keys stay, `idle` of them are unpinned."""
        torn = [key for key in self.resident if key not in whole]
        for key in torn:
            del self.resident[key]
        used = set(self.resident.values())
        self.free = [slot for slot in reversed(self.slots) if slot not in used]
        self.idle = {key: None for key in [*self.idle, *self.resident] if key in idle and key in self.resident}
        for key in torn:
            # The policy may never have heard of the key; the exception that tore the plan is the one to be seen.
            with suppress(Exception):
                self.policy.on_evict(key)

    def _enter(self, key: Key) -> None:
        self.resident[key] = self.free.pop() if self.free else self._evict()
        self.policy.on_insert(key)

    def _evict(self) -> int:
        key = self.policy.victim(self.idle.keys())
        if key not in self.idle:
            raise LabError(
                f"eviction policy {policy_name(self.policy)!r} chose {key!r}, which is not among its "
                f"{len(self.idle)} candidates. victim(candidates) must return one of them."
            )
        del self.idle[key]
        slot = self.resident.pop(key)
        self.policy.on_evict(key)
        return slot


def introduce(tables: Iterable[SlotTable]) -> None:
    """Let each table's policy hear of the others' requests, if it asks to (`PolicyExtras.on_request_elsewhere`)."""
    tables = list(tables)
    for table in tables:
        hooks = (getattr(other.policy, "on_request_elsewhere", None) for other in tables if other is not table)
        table.told = tuple(hook for hook in hooks if hook is not None)
