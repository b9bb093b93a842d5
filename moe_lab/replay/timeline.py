"""What ran when, lane by lane: a replay's calls, reads and copies as spans, and which span waited for which.

Lanes: "host" (route, fetch: the caller's thread), "compute" and "side" (the shared expert beside it; on a GPU their
times are the device's, laid onto the host's by one anchor at the end of the replay), "reader 0"... (from the first job
of an expert to its last) and "copy" (from the copy's hand-over to its arrival).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_lab.checks import wants, wants_path, wants_whole
from moe_lab.errors import LabError
from moe_lab.replay.driver import Recording
from moe_lab.replay.rows import Call
from moe_lab.replay.story import Read
from moe_lab.simulate.table import frame
from moe_lab.stream.events import NONE
from moe_lab.system.files import replace_file
from moe_lab.timing import PhaseClock, Stamp

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("span", "lane", "what", "begin_ms", "end_ms", "step", "layer", "expert", "lane_kind", "after")
HOST, COMPUTE, SIDE, COPY = "host", "compute", "side", "copy"


def timeline(recording: Recording, first: int = 0, last: int | None = None) -> "pd.DataFrame":
    """A row a span of steps first..last (all without it), columns `COLUMNS`; ms since the first call of these steps.

    `after`: the span that this one waited for (a read: the fetch that asked for it; a copy: its read; a computation:
    the read or copy that came last), -1 for none. `lane_kind`: "demand" or "prefetch" for reads. LabError where nothing
    was recorded there.
    """
    wants("what replay.timeline takes", recording, Recording, "a Recording, as moe_lab.replay.run leaves it")
    wants_whole("first", first)
    if last is not None:
        wants_whole("last", last)
    calls = [call for call in recording.calls if first <= call.step and (last is None or call.step <= last)]
    if not calls or recording.level == 0:
        raise LabError(f"no spans of steps {first} to {'the end' if last is None else last} in {recording!r}.")
    spans = _Spans(calls[0].begin_ns)
    fetch_of = {(call.step, call.layer): _host_spans(call, spans) for call in calls}
    came: dict[tuple[int, int], int] = {}
    for (step, layer), reads in recording.story.reads_of().items():
        for read in sorted(reads, key=lambda one: one.ready_ns):
            if (step, layer) in fetch_of and read.started_ns and read.done_ns:
                came[step, layer] = _read_spans(read, spans, fetch_of[step, layer])
    for call in calls:
        _device_spans(call, spans, came.get((call.step, call.layer), NONE), recording.anchor)
    return frame(sorted(spans.rows, key=lambda row: row[3]), COLUMNS)


class _Spans:
    """Rows with numbers of their own."""

    def __init__(self, zero_ns: int) -> None:
        self.zero_ns = zero_ns
        self.rows: list[tuple] = []

    def add(self, lane: str, what: str, begin: float, end: float, at: tuple[int, int], **more: Any) -> int:
        """A span from `begin` to `end` (ns on the host's clock); its number."""
        name = len(self.rows)
        begin, end = ((t - self.zero_ns) / 1e6 for t in (begin, end))
        given = (more.get("expert", NONE), more.get("kind", ""), more.get("after", NONE))
        self.rows.append((name, lane, what, begin, end, *at, *given))
        return name


def _host_spans(call: Call, spans: _Spans) -> int:
    """Route and fetch of a call; the number of the first fetch, which asks for what is absent."""
    fetch = NONE
    for stamp in call.timing.clock.stamps:
        if stamp.name != "compute":
            name = spans.add(HOST, stamp.name, stamp.begin_ns, stamp.end_ns, (call.step, call.layer))
            fetch = name if stamp.name == "fetch" and fetch == NONE else fetch
    return fetch


def _read_spans(read: Read, spans: _Spans, fetch: int) -> int:
    """A read, and its copy to a device; the number of the last."""
    at, kind = (read.step, read.layer), "prefetch" if read.ahead else "demand"
    lane = f"reader {max(read.reader, 0)}"
    after = NONE if read.ahead else fetch
    about: dict[str, Any] = {"expert": read.expert, "kind": kind}
    name = spans.add(lane, "read", read.started_ns, read.done_ns, at, after=after, **about)
    if read.copied_ns:
        name = spans.add(COPY, "copy", read.copied_ns, max(read.ready_ns, read.copied_ns), at, after=name, **about)
    return name


def _device_spans(call: Call, spans: _Spans, came: int, anchor: tuple[Any, int] | None) -> None:
    """Computation and the shared expert; the first one after the last read of the call waited for it."""
    clock, at = call.timing.clock, (call.step, call.layer)
    waited = spans.rows[came][4] if came != NONE else float("inf")
    last_begin = 0.0
    for stamp in clock.stamps:
        if stamp.name == "compute":
            last_begin, end = _times(clock, stamp, anchor)
            waits = (last_begin - spans.zero_ns) / 1e6 >= waited
            spans.add(COMPUTE, "compute", last_begin, end, at, after=came if waits else NONE)
            waited = float("inf") if waits else waited
    for part in clock.parts:
        if part.name == "shared":
            begin, end = _times(clock, part, anchor)
            spans.add(SIDE if begin < last_begin else COMPUTE, "shared", begin, end, at)


def _times(clock: PhaseClock, stamp: Stamp, anchor: tuple[Any, int] | None) -> tuple[float, float]:
    """Begin and end on the host's clock, ns."""
    if not clock.on_device or anchor is None:
        return stamp.begin_ns, stamp.end_ns
    event, at_ns = anchor
    return tuple(at_ns - t.elapsed_time(event) * 1e6 for t in (stamp.begin, stamp.end))  # type: ignore[return-value]


def to_perfetto(recording: Recording, path: str | Path, first: int = 0, last: int | None = None) -> Path:
    """Write the spans as Chrome trace JSON, which ui.perfetto.dev opens: a track a lane, reads as asynchronous slices,
    an arrow for each `after`. At level 3 torch's own trace goes beside it, as NAME.torch.json. Returns the path.
    """
    target = wants_path("the trace's path", path)
    table = timeline(recording, first, last)
    lanes = sorted(set(table["lane"]))
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": n, "args": {"name": lane}} for n, lane in enumerate(lanes)
    ]
    rows = {row["span"]: row for row in table.to_dict("records")}
    for row in rows.values():
        events += _slices(row, lanes.index(row["lane"]))
        if row["after"] != NONE:
            events += _arrow(rows[row["after"]], row, lanes)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"replay": repr(recording)}})
    if recording.profile is not None:
        recording.profile.export_chrome_trace(str(target.with_suffix(".torch.json")))
    return replace_file(target, lambda part: part.write_text(text) and None)


def _slices(row: dict[str, Any], track: int) -> list[dict[str, Any]]:
    begin, length = row["begin_ms"] * 1e3, (row["end_ms"] - row["begin_ms"]) * 1e3
    expert = "" if row["expert"] == NONE else f" expert {row['expert']}"
    about = {
        "name": f"{row['what']} layer {row['layer']}{expert}", "cat": row["lane_kind"] or row["what"], "pid": 1,
        "tid": track, "args": {"step": row["step"], "layer": row["layer"]},
    }  # fmt: skip
    if row["what"] != "read":
        return [{**about, "ph": "X", "ts": begin, "dur": length}]
    # Reads of one reader may overlap (an expert's jobs go to several threads), which tracks of slices forbid.
    ends = (("b", begin), ("e", begin + length))
    return [{**about, "ph": phase, "id": row["span"], "ts": at} for phase, at in ends]


def _arrow(cause: dict[str, Any], effect: dict[str, Any], lanes: list[str]) -> list[dict[str, Any]]:
    about = {"name": "waits for", "cat": "flow", "id": effect["span"], "pid": 1}
    begin = {**about, "ph": "s", "ts": cause["begin_ms"] * 1e3, "tid": lanes.index(cause["lane"])}
    end = {**about, "ph": "f", "bp": "e", "ts": effect["end_ms"] * 1e3, "tid": lanes.index(effect["lane"])}
    return [begin, end]
