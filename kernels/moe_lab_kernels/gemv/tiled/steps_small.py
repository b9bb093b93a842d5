"""Steps of q8_0 and q4_0, blocks of 32 values: 128 values of 16 weight rows times activation rows.

As `steps_k` has it: eight columns of 16 activations, lane 4 g + q gets dots of values 32 q .. 32 q + 31 of the 128 with
weight rows g and g + 8. Part of a lane:
    q8_0   (d * d8) * dot
    q4_0   d * (d8 * dot - 8 * s), codes 0..15, s the activations' own sum as q8_1 has it
A row's last step may start early, at `start` in units of 32 values: those before `first` have had their turn and meet
zeros, as do those of a step that the row has not (`first` past its end).

w: the tile's step; x, d8, total: activation rows; of those `there` says which are any.
"""
# pyright: reportGeneralTypeIssues=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.tiled.tensor_core import halves, ld_there, mma, quad
from moe_lab_kernels.primitives import half_bits


@jit
def q8_0(w, x, d8, start, first, there, lane, zero, NATIVE: tl.constexpr):
    """See the head of the file."""
    g, q = lane // 4, lane % 4
    dots = (zero, zero, zero, zero)
    x = (x + 32 * start).to(tl.pointer_type(tl.int32), bitcast=True)
    codes = ld_there(x, lane, there & (start + g // 2 >= first))
    for j in tl.static_range(4):
        a0, a1, a2, a3 = quad(w, 512 * j, lane, NATIVE)
        b0, b1 = tl.where(g == 2 * j, codes, 0), tl.where(g == 2 * j + 1, codes, 0)
        dots = mma(a0, a1, a2, a3, b0, b1, dots, True, NATIVE)
    d_lo, d_hi = halves(w, 2048 + 4 * lane)
    s8 = ld_there(d8, start + q, there & (start + q >= first)).to(tl.float32)
    dot_lo, dot_hi = (dots[0] + dots[1]).to(tl.float32), (dots[2] + dots[3]).to(tl.float32)
    return (half_bits(d_lo) * s8) * dot_lo, (half_bits(d_hi) * s8) * dot_hi


@jit
def q4_0(w, x, d8, total, start, first, there, lane, zero, NATIVE: tl.constexpr):
    """High nibbles stay in place: the odd columns' dots come 16 times too large."""
    g, q = lane // 4, lane % 4
    dots = (zero, zero, zero, zero)
    x = (x + 32 * start).to(tl.pointer_type(tl.int32), bitcast=True)
    codes = ld_there(x, lane, there & (start + g // 2 >= first))
    for i in tl.static_range(2):
        lo0, hi0, lo1, hi1 = quad(w, 512 * i, lane, NATIVE)
        for k in tl.static_range(2):
            low, high = (lo1, hi1) if k else (lo0, hi0)
            b0, b1 = tl.where(g == 4 * i + 2 * k, codes, 0), tl.where(g == 4 * i + 2 * k + 1, codes, 0)
            dots = mma(low & 0x0F0F0F0F, high & 0x0F0F0F0F, low & -0x0F0F0F10, high & -0x0F0F0F10, b0, b1, dots,
                       False, NATIVE)  # fmt: skip
    d_lo, d_hi = halves(w, 1024 + 4 * lane)
    s8 = ld_there(d8, start + q, there & (start + q >= first)).to(tl.float32)
    s = 8.0 * ld_there(total, start + q, there & (start + q >= first)).to(tl.float32)
    dot_lo, dot_hi = (dots[0] + (dots[1] >> 4)).to(tl.float32), (dots[2] + (dots[3] >> 4)).to(tl.float32)
    return half_bits(d_lo) * (s8 * dot_lo - s), half_bits(d_hi) * (s8 * dot_hi - s)
