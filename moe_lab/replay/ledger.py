"""What became of everything that was read ahead.

Every background read has exactly one class:
  timely    asked for after its bytes were in place                   slack_us: how long before
  late      asked for while it was under way: it came with us         late_us: what was left to wait
  harmful   never asked for, and what it pushed out was asked for, and read again, while it lay there in its place
  useless   never asked for otherwise (by the end of the record)
  dropped   given up or failed before its bytes were in place         bytes: what was read until it was given up

    recall@p               distinct experts picked that the prediction named / distinct experts picked
    bytes per useful byte  bytes read ahead / bytes of those of them that were asked for
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_lab.replay.story import Read, Request, Story, Told, story_of
from moe_lab.simulate.table import frame
from moe_lab.stream.events import MISS, NONE

if TYPE_CHECKING:
    import pandas as pd

TIMELY, LATE, USELESS, HARMFUL, DROPPED = FATES = ("timely", "late", "useless", "harmful", "dropped")
COLUMNS = ("step", "layer", "expert", "fate", "slack_us", "late_us", "bytes", "pushed_out_layer", "pushed_out_expert")
SUMMARY = (
    *("layer", "issued", *FATES, "bytes_prefetch", "bytes_useful", "bytes_per_useful_byte"),
    *("named", "recall", "slack_us_p50", "late_us_p50"),
)


def classify(story: Story) -> dict[int, str]:
    """The class of each background read, by its name."""
    missed = _misses(story)
    return {read.name: _fate(read, story, missed) for read in story.reads.values() if read.ahead and read.queued_ns}


def ledger(recording: Story | Told) -> "pd.DataFrame":
    """A row a background read, columns `COLUMNS`, in the order in which they were queued. Times in us, NaN where they
    do not apply; pushed_out_*: the expert whose slot it took, -1 for none. Takes a Recording or its story.
    """
    story = story_of(recording, "replay.ledger")
    fates = classify(story)
    rows = []
    for read in sorted((story.reads[name] for name in fates), key=lambda read: read.queued_ns):
        slack, late = _slack(read, story)
        took = read.took or (NONE, NONE)
        rows.append((read.step, read.layer, read.expert, fates[read.name], slack, late, read.nbytes, *took))
    return frame(rows, COLUMNS)


def summary(recording: Story | Told) -> "pd.DataFrame":
    """A row a layer that was predicted for, columns `SUMMARY`; `named`: experts named a step (mean), `recall`: recall@p
    at that width over the steps that predicted. NaN where there is nothing to divide by. Takes a Recording or its
    story.
    """
    story = story_of(recording, "replay.summary")
    table = ledger(story)
    named = _named(story)
    requests = story.requests_of()
    rows = []
    for layer in sorted({layer for _, layer in named} | set(table["layer"])):
        mine: Any = table[table["layer"] == layer]
        counts = {fate: int((mine["fate"] == fate).sum()) for fate in FATES}
        used = mine[mine["fate"].isin((TIMELY, LATE))]
        read, useful = int(mine["bytes"].sum()), int(used["bytes"].sum())
        steps = {step: experts for (step, n), experts in named.items() if n == layer}
        picked = {step: _picked(requests.get((step, layer), [])) for step in steps}
        found = sum(len(picked[step] & steps[step]) for step in steps)
        asked = sum(len(experts) for experts in picked.values())
        rows.append(
            (
                layer, len(mine) - counts[DROPPED], *counts.values(), read, useful, read / useful if useful else _NAN,
                sum(map(len, steps.values())) / len(steps) if steps else _NAN, found / asked if asked else _NAN,
                float(mine["slack_us"].median()), float(mine["late_us"].median()),
            )
        )  # fmt: skip
    return frame(rows, SUMMARY)


_NAN = float("nan")


def _fate(read: Read, story: Story, missed: Mapping[tuple[int, int], list[int]]) -> str:
    uses = [story.requests[name] for name in read.uses if name in story.requests]
    if uses:
        first = min(request.asked_ns for request in uses)
        return TIMELY if read.ready_ns and read.ready_ns <= first else LATE
    if not read.ready_ns:
        return DROPPED
    until = read.gone_ns or float("inf")
    wanted = [] if read.took is None else missed.get(read.took, [])
    return HARMFUL if any(read.queued_ns < at <= until for at in wanted) else USELESS


def _slack(read: Read, story: Story) -> tuple[float, float]:
    """us between ready and asked for, whichever came first."""
    asked = [story.requests[name].asked_ns for name in read.uses if name in story.requests]
    if not asked or not read.ready_ns:
        return _NAN, _NAN
    early = (min(asked) - read.ready_ns) / 1e3
    return (early, _NAN) if early >= 0 else (_NAN, -early)


def _misses(story: Story) -> dict[tuple[int, int], list[int]]:
    """When each key was asked for and absent."""
    found: dict[tuple[int, int], list[int]] = {}
    for request in story.requests.values():
        for use in request.uses:
            if use.how == MISS:
                found.setdefault((request.layer, use.expert), []).append(request.asked_ns)
    return found


def _named(story: Story) -> dict[tuple[int, int], set[int]]:
    found: dict[tuple[int, int], set[int]] = {}
    for one in story.predictions:
        found.setdefault((one.step, one.layer), set()).add(one.expert)
    return found


def _picked(requests: list[Request]) -> set[int]:
    return {use.expert for request in requests for use in request.uses}
