"""Steps of the k-quants: a super-block of 256 values of 16 weight rows times activation rows, on the tensor cores.

Both halves h of a block in turn. A half's 128 activation codes are eight groups of 16, one to each column of `mma`;
lane 4 g + q holds word q of group g and gets the dots of groups 2 q and 2 q + 1 with weight rows g and g + 8: those of
values 32 q .. 32 q + 31, which share an activation scale d8. Codes of fewer bits stay where they lie in their bytes,
masked: their dots come 2^shift too large, which is a shift of the sum or of d8, and exact. Part of a lane, with exact
integers in ():
    q2_k       d * sum_h d8 * (sc0 dot0 + sc1 dot1) - dmin * sum_h d8 * (m0 sum0 + m1 sum1)
    q3_k       d * sum_h d8 * (sc0 dot0 + sc1 dot1), codes -4..3
    q4_k q5_k  d * sum_h d8 * (sc dot) - dmin * sum_h d8 * (m sum)
    q6_k       d * sum_h d8 * (sc0 dot0 + sc1 dot1), codes -32..31
with h = 0 first, where `sums` are the activation codes' own sums by 16. Bits above a code's first ones (q3_k's third,
q5_k's fifth, q6_k's upper two) are a product of their own with the same columns. `ref` is the twin in torch.

w: the tile's step (`storage.row_tiles`); x, d8, sums: its activations, of which `there` says whether there are any;
zero int32: sums of nothing.
"""
# pyright: reportGeneralTypeIssues=false
# (pyright takes tl.static_range for a function that never returns)

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.tiled.tensor_core import bytes_of, halves, ld_there, mma, quad
from moe_lab_kernels.primitives import dp2a, half_bits, pair


@jit
def q2_k(w, x, d8, sums, there, lane, zero, NATIVE: tl.constexpr):
    """See the head of the file."""
    g, q = lane // 4, lane % 4
    d_lo, d_hi = halves(w, 1280 + 4 * g)
    dmin_lo, dmin_hi = halves(w, 1312 + 4 * g)
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    down = tl.where(q == 0, 1.0, tl.where(q == 1, 0.25, tl.where(q == 2, 0.0625, 0.015625)))
    for h in tl.static_range(2):
        codes = ld_there(x, 32 * h + lane, there)
        a0, a1, a2, a3 = quad(w, 512 * h, lane, NATIVE)
        dots = (zero, zero, zero, zero)
        for j in tl.static_range(4):
            mask = 0x03030303 << (2 * j) if j < 3 else -0x3F3F3F40
            b0, b1 = tl.where(g == 2 * j, codes, 0), tl.where(g == 2 * j + 1, codes, 0)
            dots = mma(a0 & mask, a1 & mask, a2 & mask, a3 & mask, b0, b1, dots, False, NATIVE)
        s_lo, s_hi = halves(w, 1024 + 128 * h + 4 * lane)
        s8, isum = ld_there(d8, 4 * h + q, there).to(tl.float32), ld_there(sums, 4 * h + q, there)
        main_lo = (s8 * down) * (dots[0] * (s_lo & 15) + dots[1] * (s_lo >> 8 & 15)).to(tl.float32)
        main_hi = (s8 * down) * (dots[2] * (s_hi & 15) + dots[3] * (s_hi >> 8 & 15)).to(tl.float32)
        low_lo = s8 * dp2a(isum, s_lo >> 4 & 0x0F0F, False, NATIVE).to(tl.float32)
        low_hi = s8 * dp2a(isum, s_hi >> 4 & 0x0F0F, False, NATIVE).to(tl.float32)
        m_lo, m_hi = (m_lo + main_lo, m_hi + main_hi) if h else (main_lo, main_hi)  # noqa: F821 (bound when h = 0)
        l_lo, l_hi = (l_lo + low_lo, l_hi + low_hi) if h else (low_lo, low_hi)  # noqa: F821
    return half_bits(d_lo) * m_lo - half_bits(dmin_lo) * l_lo, half_bits(d_hi) * m_hi - half_bits(dmin_hi) * l_hi


@jit
def q3_k(w, x, d8, there, lane, zero, NATIVE: tl.constexpr):
    """A code is its low bits less 4 where the third bit is not set."""
    g, q = lane // 4, lane % 4
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    d_lo, d_hi = halves(w, 1728 + 4 * g)
    third0, third1, third2, third3 = quad(w, 1024, lane, NATIVE)
    nibbles_lo, nibbles_hi = halves(w, 1536 + 4 * lane)
    tops_lo, tops_hi = halves(w, 1664 + 8 * g + 4 * (q % 2))
    for h in tl.static_range(2):
        codes = ld_there(x, 32 * h + lane, there)
        a0, a1, a2, a3 = quad(w, 512 * h, lane, NATIVE)
        dots, less = (zero, zero, zero, zero), (zero, zero, zero, zero)
        for j in tl.static_range(4):
            mask = 0x03030303 << (2 * j) if j < 3 else -0x3F3F3F40
            bit = 0x01010101 << (4 * h + j) if 4 * h + j < 7 else -0x7F7F7F80
            b0, b1 = tl.where(g == 2 * j, codes, 0), tl.where(g == 2 * j + 1, codes, 0)
            dots = mma(a0 & mask, a1 & mask, a2 & mask, a3 & mask, b0, b1, dots, False, NATIVE)
            less = mma(~third0 & bit, ~third1 & bit, ~third2 & bit, ~third3 & bit, b0, b1, less, False, NATIVE)
        s8, down, down_less = ld_there(d8, 4 * h + q, there).to(tl.float32), 2 * q, 4 * h + q
        dot0, dot1 = (dots[0] >> down) - 4 * (less[0] >> down_less), (dots[1] >> down) - 4 * (less[1] >> down_less)
        dot2, dot3 = (dots[2] >> down) - 4 * (less[2] >> down_less), (dots[3] >> down) - 4 * (less[3] >> down_less)
        s_lo = _minus_32(nibbles_lo >> 4 * h, tops_lo >> (4 * h + 2 * (q // 2)))
        s_hi = _minus_32(nibbles_hi >> 4 * h, tops_hi >> (4 * h + 2 * (q // 2)))
        main_lo = s8 * dp2a(pair(dot0, dot1, NATIVE), s_lo, False, NATIVE).to(tl.float32)
        main_hi = s8 * dp2a(pair(dot2, dot3, NATIVE), s_hi, False, NATIVE).to(tl.float32)
        m_lo, m_hi = (m_lo + main_lo, m_hi + main_hi) if h else (main_lo, main_hi)  # noqa: F821 (bound when h = 0)
    return half_bits(d_lo) * m_lo, half_bits(d_hi) * m_hi


@jit
def q45_k(w, x, d8, sums, there, lane, zero, FIVE: tl.constexpr, NATIVE: tl.constexpr):
    """A lane takes words 2 q and 2 q + 1 of 32 bytes, so columns 2 j and 2 j + 1 are the even and the odd words of 32
    activations."""
    g, q = lane // 4, lane % 4
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    ahead = 512 if FIVE else 0  # what the fifth bits take of a tile
    d_lo, d_hi = halves(w, 2240 + ahead + 4 * g)
    dmin_lo, dmin_hi = halves(w, 2272 + ahead + 4 * g)
    near_lo, near_hi = bytes_of(w, 2048 + ahead + 2 * lane)
    mins_lo, mins_hi = bytes_of(w, 2112 + ahead + 2 * lane)
    far_lo, far_hi = bytes_of(w, 2176 + ahead + 2 * lane)
    if FIVE:
        f0, f1, f2, f3 = quad(w, 2048, lane, NATIVE)
    for h in tl.static_range(2):
        codes = ld_there(x, 32 * h + 8 * (g // 2) + 2 * q + g % 2, there)
        dots, more = (zero, zero, zero, zero), (zero, zero, zero, zero)
        for m in tl.static_range(2):
            a0, a1, a2, a3 = quad(w, 1024 * h + 512 * m, lane, NATIVE)
            for up in tl.static_range(2):
                mask = -0x0F0F0F10 if up else 0x0F0F0F0F
                b0, b1 = tl.where(g == 4 * m + 2 * up, codes, 0), tl.where(g == 4 * m + 2 * up + 1, codes, 0)
                dots = mma(a0 & mask, a1 & mask, a2 & mask, a3 & mask, b0, b1, dots, False, NATIVE)
                if FIVE:
                    bit = 0x01010101 << (4 * h + 2 * m + up) if 4 * h + 2 * m + up < 7 else -0x7F7F7F80
                    more = mma(f0 & bit, f1 & bit, f2 & bit, f3 & bit, b0, b1, more, False, NATIVE)
        s8, down = ld_there(d8, 4 * h + q, there).to(tl.float32), 4 * (q % 2)
        isum = dp2a(ld_there(sums, 4 * h + q, there), 0x0101 + 0 * q, False, NATIVE)
        dot_lo, dot_hi = (dots[0] + dots[1]) >> down, (dots[2] + dots[3]) >> down
        if FIVE:
            dot_lo += 16 * ((more[0] + more[1]) >> (4 * h + q))
            dot_hi += 16 * ((more[2] + more[3]) >> (4 * h + q))
        if h:
            s_lo, s_hi = far_lo & 15 | near_lo >> 2 & 0x30, far_hi & 15 | near_hi >> 2 & 0x30
            n_lo, n_hi = far_lo >> 4 | mins_lo >> 2 & 0x30, far_hi >> 4 | mins_hi >> 2 & 0x30
        else:
            s_lo, s_hi, n_lo, n_hi = near_lo & 63, near_hi & 63, mins_lo & 63, mins_hi & 63
        main_lo, main_hi = s8 * (s_lo * dot_lo).to(tl.float32), s8 * (s_hi * dot_hi).to(tl.float32)
        low_lo, low_hi = s8 * (n_lo * isum).to(tl.float32), s8 * (n_hi * isum).to(tl.float32)
        m_lo, m_hi = (m_lo + main_lo, m_hi + main_hi) if h else (main_lo, main_hi)  # noqa: F821 (bound when h = 0)
        l_lo, l_hi = (l_lo + low_lo, l_hi + low_hi) if h else (low_lo, low_hi)  # noqa: F821
    return half_bits(d_lo) * m_lo - half_bits(dmin_lo) * l_lo, half_bits(d_hi) * m_hi - half_bits(dmin_hi) * l_hi


@jit
def q6_k(w, x, d8, sums, there, lane, zero, NATIVE: tl.constexpr):
    """A code is its low four bits and 16 times its upper two, less 32, taken off through `sums`."""
    g, q = lane // 4, lane % 4
    x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    d_lo, d_hi = halves(w, 3328 + 4 * g)
    for h in tl.static_range(2):
        codes = ld_there(x, 32 * h + lane, there)
        dots, more = (zero, zero, zero, zero), (zero, zero, zero, zero)
        u0, u1, u2, u3 = quad(w, 2048 + 512 * h, lane, NATIVE)
        for i in tl.static_range(2):
            a0, a1, a2, a3 = quad(w, 1024 * h + 512 * i, lane, NATIVE)
            for up in tl.static_range(2):
                mask = -0x0F0F0F10 if up else 0x0F0F0F0F
                two = 0x03030303 << (2 * i + 4 * up) if i + up < 2 else -0x3F3F3F40
                b0, b1 = tl.where(g == 2 * i + 4 * up, codes, 0), tl.where(g == 2 * i + 4 * up + 1, codes, 0)
                dots = mma(a0 & mask, a1 & mask, a2 & mask, a3 & mask, b0, b1, dots, False, NATIVE)
                more = mma(u0 & two, u1 & two, u2 & two, u3 & two, b0, b1, more, False, NATIVE)
        s8, isum = ld_there(d8, 4 * h + q, there).to(tl.float32), ld_there(sums, 4 * h + q, there)
        less0, less1, down, down_more = ((isum << 16) >> 16) * 32, (isum >> 16) * 32, 4 * (q // 2), 2 * q
        dot0 = (dots[0] >> down) + 16 * (more[0] >> down_more) - less0
        dot1 = (dots[1] >> down) + 16 * (more[1] >> down_more) - less1
        dot2 = (dots[2] >> down) + 16 * (more[2] >> down_more) - less0
        dot3 = (dots[3] >> down) + 16 * (more[3] >> down_more) - less1
        s_lo, s_hi = halves(w, 3072 + 128 * h + 4 * lane)
        main_lo = s8 * (((s_lo << 24) >> 24) * dot0 + ((s_lo << 16) >> 24) * dot1).to(tl.float32)
        main_hi = s8 * (((s_hi << 24) >> 24) * dot2 + ((s_hi << 16) >> 24) * dot3).to(tl.float32)
        m_lo, m_hi = (m_lo + main_lo, m_hi + main_hi) if h else (main_lo, main_hi)  # noqa: F821 (bound when h = 0)
    return half_bits(d_lo) * m_lo, half_bits(d_hi) * m_hi


@jit
def _minus_32(nibbles, tops):
    """q3_k's two scales, -32..31, as signed bytes; the set top bit keeps borrows from crossing bytes."""
    packed = nibbles & 0x0F0F | (tops & 0x0303) << 4
    return ((packed | 0x8080) - 0x2020) ^ 0x8080
