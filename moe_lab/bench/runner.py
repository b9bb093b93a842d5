"""The clock of every GPU benchmark, the machine's own ceiling, and where a number was measured.

A call is timed by replaying a CUDA graph that holds it once for each input of a rotation (so that weights stream from
device memory, and launch gaps shrink to what a graph leaves), many times over; the spread is over replays. Where
capture fails, eager calls between events are timed and the method says so.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_lab.errors import LabError
from moe_lab.system.environment import driver, environment


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds a call: 20th, 50th and 80th percentile over `n` replays, and each replay's value."""

    us_p20: float
    us_p50: float
    us_p80: float
    n: int
    method: str
    us: tuple[float, ...] = field(default=(), repr=False)


class Pass:
    """One pass over `calls` on CUDA: a graph's replay where capture works, else the calls themselves. `method` says
    which; `outputs` are the last pass's, a call each."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls, self.outputs = calls, [call() for call in calls]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            _expect_no_wait(calls[0])
            # The outer block restores the stream: torch leaves its capture stream current when capture fails.
            with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
                self.outputs = [call() for call in calls]
            self._graph, self.method = graph, f"graph-replay, rotation of {len(calls)}"
        except RuntimeError:
            torch.cuda.synchronize()
            self._graph, self.method = None, f"eager-events, rotation of {len(calls)}"

    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.outputs = [call() for call in self._calls]


def _expect_no_wait(call: Callable[[], Any]) -> None:
    """RuntimeError from a call that waits for the device. Asked first, because a capture that such a call breaks leaves
    the allocator believing that it still runs."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype: it does not find every wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode(before)


def time_calls(calls: Sequence[Callable[[], Any]], budget_ms: float = 50.0, least: int = 5, most: int = 60) -> Timed:
    """Time one pass over `calls` (the same operation on each input of the rotation); result a call. Needs CUDA."""
    if not calls or not torch.cuda.is_available():
        where = "a CUDA device" if torch.cuda.is_available() else "no CUDA device"
        raise LabError(f"time_calls needs a CUDA device and at least one call, got {len(calls)} calls and {where}.")
    return time_pass(Pass(calls), len(calls), budget_ms, least, most)


def time_pass(
    run: Pass,
    calls: int,
    budget_ms: float = 50.0,
    least: int = 5,
    most: int = 60,
    before: Callable[[], Any] | None = None,
) -> Timed:
    """Time passes of `calls` calls each; `before` runs ahead of each one, outside the clock."""

    def once() -> float:
        if before is not None:
            before()
        return _span_ms(run)

    once()
    n = int(min(most, max(least, budget_ms / max(once(), 1e-3))))
    us = torch.tensor([once() for _ in range(n)], dtype=torch.float64) * 1e3 / calls
    low, mid, high = us.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return Timed(low, mid, high, n, run.method, tuple(us.tolist()))


def _span_ms(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def bandwidth_gb_per_s(gib: float = 4.0) -> dict[str, float]:
    """Ceilings measured now on random data: "copy" (an elementwise kernel, bytes read + written), "read" (a sum)."""
    n = int(gib * 2**30 / 4)
    source = torch.rand(n, device="cuda")
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    copy = time_calls([lambda: torch.neg(source, out=target)], budget_ms=40.0, most=15).us_p50
    read = time_calls([lambda: torch.sum(source, 0, out=total)], budget_ms=40.0, most=15).us_p50
    return {"copy": 8e-3 * n / copy, "read": 4e-3 * n / read}


def measured_on() -> dict[str, str]:
    """Where a number was measured: device, driver ("unknown" when nothing tells), torch, triton, commit."""
    known = environment()
    return {"device": known["device"], "driver": driver(), **{k: known[k] for k in ("torch", "triton", "commit")}}
