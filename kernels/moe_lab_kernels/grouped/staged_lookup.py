"""Staged decoding of q2_k and q3_k: values are looked up in a table of what their sub-block can hold.

A sub-block of sixteen has one scale, so 2-bit codes have four values and 3-bit ones eight: made once, rounded once, and
picked by byte permutations, two or four codes at a time. A unit is (row, half of 32 bytes): words 4 h .. 4 h + 3, whose
fields of two bits belong to the sub-blocks 2 j + h of a half block.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.staged_parts import four, joined, pair_of
from moe_lab_kernels.primitives import funnel, half_bits


@jit
def q2_k_words(w, step):
    """Codes, scales, d and dmin of half a block; w: uint8 pointers [R, 1] to raw rows."""
    b, half = (w + step // 2 * 84).to(tl.pointer_type(tl.int32), bitcast=True), step % 2
    code = tl.load(b + 4 + 8 * half + tl.arange(0, 8)[None, :])
    return code, tl.load(b + 2 * half + tl.arange(0, 2)[None, :]), tl.load(b + 20)


@jit
def q3_k_words(w, step):
    """Aligned words around codes, third bits and scales of half a block, which begins 0 or 16 bits into them."""
    eight, two, half = tl.arange(0, 8)[None, :], tl.arange(0, 2)[None, :], step % 2
    b = w + step // 2 * 110
    odd = b.to(tl.int64).to(tl.int32) & 2
    words = (b - odd).to(tl.pointer_type(tl.int32), bitcast=True)
    codes = words + 8 + 8 * half
    halves = b.to(tl.pointer_type(tl.uint16), bitcast=True)  # a word at the end would reach past the block
    return (tl.load(codes + eight), tl.load(codes + 4 + 4 * two), tl.load(words + eight), tl.load(words + 4 + 4 * two),
            tl.load(words + 24), tl.load(words + 25), tl.load(words + 26), tl.load(halves + 53).to(tl.int32),
            tl.load(halves + 54).to(tl.int32), 8 * odd)  # fmt: skip


@jit
def _entry(t0, t1, c):
    """Entry c, 0 to 3, of a table of four halves: what the byte permutations do, in plain arithmetic."""
    return (tl.where(c < 2, t0, t1) >> (16 * (c & 1))) & 0xFFFF


def _two_of_four(j: int) -> str:
    """Two-bit codes of four bytes to four halves out of a table of eight bytes, two registers: byte b's are selected by
    the nibbles 2 c and 2 c + 1."""
    code = f"shr.b32 t, $2, {2 * j}; and.b32 t, t, 0x03030303; "
    first = "mad.lo.u32 t, t, 0x22, 0x10101010; prmt.b32 $0, $3, $4, t; "
    return "{ .reg .b32 t; " + code + first + "shr.b32 t, t, 16; prmt.b32 $1, $3, $4, t; }"


_TWO_0, _TWO_1, _TWO_2, _TWO_3 = (tl.constexpr(_two_of_four(j)) for j in range(4))


@jit
def q2_k_pairs(raw, like: tl.constexpr, NATIVE: tl.constexpr):
    """Sub-block 2 j + h of a half block: scale byte 2 j + h, codes in two bits 2 j of word 4 h .. 4 h + 3."""
    code, s, both = raw
    R: tl.constexpr = code.shape[0]
    words = four(code)
    s01, s23 = tl.split(s)
    up, both = 8 * tl.arange(0, 2)[None, :], tl.broadcast_to(both, [R, 2])
    s01, s23, d, m = s01[:, None] >> up, s23[:, None] >> up, half_bits(both), half_bits(both >> 16)
    return (
        _q2_k_part(words, s01, d, m, 0, _TWO_0, like, NATIVE),
        _q2_k_part(words, s01 >> 16, d, m, 2, _TWO_1, like, NATIVE),
        _q2_k_part(words, s23, d, m, 4, _TWO_2, like, NATIVE),
        _q2_k_part(words, s23 >> 16, d, m, 6, _TWO_3, like, NATIVE),
    )


@jit
def _q2_k_part(words, s, d, m, UP: tl.constexpr, LOOK: tl.constexpr, like: tl.constexpr, NATIVE: tl.constexpr):
    """Four values a sub-block. Products of up to 17 bits are exact, so each is rounded where `block_values` does."""
    scale = d * ((s & 15 | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0)
    less = m * ((s >> 4 & 15 | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0)
    t0 = pair_of(scale * 0.0 - less, scale - less, like, NATIVE)
    t1 = pair_of(scale * 2.0 - less, scale * 3.0 - less, like, NATIVE)
    w0, w1, w2, w3 = words
    a0, b0 = _look_2(w0, t0, t1, UP, LOOK, NATIVE)
    a1, b1 = _look_2(w1, t0, t1, UP, LOOK, NATIVE)
    a2, b2 = _look_2(w2, t0, t1, UP, LOOK, NATIVE)
    a3, b3 = _look_2(w3, t0, t1, UP, LOOK, NATIVE)
    return tl.join(joined(a0, a1, a2, a3), joined(b0, b1, b2, b3))


@jit
def _look_2(word, t0, t1, UP: tl.constexpr, LOOK: tl.constexpr, NATIVE: tl.constexpr):
    """Values of a word's four codes, as two pairs."""
    if NATIVE:
        a, b = tl.inline_asm_elementwise(LOOK, "=r,=r,r,r,r", [word, t0, t1], (tl.int32, tl.int32), True, 1)
    else:
        a = _entry(t0, t1, word >> UP & 3) | _entry(t0, t1, word >> (UP + 8) & 3) << 16
        b = _entry(t0, t1, word >> (UP + 16) & 3) | _entry(t0, t1, word >> (UP + 24) & 3) << 16
    return a, b


def _shifted(name: str, left: int) -> str:
    return f"shl.b32 t, {name}, {left}; " if left >= 0 else f"shr.b32 t, {name}, {-left}; "


def _four_of_eight(j: int) -> str:
    """Three-bit codes of two words ($4, $5; third bits $6, $7) to eight halves out of two tables, their low bytes ($8,
    $9) and their high ones: one nibble a code selects both."""
    low = f"shr.b32 t, $4, {2 * j}; and.b32 y, t, 0x03030303; "
    parts = ((f"${n}", left, mask) for n, left, mask in (
        (5, 4 - 2 * j, 0x30303030), (6, 2 - j, 0x04040404), (7, 6 - j, 0x40404040)))  # fmt: skip
    rest = "".join(f"{_shifted(n, left)}and.b32 t, t, {mask:#x}; or.b32 y, y, t; " for n, left, mask in parts)

    def look(first: int, second: int) -> str:
        picked = "prmt.b32 l, $8, $9, y; prmt.b32 h, $10, $11, y; "
        return picked + f"prmt.b32 ${first}, l, h, 0x6240; prmt.b32 ${second}, l, h, 0x7351; "

    return "{ .reg .b32 t, y, l, h; " + low + rest + look(0, 2) + "shr.b32 y, y, 16; " + look(1, 3) + "}"


_EIGHT_0, _EIGHT_1, _EIGHT_2, _EIGHT_3 = (tl.constexpr(_four_of_eight(j)) for j in range(4))
_EIGHT_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r")
_BYTES = tl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


@jit
def q3_k_pairs(raw, half, like: tl.constexpr, NATIVE: tl.constexpr):
    """As `q2_k_pairs`; blocks begin at even addresses, so words are cut out of two aligned ones."""
    code, code_end, high, high_end, s0, s1, s2, s3, d, skew = raw
    R: tl.constexpr = code.shape[0]
    up = 4 * half
    n01, n23 = funnel(s0, s1, skew, NATIVE) >> up, funnel(s1, s2, skew, NATIVE) >> up
    top = funnel(s2, s3, skew, NATIVE) >> up
    s01 = n01 & 0x0F0F0F0F | (top & 0x03030303) << 4
    s23 = n23 & 0x0F0F0F0F | (top & 0x0C0C0C0C) << 2
    skew, byte = tl.broadcast_to(skew, [R, 2]), 8 * tl.arange(0, 2)[None, :]
    c, h = cut_words(code, code_end, skew, NATIVE), cut_words(high, high_end, skew, NATIVE)
    h0, h1, h2, h3 = h
    h = (h0 >> up, h1 >> up, h2 >> up, h3 >> up)
    d, s01, s23 = tl.broadcast_to(half_bits(d), [R, 2]), s01 >> byte, s23 >> byte
    return (
        _q3_k_part(c, h, s01, d, 0, _EIGHT_0, like, NATIVE),
        _q3_k_part(c, h, s01 >> 16, d, 1, _EIGHT_1, like, NATIVE),
        _q3_k_part(c, h, s23, d, 2, _EIGHT_2, like, NATIVE),
        _q3_k_part(c, h, s23 >> 16, d, 3, _EIGHT_3, like, NATIVE),
    )


@jit
def cut_words(words, end, skew, NATIVE: tl.constexpr):
    """The four words that begin 0 or 16 bits into aligned ones."""
    w0, w1, w2, w3 = four(words)
    return (funnel(w0, w1, skew, NATIVE), funnel(w1, w2, skew, NATIVE), funnel(w2, w3, skew, NATIVE),
            funnel(w3, end, skew, NATIVE))  # fmt: skip


@jit
def _q3_k_part(c, h, s, d, J: tl.constexpr, LOOK: tl.constexpr, like: tl.constexpr, NATIVE: tl.constexpr):
    """Eight values a sub-block, (-4 .. 3) times the scale: exact before their rounding."""
    scale = d * ((s & 63 | 0x4B000000).to(tl.float32, bitcast=True) - 8388640.0)
    t0, t1 = pair_of(scale * -4.0, scale * -3.0, like, NATIVE), pair_of(scale * -2.0, scale * -1.0, like, NATIVE)
    t2, t3 = pair_of(scale * 0.0, scale, like, NATIVE), pair_of(scale * 2.0, scale * 3.0, like, NATIVE)
    c0, c1, c2, c3 = c
    h0, h1, h2, h3 = h
    if NATIVE:
        l0, u0 = tl.inline_asm_elementwise(_BYTES, "=r,=r,r,r", [t0, t1], (tl.int32, tl.int32), True, 1)
        l1, u1 = tl.inline_asm_elementwise(_BYTES, "=r,=r,r,r", [t2, t3], (tl.int32, tl.int32), True, 1)
        table = (l0, l1, u0, u1)
    else:
        table = (t0, t1, t2, t3)
    a0, b0, a1, b1 = _look_3(c0, c1, h0, h1, table, J, LOOK, NATIVE)
    a2, b2, a3, b3 = _look_3(c2, c3, h2, h3, table, J, LOOK, NATIVE)
    return tl.join(joined(a0, a1, a2, a3), joined(b0, b1, b2, b3))


@jit
def _look_3(c, e, h, g, table, J: tl.constexpr, LOOK: tl.constexpr, NATIVE: tl.constexpr):
    """Values of two words' codes (c with third bits h, e with g), as two pairs each."""
    t0, t1, t2, t3 = table
    if NATIVE:
        a, b, a1, b1 = tl.inline_asm_elementwise(
            LOOK, _EIGHT_REGISTERS, [c, e, h, g, t0, t1, t2, t3], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
    else:
        a, b = _plain_3(c, h, table, J)
        a1, b1 = _plain_3(e, g, table, J)
    return a, b, a1, b1


@jit
def _plain_3(c, h, table, J: tl.constexpr):
    t0, t1, t2, t3 = table
    c, h = c >> (2 * J), h >> J
    v0 = tl.where(h & 1 != 0, _entry(t2, t3, c & 3), _entry(t0, t1, c & 3))
    v1 = tl.where(h >> 8 & 1 != 0, _entry(t2, t3, c >> 8 & 3), _entry(t0, t1, c >> 8 & 3))
    v2 = tl.where(h >> 16 & 1 != 0, _entry(t2, t3, c >> 16 & 3), _entry(t0, t1, c >> 16 & 3))
    v3 = tl.where(h >> 24 & 1 != 0, _entry(t2, t3, c >> 24 & 3), _entry(t0, t1, c >> 24 & 3))
    return v0 | v1 << 16, v2 | v3 << 16
