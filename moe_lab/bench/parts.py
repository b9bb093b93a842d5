"""What of a layer's work has weights to amortise: its steps timed one by one on the layer's own shapes.

Batching shares weight reads; choosing experts, quantising rows, activating and adding up read no weights and cost each
row the same however many come together. Every step is the operation that the arms use on this device, timed alone. An
arm that fuses a step into a product pays less for it, so the share here is the most that such work can take.

T tokens, D width of the experts' rows, F expert width, K picks; P = T K pairs.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import ARMS, Arm, ArmContext, get_arm
from moe_lab.arms.base import activate
from moe_lab.arms.by_rows import ByRows
from moe_lab.arms.gemv import Gemv
from moe_lab.arms.gemv_float import kind_of
from moe_lab.arms.guard import is_own
from moe_lab.arms.mmq import Mmq
from moe_lab.block import router_logits
from moe_lab.errors import LabError, MissingExtra
from moe_lab.formats import quantize_activations
from moe_lab.layer import MoELayer
from moe_lab.routing import plan, route
from moe_lab.system.environment import environment
from moe_lab_kernels.backend import backend_of
from moe_lab_kernels.rows import combine

if TYPE_CHECKING:
    import pandas as pd

AUTO = "auto"
WEIGHTS, NONE = "weights", "none"
EXPERTS = "experts' products"
COLUMNS = ("tokens", "part", "reads", "time_ms", "share", "arm", "n", "backend", "device")


def measure_parts(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arm: str | Arm = "gemv",
    *,
    activation: str | None = AUTO,
    repeats: int = 15,
) -> "pd.DataFrame":
    """A row for each step of one call on x: `reads` is "weights" or "none", `share` its part of the whole call.

    The experts' products are what the whole call takes beyond the other steps (never less than 0). `activation`: the
    layout that rows and hidden rows are quantised to, None for none; "auto": what the lab's arm does to them on these
    formats, and none for an arm of the user's, of which nobody knows. Medians over `repeats`.
    """
    try:
        import pandas as pd
    except ImportError as e:
        raise MissingExtra("pandas", "lab", "measure_parts") from e
    if x.shape[0] < 1 or repeats < 1:
        raise LabError(f"measure_parts times at least one row and one repetition, got T={x.shape[0]}, n={repeats}.")
    with torch.no_grad():
        whole = _median_ms(lambda: layer(x, arm), x.device, repeats)
        chosen = get_arm(arm, layer.experts.formats, backend_of(x), layer.spec, x.shape[0])
        steps = _steps(layer, x, chosen, activation)
        timed = {step: (reads, _median_ms(work, x.device, repeats)) for step, reads, work in steps}
    timed[EXPERTS] = (WEIGHTS, max(0.0, whole - sum(ms for _, ms in timed.values())))
    rest: dict[str, Any] = {
        "arm": chosen.name, "n": repeats, "backend": backend_of(x), "device": environment()["device"],
    }  # fmt: skip
    rows = [(x.shape[0], step, reads, ms, ms / whole) for step, (reads, ms) in timed.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS[:5])).assign(**rest)


def quantised_to(arm: Arm, format: str, rows: int) -> str | None:
    """The layout of 8-bit activations in which one of the lab's arms hands rows to weights of `format`, an expert's
    group being of `rows` rows; None where it quantises none, and for every other arm."""
    if not is_own(arm, ARMS):
        return None
    if isinstance(arm, ByRows):
        return quantised_to(arm.taker(rows), format, rows)
    if isinstance(arm, Mmq):
        return arm.layout(format)
    return "q8_1" if isinstance(arm, Gemv) and kind_of(format, None) == "q8_1" else None


def _steps(layer: MoELayer, x: Tensor, arm: Arm, activation: str | None) -> list[tuple[str, str, Callable[[], Any]]]:
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
    largest = int(plan(picks, spec.num_experts).counts.max())
    formats = layer.experts.formats
    for step, rows, format in (("rows to 8 bits", x, formats[0]), ("hidden rows to 8 bits", gate, formats[-1])):
        layout = quantised_to(arm, format, largest) if activation == AUTO else activation
        if layout is not None:
            steps.append((step, NONE, partial(quantize_activations, rows, layout)))
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
