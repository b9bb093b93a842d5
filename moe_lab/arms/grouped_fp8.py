"""The grouped arm's products in fp8 on both sides: fp8_block weights, rows and hidden rows quantised by 128 values."""

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext
from moe_lab.arms.formula import bias_parts, gate_of, hidden_rows, source_rows
from moe_lab.arms.stack import ExpertStack
from moe_lab.errors import LabError
from moe_lab.formats.layouts import Laid
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8, quantize_fp8_ref


def fp8_mlp(
    x: Tensor,
    to: Scatter,
    stack: ExpertStack,
    work: WorkList,
    ctx: ArmContext,
    out: Tensor,
    weight: Tensor | None = None,
) -> None:
    """Down rows, written to out where `to` says; kernels or, where torch computes, their references. `weight` fp32 [P]:
    the router's.

    Hidden rows leave gate and up already quantised in narrow tiles; in wide ones, and where they are stored in fp32,
    they are quantised in a launch of their own, with the same bits.
    """
    others = sorted({q.format for q in stack.parts.values()} - {"fp8_block"})
    if others:
        raise LabError(
            f"arm grouped: {', '.join(others)} weights meet no fp8 rows; where they are the shared expert's, give it "
            "another arm (Options.shared_arm) that takes rows as they come."
        )
    torch_computes = ctx.backend == "torch"
    product = g8.fp8_product_ref if torch_computes else g8.fp8_product
    gate_up = g8.fp8_gate_up_ref if torch_computes else g8.fp8_gate_up
    quantize = quantize_fp8_ref if torch_computes else quantize_fp8
    gate, up, down = (_weight(stack.part(name)) for name in ("gate", "up", "down"))
    source, row_of = source_rows(x, to.row, weight, ctx.spec)
    rows, shape = g8.Fp8Rows(*quantize(source)), (len(to.row), gate.rows)
    of_gate, of_up, of_down = bias_parts(stack.biases)
    how, both = gate_of(ctx.spec, weight), None if of_gate is None or of_up is None else (of_gate, of_up)

    def made() -> g8.Fp8Rows:
        if ctx.store_dtype not in (torch.bfloat16, torch.float16):
            g, u = (ctx.empty(name, shape, ctx.store_dtype, x.device) for name in ("gate", "up"))
            product(rows, row_of, gate, work, g, bias=of_gate)
            product(rows, row_of, up, work, u, bias=of_up)
            return g8.Fp8Rows(*quantize(hidden_rows(g, u, weight, ctx)))
        if g8.quantise_apart(work.tokens):
            h = ctx.empty("hidden", shape, ctx.store_dtype, x.device)
            gate_up(rows, row_of, gate, up, work, h, how=how, biases=both)
            return g8.Fp8Rows(*quantize(h))
        groups = -(-shape[1] // g8.GROUP)
        codes = ctx.empty("hidden codes", (shape[0], groups * g8.GROUP), torch.float8_e4m3fn, x.device)
        h = g8.Fp8Rows(codes, ctx.empty("hidden scales", (shape[0], groups), torch.float32, x.device))
        gate_up(rows, row_of, gate, up, work, h, how=how, biases=both, stored=ctx.store_dtype)
        return h

    product(made(), None, down, work, out, to=to, bias=of_down)


def _weight(q: Laid) -> Weight:
    return Weight(q.data, q.format, q.shape[-1], q.tensors["scales"], None)
