"""The decode arms: q8_1 activations, integer dots on raw blocks.

`gemv`: an expert's rows in chunks of at most 8 that share one read of its weights; prefill runs the same numbers as
decode. `per_token`: each token alone, its own submission, the same arithmetic row by row, so the same bits.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack, Group, Schedule, activate, lacks_kernel
from moe_lab.arms.integer import integer_matmul
from moe_lab.formats import FORMATS, quantize_q8_1
from moe_lab.spec import MoESpec
from moe_lab_kernels.blocks import GEMV_FORMATS

# q4_0 has a kernel, but ggml's formula for it takes the raw sums of activations, and the torch path below does not
KERNEL_FORMATS = tuple(f for f in GEMV_FORMATS if f != "q4_0")
# Gates for which one launch up to the hidden rows beat three. H200, qwen3's shape, microseconds a layer, three launches
# / one: q8_0 T = 1, 4, 8: 25.4, 66, 118 / 23.0, 65, 113; q2_k: 17.1, 37, 69 / 17.1, 44, 76; q4_k: 24.5, 56, 92 / 31.9,
# 99, 176; mxfp4 T = 1: 21.5 / 25.0. The bits are the same either way.
GATED_FORMATS = ("q8_0",)


def chunk_table(
    groups: Sequence[Group], slot_of: dict[int, int], base: int, chunk_rows: int
) -> list[tuple[int, int, int]]:
    """(slot, first pair, rows <= chunk_rows) of every chunk; pairs counted from `base`."""
    return [
        (slot_of[g.expert], g.first - base + i, min(chunk_rows, g.rows - i))
        for g in groups
        for i in range(0, g.rows, chunk_rows)
    ]


class Gemv:
    """Chunks of at most 8 rows, one weight read shared within a chunk."""

    name = "gemv"
    per_token = False

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with an integer form; on the GPU and in the interpreter, those with a kernel."""
        served = KERNEL_FORMATS
        missing = [f for f in formats if f not in served]
        if not missing:
            return None
        if backend == "torch" and all(_has_integers(f) for f in missing):
            return None
        return f"it serves {', '.join(served)}, not {', '.join(sorted(set(missing)))}"

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
        chunks = chunk_table(groups, stack.slot_of, first, ctx.chunk_rows)
        ctx.work.weight_bytes += len(chunks) * stack.expert_bytes
        if ctx.backend == "torch":
            local = [Group(g.expert, g.first - first, g.rows) for g in groups]
            y[token, slot] = _torch_mlp(x, token, stack, local, ctx).to(y.dtype)
        else:
            _kernel_mlp(x, token, stack, chunks, ctx, y.view(-1, y.shape[-1]), token * y.shape[1] + slot)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        rows = torch.arange(len(x), device=x.device)
        groups = [Group(0, 0, len(x))]
        chunks = chunk_table(groups, stack.slot_of, 0, ctx.chunk_rows)
        ctx.work.weight_bytes += len(chunks) * stack.expert_bytes
        if ctx.backend == "torch":
            return _torch_mlp(x, rows, stack, groups, ctx)
        out = torch.empty(len(x), stack.down.shape[1], dtype=ctx.store_dtype, device=x.device)
        return _kernel_mlp(x, rows, stack, chunks, ctx, out, rows)


class PerToken(Gemv):
    """Each token alone, through the same arithmetic: m tokens, m submissions, no shared weight read."""

    name = "per_token"
    per_token = True

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """Row by row."""
        return torch.cat([super(PerToken, self).shared(x[t : t + 1], stack, ctx) for t in range(len(x))])


def _has_integers(name: str) -> bool:
    f = FORMATS.get(name)
    return f is not None and f.integer_form(torch.zeros(1, f.row_bytes(f.block), dtype=torch.uint8)) is not None


def _torch_mlp(x: Tensor, token: Tensor, stack: ExpertStack, groups: Sequence[Group], ctx: ArmContext) -> Tensor:
    """Down rows [P, D] of the pairs in order; each distinct row of x is quantised once."""
    rows = quantize_q8_1(x)
    spans = [slice(g.first, g.first + g.rows) for g in groups]

    def project(part: str, rows_of) -> Tensor:
        parts = [integer_matmul(rows_of(s), stack.integers(part, g.expert)) for g, s in zip(groups, spans, strict=True)]
        ctx.work.products += len(parts)
        return ctx.store(torch.cat(parts))

    gate, up = (project(part, lambda s: rows[token[s]]) for part in ("gate", "up"))
    hidden = quantize_q8_1(activate(gate, up, ctx))
    return project("down", lambda s: hidden[s])


def _kernel_mlp(
    x: Tensor,
    token: Tensor,
    stack: ExpertStack,
    chunks: list[tuple[int, int, int]],
    ctx: ArmContext,
    out: Tensor,
    out_row: Tensor,
) -> Tensor:
    """The same through the Triton kernels, written to out[out_row]: quantise, gate + up, activation, quantise, down;
    for `GATED_FORMATS` the middle three in one launch.
    """
    from moe_lab_kernels import gemv, gemv_gated, lane_rows

    table = torch.tensor(chunks, dtype=torch.int32, device=x.device).view(-1, 3)
    largest = 1 << max(0, max((rows for _, _, rows in chunks), default=1) - 1).bit_length()
    gate, up, down, row_of = stack.gate, stack.up, stack.down, token.to(torch.int32)
    own = torch.arange(len(token), dtype=torch.int32, device=x.device)
    if gate.format == up.format and gate.format in GATED_FORMATS:
        rows = lane_rows.quantize_lanes(x, gate.format)
        room = lane_rows.lane_rows("gemv", (len(token), gate.shape[1]), down.format, None, x.device)
        how = {"gelu": ctx.spec.activation == "gelu_tanh", "limit": ctx.spec.limit, "store": ctx.store_dtype}
        more = {"out": room, "max_rows": largest, **how}
        hidden = gemv_gated.gemv_gated(rows, row_of, gate.data, up.data, table, gate.format, **more)
    else:
        made = [torch.empty(len(token), q.shape[1], dtype=ctx.store_dtype, device=x.device) for q in (gate, up)]
        rows = lane_rows.quantize_lanes(x, gate.format)
        if gate.format == up.format:
            to, to2 = made
            gemv.gemv(rows, row_of, gate.data, table, gate.format, to, w2=up.data, out2=to2, max_rows=largest)
        else:
            gemv.gemv(rows, row_of, gate.data, table, gate.format, made[0], max_rows=largest)
            rows = lane_rows.quantize_lanes(x, up.format)
            gemv.gemv(rows, row_of, up.data, table, up.format, made[1], max_rows=largest)
        hidden = lane_rows.quantize_lanes(activate(made[0], made[1], ctx), down.format)
    target = out_row.to(torch.int32)
    return gemv.gemv(hidden, own, down.data, table, down.format, out, out_row=target, max_rows=largest)
