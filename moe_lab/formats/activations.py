"""Activation quantisers of the int8 arms. Now: q8_1, the decode arm's.

q8_1: per 32 values d32 = amax / 127 in fp32, code = roundf(x / d32) (halves away from zero, a division), stored scale
fp16(d32), stored total = fp16 of the fp32 sum of the *unquantised* values, added by a butterfly (distance 16, 8, 4, 2,
1). Codes use the fp32 d32, not the stored one. The same bits come from the Triton kernel (moe_lab_kernels).
"""

from typing import NamedTuple

from moe_lab._types import Float, Tensor


class Q81Rows(NamedTuple):
    """Quantised activation rows: codes int8 [R, Kd], scale and total fp16 [R, Kd / 32]."""

    codes: Tensor
    scale: Tensor
    total: Tensor


def quantize_q8_1(x: Float[Tensor, "R Kd"]) -> Q81Rows:
    """Quantise rows to q8_1. Kd must be a multiple of 32. The kernel where one serves x, torch elsewhere."""
    from moe_lab_kernels import backend, quantize_rows

    op = quantize_rows.quantize_q8_1_ref if backend.backend_of(x) == "torch" else quantize_rows.quantize_q8_1
    return Q81Rows(*op(x))
