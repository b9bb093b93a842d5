"""Staged decoding of q6_k: four bits of a code in one word, two in another, a signed scale for each sixteen.

A unit is (row, half of 32 bytes), as in `staged_lookup`: words 4 h .. 4 h + 3 of each 32 bytes, whose four parts of a
half block belong to the sub-blocks 2 j + h. A code has 64 values, too many for a table: four at a time become floats
under the exponent of 2^23.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.staged_lookup import cut_words
from moe_lab_kernels.grouped.staged_parts import joined, numbers, pair_of
from moe_lab_kernels.primitives import funnel, half_bits

_LOW = tl.constexpr(0x0F0F0F0F)
_TOP = tl.constexpr(0x30303030)


@jit
def q6_k_words(w, step):
    """Aligned words around codes, top bits and scales of half a block, which begins 0 or 16 bits into them; w: uint8
    pointers [R, 1] to raw rows."""
    eight, two, half = tl.arange(0, 8)[None, :], 4 * tl.arange(0, 2)[None, :], step % 2
    b = w + step // 2 * 210
    odd = b.to(tl.int64).to(tl.int32) & 2
    words = (b - odd).to(tl.pointer_type(tl.int32), bitcast=True)
    code, top, scale = words + 16 * half, words + 32 + 8 * half, words + 48 + 2 * half
    last = (scale + 2).to(tl.pointer_type(tl.uint16), bitcast=True)  # a word there would reach past the block
    d = b.to(tl.pointer_type(tl.uint16), bitcast=True) + 104
    return (tl.load(code + eight), tl.load(code + 4 + two), tl.load(code + 8 + eight), tl.load(code + 12 + two),
            tl.load(top + eight), tl.load(top + 4 + two), tl.load(scale), tl.load(scale + 1),
            tl.load(last).to(tl.int32), tl.load(d).to(tl.int32), 8 * odd)  # fmt: skip


@jit
def q6_k_pairs(raw, like: tl.constexpr, NATIVE: tl.constexpr):
    """Sub-block 2 j + h of a half block: scale byte 2 j + h, nibble j // 2 of the words j % 2, top bits 2 j."""
    code, code_end, code2, code2_end, top, top_end, s0, s1, s2, d, skew = raw
    R: tl.constexpr = code.shape[0]
    byte = 8 * tl.arange(0, 2)[None, :]
    s01, s23 = funnel(s0, s1, skew, NATIVE) >> byte, funnel(s1, s2, skew, NATIVE) >> byte
    skew, d = tl.broadcast_to(skew, [R, 2]), tl.broadcast_to(half_bits(d), [R, 2])
    low, high = cut_words(code, code_end, skew, NATIVE), cut_words(code2, code2_end, skew, NATIVE)
    t0, t1, t2, t3 = cut_words(top, top_end, skew, NATIVE)
    return (
        _part(low, 0, (t0 << 4, t1 << 4, t2 << 4, t3 << 4), s01, d, like, NATIVE),
        _part(high, 0, (t0 << 2, t1 << 2, t2 << 2, t3 << 2), s01 >> 16, d, like, NATIVE),
        _part(low, 4, (t0, t1, t2, t3), s23, d, like, NATIVE),
        _part(high, 4, (t0 >> 2, t1 >> 2, t2 >> 2, t3 >> 2), s23 >> 16, d, like, NATIVE),
    )


@jit
def _part(words, up: tl.constexpr, tops, s, d, like: tl.constexpr, NATIVE: tl.constexpr):
    """One sub-block a unit, top bits already above the nibble."""
    scale = d * (((s & 255) ^ 128 | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0)
    w0, w1, w2, w3 = words
    t0, t1, t2, t3 = tops
    a0, b0 = _four(w0 >> up, t0, scale, like, NATIVE)
    a1, b1 = _four(w1 >> up, t1, scale, like, NATIVE)
    a2, b2 = _four(w2 >> up, t2, scale, like, NATIVE)
    a3, b3 = _four(w3 >> up, t3, scale, like, NATIVE)
    return tl.join(joined(a0, a1, a2, a3), joined(b0, b1, b2, b3))


@jit
def _four(word, top, scale, like: tl.constexpr, NATIVE: tl.constexpr):
    v0, v1, v2, v3 = numbers(word & _LOW | top & _TOP, 32, NATIVE)
    return pair_of(v0 * scale, v1 * scale, like, NATIVE), pair_of(v2 * scale, v3 * scale, like, NATIVE)
