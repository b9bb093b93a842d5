"""The arm for many rows: a grouped GEMM on the tensor cores, weights decoded to 16-bit floats in registers.

Activations are not quantised. Operands have the dtype of x where that is bf16 or fp16; fp32 rows are rounded to bf16
for the products (and stay fp32 at the store points). A row's bits depend neither on the batch nor on the tiles, so
batched, streamed and alone are the same; where torch computes, products are in float64 and rounded once.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack, Group, Schedule, activate, lacks_kernel
from moe_lab.formats import QuantTensor
from moe_lab.spec import MoESpec
from moe_lab_kernels.gemv_float.operands import DENSE as FLOATS
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.grouped.steps import STEPS


class Grouped:
    """All rows of an expert together, up to a tile of them for each read of its weights."""

    name = "grouped"
    per_token = False

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with a decode step."""
        missing = sorted({f for f in formats if f not in STEPS})
        return f"it serves {', '.join(STEPS)}, not {', '.join(missing)}" if missing else None

    def lacks(self, spec: MoESpec) -> str | None:
        """Plain gated experts alone, weighed on their output."""
        if spec.expert_bias:
            return "expert biases"
        if spec.weight_place != "output":
            return f"the routing weight on the {spec.weight_place}"
        return lacks_kernel(spec)

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        first, last = groups[0].first, groups[-1].first + groups[-1].rows
        token, slot = schedule.token[first:last], schedule.slot[first:last]
        local = [Group(g.expert, g.first - first, g.rows) for g in groups]
        if ctx.backend == "torch":
            y[token, slot] = _torch_mlp(x, token, stack, local, ctx).to(y.dtype)
            return
        to = go.Scatter(token.to(torch.int32), slot.to(torch.int32), y.shape[1])
        _kernel_mlp(x, to, stack, local, ctx, y.view(-1, y.shape[-1]))

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        groups = [Group(0, 0, len(x))]
        if ctx.backend == "torch":
            return _torch_mlp(x, torch.arange(len(x), device=x.device), stack, groups, ctx)
        rows = torch.arange(len(x), dtype=torch.int32, device=x.device)
        out = ctx.empty("shared rows", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        _kernel_mlp(x, go.Scatter(rows, torch.zeros_like(rows), 1), stack, groups, ctx, out)
        return out


def operand_dtype(x: Tensor) -> torch.dtype:
    """What the tensor cores multiply."""
    return x.dtype if x.dtype in go.OPERANDS else torch.bfloat16


def weight_of(q: QuantTensor) -> go.Weight:
    """A stack of matrices as the kernels take it."""
    second = q.biases if q.biases is not None else q.global_scale
    data = q.data.view(FLOATS[q.format]) if q.format in FLOATS else q.data
    return go.Weight(data, q.format, q.shape[-1], q.scales, second)


def _kernel_mlp(
    x: Tensor, to: go.Scatter, stack: ExpertStack, groups: Sequence[Group], ctx: ArmContext, out: Tensor
) -> None:
    """Down rows through the kernels, written to out where `to` says."""
    pairs, operand = len(to.row), operand_dtype(x)
    tokens = gt.tokens_for(pairs, len(groups))
    entries = [
        (stack.slot_of[g.expert], g.first + i, min(tokens, g.rows - i))
        for g in groups
        for i in range(0, g.rows, tokens)
    ]
    ctx.work.weight_bytes += len(entries) * stack.expert_bytes
    work = gt.WorkList(torch.tensor(entries, dtype=torch.int32, device=x.device).view(-1, 3), tokens)
    rows, (gate, up, down) = x.to(operand), (weight_of(stack.part(name)) for name in ("gate", "up", "down"))
    shape = (pairs, gate.data.shape[1])
    hidden = ctx.empty("hidden", shape, operand, x.device)
    if ctx.store_dtype == operand and go.alike(gate, up) is None:
        gelu = ctx.spec.activation == "gelu_tanh"
        gg.grouped_gate_up(rows, to.row, gate, up, work, hidden, gelu=gelu, limit=ctx.spec.limit)
    else:
        g, u = (ctx.empty(name, shape, ctx.store_dtype, x.device) for name in ("gate", "up"))
        gg.grouped_product(rows, to.row, gate, work, g)
        gg.grouped_product(rows, to.row, up, work, u)
        hidden = activate(g, u, ctx).to(operand)
    gg.grouped_product(hidden, None, down, work, out, to=to)


def _torch_mlp(x: Tensor, token: Tensor, stack: ExpertStack, groups: Sequence[Group], ctx: ArmContext) -> Tensor:
    """Down rows [P, D] of the pairs in order."""
    operand = operand_dtype(x)
    ctx.work.weight_bytes += len(groups) * stack.expert_bytes

    def project(part: str, rows: Tensor) -> Tensor:
        ctx.work.products += len(groups)
        done = [
            rows[g.first : g.first + g.rows].double() @ stack.values(part, g.expert).to(operand).double().T
            for g in groups
        ]
        return ctx.store(torch.cat(done).float())

    rows = x[token].to(operand)
    hidden = activate(project("gate", rows), project("up", rows), ctx)
    return project("down", hidden.to(operand))
