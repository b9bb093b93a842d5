"""Steps of weights in planes (`storage.planar_layout`) for `gemv.steps.part`: all nine formats that have planes.

A lane's codes are 16 or 32 bytes side by side: 64 consecutive values of a super-block (four lanes a block), else 32.
Fields lie alike in every format, value 4 p + b of a word in byte b at bits w p, so a mask gives four values in a row,
next to their activations. A field above the lowest is left where it lies, masked: its dots come a power of two too
large, which is a shift of the sum or a factor of d8, and exact. Only where a higher bit joins are codes moved.

Part of a lane (d8: fp16 scale of 32 activations; dot, isum: over one sub-block of the lane's), with i = 0, then 1: the
lane's first 32 values, then the others; integers in ():
    q2_k        d * sum_i d8_i * (sc dot + sc dot) - dmin * sum_i d8_i * (m isum + m isum)   sub-blocks 2 i, 2 i + 1
    q3_k q6_k   d * sum_i d8_i * (sc dot + sc dot), codes -4..3, -32..31
    q4_k q5_k   d * sum_i d8_i * (sc dot) - dmin * sum_i d8_i * (m isum)
    q8_0        (d * d8) * dot
    q4_0 mxfp4 nvfp4: as in `raw.steps_nibbles`
Of q4_k, q5_k and the formats of the last line a lane has the values that it has of raw blocks: the bits are those of
raw blocks.

w: the weight, of `blocks` blocks; at int32 [1, B, 32]: the lane's block, counted from the weight's first; sub: lane of
the block; x, ordered, d8, total, there: as in `gemv.steps.part`, of the block.
"""
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# (pyright takes tl.static_range for a function that never returns)

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import e8m0_halved, ue4m3_halved
from moe_lab_kernels.gemv.raw.steps import eight_codes, minus_32
from moe_lab_kernels.gemv.raw.steps_nibbles import doubled_dots
from moe_lab_kernels.primitives import add4, dp2a, dp4a, dp4a_unsigned, four_words, half_bits, offset64, pair


@jit
def planar(w, blocks, x, ordered, d8, total, at, sub, there, FORM: tl.constexpr, STRIDE: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """fp32 parts [.., .., 32] of one step. FORM: see `forms`."""
    if FORM == "planar q2_k":
        scales = behind(w, blocks, 64)
        floats = behind(scales, blocks, 16)
        out = _two_bits(w, w, scales, w, floats, x, ordered, d8, at, sub, there, False, STRIDE, NATIVE)
    elif FORM == "planar q3_k":
        high = behind(w, blocks, 64)
        scales = behind(high, blocks, 32)
        tops = behind(scales, blocks, 8)
        floats = behind(tops, blocks, 4)
        out = _two_bits(w, high, scales, tops, floats, x, ordered, d8, at, sub, there, True, STRIDE, NATIVE)
    elif FORM == "planar q4_k" or FORM == "planar q5_k":
        high = behind(w, blocks, 128)
        scales = behind(high, blocks, 32) if FORM == "planar q5_k" else high
        tops = behind(scales, blocks, 8)
        floats = behind(tops, blocks, 4)
        out = _four_bits(w, high, scales, tops, floats, x, ordered, d8, at, sub, there, FORM == "planar q5_k", STRIDE,
                         NATIVE)  # fmt: skip
    elif FORM == "planar q6_k":
        high = behind(w, blocks, 128)
        scales = behind(high, blocks, 64)
        out = _six_bits(w, high, scales, behind(scales, blocks, 16), x, ordered, d8, at, sub, there, STRIDE, NATIVE)
    elif FORM == "planar q8_0":
        out = _bytes(w, behind(w, blocks, 32), x, ordered, d8, at + 0 * sub, there, STRIDE, NATIVE)
    elif FORM == "planar q4_0":
        out = _nibbles(w, behind(w, blocks, 16), x, ordered, d8, total, at + 0 * sub, there, STRIDE, NATIVE)
    elif FORM == "planar mxfp4":
        out = _fp4(w, behind(w, blocks, 16), x, ordered, d8, at, sub, there, False, STRIDE, NATIVE)
    else:
        tl.static_assert(FORM == "planar nvfp4")
        out = _fp4(w, behind(w, blocks, 32), x, ordered, d8, at, sub, there, True, STRIDE, NATIVE)
    return out


@jit
def behind(plane, blocks, BYTES: tl.constexpr):
    """The next plane: each starts at a multiple of 16 bytes."""
    return plane + (offset64(blocks, BYTES) + 15) // 16 * 16


@jit
def _two_bits(codes, high, scales, tops, floats, x, ordered, d8, at, sub, there, THIRD: tl.constexpr,
              STRIDE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """q2_k, and q3_k (THIRD): a word of codes is a sub-block of 16."""
    u = at * 4 + sub
    w0, w1, w2, w3 = four_words(codes + offset64(u, 16), NATIVE)
    h0, h1 = w0, w1
    if THIRD:
        eight = (high + offset64(u, 8)).to(tl.pointer_type(tl.int64), bitcast=True)
        both = tl.load(tl.max_contiguous(eight, [1, 1, 2]))
        h0, h1 = both.to(tl.int32), (both >> 32).to(tl.int32)
        low, top = _word(scales, offset64(at, 8) + sub // 2 * 4), _word(tops, offset64(at, 4) + 0 * sub)
        scale = minus_32(low >> 4 * (sub % 2) & 0x0F0F0F0F | (top >> 2 * sub & 0x03030303) << 4)
    else:
        both = _word(scales, offset64(u, 4))
        scale, least = both & 0x0F0F0F0F, both >> 4 & 0x0F0F0F0F
    dot0, sum0 = _sixteen(w0, h0, x, 64 * sub, ordered, 0, there, False, THIRD, STRIDE, NATIVE)
    dot1, sum1 = _sixteen(w1, h0, x, 64 * sub, ordered, 2, there, True, THIRD, STRIDE, NATIVE)
    dot2, sum2 = _sixteen(w2, h1, x, 64 * sub, ordered, 4, there, False, THIRD, STRIDE, NATIVE)
    dot3, sum3 = _sixteen(w3, h1, x, 64 * sub, ordered, 6, there, True, THIRD, STRIDE, NATIVE)
    s0, s1 = _d8(d8, 2 * sub, there), _d8(d8, 2 * sub + 1, there)
    main = (0.25 * s0) * dp2a(pair(dot0, dot1, NATIVE), scale, False, NATIVE).to(tl.float32)
    main = main + (0.25 * s1) * dp2a(pair(dot2, dot3, NATIVE), scale, True, NATIVE).to(tl.float32)
    if THIRD:
        out = _half(floats, offset64(at, 2) + 0 * sub) * main
    else:
        low0 = s0 * dp2a(pair(sum0, sum1, NATIVE), least, False, NATIVE).to(tl.float32)
        low1 = s1 * dp2a(pair(sum2, sum3, NATIVE), least, True, NATIVE).to(tl.float32)
        d = _word(floats, offset64(at, 4) + 0 * sub)
        out = half_bits(d) * main - half_bits(d >> 16) * (low0 + low1)
    return out


@jit
def _sixteen(w, h, x, first, ordered, i, there, ODD: tl.constexpr, THIRD: tl.constexpr, STRIDE: tl.constexpr,
             NATIVE: tl.constexpr):  # fmt: skip
    """Four times the dot of one word's codes (less 4 where they have THIRD bits), and the activations' sum. h: the word
    of third bits, of which an ODD sub-block has the upper half of each byte."""
    near, far = (
        eight_codes(x, first + 8 * i, ordered, i, there, STRIDE),
        eight_codes(x, first + 8 * i + 8, ordered, i + 1, there, STRIDE),
    )
    x0, x1, x2, x3 = near.to(tl.int32), (near >> 32).to(tl.int32), far.to(tl.int32), (far >> 32).to(tl.int32)
    up = w >> 4
    c0, c1, c2, c3 = w & 0x03030303, w & 0x0C0C0C0C, up & 0x03030303, up & 0x0C0C0C0C
    total, start = add4(x3, add4(x2, add4(x1, add4(x0, 0, NATIVE), NATIVE), NATIVE), NATIVE), 0
    if THIRD:
        start = -4 * total
        if ODD:
            c0, c1 = c0 | h >> 2 & 0x04040404, c1 | h >> 1 & 0x10101010
            c2, c3 = c2 | h >> 4 & 0x04040404, c3 | h >> 3 & 0x10101010
        else:
            c0, c1 = c0 | h << 2 & 0x04040404, c1 | h << 3 & 0x10101010
            c2, c3 = c2 | h & 0x04040404, c3 | h << 1 & 0x10101010
    even = dp4a(c2, x2, dp4a(c0, x0, start, NATIVE), NATIVE)
    return 4 * even + dp4a(c3, x3, dp4a(c1, x1, 0, NATIVE), NATIVE), total


@jit
def _four_bits(codes, high, scales, tops, floats, x, ordered, d8, at, sub, there, FIFTH: tl.constexpr,
               STRIDE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """q4_k, and q5_k (FIFTH): four words of codes are a sub-block of 32."""
    u = at * 4 + sub
    f0, f1 = sub, sub
    if FIFTH:
        eight = (high + offset64(u, 8)).to(tl.pointer_type(tl.int64), bitcast=True)
        both = tl.load(tl.max_contiguous(eight, [1, 1, 2]))
        f0, f1 = both.to(tl.int32), (both >> 32).to(tl.int32)
    dot0, sum0 = _thirty_two(codes + offset64(u, 32), f0, x, 64 * sub, ordered, 0, there, FIFTH, STRIDE, NATIVE)
    dot1, sum1 = _thirty_two(codes + offset64(u, 32) + 16, f1, x, 64 * sub, ordered, 4, there, FIFTH, STRIDE, NATIVE)
    low = tl.load(tl.max_contiguous((scales + (offset64(at, 8) + 0 * sub)).to(tl.pointer_type(tl.int64), bitcast=True),
                                    [1, 1, 2]))  # fmt: skip
    top, byte = _word(tops, offset64(at, 4) + 0 * sub) >> 2 * (sub // 2), 16 * (sub % 2)
    nibble = byte + 4 * (sub // 2)
    scale = low.to(tl.int32) >> nibble & 0x0F0F | (top >> byte & 0x0303) << 4
    least = (low >> 32).to(tl.int32) >> nibble & 0x0F0F | (top >> byte & 0x3030)
    s0, s1 = _d8(d8, 2 * sub, there), _d8(d8, 2 * sub + 1, there)
    main = s0 * ((scale & 63) * dot0).to(tl.float32) + s1 * ((scale >> 8) * dot1).to(tl.float32)
    less = s0 * ((least & 63) * sum0).to(tl.float32) + s1 * ((least >> 8) * sum1).to(tl.float32)
    d = _word(floats, offset64(at, 4) + 0 * sub)
    return half_bits(d) * main - half_bits(d >> 16) * less


@jit
def _thirty_two(codes, fifths, x, first, ordered, i, there, FIFTH: tl.constexpr, STRIDE: tl.constexpr,
                NATIVE: tl.constexpr):  # fmt: skip
    """The dot of four words of 4-bit codes (with their FIFTH bits), and the activations' sum."""
    w0, w1, w2, w3 = four_words(codes, NATIVE)
    even, odd, total = 0, 0, 0
    for k in tl.static_range(4):
        w = w0 if k == 0 else w1 if k == 1 else w2 if k == 2 else w3
        eight = eight_codes(x, first + 8 * (i + k), ordered, i + k, there, STRIDE)
        near, far = eight.to(tl.int32), (eight >> 32).to(tl.int32)
        if FIFTH:
            if k < 2:
                a, b = fifths << (4 - 2 * k), fifths << (3 - 2 * k)
            else:
                a, b = fifths >> (2 * k - 4), fifths >> (2 * k - 3)
            even = dp4a(w & 0x0F0F0F0F | a & 0x10101010, near, even, NATIVE)
            even = dp4a(w >> 4 & 0x0F0F0F0F | b & 0x10101010, far, even, NATIVE)
        else:
            even = dp4a(w & 0x0F0F0F0F, near, even, NATIVE)
            odd = dp4a_unsigned(w & -0x0F0F0F10, far, odd, NATIVE)  # sixteen times as much
        total = add4(far, add4(near, total, NATIVE), NATIVE)
    if not FIFTH:
        even = even + (odd >> 4)
    return even, total


@jit
def _six_bits(codes, high, scales, floats, x, ordered, d8, at, sub, there, STRIDE: tl.constexpr,
              NATIVE: tl.constexpr):  # fmt: skip
    """q6_k: two words of codes and one of high bits are a sub-block of 16."""
    u = at * 4 + sub
    w0, w1, w2, w3 = four_words(codes + offset64(u, 32), NATIVE)
    w4, w5, w6, w7 = four_words(codes + offset64(u, 32) + 16, NATIVE)
    h0, h1, h2, h3 = four_words(high + offset64(u, 16), NATIVE)
    scale = _word(scales, offset64(u, 4))
    dot0 = _sixteen_of_six(w0, w1, h0, x, 64 * sub, ordered, 0, there, STRIDE, NATIVE)
    dot1 = _sixteen_of_six(w2, w3, h1, x, 64 * sub, ordered, 2, there, STRIDE, NATIVE)
    dot2 = _sixteen_of_six(w4, w5, h2, x, 64 * sub, ordered, 4, there, STRIDE, NATIVE)
    dot3 = _sixteen_of_six(w6, w7, h3, x, 64 * sub, ordered, 6, there, STRIDE, NATIVE)
    near = ((scale << 24) >> 24) * dot0 + ((scale << 16) >> 24) * dot1
    far = ((scale << 8) >> 24) * dot2 + (scale >> 24) * dot3
    main = _d8(d8, 2 * sub, there) * near.to(tl.float32) + _d8(d8, 2 * sub + 1, there) * far.to(tl.float32)
    return _half(floats, offset64(at, 2) + 0 * sub) * main


@jit
def _sixteen_of_six(w0, w1, h, x, first, ordered, i, there, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """The dot of 16 codes, -32..31: 32 for each is taken off through the activations' sum."""
    near, far = (
        eight_codes(x, first + 8 * i, ordered, i, there, STRIDE),
        eight_codes(x, first + 8 * i + 8, ordered, i + 1, there, STRIDE),
    )
    x0, x1, x2, x3 = near.to(tl.int32), (near >> 32).to(tl.int32), far.to(tl.int32), (far >> 32).to(tl.int32)
    dot = -32 * add4(x3, add4(x2, add4(x1, add4(x0, 0, NATIVE), NATIVE), NATIVE), NATIVE)
    dot = dp4a(w0 & 0x0F0F0F0F | h << 4 & 0x30303030, x0, dot, NATIVE)
    dot = dp4a(w0 >> 4 & 0x0F0F0F0F | h << 2 & 0x30303030, x1, dot, NATIVE)
    dot = dp4a(w1 & 0x0F0F0F0F | h & 0x30303030, x2, dot, NATIVE)
    return dp4a(w1 >> 4 & 0x0F0F0F0F | h >> 2 & 0x30303030, x3, dot, NATIVE)


@jit
def _bytes(codes, floats, x, ordered, d8, at, there, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """q8_0: a block a lane."""
    w0, w1, w2, w3 = four_words(codes + offset64(at, 32), NATIVE)
    w4, w5, w6, w7 = four_words(codes + offset64(at, 32) + 16, NATIVE)
    dot, zero = 0, 0 * at
    for k in tl.static_range(4):
        a, b = (w0, w1) if k == 0 else (w2, w3) if k == 1 else (w4, w5) if k == 2 else (w6, w7)
        eight = eight_codes(x, zero + 8 * k, ordered, k, there, STRIDE)
        dot = dp4a(b, (eight >> 32).to(tl.int32), dp4a(a, eight.to(tl.int32), dot, NATIVE), NATIVE)
    return (_half(floats, offset64(at, 2)) * _d8(d8, zero, there)) * dot.to(tl.float32)


@jit
def _nibbles(codes, floats, x, ordered, d8, total, at, there, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """q4_0: a block a lane, codes 0..15."""
    zero = 0 * at
    dot, _ = _thirty_two(codes + offset64(at, 16), zero, x, zero, ordered, 0, there, False, STRIDE, NATIVE)
    s = _d8(total, zero, there)
    return _half(floats, offset64(at, 2)) * (_d8(d8, zero, there) * dot.to(tl.float32) - 8.0 * s)


@jit
def _fp4(codes, scales, x, ordered, d8, at, sub, there, PAIRS: tl.constexpr, STRIDE: tl.constexpr,
         NATIVE: tl.constexpr):  # fmt: skip
    """mxfp4, a block a lane; nvfp4 (PAIRS), half a block with two scales."""
    u = at * 2 + sub if PAIRS else at + 0 * sub
    w0, w1, w2, w3 = four_words(codes + offset64(u, 16), NATIVE)
    first = 32 * sub
    e0, e1 = eight_codes(x, first, ordered, 0, there, STRIDE), eight_codes(x, first + 8, ordered, 1, there, STRIDE)
    e2, e3 = (
        eight_codes(x, first + 16, ordered, 2, there, STRIDE),
        eight_codes(x, first + 24, ordered, 3, there, STRIDE),
    )
    plus, minus = doubled_dots(w0, e0.to(tl.int32), (e0 >> 32).to(tl.int32), 0, 0, NATIVE)
    plus, minus = doubled_dots(w1, e1.to(tl.int32), (e1 >> 32).to(tl.int32), plus, minus, NATIVE)
    if PAIRS:
        near, plus, minus = (plus - minus).to(tl.float32), 0, 0
    plus, minus = doubled_dots(w2, e2.to(tl.int32), (e2 >> 32).to(tl.int32), plus, minus, NATIVE)
    plus, minus = doubled_dots(w3, e3.to(tl.int32), (e3 >> 32).to(tl.int32), plus, minus, NATIVE)
    dot, s8 = (plus - minus).to(tl.float32), _d8(d8, sub, there)
    if PAIRS:
        two = (scales + offset64(u, 2)).to(tl.pointer_type(tl.uint16), bitcast=True)
        scale = tl.load(tl.max_contiguous(two, [1, 1, 2])).to(tl.int32)
        out = s8 * (ue4m3_halved(scale & 0xFF) * near + ue4m3_halved(scale >> 8) * dot)
    else:
        e = tl.load(tl.max_contiguous(scales + offset64(u, 1), [1, 1, 2])).to(tl.int32)
        out = (e8m0_halved(e) * s8) * dot
    return out


@jit
def _word(base, offset):
    at = (base + offset).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(tl.max_contiguous(at, [1, 1, 2]))


@jit
def _half(base, offset):
    at = (base + offset).to(tl.pointer_type(tl.float16), bitcast=True)
    return tl.load(tl.max_contiguous(at, [1, 1, 2])).to(tl.float32)


@jit
def _d8(d8, i, there):
    return tl.load(tl.max_contiguous(d8 + i, [1, 1, 2]), mask=there, other=0).to(tl.float32)
