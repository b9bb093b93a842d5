"""What no policy can beat: optima that know the whole trace.

belady          MIN: every miss gets a slot, and the key whose next use is farthest leaves (Belady, 1966)
belady_bypass   MIN where a miss may pass through a staging buffer without taking a slot: the bound for a cache with one
infinite        a slot for every expert: what is left are first uses
All three choose the keys to keep by their next use alone, which is optimal when every expert costs the same to read.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence

from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key
from moe_lab.stream.policies.ranking import Ranking

BELADY, BELADY_BYPASS, INFINITE = "belady", "belady_bypass", "infinite"
BOUNDS = (BELADY, BELADY_BYPASS, INFINITE)
NEVER = 1 << 62


class _Future:
    """When each key is asked for, request by request."""

    def __init__(self, requests: Sequence[Sequence[Key]]) -> None:
        self._uses: dict[Key, list[int]] = defaultdict(list)
        for time, group in enumerate(requests):
            for key in group:
                self._uses[key].append(time)
        for times in self._uses.values():
            times.reverse()  # the next use is the last element

    def next_after_this(self, key: Key) -> int:
        """The use after the present one, which is over with this call; `NEVER` for the last."""
        times = self._uses[key]
        if not times:
            raise LabError(f"belady was built for another trace: it does not know this request of {key!r}.")
        times.pop()
        return times[-1] if times else NEVER


class Belady:
    """Evicts the key whose next use is farthest away. `requests`: all groups of keys to come, in order."""

    name = BELADY

    def __init__(self, requests: Sequence[Sequence[Key]]) -> None:
        self._future = _Future(requests)
        self._ranking = Ranking()

    def on_hit(self, key: Key) -> None:
        self._ranking.put(key, -self._future.next_after_this(key))

    def on_insert(self, key: Key) -> None:
        self.on_hit(key)

    def on_evict(self, key: Key) -> None:
        self._ranking.drop(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        return self._ranking.lowest(candidates)


class BypassTable:
    """Keeps the `slots` keys of nearest next use among those it holds and those just asked for."""

    def __init__(self, slots: int, requests: Sequence[Sequence[Key]]) -> None:
        self._slots, self._future = slots, _Future(requests)
        self._ranking = Ranking()
        self._resident: dict[Key, None] = {}

    def take(self, keys: Sequence[Key]) -> list[Key]:
        """The keys of one request that have to be read."""
        missing = [key for key in keys if key not in self._resident]
        for key in keys:
            self._resident[key] = None
            self._ranking.put(key, -self._future.next_after_this(key))
        while len(self._resident) > self._slots:
            leaving = self._ranking.lowest(self._resident)
            self._ranking.drop(leaving)
            del self._resident[leaving]
        return missing

    def put_back(self, key: Key) -> None:
        """Nothing is pinned here: what a request uses may be in the staging buffer."""


class EndlessTable:
    """Never evicts."""

    def __init__(self) -> None:
        self._seen: set[Key] = set()

    def take(self, keys: Sequence[Key]) -> list[Key]:
        """The keys of one request that have to be read: those never asked for before."""
        missing = [key for key in keys if key not in self._seen]
        self._seen.update(missing)
        return missing

    def put_back(self, key: Key) -> None:
        """Nothing is ever evicted."""
