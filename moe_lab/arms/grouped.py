"""The arm for many rows: a grouped GEMM on the tensor cores, weights decoded to 16-bit floats inside it or, where
experts have many rows, once before it.

Activations are not quantised, but for fp8_block weights where Options.activation="fp8" asks for it (`grouped_fp8`).
Operands have the dtype of x where that is bf16 or fp16; fp32 rows are rounded to bf16 for the products (and stay fp32
at the store points). A row's bits depend neither on the batch nor on the tiles nor on where weights were decoded, so
batched, streamed and alone are the same; where torch computes, products are in float64 and rounded once.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack, Group, PlannedWork, Schedule, activate, lacks_kernel
from moe_lab.arms.grouped_fp8 import fp8_mlp
from moe_lab.arms.lists import numbers, shared_tiles, tiles_of, zeros
from moe_lab.formats import QuantTensor
from moe_lab.spec import MoESpec
from moe_lab_kernels.gemv_float.operands import DENSE as FLOATS
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.grouped.tiles import WorkList

# Measured on an H200, q2_k and q3_k: at 128 rows an expert (qwen3-30b-a3b) a layer that writes them as bf16 first takes
# 858 us, the products that decode take 888 by themselves; at 64 (deepseek-v3-like) the pass's 6.6 ms are more than the
# 3.8 that such products lose to those of floats. Formats whose decoding is cheap, or whose bytes are many, later:
# mxfp4_oss loses at 256 rows (19.6 ms against 18.1) and wins at 512. Scratch: at most this, and a sixteenth of memory.
DECODE_FROM_ROWS = 96
DECODE_LATE = {"mxfp4_oss": 384, "mxfp8": 384, "fp8_block": 384}
DECODED_BYTES = 4 << 30


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

    def meets(self, formats: Sequence[str], activation: str) -> str | None:
        """None when activations of this kind meet weights of all these formats, else why not."""
        if activation == "bf16":
            return None
        others = sorted({f for f in formats if f != "fp8_block"})
        if activation == "fp8":
            return f"fp8 rows meet fp8_block weights, not {', '.join(others)}" if others else None
        return "it multiplies rows as they come, or in fp8"

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        first, last = groups[0].first, groups[-1].first + groups[-1].rows
        token, slot = schedule.token[first:last], schedule.slot[first:last]
        local = [Group(g.expert, g.first - first, g.rows) for g in groups]
        if ctx.backend == "torch" and ctx.activation != "fp8":
            y[token, slot] = _torch_mlp(x, token, stack, local, ctx).to(y.dtype)
            return
        to = go.Scatter(token.to(torch.int32), slot.to(torch.int32), y.shape[1])
        work = tiles_of(stack, local, len(token), x.device)
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        _kernel_mlp(x, to, stack, work, ctx, y.view(-1, y.shape[-1]))

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        """See `ArmExtras.experts_of_plan`."""
        if ctx.backend != "torch" or ctx.activation == "fp8":
            to = go.Scatter(plan.token, plan.slot, y.shape[1])
            _kernel_mlp(x, to, stack, plan.tiles(), ctx, y.view(-1, y.shape[-1]))
            return
        known = plan.known()
        for groups in known.steps:
            y[known.token, known.slot] = _torch_mlp(x, known.token, stack, groups, ctx).to(y.dtype)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        groups = [Group(0, 0, len(x))]
        if ctx.backend == "torch" and ctx.activation != "fp8":
            return _torch_mlp(x, torch.arange(len(x), device=x.device), stack, groups, ctx)
        out = ctx.empty("shared rows", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        work = shared_tiles(len(x), x.device)
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        _kernel_mlp(x, go.Scatter(numbers(len(x), x.device), zeros(len(x), x.device), 1), stack, work, ctx, out)
        return out


def operand_dtype(x: Tensor) -> torch.dtype:
    """What the tensor cores multiply."""
    return x.dtype if x.dtype in go.OPERANDS else torch.bfloat16


def weight_of(q: QuantTensor) -> go.Weight:
    """A stack of matrices as the kernels take it."""
    second = q.biases if q.biases is not None else q.global_scale
    data = q.data.view(FLOATS[q.format]) if q.format in FLOATS else q.data
    return go.Weight(data, q.format, q.shape[-1], q.scales, second)


def _kernel_mlp(x: Tensor, to: go.Scatter, stack: ExpertStack, work: WorkList, ctx: ArmContext, out: Tensor) -> None:
    """Down rows through the kernels, written to out where `to` says. Nothing is read back."""
    if ctx.activation == "fp8":
        fp8_mlp(x, to, stack, work, ctx, out)
        return
    pairs, operand = len(to.row), operand_dtype(x)
    rows, weights = x.to(operand), [weight_of(stack.part(name)) for name in ("gate", "up", "down")]
    shape, slots = (pairs, weights[0].data.shape[1]), len(weights[0].data)
    names = ["hidden"] if _fuses(weights, operand, ctx) else ["hidden", "gate", "up"]
    rooms = [ctx.empty(n, shape, operand if n == "hidden" else ctx.store_dtype, x.device) for n in names]
    if pairs < decode_from(weights) * slots or not all(map(decoded.can_decode, weights)):
        _products(rows, to, weights, work, ctx, rooms, out)
        return
    wave = decoded.slots_a_wave(weights, _decoded_bytes(x.device))
    scratch = [
        ctx.empty(f"decoded {name}", (decoded.scratch_values(w, wave),), operand, x.device)
        for name, w in zip(("gate", "up", "down"), weights, strict=True)
    ]
    for first, some in decoded.waves(work, slots, wave):
        plain = [decoded.decode_slots(w, first, wave, room) for w, room in zip(weights, scratch, strict=True)]
        _products(rows, to, plain, some, ctx, rooms, out)


def decode_from(weights: Sequence[go.Weight]) -> int:
    """Rows a slot from which on these matrices are decoded first."""
    return max(DECODE_LATE.get(w.format, DECODE_FROM_ROWS) for w in weights)


def _decoded_bytes(device: torch.device) -> int:
    """Scratch memory for decoded weights."""
    if device.type != "cuda":
        return DECODED_BYTES
    return min(DECODED_BYTES, torch.cuda.get_device_properties(device).total_memory // 16)


def _fuses(weights: Sequence[go.Weight], operand: torch.dtype, ctx: ArmContext) -> bool:
    return ctx.store_dtype == operand and go.alike(weights[0], weights[1]) is None


def _products(
    rows: Tensor,
    to: go.Scatter,
    weights: Sequence[go.Weight],
    work: WorkList,
    ctx: ArmContext,
    rooms: Sequence[Tensor],
    out: Tensor,
) -> None:
    """Gate, up, activation and down of the pairs in the work list; `rooms`: hidden, and gate and up unless fused."""
    (gate, up, down), hidden = weights, rooms[0]
    if len(rooms) == 1:
        gelu = ctx.spec.activation == "gelu_tanh"
        gg.grouped_gate_up(rows, to.row, gate, up, work, hidden, gelu=gelu, limit=ctx.spec.limit)
    else:
        gg.grouped_product(rows, to.row, gate, work, rooms[1])
        gg.grouped_product(rows, to.row, up, work, rooms[2])
        hidden = activate(rooms[1], rooms[2], ctx).to(hidden.dtype)
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
