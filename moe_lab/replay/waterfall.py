"""From a step with everything at hand to the step that was measured, and the lines that bound it.

The bars add up to the wall: computation, routing, what the cache costs the host without a wait, waits for predictions
that came late, all other waits, the rest. The lines are the mean step
  all at hand        less everything that waited for bytes
  optimal policy     with the waits of as many misses as Belady's policy has (with bypass: a miss may pass through)
  perfect prefetch   the longer of reading and everything else
  measured
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from moe_lab.checks import wants
from moe_lab.errors import LabError
from moe_lab.replay.driver import Recording
from moe_lab.replay.stalls import BEHIND, PREDICTED_LATE
from moe_lab.replay.story import Story, length_ms, merged
from moe_lab.simulate.bounds import BELADY, BELADY_BYPASS
from moe_lab.simulate.replay import misses_of
from moe_lab.simulate.requests import Request
from moe_lab.simulate.table import frame
from moe_lab.stream.events import HIT

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("kind", "what", "ms_per_step", "steps")
PARTS = ("all resident", "routing", "hidden I/O", "late prefetch", "demand stall", "other")
LINES = ("all at hand", "optimal policy, bypass", "optimal policy", "perfect prefetch", "measured")


def waterfall(recording: Recording) -> "pd.DataFrame":
    """A row a bar ("part", in order) and a row a bound ("line"), columns `COLUMNS`, ms a mean step. LabError for a
    recording at level 0, which has no parts."""
    wants("what replay.waterfall takes", recording, Recording, "a Recording, as moe_lab.replay.run leaves it")
    if recording.level == 0:
        raise LabError("waterfall: level 0 records no parts; replay at level 1.")
    table: Any = recording.table
    steps = len(recording.step_ms)
    waits = table["demand_wait_ms"].sum()
    stalled: Any = recording.stalls
    late = float(stalled.loc[stalled["cause"].isin((PREDICTED_LATE, BEHIND)), "wait_ms"].sum()) if len(stalled) else 0.0
    wall = sum(recording.step_ms)
    named = [
        float(table["compute_ms"].sum()), float((table["route_ms"] + table["t_host_block_ms"]).sum()),
        float((table["plan_ms"] + table["h2d_ms"]).sum()), late, float(waits) - late,
    ]  # fmt: skip
    parts = zip(PARTS, [*named, wall - sum(named)], strict=True)
    rows = [("part", name, value / steps, steps) for name, value in parts]
    rows += [("line", name, value / steps, steps) for name, value in _lines(recording, wall, float(waits)).items()]
    return frame(rows, COLUMNS)


def _lines(recording: Recording, wall: float, waits: float) -> dict[str, float]:
    hits = wall - waits
    own, shares = _requests(recording.story), recording.shares
    mine = sum(use.how != HIT for request in recording.story.requests.values() for use in request.uses)
    # Reading ahead can leave fewer misses than the best policy has without it: then what was measured is the bound.
    share = {p: min(1.0, sum(misses_of(own, shares, p)) / mine) if mine else 0.0 for p in (BELADY_BYPASS, BELADY)}
    reading = _reading(recording)
    perfect = sum(max(step - wait, reading.get(n, 0.0)) for n, (step, wait) in enumerate(_steps(recording)))
    values = (hits, hits + waits * share[BELADY_BYPASS], hits + waits * share[BELADY], perfect, wall)
    return dict(zip(LINES, values, strict=True))


def _steps(recording: Recording) -> list[tuple[float, float]]:
    """Wall and waits of each step."""
    by_step: Any = recording.table.groupby("step")
    waits: Mapping[Any, float] = by_step["demand_wait_ms"].sum().to_dict()
    return [(wall, waits.get(step, 0.0)) for step, wall in enumerate(recording.step_ms)]


def _reading(recording: Recording) -> dict[int, float]:
    """ms in which readers were at work for each step."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for read in recording.story.reads.values():
        if read.started_ns and read.done_ns:
            spans.setdefault(read.step, []).append((read.started_ns, read.done_ns))
    return {step: length_ms(merged(found)) for step, found in spans.items()}


def _requests(story: Story) -> list[Request]:
    """What was asked, as the simulator takes it."""
    return [Request(request.step, request.layer, request.keys) for request in story.requests.values()]
