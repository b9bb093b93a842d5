"""The arm for many rows: a grouped GEMM on the tensor cores, weights decoded to 16-bit floats inside it or, where
experts have many rows, once before it.

Activations are not quantised, but for fp8_block weights where Options.activation="fp8" asks for it (`grouped_fp8`).
Operands have the dtype of x where that is bf16 or fp16; fp32 rows are rounded to bf16 for the products (and stay fp32
at the store points). A row's bits depend neither on the batch nor on the tiles nor on where weights were decoded, so
batched, streamed and alone are the same; where torch computes, products are in float64 and rounded once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, reads_only
from moe_lab.arms.formula import bias_parts, gate_of, hidden_rows, lacks_formula, source_rows
from moe_lab.arms.grouped_fp8 import fp8_mlp
from moe_lab.arms.lists import numbers, shared_tiles, tiles_of, zeros
from moe_lab.arms.schedule import Group, PlannedWork, Schedule
from moe_lab.arms.stack import ExpertBiases, ExpertStack, by_slot
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import RAW, Laid
from moe_lab.spec import MoESpec
from moe_lab_kernels.gemv_float.operands import DENSE as FLOATS
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped.staged import STAGED as STEPS_BY_WORDS
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.grouped.tiles import MOST_FP8_TOKENS, TOKENS, WorkList, tokens_for

# Rows an expert from which on weights are decoded to scratch memory first; gate and up by theirs, down by its own.
# Measured on an H200, us decoded first (the pass and the products on it) against the products that decode. q3_k down at
# 128 rows an expert 300 and 364 (qwen3-30b-a3b), 650 and 839 (mixtral-8x7b); q2_k gate + up at 128 rows 555 and 396,
# 1,250 and 989; q4_k gate + up at 128 580 and 577, 1,290 and 1,350; q6_k down at 128 326 and 385, 690 and 897, at 32
# 277 and 185 (qwen3). mxfp4_oss layers at 128 873 and 601, at 256 19.6 and 16.8 ms (deepseek-v3-like), at 512 3,516 and
# 3,760 (mixtral); with rows that fill no step 5,573 and 6,100 at 256 (gpt-oss-120b-like). Scratch: at most
# DECODED_BYTES, and a sixteenth of memory.
DECODE_FROM_ROWS = 96
DECODE_FROM = {"q2_k": 160, "mxfp4_oss": 384, "mxfp8": 384, "fp8_block": 384}
DECODE_UNEVEN_FROM = {"mxfp4_oss": 192}  # where a row's end cuts a step
# Where rows begin at no multiple of 16 bytes: gemma4-26b-a4b-like's gate + up of q2_k, 924 bytes a row, 565, 755 and
# 1,547 us at 8, 32 and 128 rows; decoding takes 320, the products then some 230, 260 and 370.
DECODE_CROOKED_FROM = {"q2_k": 24}
DECODED_BYTES = 4 << 30
PARTS = ("gate", "up", "down")


class Grouped:
    """All rows of an expert together, up to a tile of them for each read of its weights."""

    name = "grouped"
    per_token = False
    layouts: tuple[str, ...] = (RAW, "planar")

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with a decode step."""
        missing = sorted({f for f in formats if f not in STEPS})
        return f"it serves {', '.join(STEPS)}, not {', '.join(missing)}" if missing else None

    def lacks(self, spec: MoESpec) -> str | None:
        """Gated experts alone; biases, every clamp and every place of the routing weight are served."""
        return lacks_formula(spec)

    def reads(self, layout: str, activation: str | None) -> str | None:
        """See `ArmExtras.reads`."""
        return None if layout in self.layouts else reads_only(self.layouts, layout)

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
        token, slot, weight = (t[first:last] for t in (schedule.token, schedule.slot, schedule.weight))
        local = [Group(g.expert, g.first - first, g.rows) for g in groups]
        if ctx.backend == "torch" and ctx.activation != "fp8":
            y[token, slot] = _torch_mlp(x, token, stack, local, ctx, weight).to(y.dtype)
            return
        to = go.Scatter(token.to(torch.int32), slot.to(torch.int32), y.shape[1])
        work = tiles_of(stack, local, len(token), x.device, most_rows(ctx))
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        _kernel_mlp(x, to, stack, work, ctx, y.view(-1, y.shape[-1]), weight)

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        """See `ArmExtras.experts_of_plan`."""
        if ctx.backend != "torch" or ctx.activation == "fp8":
            to = go.Scatter(plan.token, plan.slot, y.shape[1])
            work = plan.tiles(tokens_for(len(plan.token), min(len(plan.token), len(plan.counts)), most_rows(ctx)))
            _kernel_mlp(x, to, stack, work, ctx, y.view(-1, y.shape[-1]), plan.weight)
            return
        known = plan.known()
        for groups in known.steps:
            made = _torch_mlp(x, known.token, stack, groups, ctx, known.weight)
            y[known.token, known.slot] = made.to(y.dtype)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        groups = [Group(0, 0, len(x))]
        if ctx.backend == "torch" and ctx.activation != "fp8":
            return _torch_mlp(x, torch.arange(len(x), device=x.device), stack, groups, ctx)
        out = ctx.empty("shared rows", (len(x), stack.down.shape[1]), ctx.store_dtype, x.device)
        work = shared_tiles(len(x), x.device, most_rows(ctx))
        ctx.work.weight_bytes += len(work.tiles) * stack.expert_bytes
        _kernel_mlp(x, go.Scatter(numbers(len(x), x.device), zeros(len(x), x.device), 1), stack, work, ctx, out)
        return out


def most_rows(ctx: ArmContext) -> int:
    """Rows a tile, at most."""
    return MOST_FP8_TOKENS if ctx.activation == "fp8" else TOKENS[-1]


def operand_dtype(x: Tensor) -> torch.dtype:
    """What the tensor cores multiply."""
    return x.dtype if x.dtype in go.OPERANDS else torch.bfloat16


def weight_of(q: Laid) -> go.Weight:
    """A stack of matrices as the kernels take it."""
    if not isinstance(q, QuantTensor):
        return go.Weight(by_slot(q), q.format, q.shape[-1], layout=q.layout)
    second = q.biases if q.biases is not None else q.global_scale
    data = q.data.view(FLOATS[q.format]) if q.format in FLOATS else q.data
    return go.Weight(data, q.format, q.shape[-1], q.scales, second)


def _kernel_mlp(
    x: Tensor,
    to: go.Scatter,
    stack: ExpertStack,
    work: WorkList,
    ctx: ArmContext,
    out: Tensor,
    weight: Tensor | None = None,
) -> None:
    """Down rows through the kernels, written to out where `to` says; `weight` fp32 [P], the router's. Nothing is read
    back."""
    if ctx.activation == "fp8":
        fp8_mlp(x, to, stack, work, ctx, out, weight)
        return
    pairs, operand = len(to.row), operand_dtype(x)
    rows, row_of = source_rows(x, to.row, weight, ctx.spec)
    weights = [weight_of(stack.part(name)) for name in PARTS]
    shape = (pairs, weights[0].rows)
    names = ["hidden"] if _fuses(weights, operand, ctx) else ["hidden", "gate", "up"]
    rooms = [ctx.empty(n, shape, operand if n == "hidden" else ctx.store_dtype, x.device) for n in names]
    call = _Call(rows.to(operand), row_of, to, stack.biases, weight, ctx, rooms, out)
    for plain, some in _ready(PARTS[:2], weights[:2], work, call):
        _gate_up(call, plain, some)
    hidden = _hidden(call)
    for (down,), some in _ready(PARTS[2:], weights[2:], work, call):
        bias = bias_parts(call.biases)[2]
        gg.grouped_product(hidden, None, down, some, call.out, to=call.to, bias=bias)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """What the products of a call share, whatever the weights; `rooms`: hidden, and gate and up unless fused."""

    rows: Tensor
    row_of: Tensor | None
    to: go.Scatter
    biases: ExpertBiases | None
    weight: Tensor | None
    ctx: ArmContext
    rooms: Sequence[Tensor]
    out: Tensor


def decode_from(weights: Sequence[go.Weight]) -> int:
    """Rows a slot from which on these matrices are decoded first: as the costliest wants it."""

    def of(w: go.Weight) -> int:
        uneven = w.kd % STEPS_BY_WORDS.get(w.format, STEPS[w.format]).values != 0
        own = DECODE_FROM.get(w.format, DECODE_FROM_ROWS)
        sooner = DECODE_UNEVEN_FROM if uneven else DECODE_CROOKED_FROM if w.data.stride(-2) % 16 else {}
        return min(own, sooner.get(w.format, own))

    return min(map(of, weights))


def _decoded_bytes(device: torch.device) -> int:
    """Scratch memory for decoded weights."""
    if device.type != "cuda":
        return DECODED_BYTES
    return min(DECODED_BYTES, torch.cuda.get_device_properties(device).total_memory // 16)


def _fuses(weights: Sequence[go.Weight], operand: torch.dtype, ctx: ArmContext) -> bool:
    return ctx.store_dtype == operand and go.alike(weights[0], weights[1]) is None


def _ready(
    names: Sequence[str], weights: Sequence[go.Weight], work: WorkList, call: _Call
) -> Iterator[tuple[Sequence[go.Weight], WorkList]]:
    """Weights that are multiplied together and the tiles that meet them: all as they lie, or decoded, wave after wave;
    each product as its own formats want it."""
    slots, device, ctx = len(weights[0].data), call.rows.device, call.ctx
    raw = all(w.layout == RAW for w in weights)
    if raw and (len(call.to.row) < decode_from(weights) * slots or not all(map(decoded.can_decode, weights))):
        yield weights, work
        return
    wave = decoded.slots_a_wave(weights, _decoded_bytes(device))
    with ctx.phase("decoded weights") as inner:
        rooms = [
            inner.empty(f"decoded {name}", (decoded.scratch_values(w, wave),), call.rows.dtype, device)
            for name, w in zip(names, weights, strict=True)
        ]
        for first, some in decoded.waves(work, slots, wave):
            yield [decoded.decode_slots(w, first, wave, room) for w, room in zip(weights, rooms, strict=True)], some


def _gate_up(call: _Call, weights: Sequence[go.Weight], work: WorkList) -> None:
    """Hidden rows of the pairs in the work list, or gate and up."""
    gate, up = weights
    of_gate, of_up, _ = bias_parts(call.biases)
    if len(call.rooms) == 1:
        both = None if of_gate is None or of_up is None else (of_gate, of_up)
        how = gate_of(call.ctx.spec, call.weight)
        gg.grouped_gate_up(call.rows, call.row_of, gate, up, work, call.rooms[0], how=how, biases=both)
    else:
        gg.grouped_product(call.rows, call.row_of, gate, work, call.rooms[1], bias=of_gate)
        gg.grouped_product(call.rows, call.row_of, up, work, call.rooms[2], bias=of_up)


def _hidden(call: _Call) -> Tensor:
    """What down multiplies."""
    if len(call.rooms) == 1:
        return call.rooms[0]
    return hidden_rows(call.rooms[1], call.rooms[2], call.weight, call.ctx).to(call.rooms[0].dtype)


def _torch_mlp(
    x: Tensor,
    token: Tensor,
    stack: ExpertStack,
    groups: Sequence[Group],
    ctx: ArmContext,
    weight: Tensor | None = None,
) -> Tensor:
    """Down rows [P, D] of the pairs in order."""
    operand = operand_dtype(x)
    x, row_of = source_rows(x, token, weight, ctx.spec)
    ctx.work.weight_bytes += len(groups) * stack.expert_bytes

    def project(part: str, rows: Tensor) -> Tensor:
        ctx.work.products += len(groups)
        done = []
        for g in groups:
            values = stack.values(part, g.expert).to(operand).double()
            product = (rows[g.first : g.first + g.rows].double() @ values.T).float()
            bias = stack.bias(part, g.expert)
            done.append(product if bias is None else product + bias.float())
        return ctx.store(torch.cat(done))

    rows = (x if row_of is None else x[row_of]).to(operand)
    hidden = hidden_rows(project("gate", rows), project("up", rows), weight, ctx)
    return project("down", hidden.to(operand))
