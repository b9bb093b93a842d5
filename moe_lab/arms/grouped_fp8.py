"""The grouped arm's products in fp8 on both sides: fp8_block weights, rows and hidden rows quantised by 128 values."""

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack, activate
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8, quantize_fp8_ref


def fp8_mlp(x: Tensor, to: Scatter, stack: ExpertStack, work: WorkList, ctx: ArmContext, out: Tensor) -> None:
    """Down rows, written to out where `to` says; kernels or, where torch computes, their references.

    Hidden rows leave gate and up already quantised where they are stored in 16 bits; fp32 ones are quantised in a
    launch of their own.
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
    rows, pairs, n = g8.Fp8Rows(*quantize(x)), len(to.row), gate.data.shape[1]
    work = work if work.tokens <= g8.MOST_TOKENS else _narrower(work)
    if ctx.store_dtype in (torch.bfloat16, torch.float16):
        groups = -(-n // g8.GROUP)
        codes = ctx.empty("hidden codes", (pairs, groups * g8.GROUP), torch.float8_e4m3fn, x.device)
        hidden = g8.Fp8Rows(codes, ctx.empty("hidden scales", (pairs, groups), torch.float32, x.device))
        gelu = ctx.spec.activation == "gelu_tanh"
        gate_up(rows, to.row, gate, up, work, hidden, gelu=gelu, limit=ctx.spec.limit, hidden=ctx.store_dtype)
    else:
        g, u = (ctx.empty(name, (pairs, n), ctx.store_dtype, x.device) for name in ("gate", "up"))
        product(rows, to.row, gate, work, g)
        product(rows, to.row, up, work, u)
        hidden = g8.Fp8Rows(*quantize(activate(g, u, ctx)))
    product(hidden, None, down, work, out, to=to)


def _weight(q: QuantTensor) -> Weight:
    return Weight(q.data, q.format, q.shape[-1], q.scales, None)


def _narrower(work: WorkList) -> WorkList:
    """Each tile as two of half the rows, made on the device."""
    half = work.tokens // 2
    slot, first, n = work.tiles.unbind(1)
    low = torch.stack([slot, first, n.clamp(max=half)], 1)
    high = torch.stack([slot, first + half, (n - half).clamp(min=0)], 1)
    return WorkList(torch.stack([low, high], 1).view(-1, 3), half)
