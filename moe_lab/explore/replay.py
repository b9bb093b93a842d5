"""Explorers of a replay: what ran when, step by step, and what a step would take after purchases."""

from collections.abc import Sequence
from typing import Any

from moe_lab.caching.cost import Cost
from moe_lab.caching.what_if import Change, what_if
from moe_lab.checks import came, wants, wants_number, wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.explore.explorer import MOST_FRAMES, Explorer
from moe_lab.explore.grid import GridExplorer
from moe_lab.plots.cost import what_if as draw
from moe_lab.plots.style import Axes
from moe_lab.plots.timeline import timeline as draw_timeline
from moe_lab.replay.driver import Recording
from moe_lab.replay.timeline import timeline as spans
from moe_lab.simulate.replay import AnyPolicy
from moe_lab.simulate.requests import Trace


def timeline(recording: Recording, most: int = 16) -> Explorer:
    """The lanes of one step at a time: the last `most` steps of a replay. LabError where it has none, or level 0."""
    wants("lab.explore.timeline's recording", recording, Recording, "what moe_lab.replay.run leaves")
    wants_whole("most (of lab.explore.timeline)", most, 1, MOST_FRAMES)
    steps = sorted({call.step for call in recording.calls})[-most:]
    table: Any = spans(recording, steps[0] if steps else 0)
    return Explorer(steps, lambda step: draw_timeline(table[table["step"] == step]), label="step")


def buy(
    trace: Trace,
    cost: Cost,
    capacity: int,
    policy: AnyPolicy = "lru",
    *,
    disk: Sequence[float] = (1, 2, 4),
    slots: Sequence[float] = (1, 1.5, 2),
    expert_bytes: Sequence[float] = (1, 0.75, 0.5),
    per_layer: bool = False,
    step_tokens: int = 1,
) -> GridExplorer:
    """A faster disk, more slots, smaller experts: what a step of `trace` would take, for every combination of factors.

    `cost`: a model of this machine (`lab.caching.Cost.fit`). Smaller experts leave room for more in the same memory.
    All combinations are simulated once; nothing is run. LabError as lab.caching.what_if.
    """
    for name, factors in (("disk", disk), ("slots", slots), ("expert_bytes", expert_bytes)):
        if isinstance(factors, str | bytes) or not isinstance(factors, Sequence) or not factors:
            raise LabTypeError(f"lab.explore.buy: {name} is {came(factors)}; wanted several factors, such as [1, 2].")
        for factor in factors:
            wants_number(name, factor)
            if not 0 < factor < float("inf"):
                raise LabError(f"lab.explore.buy: {name}={factor}; wanted factors above 0.")
    combinations = [(d, s, b) for d in disk for s in slots for b in expert_bytes]
    if len(combinations) > MOST_FRAMES:
        raise LabError(f"lab.explore.buy: {len(combinations)} combinations; a page holds {MOST_FRAMES}.")
    changes = [
        Change(name=_name(d, s, b), disk=d, slots=s / b, expert_bytes=b, assumes="host work and arithmetic as before")
        for d, s, b in combinations
    ]
    table: Any = what_if(trace, cost, capacity, policy, changes, per_layer=per_layer, step_tokens=step_tokens)

    def frame(d: float, s: float, b: float) -> Axes:
        return draw(table[table["change"].isin(("today", _name(d, s, b)))])

    values = {"disk": list(disk), "slots": list(slots), "bytes an expert": list(expert_bytes)}
    start = (min(1, len(disk) - 1), 0, 0)
    return GridExplorer(values, frame, show=dict.fromkeys(values, lambda factor: f"x{factor:g}"), start=start)


def _name(disk: float, slots: float, expert_bytes: float) -> str:
    return f"disk x{disk:g}, slots x{slots:g}, experts x{expert_bytes:g}"
