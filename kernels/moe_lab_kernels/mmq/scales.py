"""A block's sub-block scales and minima as the int8 product needs them: integers, or rounded through fp16 with d.

Where a weight has few rows to meet, most instructions would go into these, which every thread of four needs for its
two rows. So they are made four at a time: bytes of a word, or two by two as fp16, whose rounding is the one wanted.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq.codes import of_word
from moe_lab_kernels.primitives import half_bits

# Of $1, scales and minima of four sub-blocks, a byte each, two by two as fp16: 1024 + n has n in its low bits. $2: m,
# or dmin, twice. m * scale rounds as A does, and what the rounding left is exact.
_BESIDE = tl.constexpr(
    "{ .reg .b32 a, b, p, q; and.b32 a, $1, 0x000F000F; or.b32 a, a, 0x64006400; shr.b32 b, $1, 8; "
    "and.b32 b, b, 0x000F000F; or.b32 b, b, 0x64006400; mov.b32 q, 0xE400E400; add.rn.f16x2 a, a, q; "
    "add.rn.f16x2 b, b, q; mul.rn.f16x2 p, a, $2; mul.rn.f16x2 q, b, $2; neg.f16x2 p, p; neg.f16x2 q, q; "
    "fma.rn.f16x2 p, a, $2, p; fma.rn.f16x2 q, b, $2, q; sub.rn.f16x2 p, a, p; sub.rn.f16x2 q, b, q; "
    "mov.b32 a, 0x64006400; add.rn.f16x2 p, p, a; add.rn.f16x2 q, q, a; prmt.b32 $0, p, q, 0x6240; }"
)
_MINIMA = tl.constexpr(
    "{ .reg .b32 a, q; shr.b32 a, $1, 4; and.b32 a, a, 0x000F000F; or.b32 a, a, 0x64006400; mov.b32 q, 0xE400E400; "
    "add.rn.f16x2 a, a, q; mul.rn.f16x2 $0, a, $2; }"
)


@jit
def rounded(v):
    """Through fp16."""
    return v.to(tl.float16).to(tl.float32)


@jit
def place_of(both):
    """(u, m, m - 1) of the fp16 in the low half: its last place with its sign, as fp32, and |d| / u as int32. NaN for u
    where a product with 15 may leave fp16."""
    e = both >> 10 & 31
    m = tl.where(e == 0, both & 0x3FF, both & 0x3FF | 0x400)
    bits = (tl.maximum(e, 1) + 102) << 23 | (both & 0x8000) << 16
    u = tl.where((both & 0x7FFF) < 0x6C44, bits.to(tl.float32, bitcast=True), float("nan"))  # 0x6C44 is 4368
    return u, m


@jit
def besides(m, four, NATIVE: tl.constexpr):
    """e of four sub-blocks, see above, a byte each; `four`: their scales in the low nibbles of its bytes."""
    if NATIVE:
        twice = m.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) * 0x10001
        out = tl.inline_asm_elementwise(_BESIDE, "=r,r,r", [four, twice], dtype=tl.int32, is_pure=True, pack=1)
    else:
        out = beside(m, four & 15) | beside(m, four >> 8 & 15) << 8
        out = out | beside(m, four >> 16 & 15) << 16 | beside(m, four >> 24 & 15) << 24
    return out


@jit
def beside(m, sc):
    """e of one sub-block, int32."""
    whole = m * sc
    return rounded(whole.to(tl.float32)).to(tl.int32) - whole + sc


@jit
def minima_of(both, four, NATIVE: tl.constexpr):
    """Mn of four sub-blocks; both: d and dmin."""
    if NATIVE:
        twice = (both >> 16 & 0xFFFF) * 0x10001
        even = tl.inline_asm_elementwise(_MINIMA, "=r,r,r", [four, twice], dtype=tl.int32, is_pure=True, pack=1)
        odd = tl.inline_asm_elementwise(_MINIMA, "=r,r,r", [four >> 8, twice], dtype=tl.int32, is_pure=True, pack=1)
        m0, m1, m2, m3 = half_bits(even), half_bits(odd), half_bits(even >> 16), half_bits(odd >> 16)
    else:
        dmin = half_bits(both >> 16)
        m0, m1 = rounded(dmin * (four >> 4 & 15).to(tl.float32)), rounded(dmin * (four >> 12 & 15).to(tl.float32))
        m2, m3 = rounded(dmin * (four >> 20 & 15).to(tl.float32)), rounded(dmin * (four >> 28 & 15).to(tl.float32))
    return m0, m1, m2, m3


@jit
def two_at(at):
    """Two neighbouring bytes, int32."""
    return tl.load(at.to(tl.pointer_type(tl.uint16), bitcast=True)).to(tl.int32)


@jit
def scale_words_of_q3(b):
    """The sixteen scales of a block, a byte each, 32 too large: four words [.., R, 1]."""
    return bytes_of_q3(mc.last_words_at(b + 96, 0, 2), mc.last_words_at(b + 100, 0, 2), mc.last_words_at(b + 104, 0, 2))


@jit
def bytes_of_q3(near, far, top):
    """The same of the three words that hold them."""
    s0, s1 = near & 0x0F0F0F0F | (top & 0x03030303) << 4, far & 0x0F0F0F0F | (top >> 2 & 0x03030303) << 4
    s2 = near >> 4 & 0x0F0F0F0F | (top >> 4 & 0x03030303) << 4
    s3 = far >> 4 & 0x0F0F0F0F | (top >> 6 & 0x03030303) << 4
    return s0, s1, s2, s3


@jit
def scales_of_q3(s0, s1, s2, s3, p: tl.constexpr):
    """Scales of a part's two sub-blocks, -32..31, [R, 8]."""
    four = s0 if p // 2 == 0 else s1 if p // 2 == 1 else s2 if p // 2 == 2 else s3
    return (of_word(four, 16 * (p % 2)) & 63) - 32


@jit
def scale_of_q45(words, s: tl.constexpr):
    """Scale and minimum of sub-block s, int32; the first four of eight keep their six bits together."""
    return pair_of_q45(tl.load(words + 1), tl.load(words + 2), tl.load(words + 3), s)


@jit
def pair_of_q45(first, second, last, s: tl.constexpr):
    """The same of a block's three words of scales."""
    up: tl.constexpr = 8 * (s % 4)
    if s < 4:
        sc, m = first >> up & 63, second >> up & 63
    else:
        rest = last >> up
        sc, m = rest & 15 | first >> up >> 2 & 0x30, rest >> 4 & 15 | second >> up >> 2 & 0x30
    return sc, m
