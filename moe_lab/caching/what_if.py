"""Bounds and purchases: what a step would take with a better policy, perfect prefetch, a faster disk, more slots.

Everything comes from one simulated replay and one cost model; nothing is run. Each row says what it assumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lab.caching.cost import Cost
from moe_lab.checks import wants, wants_number, wants_whole
from moe_lab.errors import LabError
from moe_lab.simulate.bounds import BELADY, BELADY_BYPASS, INFINITE
from moe_lab.simulate.replay import AnyPolicy
from moe_lab.simulate.requests import Trace, ids_of
from moe_lab.simulate.table import frame, steps
from moe_lab.stream.policy import policy_name

if TYPE_CHECKING:
    import pandas as pd

BOUND_COLUMNS = ("bound", "ms_per_step", "fetch_ms", "rest_ms", "misses_per_step", "bytes_per_step", "steps")
COLUMNS = (
    *("change", "capacity_slots", "ms_per_step", "speedup", "fetch_ms", "rest_ms"),
    *("misses_per_step", "bytes_per_step", "steps", "assumes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be bought: factors on speeds, slots and the size of an expert. `assumes` in words."""

    name: str
    disk: float = 1.0
    copy: float = 1.0
    compute: float = 1.0
    slots: float = 1.0
    expert_bytes: float = 1.0
    assumes: str = ""

    def __post_init__(self) -> None:
        for what in ("disk", "copy", "compute", "slots", "expert_bytes"):
            wants_number(f"Change.{what}", factor := getattr(self, what))
            if not 0 < factor < float("inf"):
                raise LabError(f"Change.{what} is {factor}; wanted a factor above 0.")


CHANGES = (
    Change(name="disk x2", disk=2, assumes="reads twice as fast, host work and copies as before"),
    Change(name="slots +50%", slots=1.5, assumes="half as much memory again, all of it for experts"),
    Change(
        name="experts 25% smaller", expert_bytes=0.75, slots=4 / 3,
        assumes="4 to 3 bits a weight: the same memory holds a third more; arithmetic as before",
    ),
    Change(
        name="second GPU", slots=2, copy=2, compute=2,
        assumes="experts split evenly, one disk, no time for the exchange between the GPUs",
    ),
)  # fmt: skip


def bounds(
    trace: Trace,
    cost: Cost,
    capacity: int,
    policy: AnyPolicy = "lru",
    *,
    per_layer: bool = False,
    step_tokens: int = 1,
) -> "pd.DataFrame":
    """A step's mean time under `policy` and under what bounds it, best first: columns `BOUND_COLUMNS`, times in ms.

    all resident: no reads. infinite: first reads alone. belady_bypass, belady: those policies. perfect prefetch: the
    policy's own reads, all hidden, so a step takes the longer of reading and the rest. no cache: every request reads.
    Among the middle ones the order is theirs, not a promise. LabError as lab.simulate.
    """
    wants("cost", cost, Cost, "a cost model, as lab.caching.Cost.fit makes it")
    wants_whole("capacity", capacity, 1)
    how = {"per_layer": per_layer, "step_tokens": step_tokens}
    counted = {name: steps(trace, capacity, name, **how) for name in (INFINITE, BELADY_BYPASS, BELADY)}
    own = steps(trace, capacity, policy, **how)
    label = policy_name(policy)
    found = {
        "all resident": _mean(cost, own.assign(misses=0)),
        **{name: _mean(cost, table) for name, table in counted.items()},
        f"{label}, perfect prefetch": _mean(cost, own, hidden=True),
        label: _mean(cost, own),
        "no cache": _mean(cost, own.assign(misses=own["requests"])),
    }
    order = sorted(found, key=lambda name: found[name][0])
    return frame([(name, *found[name]) for name in order], BOUND_COLUMNS)


def what_if(
    trace: Trace,
    cost: Cost,
    capacity: int,
    policy: AnyPolicy = "lru",
    changes: Sequence[Change] = CHANGES,
    *,
    per_layer: bool = False,
    step_tokens: int = 1,
) -> "pd.DataFrame":
    """A row for today and one for each change: columns `COLUMNS`; speedup = today's ms / the change's.

    capacity_slots after the change, at most all experts; times in ms a step. LabError as lab.simulate.
    """
    wants("cost", cost, Cost, "a cost model, as lab.caching.Cost.fit makes it")
    wants_whole("capacity", capacity, 1)
    _, layers, experts = ids_of(trace)
    rows: list[tuple[Any, ...]] = []
    today = float("nan")
    for change in (Change(name="today", assumes="as measured"), *changes):
        slots = max(1, min(int(capacity * change.slots), len(layers) * experts))
        bought = cost.scaled(
            disk=change.disk, copy=change.copy, compute=change.compute, expert_bytes=change.expert_bytes
        )
        counts = steps(trace, slots, policy, per_layer=per_layer, step_tokens=step_tokens)
        wall, fetch, rest, misses, nbytes, number = _mean(bought, counts)
        today = wall if not rows else today
        rows.append((change.name, slots, wall, today / wall, fetch, rest, misses, nbytes, number, change.assumes))
    return frame(rows, COLUMNS)


def _mean(cost: Cost, counts: "pd.DataFrame", *, hidden: bool = False) -> tuple[float, float, float, float, float, int]:
    """ms, fetch and rest ms, misses, bytes of a mean step, and the steps. `hidden`: reading goes beside the rest."""
    if not len(counts):
        raise LabError("the trace holds no token: there is no step to cost.")
    steps_of: Any = cost.predict(counts).groupby("step")
    found = steps_of[["wall_ms", "fetch_ms", "misses", "bytes_read"]].sum()
    rest = found["wall_ms"] - found["fetch_ms"]
    fetch = found["fetch_ms"]
    if hidden:  # what is never hidden is asking the cache at all
        fetch = (fetch - rest).clip(lower=steps_of.size() * cost.fetch.idle_ms)
    means = (rest + fetch, fetch, rest, found["misses"], found["bytes_read"])
    return (*(float(column.mean()) for column in means), len(found))  # type: ignore[return-value]
