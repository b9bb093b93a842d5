"""Why work stood still: every wait of a request, and in it every expert that was waited for, with one cause each.

A request's wait is shared out along its critical path: an expert has the time from the arrival of the one before it to
its own. So the shares add up to the wait, and an expert that came while another was waited for has 0. Causes, the first
that holds:
  slot wait              no slot was free: leases or reads under way held them all
  host late              the bytes were there, the waiting thread was not woken or had no processor (half of the share)
  predicted late         a background read of it was under way or in line when it was asked for
  queued behind prefetch its read waited for a reader (half of the share), and readers were busy with background reads
  slow disk              its read took more than three times the median one, and that is half of the share
  evicted too early      it was predicted in time and lost its slot before its use, or the optimal policy with as many
                         slots would have kept it
  never predicted        none of these: no cache of this size could have had it, and nobody asked for it before
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.caching.distances import stack_distances
from moe_lab.checks import wants
from moe_lab.replay.story import Interval, Read, Request, Story, Told, Use, common, length_ms, merged, story_of
from moe_lab.simulate.bounds import Belady
from moe_lab.simulate.table import frame
from moe_lab.stream.events import BEGUN, HIT, IN_LINE, LATE, NONE, RESIDENT
from moe_lab.stream.policies.base import Key
from moe_lab.stream.slots import SlotTable

if TYPE_CHECKING:
    import pandas as pd

SLOT, HOST, PREDICTED_LATE, BEHIND, DISK, EVICTED, NEVER = CAUSES = (
    *("slot wait", "host late", "predicted late", "queued behind prefetch", "slow disk"),
    *("evicted too early", "never predicted"),
)
COLUMNS = ("step", "layer", "expert", "cause", "wait_ms", "latency_ms", "queue_ms", "read_ms", "counterfactual")
SLOW = 3.0  # times the median read


def stalls(recording: Story | Told, shares: Mapping[int, range] | None = None) -> "pd.DataFrame":
    """A row for each expert that a request waited for (or could have: wait_ms 0), and one for each wait for a slot
    (expert -1); columns `COLUMNS`, times in ms. latency_ms: from asked for to in place, whoever waited; queue_ms until
    a reader began. Takes a Recording, or its story and `shares`: the slots of each layer, as in `Recording.shares`.
    """
    story = story_of(recording, "replay.stalls")
    if shares is None:
        shares = getattr(recording, "shares", None)
    wants("shares (of replay.stalls)", shares, Mapping, "the slots of each layer, as a Recording has them")
    assert shares is not None
    known = _Known.of(story, shares)
    rows = []
    for request in story.requests.values():
        if slot := merged(request.slot_waits):
            rows.append(
                (request.step, request.layer, NONE, SLOT, length_ms(slot), _NAN, _NAN, _NAN, _more_slots(request))
            )
        for use, read, share in _shared_out(request, story):
            queue_ms, read_ms = _queued(use, read), max(0, read.done_ns - read.started_ns) / 1e6
            cause = _cause(request, use, read, share, known)
            text = known.instead(request, use, read, cause, length_ms(share))
            about = (request.step, request.layer, use.expert, cause)
            latency_ms = max(0, read.ready_ns - request.asked_ns) / 1e6
            rows.append((*about, length_ms(share), latency_ms, queue_ms, read_ms, text))
    return frame(rows, COLUMNS)


_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class _Known:
    """What the causes are judged by: median read by layer, background reads at work, predictions, and the simulator."""

    usual_ms: Mapping[int, float]
    background: list[Interval]
    fates: Mapping[tuple[int, int, int], int]
    optimal: set[tuple[int, int]]
    distance: Mapping[tuple[int, int], float]

    @classmethod
    def of(cls, story: Story, shares: Mapping[int, range]) -> "_Known":
        times: dict[int, list[float]] = {}
        for read in story.reads.values():
            if read.done_ns and read.started_ns:
                times.setdefault(read.layer, []).append((read.done_ns - read.started_ns) / 1e6)
        ahead = [read for read in story.reads.values() if read.ahead and read.started_ns and read.done_ns]
        asked = [
            (r.name, [(r.layer, e) for e in sorted(use.expert for use in r.uses)]) for r in story.requests.values()
        ]
        optimal, distance = set(), {}
        for share in set(shares.values()):
            mine = [(name, keys) for name, keys in asked if keys and shares.get(keys[0][0]) == share]
            optimal |= _missed_by_the_optimum(mine, share)
            distance |= _distances(mine)
        return cls(
            {n: median(found) for n, found in times.items()},
            merged([(read.started_ns, read.done_ns) for read in ahead]),
            {(one.step, one.layer, one.expert): one.fate for one in story.predictions}, optimal, distance,
        )  # fmt: skip

    def instead(self, request: Request, use: Use, read: Read, cause: str, wait_ms: float) -> str:
        """What would have spared this wait, in a line."""
        usual = self.usual_ms.get(request.layer, _NAN)
        if cause == HOST:
            return f"woken when its bytes came: {max(0, request.granted_ns - read.ready_ns) / 1e6:.2f} ms less"
        if cause == PREDICTED_LATE:
            return f"asked for {max(0, read.ready_ns - request.asked_ns) / 1e6:.2f} ms earlier it would have been there"
        if cause == BEHIND:
            return f"with no background read at work: up to {min(wait_ms, _queued(use, read)):.2f} ms less"
        if cause == DISK:
            return f"at the layer's median read ({usual:.2f} ms): {_read_ms(read) - usual:.2f} ms less"
        distance = self.distance.get((request.name, use.expert), np.inf)
        if cause == EVICTED:
            return f"the optimal policy keeps it in these slots; LRU would need {distance + 1:.0f}"
        return (
            "first use: only a prediction helps" if distance == np.inf else f"LRU would need {distance + 1:.0f} slots"
        )


def _cause(request: Request, use: Use, read: Read, share: list[Interval], known: _Known) -> str:
    wait_ns = sum(end - begin for begin, end in share)
    after = length_ms(common(share, [(read.ready_ns, max(read.ready_ns, request.granted_ns))])) * 1e6
    fate = known.fates.get((request.step, request.layer, use.expert))
    if wait_ns and after >= 0.5 * wait_ns:
        return HOST
    if use.how == LATE or fate == IN_LINE:
        return PREDICTED_LATE
    queued = [(read.queued_ns, read.started_ns)] if read.started_ns else []
    held = length_ms(common(common(queued, known.background), share)) * 1e6
    if wait_ns and held >= 0.5 * wait_ns:
        return BEHIND
    usual = known.usual_ms.get(request.layer, np.inf)
    if _read_ms(read) > SLOW * usual and (_read_ms(read) - usual) * 1e6 >= 0.5 * wait_ns:
        return DISK
    if fate in (RESIDENT, BEGUN) or (request.name, use.expert) not in known.optimal:
        return EVICTED
    return NEVER


def _shared_out(request: Request, story: Story) -> Iterator[tuple[Use, Read, list[Interval]]]:
    """Experts that were not there, by arrival, each with its part of the wait for bytes."""
    waits = merged(request.byte_waits)
    absent = [(use, story.reads[use.read]) for use in request.uses if use.how != HIT and use.read in story.reads]
    absent = sorted(((u, r) for u, r in absent if r.ready_ns), key=lambda pair: pair[1].ready_ns)
    before = 0
    for place, (use, read) in enumerate(absent):
        until = read.ready_ns if place + 1 < len(absent) else max(request.granted_ns, read.ready_ns)
        yield use, read, common(waits, [(before, until)])
        before = until


def _queued(use: Use, read: Read) -> float:
    """ms from the moment somebody waited for it until a reader began."""
    since = read.promoted_ns or read.queued_ns
    return max(0, read.started_ns - since) / 1e6


def _read_ms(read: Read) -> float:
    return max(0, read.done_ns - read.started_ns) / 1e6


def _more_slots(request: Request) -> str:
    return f"{len(request.uses)} slots more, and it would not have waited for one"


def _missed_by_the_optimum(asked: Sequence[tuple[int, list[Key]]], share: range) -> set[tuple[int, int]]:
    """(request, expert) that Belady's policy would have to read as well."""
    table = SlotTable(share, Belady([keys for _, keys in asked]))
    found = set()
    for name, keys in asked:
        missing = table.take(keys)
        assert missing is not None  # a request was served by as many slots
        found |= {(name, expert) for _, expert in missing}
        for key in keys:
            table.put_back(key)
    return found


def _distances(asked: Sequence[tuple[int, list[Key]]]) -> dict[tuple[int, int], float]:
    """Stack distance of each key of each request: an LRU of more slots than that would have held it."""
    flat = stack_distances([keys for _, keys in asked])
    names = [(name, expert) for name, keys in asked for _, expert in keys]
    return dict(zip(names, flat.tolist(), strict=True))


__all__ = ["CAUSES", "COLUMNS", "stalls"]
