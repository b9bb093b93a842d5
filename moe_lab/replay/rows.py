"""One row a (step, layer): where the time of the call went, on each clock, and what the cache did for it.

Three clocks, never mixed in one column:
  host    t_host_block_ms  blocked until the device said what the router picked
          select_host_ms   grouping picks on the host
          plan_ms          asking the cache: pins, victims, bookkeeping
          demand_wait_ms   blocked for bytes or a slot (union of intervals: no instant counts twice)
          launch_ms        handing work to a GPU; 0 on a CPU, where handing over is doing
          other_ms         the rest of the call
          between_ms       not in the call but in its step: the driver's own work since the last call or the step's
                           begin (inputs, asking ahead for a forecast), with a step's last call also that behind it
  device  route_gpu_ms     logits, picks, plan         routed_gpu_ms   experts and the weighted sum
          shared_gpu_ms    shared expert               shared_hidden_ms  the part of it beside other device work
          h2d_ms           copies that the work stood still for after the host had gone on
  readers what the events of the cache tell
On a CPU both are one clock, and wall = host parts + route + routed + shared - hidden. On a GPU the host parts alone add
up to wall, and the device's columns say what went on meanwhile; NaN at level 1, which takes no device time. A step's
wall_ms and between_ms add up to its step_ms, on every level.

The six classic columns mean the same in every arm and on every device:
  route_ms = route_gpu + select_host, fetch_ms = plan + demand_wait + h2d, compute_ms = routed_gpu + shared_gpu - hidden
  hits, misses: distinct experts found or not; bytes_read: file bytes read for this layer in this step, on either lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lab.replay.depth import Depth
from moe_lab.replay.ledger import DROPPED, HARMFUL, LATE, TIMELY, USELESS, classify
from moe_lab.replay.story import Interval, Read, Request, Story, common, length_ms, merged
from moe_lab.simulate.table import frame
from moe_lab.stream.events import LATE as LATE_HIT
from moe_lab.timing import PhaseClock, Stamp, Timing, Unclocked

if TYPE_CHECKING:
    import pandas as pd

HOST_PARTS = ("t_host_block_ms", "select_host_ms", "plan_ms", "demand_wait_ms", "launch_ms", "other_ms")
DEVICE_PARTS = ("route_gpu_ms", "routed_gpu_ms", "shared_gpu_ms", "shared_hidden_ms", "h2d_ms")
CLASSIC = ("route_ms", "fetch_ms", "compute_ms", "hits", "misses", "bytes_read")
COLUMNS = (
    *("step", "layer", "arm", "tokens", "wall_ms"),
    *("t_host_block_ms", "route_gpu_ms", "select_host_ms", "plan_ms", "demand_wait_ms", "h2d_ms", "routed_gpu_ms"),
    *("shared_gpu_ms", "shared_hidden_ms", "launch_ms", "other_ms", "between_ms"),
    *("hits", "misses", "late_hits", "prefetch_issued", "prefetch_useful", "prefetch_late", "prefetch_useless"),
    *("prefetch_harmful", "bytes_demand", "bytes_prefetch", "bytes_wasted", "queue_depth_p50", "queue_depth_max"),
    *("io_mode", "route_ms", "fetch_ms", "compute_ms", "bytes_read"),
    *("backend", "level", "submissions", "launches", "cpu_ms", "major_faults"),
)


EVENT_COUNTS = (
    *("late_hits", "prefetch_issued", "prefetch_useful", "prefetch_late", "prefetch_useless", "prefetch_harmful"),
    *("bytes_demand", "bytes_prefetch", "bytes_wasted", "bytes_read"),
)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer as the driver saw it; `drained_ns`: end of the wait for the device after a step's last;
    `between_ns`: the driver's own work around it, outside the call."""

    step: int
    layer: int
    begin_ns: int
    end_ns: int
    timing: Timing
    drained_ns: int = 0
    cpu_ns: int = 0
    major_faults: int = 0
    between_ns: int = 0

    @property
    def over_ns(self) -> int:
        """When the call counts as ended."""
        return max(self.end_ns, self.drained_ns)


def table(calls: Sequence[Call], story: Story, level: str) -> "pd.DataFrame":
    """A row for each call, columns `COLUMNS`."""
    requests, reads = story.requests_of(), story.reads_of()
    fates = classify(story)
    depth = Depth(story)
    rows = []
    for call in calls:
        key = (call.step, call.layer)
        mine = _times(call, requests.get(key, []))
        mine |= _counts(call.timing, requests.get(key, []), reads.get(key, []), fates)
        if isinstance(call.timing.clock, Unclocked):  # level 0 notes no events either: unknown, not none
            mine |= dict.fromkeys(EVENT_COUNTS, float("nan"))
        mine |= depth.over(call.begin_ns, call.over_ns)
        timing = call.timing
        mine |= {
            "step": call.step, "layer": call.layer, "arm": timing.arm, "tokens": timing.tokens,
            "io_mode": timing.io_mode, "backend": timing.backend, "level": level, "submissions": timing.submissions,
            "launches": timing.launches, "cpu_ms": call.cpu_ns / 1e6, "major_faults": call.major_faults,
            "between_ms": call.between_ns / 1e6,
        }  # fmt: skip
        rows.append(tuple(mine[name] for name in COLUMNS))
    return frame(rows, COLUMNS)


def _times(call: Call, requests: Sequence[Request]) -> dict[str, float]:
    clock = call.timing.clock
    if isinstance(clock, Unclocked):  # level 0
        named = (*HOST_PARTS, *DEVICE_PARTS, "route_ms", "fetch_ms", "compute_ms")
        return {"wall_ms": (call.over_ns - call.begin_ns) / 1e6, **dict.fromkeys(named, float("nan"))}
    waits = merged([wait for request in requests for wait in request.waits])
    found = (_on_gpu if clock.device.type == "cuda" else _on_cpu)(clock, waits)
    drained_ms = max(0, call.drained_ns - call.end_ns) / 1e6
    found["t_host_block_ms"] += drained_ms
    found["demand_wait_ms"] = length_ms(waits)
    found["wall_ms"] = (call.over_ns - call.begin_ns) / 1e6
    found["other_ms"] = found["wall_ms"] - drained_ms - length_ms(_host(clock.stamps))
    found["route_ms"] = found["route_gpu_ms"] + found["select_host_ms"]
    found["fetch_ms"] = found["plan_ms"] + found["demand_wait_ms"] + found["h2d_ms"]
    found["compute_ms"] = found["routed_gpu_ms"] + found["shared_gpu_ms"] - found["shared_hidden_ms"]
    return found


def _on_cpu(clock: PhaseClock, waits: list[Interval]) -> dict[str, float]:
    """One clock, the host's: device work is what the host did."""
    route, select, fetch, compute = _phases(clock)
    shared = _host([part for part in clock.parts if part.name == "shared"])
    return {
        "t_host_block_ms": length_ms(_read_back(clock)), "route_gpu_ms": _busy(route, clock, waits),
        "select_host_ms": _busy(select, clock, waits), "plan_ms": _busy(fetch, clock, waits), "h2d_ms": 0.0,
        "routed_gpu_ms": _busy(compute, clock, waits) - length_ms(common(compute, shared)),
        "shared_gpu_ms": length_ms(shared), "shared_hidden_ms": 0.0, "launch_ms": 0.0,
    }  # fmt: skip


def _on_gpu(clock: PhaseClock, waits: list[Interval]) -> dict[str, float]:
    """The host's parts from its own stamps, the device's from events, which level 1 has not."""
    route, select, fetch, compute = _phases(clock)
    host = {
        "t_host_block_ms": length_ms(_read_back(clock)), "select_host_ms": _busy(select, clock, waits),
        "plan_ms": _busy(fetch, clock, waits), "launch_ms": _busy(merged([*route, *compute]), clock, waits),
    }  # fmt: skip
    device = device_times(clock) if clock.on_device else dict.fromkeys(DEVICE_PARTS, float("nan"))
    return host | device


def device_times(clock: PhaseClock) -> dict[str, float]:
    """`DEVICE_PARTS` from a clock with events. The shared expert is hidden where it ran beside work on the main stream
    before that stream came to the sum; copies count where the stream stood still longer than the host did.
    """
    at = {name: [(clock.since(s.begin), clock.since(s.end)) for s in clock.stamps if s.name == name] for name in _NAMES}
    shared = [(clock.since(part.begin), clock.since(part.end)) for part in clock.parts if part.name == "shared"]
    fetched, last = _sum(at["fetch"]), at["compute"][-1:] or [(0.0, 0.0)]
    inside = _overlap(shared, last)  # on the main stream the shared expert runs within the last phase
    beside = _sum(shared) - inside
    hidden = min(beside, _overlap(shared, [(0.0, last[0][0])]))
    stood = sum(s.end_ns - s.begin_ns for s in clock.stamps if s.name == "fetch") / 1e6
    return {
        "route_gpu_ms": _sum(at["route"][:1]), "routed_gpu_ms": _sum(at["compute"]) - inside - (beside - hidden),
        "shared_gpu_ms": _sum(shared), "shared_hidden_ms": hidden, "h2d_ms": max(0.0, fetched - stood),
    }  # fmt: skip


_NAMES = ("route", "fetch", "compute")


def _sum(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def _overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    return sum(max(0.0, min(b, d) - max(a, c)) for a, b in some for c, d in others)


def _phases(clock: PhaseClock) -> tuple[list[Interval], list[Interval], list[Interval], list[Interval]]:
    """The router's work, the grouping after it, fetches, and computation, as the host stamped them."""
    routes = [stamp for stamp in clock.stamps if stamp.name == "route"]
    rest = [[stamp for stamp in clock.stamps if stamp.name == name] for name in ("fetch", "compute")]
    return _host(routes[:1]), _host(routes[1:]), _host(rest[0]), _host(rest[1])


def _host(stamps: Sequence[Stamp]) -> list[Interval]:
    return merged([(stamp.begin_ns, stamp.end_ns) for stamp in stamps])


def _read_back(clock: PhaseClock) -> list[Interval]:
    return _host([part for part in clock.parts if part.name == "read_back"])


def _busy(spans: list[Interval], clock: PhaseClock, waits: list[Interval]) -> float:
    """Milliseconds of `spans` in which the host was not blocked."""
    blocked = merged([*waits, *_read_back(clock)])
    return length_ms(spans) - length_ms(common(spans, blocked))


def _counts(
    timing: Timing, requests: Sequence[Request], reads: Sequence[Read], fates: Mapping[int, str]
) -> dict[str, Any]:
    ahead = [read for read in reads if read.ahead and fates[read.name] != DROPPED]
    found = [fates[read.name] for read in ahead]
    mine = [read for read in reads if not read.ahead]
    wasted = sum(read.nbytes for read in reads if read.ahead and fates[read.name] in (USELESS, HARMFUL, DROPPED))
    fetched = sum(read.nbytes for read in mine), sum(read.nbytes for read in reads if read.ahead)
    return {
        "hits": timing.hits, "misses": timing.misses,
        "late_hits": sum(use.how == LATE_HIT for request in requests for use in request.uses),
        "prefetch_issued": len(ahead), "prefetch_useful": found.count(TIMELY), "prefetch_late": found.count(LATE),
        "prefetch_useless": found.count(USELESS), "prefetch_harmful": found.count(HARMFUL),
        "bytes_demand": fetched[0], "bytes_prefetch": fetched[1], "bytes_wasted": wasted,
        "bytes_read": sum(fetched),
    }  # fmt: skip
