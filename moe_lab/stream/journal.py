"""Where the parts of a cache find the log of what it does; without one, noting is a comparison."""

import threading
from collections.abc import Callable

from moe_lab.stream.entry import Entry
from moe_lab.stream.events import NONE, EventLog, Kind

QUEUED, STARTED, DONE, COPIED, READY = (int(k) for k in (Kind.QUEUED, Kind.STARTED, Kind.DONE, Kind.COPIED, Kind.READY))
USED, PROMOTED, FAILED, DROPPED, EVICTED = (
    int(k) for k in (Kind.USED, Kind.PROMOTED, Kind.FAILED, Kind.DROPPED, Kind.EVICTED)
)
ASKED, SLOT_WAIT, BYTES_WAIT, GRANTED, ENDED = (
    int(k) for k in (Kind.ASKED, Kind.SLOT_WAIT, Kind.BYTES_WAIT, Kind.GRANTED, Kind.ENDED)
)
PREDICTED, INELIGIBLE = int(Kind.PREDICTED), int(Kind.INELIGIBLE)


class Journal:
    """One for a cache and all its parts, so that a log can come and go at any time. `log` None: nothing is noted."""

    def __init__(self) -> None:
        self.log: EventLog | None = None

    def name(self) -> int:
        """A new number for a read; NONE without a log."""
        return NONE if self.log is None else self.log.name()

    def entry(self, kind: int, entry: Entry, value: int = 0, request: int = NONE) -> None:
        """Something happened to one expert's stay."""
        if self.log is not None:
            self.log.put(kind, *entry.key, request=request, read=entry.read, value=value)

    def request(self, kind: int, layer: int, request: int, value: int = 0) -> None:
        """Something happened to a request."""
        if self.log is not None:
            self.log.put(kind, layer, request=request, value=value)

    def guess(self, layer: int, expert: int, read: int, value: int) -> None:
        """What became of a predicted expert."""
        if self.log is not None:
            self.log.put(PREDICTED, layer, expert, read=read, value=value)

    def starting(self, entry: Entry, wait: Callable[[], None]) -> Callable[[], None]:
        """`wait`, which a reader calls before each of the entry's jobs; with a log the first call is noted."""
        if self.log is None:
            return wait

        def begin() -> None:
            if not entry.begun:
                entry.begun = True
                self.entry(STARTED, entry, reader_number())
            wait()

        return begin


def reader_number() -> int:
    """The number in the name of the reader thread that runs this; NONE elsewhere."""
    tail = threading.current_thread().name.rpartition("-")[2]
    return int(tail) if tail.isdigit() else NONE
