"""How long an arm takes in one cell: new rows every repetition, weights cold or warm, the clock named.

On CUDA a pass over a rotation of calls is timed as one (`runner.Pass`), in a graph where the arm can take its work from
the device: the bits are the same, and what is timed is the GPU, not the host that feeds it. Cold, the rotation touches
more weight bytes than the L2 holds, with copies of the layer where one is too small; warm, it is the same call again.
On a CPU each call is timed by the host's clock; cold, a buffer larger than the last cache is written before it. Copies
of the weights would not do there: the torch arms keep what they decode, for each copy anew.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import Arm
from moe_lab.bench.cell import MOST_CALLS, Cell, Settings, clone, l2_bytes
from moe_lab.bench.check import fresh
from moe_lab.bench.runner import Pass, time_pass
from moe_lab.errors import LabError
from moe_lab.execution.parts import check_on_device
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing

BEYOND_L2 = 1.5
_CELLS = itertools.count(1)  # each cell draws rows of its own: with one seed for all, warm repeats what cold was asked
MOST_WARM = 16  # calls of a warm pass: enough that what a replay itself costs does not show


@dataclass(frozen=True, slots=True, eq=False)
class Clocked:
    """Milliseconds a call, one value a repetition; the clock; and one call's rows, picks and output to be checked."""

    times_ms: tuple[float, ...]
    method: str
    x: Tensor
    routing: Routing
    out: Tensor


def clock(cell: Cell, arm: Arm, state: str, settings: Settings) -> Clocked:
    """Time `arm` in one state ("cold", "warm", or "" for a streamed layer, whose cache decides)."""
    run = _on_cuda if cell.x.device.type == "cuda" and not cell.streamed else _on_host
    return run(cell, arm, state, settings)


def in_graph(cell: Cell, arm: Arm) -> Options:
    """The cell's options with routing on the device where this arm can go without the host, else as they are."""
    on_device = replace(cell.options, routing="device")
    try:
        check_on_device(cell.layer, arm, on_device, cell.x.shape[1])
    except LabError:
        return cell.options
    return on_device


def _calls(cell: Cell, state: str) -> list[tuple[MoELayer, Tensor, Routing]]:
    """One call for each place of the rotation: layer, rows, picks."""
    r = len(cell.routings)
    if state == "warm":
        return [(cell.layer, cell.x[0], cell.routings[0])] * max(1, min(r, MOST_WARM))
    wanted = math.ceil(BEYOND_L2 * l2_bytes(cell.x.device) / max(1.0, cell.weight_bytes))
    n = min(MOST_CALLS, max(r, wanted))
    layers = [cell.layer] + [clone(cell.layer) for _ in range(1, math.ceil(n / r))]
    return [(layers[i // r], cell.x[i % r], cell.routings[i % r]) for i in range(n)]


def _draw(settings: Settings) -> torch.Generator:
    """Reproducible in a new process, never the same twice within one."""
    return torch.Generator().manual_seed(settings.seed + 1_000_003 * next(_CELLS))


def _on_cuda(cell: Cell, arm: Arm, state: str, settings: Settings) -> Clocked:
    calls = _calls(cell, state)
    base = torch.stack([x for _, x, _ in calls])
    rows, draw = base.clone(), _draw(settings)

    options = in_graph(cell, arm)

    def one(i: int) -> Callable[[], Tensor]:
        layer, _, routing = calls[i]
        return lambda: layer(rows[i], arm, routing=routing, options=options).out

    run = Pass([one(i) for i in range(len(calls))])
    timed = time_pass(
        run, len(calls), settings.cell_ms, settings.least, settings.most, before=lambda: rows.copy_(fresh(base, draw))
    )
    last = len(calls) - 1
    method = timed.method if state == "cold" else timed.method.replace("rotation", "same call, rotation")
    return Clocked(tuple(us / 1e3 for us in timed.us), method, rows[last], calls[last][2], run.outputs[last])


def _on_host(cell: Cell, arm: Arm, state: str, settings: Settings) -> Clocked:
    r, draw = len(cell.routings), _draw(settings)
    flush = torch.zeros(2 * l2_bytes(cell.x.device) // 4) if state == "cold" else None

    def one(i: int) -> tuple[float, Any, Tensor, Routing]:
        x, routing = fresh(cell.x[i], draw), cell.routings[i]
        if flush is not None:
            flush.add_(1)
        begin = time.perf_counter()
        y = cell.layer(x, arm, routing=routing, options=cell.options)
        if x.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3, y.out, x, routing

    places = [0] if state == "warm" else list(range(r))
    warmed = [one(i)[0] for i in places]
    n = int(min(settings.most, max(settings.least, settings.cell_ms / max(min(warmed), 1e-3))))
    times = []
    for repeat in range(n):
        spent, out, x, routing = one(places[repeat % len(places)])
        times.append(spent)
    how = {"cold": f"caches flushed, rotation of {r}", "warm": "same picks and weights", "": f"rotation of {r}"}
    return Clocked(tuple(times), f"host clock, {how[state]}", x, routing, out)
