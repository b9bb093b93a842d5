"""An expert's formula in plain fp32 torch: every activation, clamp, bias and place of the routing weight.

The truth that faster arms are measured against, so it takes nothing from them: no kernel, no quantised activations.
Rows [r, D] of one expert in, down rows [r, D] out (D is the width the experts see), with the store points between.
"""

import torch
from torch.nn import functional

from moe_lab._types import Float, Tensor
from moe_lab.arms.base import ArmContext
from moe_lab.arms.stack import ExpertStack
from moe_lab.spec import MoESpec

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    "relu2": lambda v: functional.relu(v).square(),
}


def widened(t: Tensor) -> Tensor:
    """fp32, or float64 as it is: the store points decide how exact a formula is computed."""
    return t if t.dtype == torch.float64 else t.float()


def linear(x: Float[Tensor, "r Kd"], weight: Float[Tensor, "N Kd"], bias: Tensor | None = None) -> Float[Tensor, "r N"]:
    """x weight^T (+ bias): float64 for rows of float64, else IEEE fp32, also on CUDA, where TF32 would keep 10 bits."""
    x = widened(x)
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        product = x @ weight.to(x.dtype).T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
    return product if bias is None else product + bias.to(x.dtype)


def activate_dense(gate: Tensor | None, up: Tensor, spec: MoESpec) -> Tensor:
    """The hidden rows [r, F] in fp32 (of float64 rows in float64) from gate and up; `gate` is None for experts without
    one."""
    act = ACTIVATIONS[spec.activation]
    up = widened(up)
    if gate is None:
        return act(up)
    gate = widened(gate)
    if spec.limit is not None:
        up = up.clamp(-spec.limit, spec.limit)
        # One-sided: a clamp from below would turn silu(-50), which is 0, into silu(-limit).
        gate = gate if spec.limit_mode == "after" else gate.clamp(max=spec.limit)
    if spec.limit_mode == "oai":
        return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)
    hidden = act(gate)
    if spec.limit is not None and spec.limit_mode == "after":
        hidden = hidden.clamp(max=spec.limit)
    return hidden * up


def dense_mlp(x: Tensor, stack: ExpertStack, expert: int, ctx: ArmContext, weight: Tensor | None = None) -> Tensor:
    """Down rows of the stored dtype from rows x [r, D] of one expert; `weight` [r] where the spec places it inside."""
    spec = ctx.spec
    scale = None if weight is None else weight.float().unsqueeze(-1)
    x = widened(x)
    if scale is not None and spec.weight_place == "input":
        x = x * scale

    def project(part: str, rows: Tensor) -> Tensor:
        return ctx.store(linear(rows, stack.values(part, expert), stack.bias(part, expert)))

    gate = project("gate", x) if spec.gated else None
    hidden = activate_dense(gate, project("up", x), spec)
    if scale is not None and spec.weight_place == "hidden":
        hidden = hidden * scale
    return project("down", widened(ctx.store(hidden)))
