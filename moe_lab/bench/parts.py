"""What of a layer's work has weights to amortise: its steps timed one by one on the layer's own shapes.

Batching shares weight reads; choosing experts, quantising rows, activating and adding up read no weights and cost each
row the same however many come together. Every step is the operation that the arms use on this device, timed alone. An
arm that fuses a step into a product pays less for it, so the share here is the most that such work can take.

T tokens, D width of the experts' rows, F expert width, K picks; P = T K pairs.
"""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import Arm, ArmContext
from moe_lab.arms.base import activate
from moe_lab.block import router_logits
from moe_lab.environment import environment
from moe_lab.errors import LabError, MissingExtra
from moe_lab.formats import quantize_activations
from moe_lab.layer import MoELayer
from moe_lab.routing import plan, route
from moe_lab_kernels import combine
from moe_lab_kernels.backend import backend_of

if TYPE_CHECKING:
    import pandas as pd

WEIGHTS, NONE = "weights", "none"
EXPERTS = "experts' products"
COLUMNS = ("tokens", "part", "reads", "time_ms", "share", "arm", "n", "backend", "device")


def measure_parts(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arm: str | Arm = "gemv",
    *,
    activation: str | None = "q8_1",
    repeats: int = 15,
) -> "pd.DataFrame":
    """A row for each step of one call on x: `reads` is "weights" or "none", `share` its part of the whole call.

    The experts' products are what the whole call takes beyond the other steps (never less than 0). `activation`: the
    layout that rows and hidden rows are quantised to, None where the arm quantises none. Medians over `repeats`.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "measure_parts") from e
    if x.shape[0] < 1 or repeats < 1:
        raise LabError(f"measure_parts times at least one row and one repetition, got T={x.shape[0]}, n={repeats}.")
    with torch.no_grad():
        whole = _median_ms(lambda: layer(x, arm), x.device, repeats)
        name = layer(x, arm).arm
        timed = {
            step: (reads, _median_ms(work, x.device, repeats)) for step, reads, work in _steps(layer, x, activation)
        }
    timed[EXPERTS] = (WEIGHTS, max(0.0, whole - sum(ms for _, ms in timed.values())))
    rest: dict[str, Any] = {
        "arm": name, "n": repeats, "backend": backend_of(x), "device": environment()["device"],
    }  # fmt: skip
    rows = [(x.shape[0], step, reads, ms, ms / whole) for step, (reads, ms) in timed.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS[:5])).assign(**rest)


def _steps(layer: MoELayer, x: Tensor, activation: str | None) -> list[tuple[str, str, Callable[[], Any]]]:
    """(step, what it reads, the operation) of everything but the experts' products."""
    spec, own = layer.spec, layer.router_weights
    logits = router_logits(x, own, spec)
    picks = route(logits, spec.router, **own.for_routing())
    t, k = picks.ids.shape
    gate, up = (torch.randn(t * k, spec.d_expert, device=x.device, dtype=x.dtype) for _ in range(2))
    y = torch.randn(t, k, spec.d_routed, device=x.device, dtype=x.dtype)
    backend = backend_of(x)
    ctx = ArmContext(spec, backend, x.dtype)
    add = combine.combine_ref if backend == "torch" else combine.combine
    steps: list[tuple[str, str, Callable[[], Any]]] = [
        ("router's product", WEIGHTS, lambda: router_logits(x, own, spec)),
        ("selection", NONE, lambda: route(logits, spec.router, **own.for_routing())),
        ("plan", NONE, lambda: plan(picks, spec.num_experts)),
        ("activation", NONE, lambda: activate(gate, up, ctx)),
        ("weighted sum", NONE, lambda: add(y, picks.weights)),
    ]
    if activation is not None:
        steps.append(("rows to 8 bits", NONE, lambda: quantize_activations(x, activation)))
        steps.append(("hidden rows to 8 bits", NONE, lambda: quantize_activations(gate, activation)))
    return steps


def _median_ms(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """A call's median by the host's clock, the device idle before and after; on CUDA over 8 calls in a row."""
    at_once = 8 if device.type == "cuda" else 1
    spent = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(at_once):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append((time.perf_counter() - begin) * 1e3 / at_once)
    return statistics.median(spent[1:])


__all__ = ["COLUMNS", "measure_parts"]
