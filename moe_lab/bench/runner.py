"""The clock of every GPU benchmark, the machine's own ceiling, and where a number was measured.

A call is timed by replaying a CUDA graph that holds it once for each input of a rotation (so that weights stream from
device memory, and launch gaps shrink to what a graph leaves), many times over; the spread is over replays. Where
capture fails, eager calls between events are timed and the method says so.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_lab.environment import environment
from moe_lab.errors import LabError


@dataclass(frozen=True, slots=True)
class Timed:
    """Microseconds a call: 20th, 50th and 80th percentile over `n` replays."""

    us_p20: float
    us_p50: float
    us_p80: float
    n: int
    method: str


def time_calls(calls: Sequence[Callable[[], Any]], budget_ms: float = 50.0, least: int = 5, most: int = 60) -> Timed:
    """Time one pass over `calls` (the same operation on each input of the rotation); result a call. Needs CUDA."""
    if not calls or not torch.cuda.is_available():
        where = "a CUDA device" if torch.cuda.is_available() else "no CUDA device"
        raise LabError(f"time_calls needs a CUDA device and at least one call, got {len(calls)} calls and {where}.")
    _all(calls)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    method = f"graph-replay, rotation of {len(calls)}"
    try:
        with torch.cuda.graph(graph):
            kept = [call() for call in calls]
        replay = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
        method = f"eager-events, rotation of {len(calls)}"
        replay = partial(_all, calls)

    replay()
    once = _span_ms(replay)
    n = int(min(most, max(least, budget_ms / max(once, 1e-3))))
    us = torch.tensor([_span_ms(replay) for _ in range(n)], dtype=torch.float64) * 1e3 / len(calls)
    low, mid, high = us.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    del kept
    return Timed(low, mid, high, n, method)


def _all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


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
    driver = _says("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {"device": known["device"], "driver": driver, **{k: known[k] for k in ("torch", "triton", "commit")}}


def _says(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"
