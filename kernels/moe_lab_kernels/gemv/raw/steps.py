"""Steps of q2_k, q3_k and q8_0 for `gemv.steps.part`: blocks times q8_1 codes, as per-lane fp32 parts.

A step covers consecutive blocks of a row; each block is shared by a few lanes. A lane multiplies its own words of codes
with `dp4a`, folds the sub-block scales in with `dp2a`, and only then meets a float. Lane order, the order of additions
inside a lane and the rounding of every product are written out, so the interpreter, the compiled kernel and the torch
reference (`gemv.ref`) agree bit for bit. The integers are exact: below 2^21 in magnitude a lane.

Part of one lane (d8: fp16 scale of 32 activations; a dot: integer dot over the lane's own elements):
    q2_k   d * sum_j d8_j * (sc . idot)_j - dmin * sum_j d8_j * (m . isum)_j        j = 0..3 in this order
    q3_k   d * sum_j d8_j * ((sc - 32) . idot)_j
    q8_0   (d * d8) * idot
A 256-block has 8 or 4 lanes: lane = (h, k), half h of the block and word k (words 2 k and 2 k + 1 when there are 4
lanes) of each of the half's two quarters g = 0, 1. An int32 of 2-bit codes holds four groups of four, 32 values apart:
at bits 2 j, word k of quarter g meets activations 128 h + 32 j + 16 g + 4 k .. + 3, of sub-block 8 h + 2 j + g. Groups
j = 1 and 3 stay where they are, two bits up, and their d8 is quartered instead: the same product, exactly.

q2_k rows lie on 4-byte addresses. q3_k and q8_0 rows lie on 2-byte ones: their words are cut out of two neighbouring
aligned words, and out of a half-word where the second would reach past the block. Nothing behind a row is read; before
it, only the first half of an aligned word whose second half is the row's.

`max_contiguous` names lanes as the axis for neighbouring threads. Without it triton 3.6 sees no contiguous axis, gives
weight rows to threads and sends words through shared memory (40 trips a step). With it no load gets wider, as nothing
is known of alignment. It holds for a pointer computed in the same function, not for a parameter.
"""
# pyright: reportGeneralTypeIssues=false
# (pyright takes tl.static_range for a function that never returns)

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import add4, dp2a, dp4a, funnel, half_bits, pair


@jit
def q2_k(w, x, ordered, d8, h, k, there, WIDE: tl.constexpr, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    at = words + 4 + 8 * h + (2 * k if WIDE else k)
    a0, a1 = tl.load(tl.max_contiguous(at, [1, 1, 2])), tl.load(tl.max_contiguous(at + 4, [1, 1, 2]))
    b0, b1 = a0, a1
    if WIDE:
        b0, b1 = tl.load(tl.max_contiguous(at + 1, [1, 1, 2])), tl.load(tl.max_contiguous(at + 5, [1, 1, 2]))
    packed01 = tl.load(tl.max_contiguous(words + 2 * h, [1, 1, 2]))
    packed23 = tl.load(tl.max_contiguous(words + 2 * h + 1, [1, 1, 2]))
    both = tl.load(tl.max_contiguous(words + 20, [1, 1, 2]))
    scales01, scales23 = packed01 & 0x0F0F0F0F, packed23 & 0x0F0F0F0F
    mins01, mins23 = (packed01 >> 4) & 0x0F0F0F0F, (packed23 >> 4) & 0x0F0F0F0F
    for j in tl.static_range(4):
        x0, y0, x1, y1, s8 = _activations(x, ordered, d8, h, k, j, there, WIDE, STRIDE)
        up, mask = 2 * (j % 2), 0x03030303 << (2 * (j % 2))  # codes of group j, times 4 when j is odd
        idot0, idot1 = (
            dp4a((a0 >> (2 * j - up)) & mask, x0, 0, NATIVE),
            dp4a((a1 >> (2 * j - up)) & mask, x1, 0, NATIVE),
        )
        sum0, sum1 = add4(x0, 0, NATIVE), add4(x1, 0, NATIVE)
        if WIDE:
            idot0 = dp4a((b0 >> (2 * j - up)) & mask, y0, idot0, NATIVE)
            idot1 = dp4a((b1 >> (2 * j - up)) & mask, y1, idot1, NATIVE)
            sum0, sum1 = sum0 + add4(y0, 0, NATIVE), sum1 + add4(y1, 0, NATIVE)
        scaled = dp2a(pair(idot0, idot1, NATIVE), scales01 if j < 2 else scales23, j % 2, NATIVE)
        shifted = dp2a(pair(sum0, sum1, NATIVE), mins01 if j < 2 else mins23, j % 2, NATIVE)
        main_j, low_j = (s8 * (0.25 if j % 2 else 1.0)) * scaled.to(tl.float32), s8 * shifted.to(tl.float32)
        main = main_j if j == 0 else main + main_j  # noqa: F821 (bound when j = 0)
        low = low_j if j == 0 else low + low_j  # noqa: F821
    return half_bits(both) * main - half_bits(both >> 16) * low


@jit
def q3_k(w, x, ordered, d8, h, k, there, WIDE: tl.constexpr, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """Codes are low + 4 high (0..7) less 4; the 4 is taken off through the activations' sum."""
    odd = w.to(tl.int64).to(tl.int32) & 2
    words, shift = (w - odd).to(tl.pointer_type(tl.int32), bitcast=True), 8 * odd
    at = 2 * k if WIDE else k
    a0, b0 = _two_words(tl.max_contiguous(words + 8 + 8 * h + at, [1, 1, 2]), shift, WIDE, NATIVE)
    a1, b1 = _two_words(tl.max_contiguous(words + 12 + 8 * h + at, [1, 1, 2]), shift, WIDE, NATIVE)
    high_a0, high_b0 = _two_words(tl.max_contiguous(words + at, [1, 1, 2]), shift, WIDE, NATIVE)
    high_a1, high_b1 = _two_words(tl.max_contiguous(words + 4 + at, [1, 1, 2]), shift, WIDE, NATIVE)
    high_a0, high_b0, high_a1, high_b1 = high_a0 >> (4 * h), high_b0 >> (4 * h), high_a1 >> (4 * h), high_b1 >> (4 * h)
    s0, s1 = tl.load(tl.max_contiguous(words + 24, [1, 1, 2])), tl.load(tl.max_contiguous(words + 25, [1, 1, 2]))
    s2 = tl.load(tl.max_contiguous(words + 26, [1, 1, 2]))
    # 16-bit loads: a word here would reach two bytes past the block, and past the tensor behind its last one
    top = funnel(s2, _half_word(w + 106), shift, NATIVE) >> (4 * h)
    nibbles01, nibbles23 = funnel(s0, s1, shift, NATIVE) >> (4 * h), funnel(s1, s2, shift, NATIVE) >> (4 * h)
    scales01 = minus_32((nibbles01 & 0x0F0F0F0F) | ((top & 0x03030303) << 4))
    scales23 = minus_32((nibbles23 & 0x0F0F0F0F) | (((top >> 2) & 0x03030303) << 4))
    for j in tl.static_range(4):
        x0, y0, x1, y1, s8 = _activations(x, ordered, d8, h, k, j, there, WIDE, STRIDE)
        up, mask, third = 2 * (j % 2), 0x03030303 << (2 * (j % 2)), 0x04040404 << (2 * (j % 2))
        code0 = ((a0 >> (2 * j - up)) & mask) | ((high_a0 << (2 + up - j)) & third)
        code1 = ((a1 >> (2 * j - up)) & mask) | ((high_a1 << (2 + up - j)) & third)
        sum0, sum1 = add4(x0, 0, NATIVE), add4(x1, 0, NATIVE)
        if WIDE:
            sum0, sum1 = sum0 + add4(y0, 0, NATIVE), sum1 + add4(y1, 0, NATIVE)
        idot0, idot1 = dp4a(code0, x0, sum0 * (-4 << up), NATIVE), dp4a(code1, x1, sum1 * (-4 << up), NATIVE)
        if WIDE:
            code0 = ((b0 >> (2 * j - up)) & mask) | ((high_b0 << (2 + up - j)) & third)
            code1 = ((b1 >> (2 * j - up)) & mask) | ((high_b1 << (2 + up - j)) & third)
            idot0, idot1 = dp4a(code0, y0, idot0, NATIVE), dp4a(code1, y1, idot1, NATIVE)
        scaled = dp2a(pair(idot0, idot1, NATIVE), scales01 if j < 2 else scales23, j % 2, NATIVE)
        main_j = (s8 * (0.25 if j % 2 else 1.0)) * scaled.to(tl.float32)
        main = main_j if j == 0 else main + main_j  # noqa: F821 (bound when j = 0)
    return half_bits(_half_word(w + 108)) * main


@jit
def q8_0(w, x, d8, sub, there, NATIVE: tl.constexpr):
    """32-value blocks of four lanes; a lane holds words 2 sub and 2 sub + 1 of the eight behind the scale."""
    d = tl.load(tl.max_contiguous(w.to(tl.pointer_type(tl.float16), bitcast=True), [1, 1, 2])).to(tl.float32)
    w += 2
    odd = w.to(tl.int64).to(tl.int32) & 2
    words, shift = (w - odd).to(tl.pointer_type(tl.int32), bitcast=True), 8 * odd
    first = tl.load(tl.max_contiguous(words + 2 * sub, [1, 1, 2]))
    second = tl.load(tl.max_contiguous(words + (2 * sub + 1), [1, 1, 2]))
    # the third word is needed by half, and its other half may lie behind the tensor
    a, b = funnel(first, second, shift, NATIVE), funnel(second, _half_word(w + (8 * sub + 6)), shift, NATIVE)
    x_at = (x + 8 * sub).to(tl.pointer_type(tl.int64), bitcast=True)
    xy = tl.load(tl.max_contiguous(x_at, [1, 1, 2]), mask=there, other=0)
    s8 = tl.load(d8, mask=there, other=0).to(tl.float32)
    idot = dp4a(b, (xy >> 32).to(tl.int32), dp4a(a, xy.to(tl.int32), 0, NATIVE), NATIVE)
    return (d * s8) * idot.to(tl.float32)


@jit
def _activations(x, ordered, d8, h, k, j, there, WIDE: tl.constexpr, STRIDE: tl.constexpr):
    """The lane's words of codes at group j of a 256-block, for quarter 0 and quarter 1, and the scale they share."""
    if WIDE:
        xy0 = eight_codes(x, 128 * h + 32 * j + 8 * k, ordered, 2 * j, there, STRIDE)
        xy1 = eight_codes(x, 128 * h + 32 * j + 16 + 8 * k, ordered, 2 * j + 1, there, STRIDE)
        x0, y0, x1, y1 = xy0.to(tl.int32), (xy0 >> 32).to(tl.int32), xy1.to(tl.int32), (xy1 >> 32).to(tl.int32)
    else:
        at = (x + (128 * h + 32 * j + 4 * k)).to(tl.pointer_type(tl.int32), bitcast=True)
        x0 = tl.load(tl.max_contiguous(at, [1, 1, 2]), mask=there, other=0)
        x1 = tl.load(tl.max_contiguous(at + 4, [1, 1, 2]), mask=there, other=0)
        y0, y1 = x0, x1
    s8 = tl.load(tl.max_contiguous(d8 + (4 * h + j), [1, 1, 2]), mask=there, other=0)
    return x0, y0, x1, y1, s8.to(tl.float32)


@jit
def eight_codes(x, plain, ordered, i, there, STRIDE: tl.constexpr):
    """A lane's i-th unit of eight codes as an int64: at byte `plain` of the block, or, where rows are in lane order, i
    STRIDEs behind the lane's first."""
    at = x + plain
    if STRIDE:
        at = ordered + i * STRIDE
    at = at.to(tl.pointer_type(tl.int64), bitcast=True)
    return tl.load(tl.max_contiguous(at, [1, 1, 2]), mask=there, other=0)


@jit
def minus_32(packed):
    """Four bytes 0..63 to four signed bytes -32..31; the set top bit keeps borrows from crossing bytes."""
    return ((packed | -0x7F7F7F80) - 0x20202020) ^ -0x7F7F7F80


@jit
def _two_words(at, shift, WIDE: tl.constexpr, NATIVE: tl.constexpr):
    """The word (or two) that starts `shift` bits into the aligned word at `at`."""
    first, second = tl.load(at), tl.load(tl.max_contiguous(at + 1, [1, 1, 2]))
    a = funnel(first, second, shift, NATIVE)
    return a, funnel(second, tl.load(tl.max_contiguous(at + 2, [1, 1, 2])), shift, NATIVE) if WIDE else a


@jit
def _half_word(at):
    """The two bytes at `at`, zero-extended to an int32."""
    half = tl.load(tl.max_contiguous(at.to(tl.pointer_type(tl.int16), bitcast=True), [1, 1, 2]))
    return half.to(tl.int32) & 0xFFFF
