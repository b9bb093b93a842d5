"""Steps of the formats with 4 bits and more a code, for `gemv.steps.part`: q4_k, q5_k, q6_k, q4_0, mxfp4, nvfp4.

A lane owns whole sub-blocks, so sub-block scales meet integer dots of 32 or 16 products, exact in int32 and in fp32:
    q4_k q5_k  4 lanes a block; lane g: values 64 g .. + 63, sub-blocks 2 g and 2 g + 1
               d * sum_i d8_i * (sc_i * idot_i) - dmin * sum_i d8_i * (m_i * isum_i)       i = 0, 1 in order
    q6_k       4 lanes a block; lane (n, t): 16 values from 128 n + 32 j + 16 t on, sub-block 8 n + 2 j + t
               d * sum_j d8_j * (sc_j * idot_j)                                              j = 0..3 in order
    q4_0       1 lane a block: d * (d8 * idot - 8 * s), codes 0..15, s the activations' own sum
    mxfp4      1 lane a block: (2^(e - 128) * d8) * idot over doubled E2M1 values
    nvfp4      2 lanes a block; lane t: sub-blocks 2 t and 2 t + 1
               d8 * (s_0 * idot_0 + s_1 * idot_1), s = E4M3 / 2, doubled E2M1 values

Doubled E2M1 values come out of a byte permutation whose selectors are the codes themselves: a selector's fourth bit
repeats the sign bit of the chosen byte, which is 0 in a table of magnitudes, so codes 8..15 give 0, and 0..7 give 0
once that bit is turned over. The two tables' dots are subtracted. Eight codes of a word lie low, high, low, high: the
activations are put into that order, which rows of a tile share.

q4_k and q5_k rows lie on 8-byte addresses, nvfp4 rows on 4-byte ones, the others anywhere that `blocks` allows: words
are cut out of aligned ones. Nothing behind a row is read.
"""
# pyright: reportGeneralTypeIssues=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import e8m0_halved, ue4m3_halved
from moe_lab_kernels.gemv.raw.steps import eight_codes
from moe_lab_kernels.primitives import add4, dp4a, funnel


@jit
def q45_k(w, x, ordered, d8, g, there, FIVE: tl.constexpr, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """w, x, d8: the block's own pointers; g: lane of four."""
    head = w.to(tl.pointer_type(tl.int64), bitcast=True)
    h0, h1 = (
        tl.load(tl.max_contiguous(head + 0 * g, [1, 1, 2])),
        tl.load(tl.max_contiguous(head + 1 + 0 * g, [1, 1, 2])),
    )
    both, up = h0.to(tl.int32), 16 * (g % 2)
    s, m, rest = (h0 >> 32).to(tl.int32) >> up, h1.to(tl.int32) >> up, (h1 >> 32).to(tl.int32) >> up
    near = g < 2  # the first four of eight keep their six bits together
    scale0 = tl.where(near, s & 63, rest & 15 | s >> 2 & 0x30)
    scale1 = tl.where(near, s >> 8 & 63, rest >> 8 & 15 | s >> 10 & 0x30)
    min0 = tl.where(near, m & 63, rest >> 4 & 15 | m >> 2 & 0x30)
    min1 = tl.where(near, m >> 8 & 63, rest >> 12 & 15 | m >> 10 & 0x30)
    codes = (w + ((48 if FIVE else 16) + 32 * g)).to(tl.pointer_type(tl.int64), bitcast=True)
    fifths = (w + (16 + 0 * g)).to(tl.pointer_type(tl.int64), bitcast=True)
    idot0, idot1, isum0, isum1 = 0, 0, 0, 0
    for i in tl.static_range(4):
        both_words = tl.load(tl.max_contiguous(codes + i, [1, 1, 2]))
        a, b = both_words.to(tl.int32), (both_words >> 32).to(tl.int32)
        a0, b0, a1, b1 = a & 0x0F0F0F0F, b & 0x0F0F0F0F, a >> 4 & 0x0F0F0F0F, b >> 4 & 0x0F0F0F0F
        if FIVE:
            high = tl.load(tl.max_contiguous(fifths + i, [1, 1, 2]))
            c, e = high.to(tl.int32) >> (2 * g), (high >> 32).to(tl.int32) >> (2 * g)
            a0, b0 = a0 | c << 4 & 0x10101010, b0 | e << 4 & 0x10101010
            a1, b1 = a1 | c << 3 & 0x10101010, b1 | e << 3 & 0x10101010
        x0 = eight_codes(x, 64 * g + 8 * i, ordered, i, there, STRIDE)
        x1 = eight_codes(x, 64 * g + 32 + 8 * i, ordered, 4 + i, there, STRIDE)
        xa, xb, ya, yb = x0.to(tl.int32), (x0 >> 32).to(tl.int32), x1.to(tl.int32), (x1 >> 32).to(tl.int32)
        idot0 = dp4a(b0, xb, dp4a(a0, xa, idot0, NATIVE), NATIVE)
        idot1 = dp4a(b1, yb, dp4a(a1, ya, idot1, NATIVE), NATIVE)
        isum0 = add4(xb, add4(xa, isum0, NATIVE), NATIVE)
        isum1 = add4(yb, add4(ya, isum1, NATIVE), NATIVE)
    s8_0 = tl.load(tl.max_contiguous(d8 + 2 * g, [1, 1, 2]), mask=there, other=0).to(tl.float32)
    s8_1 = tl.load(tl.max_contiguous(d8 + (2 * g + 1), [1, 1, 2]), mask=there, other=0).to(tl.float32)
    main = s8_0 * (scale0 * idot0).to(tl.float32) + s8_1 * (scale1 * idot1).to(tl.float32)
    low = s8_0 * (min0 * isum0).to(tl.float32) + s8_1 * (min1 * isum1).to(tl.float32)
    return _half(both) * main - _half(both >> 16) * low


@jit
def q6_k(w, x, ordered, d8, sub, there, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """w, x, d8: the block's own pointers; sub = 2 n + t: lane of four."""
    n, t = sub // 2, sub % 2
    odd = w.to(tl.int64).to(tl.int32) & 2
    words, shift = (w - odd).to(tl.pointer_type(tl.int32), bitcast=True), 8 * odd
    low, high = words + (16 * n + 4 * t), words + (32 + 8 * n + 4 * t)
    at = (w + (192 + 8 * n + t)).to(tl.pointer_type(tl.int8), bitcast=True)
    at_x, from_d8 = 128 * n + 16 * t, d8 + 4 * n
    a = tl.load(tl.max_contiguous(low, [1, 1, 2]))
    b = tl.load(tl.max_contiguous(low + 8, [1, 1, 2]))
    h = tl.load(tl.max_contiguous(high, [1, 1, 2]))
    idot0, idot1, idot2, idot3 = 0, 0, 0, 0
    isum0, isum1, isum2, isum3 = 0, 0, 0, 0
    for i in tl.static_range(4):
        a_next = tl.load(tl.max_contiguous(low + (i + 1), [1, 1, 2]))
        b_next = tl.load(tl.max_contiguous(low + (i + 9), [1, 1, 2]))
        h_next = tl.load(tl.max_contiguous(high + (i + 1), [1, 1, 2]))
        la, lb = funnel(a, a_next, shift, NATIVE), funnel(b, b_next, shift, NATIVE)
        lh = funnel(h, h_next, shift, NATIVE)
        a, b, h = a_next, b_next, h_next
        if i % 2 == 0:
            both0 = eight_codes(x, at_x + 4 * i, ordered, i // 2, there, STRIDE)
            both1 = eight_codes(x, at_x + 32 + 4 * i, ordered, 2 + i // 2, there, STRIDE)
            both2 = eight_codes(x, at_x + 64 + 4 * i, ordered, 4 + i // 2, there, STRIDE)
            both3 = eight_codes(x, at_x + 96 + 4 * i, ordered, 6 + i // 2, there, STRIDE)
        x0, x1 = (both0 >> 32 * (i % 2)).to(tl.int32), (both1 >> 32 * (i % 2)).to(tl.int32)
        x2, x3 = (both2 >> 32 * (i % 2)).to(tl.int32), (both3 >> 32 * (i % 2)).to(tl.int32)
        idot0 = dp4a(la & 0x0F0F0F0F | lh << 4 & 0x30303030, x0, idot0, NATIVE)
        idot1 = dp4a(lb & 0x0F0F0F0F | lh << 2 & 0x30303030, x1, idot1, NATIVE)
        idot2 = dp4a(la >> 4 & 0x0F0F0F0F | lh & 0x30303030, x2, idot2, NATIVE)
        idot3 = dp4a(lb >> 4 & 0x0F0F0F0F | lh >> 2 & 0x30303030, x3, idot3, NATIVE)
        isum0, isum1 = add4(x0, isum0, NATIVE), add4(x1, isum1, NATIVE)
        isum2, isum3 = add4(x2, isum2, NATIVE), add4(x3, isum3, NATIVE)
    s0, s1 = _int8(at), _int8(at + 2)
    s2, s3 = _int8(at + 4), _int8(at + 6)
    main = _d8(from_d8, 0, there) * (s0 * (idot0 - 32 * isum0)).to(tl.float32)
    main = main + _d8(from_d8, 1, there) * (s1 * (idot1 - 32 * isum1)).to(tl.float32)
    main = main + _d8(from_d8, 2, there) * (s2 * (idot2 - 32 * isum2)).to(tl.float32)
    main = main + _d8(from_d8, 3, there) * (s3 * (idot3 - 32 * isum3)).to(tl.float32)
    return _half_at(w + (208 + 0 * sub)) * main


@jit
def q4_0(w, x, ordered, d8, total, there, zero, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """w, x, d8, total: the block's own pointers; zero int32 [1, 1, LANES] names the axis of lanes."""
    at = w + 2
    odd = at.to(tl.int64).to(tl.int32) & 2
    words, shift = (at - odd).to(tl.pointer_type(tl.int32), bitcast=True) + zero, 8 * odd
    # the fifth word is needed by half, and its other half may lie behind the tensor
    last = _half_word(w + (16 + zero))
    this, idot = tl.load(tl.max_contiguous(words, [1, 1, 2])), 0
    for i in tl.static_range(4):
        after = last if i == 3 else tl.load(tl.max_contiguous(words + (i + 1), [1, 1, 2]))
        q = funnel(this, after, shift, NATIVE)
        this = after
        if i % 2 == 0:
            low = eight_codes(x, zero + 4 * i, ordered, i // 2, there, STRIDE)
            high = eight_codes(x, zero + (16 + 4 * i), ordered, 2 + i // 2, there, STRIDE)
        idot = dp4a(q & 0x0F0F0F0F, (low >> 32 * (i % 2)).to(tl.int32), idot, NATIVE)
        idot = dp4a(q >> 4 & 0x0F0F0F0F, (high >> 32 * (i % 2)).to(tl.int32), idot, NATIVE)
    s = tl.load(tl.max_contiguous(total + zero, [1, 1, 2]), mask=there, other=0).to(tl.float32)
    return _half_at(w + zero) * (_d8(d8 + zero, 0, there) * idot.to(tl.float32) - 8.0 * s)


@jit
def mxfp4(w, x, ordered, d8, there, zero, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """w, x, d8: the block's own pointers; zero int32 [1, 1, LANES] names the axis of lanes."""
    at = w + (1 + zero)
    skew = at.to(tl.int64).to(tl.int32) & 3
    words = (at - skew).to(tl.pointer_type(tl.int32), bitcast=True)
    # of the fifth word, only the one, two or three bytes that belong to the block
    pair_at = (at + (16 - skew)).to(tl.pointer_type(tl.uint16), bitcast=True)
    pair = tl.load(tl.max_contiguous(pair_at, [1, 1, 2]), mask=skew >= 2, other=0).to(tl.int32)
    last = pair | tl.load(tl.max_contiguous(at + 15, [1, 1, 2])).to(tl.int32) << (8 * (skew - 1) & 24)
    this = tl.load(tl.max_contiguous(words, [1, 1, 2]))
    plus, minus = 0, 0
    for i in tl.static_range(4):
        after = last if i == 3 else tl.load(tl.max_contiguous(words + (i + 1), [1, 1, 2]))
        q = funnel(this, after, 8 * skew, NATIVE)
        this = after
        if i % 2 == 0:
            low = eight_codes(x, zero + 4 * i, ordered, i // 2, there, STRIDE)
            high = eight_codes(x, zero + (16 + 4 * i), ordered, 2 + i // 2, there, STRIDE)
        x0, x1 = (low >> 32 * (i % 2)).to(tl.int32), (high >> 32 * (i % 2)).to(tl.int32)
        plus, minus = doubled_dots(q, x0, x1, plus, minus, NATIVE)
    e = tl.load(tl.max_contiguous(w + zero, [1, 1, 2])).to(tl.int32)
    return (e8m0_halved(e) * _d8(d8 + zero, 0, there)) * (plus - minus).to(tl.float32)


@jit
def nvfp4(w, x, ordered, d8, t, there, STRIDE: tl.constexpr, NATIVE: tl.constexpr):
    """w, x, d8: the block's own pointers; t: lane of two."""
    words = w.to(tl.pointer_type(tl.int32), bitcast=True) + 4 * t
    scales = tl.load(tl.max_contiguous((w + 2 * t).to(tl.pointer_type(tl.uint16), bitcast=True), [1, 1, 2])).to(
        tl.int32
    )
    x01 = eight_codes(x, 32 * t, ordered, 0, there, STRIDE)
    x23 = eight_codes(x, 32 * t + 8, ordered, 1, there, STRIDE)
    near, far = tl.load(tl.max_contiguous(words + 1, [1, 1, 2])), tl.load(tl.max_contiguous(words + 2, [1, 1, 2]))
    plus, minus = doubled_dots(near, x01.to(tl.int32), x23.to(tl.int32), 0, 0, NATIVE)
    plus, minus = doubled_dots(far, (x01 >> 32).to(tl.int32), (x23 >> 32).to(tl.int32), plus, minus, NATIVE)
    first = ue4m3_halved(scales & 0xFF) * (plus - minus).to(tl.float32)
    x01 = eight_codes(x, 32 * t + 16, ordered, 2, there, STRIDE)
    x23 = eight_codes(x, 32 * t + 24, ordered, 3, there, STRIDE)
    near, far = tl.load(tl.max_contiguous(words + 3, [1, 1, 2])), tl.load(tl.max_contiguous(words + 4, [1, 1, 2]))
    plus, minus = doubled_dots(near, x01.to(tl.int32), x23.to(tl.int32), 0, 0, NATIVE)
    plus, minus = doubled_dots(far, (x01 >> 32).to(tl.int32), (x23 >> 32).to(tl.int32), plus, minus, NATIVE)
    second = ue4m3_halved(scales >> 8) * (plus - minus).to(tl.float32)
    return _d8(d8 + t, 0, there) * (first + second)


@jit
def doubled_dots(q, x_low, x_high, plus, minus, NATIVE: tl.constexpr):
    """Dots of a word's positive and negative codes: low nibbles meet the bytes of x_low, high ones those of x_high."""
    near, far = _interleave(x_low, x_high, False, NATIVE), _interleave(x_low, x_high, True, NATIVE)
    turned = q ^ -0x77777778
    plus = dp4a(_magnitudes(q, NATIVE), near, plus, NATIVE)
    plus = dp4a(_magnitudes(q >> 16, NATIVE), far, plus, NATIVE)
    minus = dp4a(_magnitudes(turned, NATIVE), near, minus, NATIVE)
    minus = dp4a(_magnitudes(turned >> 16, NATIVE), far, minus, NATIVE)
    return plus, minus


@jit
def _magnitudes(q, NATIVE: tl.constexpr):
    """Four bytes of the four low codes: doubled E2M1 of codes 0..7, zero for 8..15."""
    if NATIVE:
        # As a constant the table's half came out of a uniform register, copied anew for every permutation (88 of 613
        # instructions of a step). The upper half of three times a lane's number, which is 0, hides that it is one.
        out = tl.inline_asm_elementwise(
            "{.reg .b32 t; mov.u32 t, %laneid; mul.hi.u32 t, t, 3; add.u32 t, t, 0x03020100; "
            "prmt.b32 $0, t, 0x0C080604, $1;}",
            "=r,r",
            [q],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        out = _magnitude(q) | _magnitude(q >> 4) << 8 | _magnitude(q >> 8) << 16 | _magnitude(q >> 12) << 24
    return out


@jit
def _magnitude(q):
    table = tl.where(q & 4 == 0, 0x03020100, 0x0C080604) >> (8 * (q & 3)) & 0xFF
    return tl.where(q & 8 == 0, table, 0)


@jit
def _interleave(low, high, FAR: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes 0, 0, 1, 1 of low, high, low, high, or bytes 2, 2, 3, 3."""
    if not NATIVE:
        low, high = low >> 16 if FAR else low, high >> 16 if FAR else high
        out = low & 0xFF | (high & 0xFF) << 8 | (low & 0xFF00) << 8 | (high & 0xFF00) << 16
    elif FAR:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7362;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5140;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    return out


@jit
def _d8(d8, i, there):
    return tl.load(tl.max_contiguous(d8 + i, [1, 1, 2]), mask=there, other=0).to(tl.float32)


@jit
def _int8(at):
    return tl.load(tl.max_contiguous(at + 0, [1, 1, 2])).to(tl.int32)


@jit
def _half(bits):
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _half_word(at):
    half = tl.load(tl.max_contiguous(at.to(tl.pointer_type(tl.int16), bitcast=True), [1, 1, 2]))
    return half.to(tl.int32) & 0xFFFF


@jit
def _half_at(at):
    return tl.load(tl.max_contiguous(at.to(tl.pointer_type(tl.float16), bitcast=True), [1, 1, 2])).to(tl.float32)
