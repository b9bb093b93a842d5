"""Staged decoding of 4-bit codes: q4_k, and MXFP4 with scales of its own.

A unit is 64 values of a row, four words of each 32 bytes. Integer codes become floats four at a time under the
exponent of 2^23; MXFP4's are looked up, as e2m1 has eight magnitudes and a scale that is a power of two moves them
exactly.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.staged_parts import four, joined, numbers, pair_of
from moe_lab_kernels.primitives import half_bits
from moe_lab_kernels.storage.minifloat import e2m1_to_f32, e8m0_to_f32

_LOW = tl.constexpr(0x0F0F0F0F)


@jit
def q4_k_words(w, step):
    """Codes of half a block, and its header."""
    b, lane = (w + step // 2 * 144).to(tl.pointer_type(tl.int32), bitcast=True), tl.arange(0, 8)[None, :]
    at = b + 4 + 16 * (step % 2)
    return tl.load(at + lane), tl.load(at + 8 + lane), tl.load(b), tl.load(b + 1), tl.load(b + 2), tl.load(b + 3)


@jit
def q4_k_pairs(raw, half, like: tl.constexpr, NATIVE: tl.constexpr):
    """Sub-blocks 4 half + j, j = 0 .. 3; the first four of a block have their six bits together."""
    code, code2, both, s, m, rest = raw
    R: tl.constexpr = code.shape[0]
    near = half == 0
    # scale j in byte j
    s, m = (tl.where(near, s, rest & _LOW | s >> 2 & 0x30303030) & 0x3F3F3F3F,
            tl.where(near, m, rest >> 4 & _LOW | m >> 2 & 0x30303030) & 0x3F3F3F3F)  # fmt: skip
    both, s, m = tl.broadcast_to(both, [R, 2]), tl.broadcast_to(s, [R, 2]), tl.broadcast_to(m, [R, 2])
    d, dmin, low, high = half_bits(both), half_bits(both >> 16), four(code), four(code2)
    s0, s1, s2, s3 = numbers(s, 0, NATIVE)
    m0, m1, m2, m3 = numbers(m, 0, NATIVE)
    return (
        _q4_k_part(low, 0, d * s0, dmin * m0, like, NATIVE),
        _q4_k_part(low, 4, d * s1, dmin * m1, like, NATIVE),
        _q4_k_part(high, 0, d * s2, dmin * m2, like, NATIVE),
        _q4_k_part(high, 4, d * s3, dmin * m3, like, NATIVE),
    )


@jit
def _q4_k_part(words, up: tl.constexpr, scale, less, like: tl.constexpr, NATIVE: tl.constexpr):
    """One sub-block: a nibble of each byte. Scale times code is exact, so one fused step rounds where two would."""
    w0, w1, w2, w3 = words
    a0, b0 = _q4(w0 >> up, scale, less, like, NATIVE)
    a1, b1 = _q4(w1 >> up, scale, less, like, NATIVE)
    a2, b2 = _q4(w2 >> up, scale, less, like, NATIVE)
    a3, b3 = _q4(w3 >> up, scale, less, like, NATIVE)
    return tl.join(joined(a0, a1, a2, a3), joined(b0, b1, b2, b3))


@jit
def _q4(word, scale, less, like: tl.constexpr, NATIVE: tl.constexpr):
    v0, v1, v2, v3 = numbers(word & _LOW, 0, NATIVE)
    if NATIVE:
        v0, v1 = tl.fma(v0, scale, 0.0 - less), tl.fma(v1, scale, 0.0 - less)
        v2, v3 = tl.fma(v2, scale, 0.0 - less), tl.fma(v3, scale, 0.0 - less)
    else:
        v0, v1, v2, v3 = v0 * scale - less, v1 * scale - less, v2 * scale - less, v3 * scale - less
    return pair_of(v0, v1, like, NATIVE), pair_of(v2, v3, like, NATIVE)


@jit
def _codes(w, step, Kd, EVEN: tl.constexpr):
    """Words of a step's two halves of 64 codes; zeros past the row's end."""
    lane = 16 * step + tl.arange(0, 8)[None, :]
    at = w.to(tl.pointer_type(tl.int32), bitcast=True) + lane
    if EVEN:
        first, second = tl.load(at), tl.load(at + 8)
    else:
        first, second = tl.load(at, mask=8 * lane < Kd, other=0), tl.load(at + 8, mask=8 * lane + 64 < Kd, other=0)
    return first, second


@jit
def e2m1_words(w, scale, step, Kd, EVEN: tl.constexpr):
    """Codes and the scales of the four groups of 32: one word where rows are whole steps, as a load of a warp looks up
    a line of the cache for each row, whatever it takes from it."""
    first, second = _codes(w, step, Kd, EVEN)
    group = 4 * step + tl.arange(0, 2)[None, :]
    if EVEN:
        s0 = tl.load((scale + 4 * step).to(tl.pointer_type(tl.int32), bitcast=True))
        s1 = s0
    else:
        s0 = tl.load(scale + group, mask=32 * group < Kd, other=0)
        s1 = tl.load(scale + group + 2, mask=32 * group + 64 < Kd, other=0)
    return first, second, s0, s1


def _look() -> str:
    """Eight nibbles ($4) to eight halves: magnitudes out of tables of low ($5, $6) and high bytes ($7, $8). A selector
    with its top bit set repeats the sign of the byte it selects: 0x80 becomes 0xff, and a shift leaves the code's sign
    at the top of its byte."""
    signs = "prmt.b32 s, t, t, $4; shl.b32 s, s, 1; and.b32 s, s, t; "
    picked = "prmt.b32 l, $5, $6, m; prmt.b32 h, $7, $8, m; xor.b32 h, h, s; "
    begin = "{ .reg .b32 t, m, s, l, h, w; mov.b32 t, 0x80808080; and.b32 m, $4, 0x77777777; "
    first = signs + picked + "prmt.b32 $0, l, h, 0x5140; prmt.b32 $1, l, h, 0x7362; "
    again = signs.replace("$4", "w") + picked + "prmt.b32 $2, l, h, 0x5140; prmt.b32 $3, l, h, 0x7362; }"
    return begin + first + "shr.b32 m, m, 16; shr.b32 w, $4, 16; " + again


_LOOK = tl.constexpr(_look())
_FOUR = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r")
# (0, 0.5), (1, 1.5), (2, 3), (4, 6) times a pair of scales, as low bytes and high bytes
_TABLE = tl.constexpr(
    "{ .reg .b32 a, b, c, d; mov.b32 a, 0x3F000000; mov.b32 b, 0x3FC03F80; mov.b32 c, 0x40404000; "
    "mov.b32 d, 0x40C04080; mul.rn.bf16x2 a, $4, a; mul.rn.bf16x2 b, $4, b; mul.rn.bf16x2 c, $4, c; "
    "mul.rn.bf16x2 d, $4, d; prmt.b32 $0, a, b, 0x6420; "
    "prmt.b32 $1, c, d, 0x6420; prmt.b32 $2, a, b, 0x7531; prmt.b32 $3, c, d, 0x7531; }"
)


@jit
def e2m1_pairs(raw, like: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Codes in order, low nibble first. bf16 has the exponents of the scales, so products are exact there."""
    tl.static_assert(like == tl.bfloat16)
    first, second, s0, s1 = raw
    if EVEN:
        s0 = tl.broadcast_to(s0, [first.shape[0], 2]) >> 8 * tl.arange(0, 2)[None, :]
        s0, s1 = s0 & 255, s0 >> 16 & 255
    return _e2m1_half(four(first), s0, NATIVE), _e2m1_half(four(second), s1, NATIVE)


@jit
def _e2m1_half(words, s, NATIVE: tl.constexpr):
    w0, w1, w2, w3 = words
    table = _e2m1_table(s, NATIVE)
    a0, b0, c0, d0 = _e2m1(w0, table, NATIVE)
    a1, b1, c1, d1 = _e2m1(w1, table, NATIVE)
    a2, b2, c2, d2 = _e2m1(w2, table, NATIVE)
    a3, b3, c3, d3 = _e2m1(w3, table, NATIVE)
    return joined(joined(a0, a1, a2, a3), joined(b0, b1, b2, b3), joined(c0, c1, c2, c3), joined(d0, d1, d2, d3))


@jit
def _e2m1_table(s, NATIVE: tl.constexpr):
    """Low and high bytes of the eight magnitudes times 2^(s - 127), two registers each; plain: that power in fp32."""
    if NATIVE:
        e = s.to(tl.int32)
        half = tl.where(e == 0, 0x40, e << 7) | tl.where(e == 255, 0x40, 0)  # bf16: 2^-127 is subnormal, 255 is NaN
        out = tl.inline_asm_elementwise(
            _TABLE, "=r,=r,=r,=r,r", [half | half << 16], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        power = e8m0_to_f32(s.to(tl.uint8))
        out = (power, power, power, power)
    return out


@jit
def _e2m1(word, table, NATIVE: tl.constexpr):
    l0, l1, h0, h1 = table
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            _LOOK, _FOUR, [word, l0, l1, h0, h1], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        a = _plain_pair(word, l0)
        b = _plain_pair(word >> 8, l0)
        c = _plain_pair(word >> 16, l0)
        d = _plain_pair(word >> 24, l0)
    return a, b, c, d


@jit
def _plain_pair(byte, power):
    return pair_of(e2m1_to_f32(byte & 15) * power, e2m1_to_f32(byte >> 4 & 15) * power, tl.bfloat16, False)
