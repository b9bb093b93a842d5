"""What a cache did and when: one bounded log of small events, from which ledgers, stall labels and timelines are made.

    log = EventLog()
    cache.record(log)          # None ends it
    ...
    table = log.table()        # structured array, oldest first

An event is nine int64: its number, when, kind, step, layer, expert, request, read, value. A *request* is one call of
`lease`, a *read* one stay of an expert in a slot, from the decision to fetch it. Events come from the caller's thread
and from readers; nothing waits and nothing grows: past `most` events the oldest are overwritten and counted in `lost`.
`clock` gives nanoseconds (tests inject their own). Knows nothing about what the events will be used for.
"""

import struct
import time
from collections.abc import Callable
from enum import IntEnum
from itertools import count

import numpy as np

from moe_lab.checks import wants_whole

NONE = -1
DEMAND, PREFETCH = 0, 1  # lanes
HIT, LATE, MISS = 0, 1, 2  # what a request found of an expert: there, on its way, absent
RESIDENT, BEGUN, UNDER_WAY, IN_LINE = 0, 1, 2, 3  # a predicted expert; IN_LINE until a BEGUN follows, if one does

# A ring row; `struct` packs it under the interpreter's lock in one step, so rows of two threads cannot mix.
_ROW = struct.Struct("=9q")
FIELDS = ("number", "at_ns", "kind", "step", "layer", "expert", "request", "read", "value")
DTYPE = np.dtype([(name, np.int64) for name in FIELDS])


class Kind(IntEnum):
    """What happened. In brackets what `value` holds; fields that are not named are NONE."""

    ASKED = 0  # a request came                        layer, request           [distinct experts]
    USED = 1  # one of its experts was pinned          layer, expert, request, read  [HIT, LATE, MISS]
    SLOT_WAIT = 2  # its caller was blocked till now   layer, request           [since when, ns]: no slot was free
    BYTES_WAIT = 3  # the same, for bytes              layer, request           [since when, ns]
    GRANTED = 4  # all its bytes are in place          layer, request
    ENDED = 5  # it was released                       layer, request
    QUEUED = 6  # a read was handed to the readers     layer, expert, read, request  [lane]
    STARTED = 7  # the first of its jobs began         layer, expert, read      [reader's number]
    DONE = 8  # the last of its jobs ended             layer, expert, read      [reader's number]
    COPIED = 9  # its copy to a device was queued      layer, expert, read
    READY = 10  # its bytes are in place               layer, expert, read      [bytes]
    PROMOTED = 11  # demand joined a background read   layer, expert, read, request
    FAILED = 12  # it ended in an error                layer, expert, read
    DROPPED = 13  # it was given up                    layer, expert, read      [bytes read until then]
    EVICTED = 14  # an expert lost its slot            layer, expert, read; request: the read that took it  [its lane]
    PREDICTED = 15  # a prediction named an expert     layer, expert, read      [RESIDENT, BEGUN, UNDER_WAY, IN_LINE]
    INELIGIBLE = 16  # a layer made no prediction      layer                    [reason, see stream.prediction]


_NUMBERS = count(1)


def next_number() -> int:
    """A number that no request and no read of this process has had: one in an error is the same one in a log."""
    return next(_NUMBERS)


class EventLog:
    """A ring of `most` events. `step` is the current step's number, which the driver sets; events carry it."""

    def __init__(self, most: int = 1 << 16, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.most = wants_whole("most", most, 1)
        self.clock = clock
        self.step = 0
        self._ring = bytearray(self.most * _ROW.size)
        self._places = count(1)

    def name(self) -> int:
        """A number that no request and no read has had."""
        return next_number()

    def put(
        self,
        kind: int,
        layer: int = NONE,
        expert: int = NONE,
        request: int = NONE,
        read: int = NONE,
        value: int = 0,
        at_ns: int | None = None,
    ) -> None:
        """Note an event, now or at `at_ns`. About a microsecond; safe from any thread."""
        at = self.clock() if at_ns is None else at_ns
        place = next(self._places)
        where = (place - 1) % self.most * _ROW.size
        _ROW.pack_into(self._ring, where, place, at, kind, self.step, layer, expert, request, read, value)

    def __len__(self) -> int:
        return int((self._rows()["number"] > 0).sum())

    @property
    def lost(self) -> int:
        """Events that were overwritten."""
        return max(0, int(self._rows()["number"].max()) - self.most)

    def table(self) -> np.ndarray:
        """The events that are still there, oldest first, as a structured array of `FIELDS`; a copy."""
        rows = self._rows()
        rows = rows[rows["number"] > 0]
        return rows[np.argsort(rows["number"])]

    def _rows(self) -> np.ndarray:
        return np.frombuffer(bytes(self._ring), DTYPE)

    def clear(self) -> None:
        """Forget the events; names go on."""
        self._places, self._ring = count(1), bytearray(len(self._ring))
