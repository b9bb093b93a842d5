"""The events of a cache put together: what happened to each read and to each request.

An EventLog is a flat list in order of time; a Story is the same as records. Nothing here measures or judges.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from moe_lab.checks import wants
from moe_lab.stream.events import BEGUN, DEMAND, DTYPE, IN_LINE, NONE, PREFETCH, EventLog, Kind
from moe_lab.stream.policies.base import Key

Interval = tuple[int, int]


@dataclass(slots=True)
class Use:
    """A request's pick of one expert: `how` is HIT, LATE or MISS; `read` brought it (NONE: before the log began)."""

    expert: int
    how: int
    read: int


@dataclass(slots=True)
class Request:
    """One lease. Times in ns, 0 where not reached. `slot_waits`, `byte_waits`: when its caller was blocked."""

    name: int
    step: int
    layer: int
    asked_ns: int
    granted_ns: int = 0
    ended_ns: int = 0
    uses: list[Use] = field(default_factory=list)
    slot_waits: list[Interval] = field(default_factory=list)
    byte_waits: list[Interval] = field(default_factory=list)

    @property
    def keys(self) -> list[Key]:
        """What it asked for, ascending."""
        return [(self.layer, expert) for expert in sorted(use.expert for use in self.uses)]

    @property
    def waits(self) -> list[Interval]:
        """All of it, merged: no instant counts twice."""
        return merged([*self.slot_waits, *self.byte_waits])


@dataclass(slots=True)
class Read:
    """One expert brought in. `lane`: DEMAND or PREFETCH, as it was queued. Times in ns, 0 where not reached.

    `nbytes`: brought in; of one that was given up (`dropped`), read until then.
    `took`: the key (layer, expert) that lost its slot to it. `gone_ns`: when it lost its own. `uses`: requests that
    found it, in order.
    """

    name: int
    layer: int
    expert: int
    step: int = NONE
    lane: int = DEMAND
    request: int = NONE
    queued_ns: int = 0
    started_ns: int = 0
    done_ns: int = 0
    copied_ns: int = 0
    ready_ns: int = 0
    promoted_ns: int = 0
    gone_ns: int = 0
    reader: int = NONE
    nbytes: int = 0
    failed: bool = False
    dropped: bool = False
    took: tuple[int, int] | None = None
    uses: list[int] = field(default_factory=list)

    @property
    def ahead(self) -> bool:
        """Whether it was read before anybody asked."""
        return self.lane == PREFETCH


@dataclass(slots=True)
class Prediction:
    """One expert named for a layer in a step, and what became of it: RESIDENT, BEGUN, UNDER_WAY, or IN_LINE to the
    end.
    """

    step: int
    layer: int
    expert: int
    fate: int
    at_ns: int


@dataclass(slots=True)
class Story:
    """Requests and reads by name, and the predictions in order. `lost`: events that the log no longer had."""

    requests: dict[int, Request] = field(default_factory=dict)
    reads: dict[int, Read] = field(default_factory=dict)
    predictions: list[Prediction] = field(default_factory=list)
    lost: int = 0

    def requests_of(self) -> dict[tuple[int, int], list[Request]]:
        """Requests by (step, layer): several where a call came in waves."""
        found: dict[tuple[int, int], list[Request]] = {}
        for request in self.requests.values():
            found.setdefault((request.step, request.layer), []).append(request)
        return found

    def reads_of(self) -> dict[tuple[int, int], list[Read]]:
        """Reads by the (step, layer) that they were made for."""
        found: dict[tuple[int, int], list[Read]] = {}
        for read in self.reads.values():
            if read.queued_ns:
                found.setdefault((read.step, read.layer), []).append(read)
        return found


@runtime_checkable
class Told(Protocol):
    """What has a story: a Recording."""

    @property
    def story(self) -> Story:
        """What its cache did."""
        ...


def story_of(given: Story | Told, who: str) -> Story:
    """A story, or that of a recording. LabTypeError for what is neither."""
    found = given.story if isinstance(given, Told) else given
    wants(f"what {who} takes", found, Story, "a Recording, as moe_lab.replay.run leaves it, or its story")
    return found


def tell(events: np.ndarray | EventLog, lost: int = 0) -> Story:
    """The story of an EventLog, or of its `table()`. Events of requests and reads that began before the log are left
    out. LabTypeError for what is neither.
    """
    if isinstance(events, EventLog):
        return tell(events.table(), events.lost)
    if not isinstance(events, np.ndarray) or events.dtype != DTYPE:
        wants("what tell takes", events, EventLog, "an EventLog or its table(); a Recording has its .story already")
    story = Story(lost=lost)
    in_line: dict[tuple[int, int], Prediction] = {}
    for _, at, kind, step, layer, expert, request, read, value in events.tolist():
        if kind == Kind.ASKED:
            story.requests[request] = Request(request, step, layer, at)
        elif kind == Kind.PREDICTED:
            waiting = in_line.pop((layer, expert), None)
            if value == BEGUN and waiting is not None:  # its turn came, maybe in a reader's thread and a step later
                waiting.fate = BEGUN
                continue
            story.predictions.append(Prediction(step, layer, expert, value, at))
            if value == IN_LINE:
                in_line[layer, expert] = story.predictions[-1]
        elif kind in _OF_REQUEST:
            _request_event(story, kind, at, expert, request, read, value)
        elif kind in _OF_READ:
            _read_event(story, kind, at, step, layer, expert, request, read, value)
    return story


_OF_REQUEST = {Kind.USED, Kind.SLOT_WAIT, Kind.BYTES_WAIT, Kind.GRANTED, Kind.ENDED}
_OF_READ = {
    *(Kind.QUEUED, Kind.STARTED, Kind.DONE, Kind.COPIED, Kind.READY),
    *(Kind.PROMOTED, Kind.FAILED, Kind.DROPPED, Kind.EVICTED),
}  # fmt: skip


def _request_event(story: Story, kind: int, at: int, expert: int, request: int, read: int, value: int) -> None:
    mine = story.requests.get(request)
    if mine is None:
        return
    if kind == Kind.USED:
        mine.uses.append(Use(expert, value, read))
        if read in story.reads:
            story.reads[read].uses.append(request)
        elif read != NONE:
            story.reads[read] = Read(read, mine.layer, expert, uses=[request])
    elif kind == Kind.SLOT_WAIT:
        mine.slot_waits.append((value, at))
    elif kind == Kind.BYTES_WAIT:
        mine.byte_waits.append((value, at))
    elif kind == Kind.GRANTED:
        mine.granted_ns = at
    else:
        mine.ended_ns = at


def _read_event(
    story: Story, kind: int, at: int, step: int, layer: int, expert: int, request: int, read: int, value: int
) -> None:
    if kind == Kind.EVICTED:  # `request` names the read that took the slot
        if read in story.reads:
            story.reads[read].gone_ns = at
        story.reads.setdefault(request, Read(request, NONE, NONE)).took = (layer, expert)
        return
    mine = story.reads.setdefault(read, Read(read, layer, expert))
    mine.layer, mine.expert = layer, expert
    if kind == Kind.QUEUED:
        mine.step, mine.lane, mine.request, mine.queued_ns = step, value, request, at
    elif kind == Kind.STARTED:
        mine.started_ns, mine.reader = at, value
    elif kind == Kind.DONE:
        mine.done_ns = at
    elif kind == Kind.COPIED:
        mine.copied_ns = at
    elif kind == Kind.READY:
        mine.ready_ns, mine.nbytes = at, value
    elif kind == Kind.PROMOTED:
        mine.promoted_ns = at
    elif kind == Kind.FAILED:
        mine.failed = True
    else:
        mine.dropped, mine.nbytes = True, value


def merged(intervals: list[Interval]) -> list[Interval]:
    """The union of intervals as disjoint ones, ascending."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def length_ms(intervals: list[Interval]) -> float:
    """Milliseconds of disjoint intervals."""
    return sum(end - begin for begin, end in intervals) / 1e6


def common(one: list[Interval], other: list[Interval]) -> list[Interval]:
    """Where both are: the intersection of two lists of disjoint intervals."""
    return list(_common(merged(one), merged(other)))


def _common(one: list[Interval], other: list[Interval]) -> Iterator[Interval]:
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            yield begin, end
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
