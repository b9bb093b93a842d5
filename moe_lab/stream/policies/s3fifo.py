"""S3-FIFO: a small queue weeds out what is asked for once, a main queue keeps the rest, a ghost queue remembers names.

After Yang, Zhang, Qiu, Yue, Vinayak, "FIFO queues are all you need for cache eviction" (SOSP 2023): new keys enter the
small queue (a tenth of the slots), or the main queue when the ghost queue still knows them. A key leaving the small
queue moves on when it was asked for again more than once, else its name goes to the ghosts; the main queue gives a key
another round for each of up to three requests.
"""

from collections import OrderedDict
from collections.abc import Collection

from moe_lab.errors import LabError
from moe_lab.stream.policies.base import Key

SMALL_SHARE = 0.1
MOST_REQUESTS = 3
MOVES_ON = 2  # requests after the first that make a key of the small queue stay


class S3FIFO:
    """Three FIFO queues (see the module). The capacity is the number of resident keys when a victim is asked for."""

    name = "s3fifo"

    def __init__(self) -> None:
        self._small: OrderedDict[Key, None] = OrderedDict()
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._asked: dict[Key, int] = {}  # requests since it entered its queue, at most MOST_REQUESTS
        self._weeded: Key | None = None  # the victim that becomes a ghost; a read that fails leaves none

    def on_hit(self, key: Key) -> None:
        self._asked[key] = min(self._asked[key] + 1, MOST_REQUESTS)

    def on_insert(self, key: Key) -> None:
        known = self._ghosts.pop(key, self) is None
        (self._main if known else self._small)[key] = None
        self._asked[key] = 0

    def on_evict(self, key: Key) -> None:
        if key == self._weeded:
            self._ghosts[key] = None
        self._weeded = None
        self._small.pop(key, None)
        self._main.pop(key, None)
        self._asked.pop(key, None)

    def victim(self, candidates: Collection[Key]) -> Key:
        capacity = len(self._small) + len(self._main)
        while len(self._ghosts) > max(1, round(capacity * (1 - SMALL_SHARE))):
            self._ghosts.popitem(last=False)
        if len(self._small) >= SMALL_SHARE * capacity and (key := self._from_small(candidates)) is not None:
            return key
        key = self._from_main(candidates)
        if key is None:
            key = self._from_small(candidates)  # the main queue is empty or in use
        if key is None:
            key = self._from_main(candidates)  # all of the small queue moved on
        if key is None:
            raise LabError(f"s3fifo: none of {len(candidates)} candidates was ever inserted.")
        return key

    def _from_small(self, candidates: Collection[Key]) -> Key | None:
        while (key := _oldest(self._small, candidates)) is not None:
            if self._asked[key] < MOVES_ON:
                self._weeded = key
                return key
            del self._small[key]
            self._main[key], self._asked[key] = None, 0
        return None

    def _from_main(self, candidates: Collection[Key]) -> Key | None:
        while (key := _oldest(self._main, candidates)) is not None:
            if not self._asked[key]:
                self._weeded = None
                return key
            self._asked[key] -= 1
            self._main.move_to_end(key)
        return None


def _oldest(queue: OrderedDict[Key, None], candidates: Collection[Key]) -> Key | None:
    """The first of the queue that nobody uses; those in use keep their place."""
    return next((key for key in queue if key in candidates), None)
