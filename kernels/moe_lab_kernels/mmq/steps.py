"""One step of the int8 product for each weight format: some groups of values added to fp32 sums [R, TOKENS].

Weights are the M side of the tensor cores' product and rows of activations its N side. Integer dots are exact and come
in any order; what follows is fp32 in the order written here, one rounding an operation (`primitives.fma` rounds once),
so bits depend on the format alone. With dy an activation scale, I a dot over 32 values (a, b: its halves of 16), S a
sum of activations, A and Mn the fp16-rounded products of a super-block's floats with its sub-block scale and minimum,
everything as ggml's prefill arm has it (kquants 2.4):

    q8_0 q4_0 mxfp4   acc = (I * d) * dy + acc
    nvfp4             acc = (Ib * db + Ia * da) * dy + acc
    q3_k              acc = (I * d) * dy + acc              I over codes times their scale
    q6_k              acc = ((Ib * sb + Ia * sa) * d) * dy + acc
    q4_k q5_k         acc = (I * A) * dy + acc; acc = acc - Mn * S
    q2_k, 64 values   t = V * u; acc = t * dy + acc; acc = acc - Mn * S for its four sub-blocks; but of d2s6's last two
                      sub-blocks of eight, t = t - Mn * S comes before

q2_k has four A under one dy. With u the last place of d and m = |d| / u, A / u is the integer a = (m - 1) sc + e, where
e = a - m sc + sc is between 0 and 2 sc. So V = (m - 1) * (dot of codes times sc) + (dot of codes times e) is the sum of
A / u times its dots, exactly, in two products over 64 values instead of four over 16 masked ones. A block whose d is so
large (4368) that A may leave fp16 gives NaN, as does a scale that is multiplied with I from 2^104 on.

Against q8_k rows: `mmq.fold`.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import e8m0_halved, half_at, ue4m3_halved
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq.codes import pick, word
from moe_lab_kernels.mmq.scales import (
    besides,
    bytes_of_q3,
    minima_of,
    place_of,
    rounded,
    scale_of_q45,
    scale_words_of_q3,
    scales_of_q3,
    two_at,
)
from moe_lab_kernels.primitives import INTERPRET, fma, half_bits

# values of a row that one turn of the loop takes
STEPS = {
    **dict.fromkeys(("q3_k", "q4_k", "q5_k", "q6_k"), 256),
    "q2_k": 128,  # half a block: the loop of a whole one spills at 64 rows of x
    **dict.fromkeys(("q8_0", "q4_0", "mxfp4"), 32),
    "nvfp4": 64,
}


# 1.5 * 2^23, whose bits plus an integer below 2^22 are the float M + I: see `mmq.wide`
M = tl.constexpr(12582912.0)
M_BITS = tl.constexpr(0x4B400000)


@jit
def product_of(words, b, c):
    """c + codes @ b in int32, [.., R, W] words times [4 W, TOKENS]. The interpreter's float dot is exact below 2^24,
    and quicker."""
    a = mc.codes_of(words)
    if len(a.shape) == 3:
        b = tl.broadcast_to(b[None], [a.shape[0], b.shape[0], b.shape[1]])
    if INTERPRET:
        out = c + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    else:
        out = tl.dot(a, b, c, out_dtype=tl.int32)
    return out


@jit
def rows_at(x, known, k, WIDTH: tl.constexpr = 32):
    """Codes k .. k + WIDTH - 1 of the tile's rows, int8 [WIDTH, TOKENS]."""
    return tl.trans(tl.load(x + (k + tl.arange(0, WIDTH)[None, :]), mask=known, other=0))


@jit
def two_of(at):
    """Two neighbouring floats each of pointers [.., 1, n] or [.., n, 1]: two tensors of their shape."""
    return tl.split(tl.load(tl.expand_dims(at, len(at.shape)) + tl.arange(0, 2)))


@jit
def four_of(at):
    """Four neighbours each."""
    i = tl.arange(0, 4)
    v = tl.load(tl.expand_dims(at, len(at.shape)) + i)
    even, odd = tl.split(tl.reshape(v, [at.shape[0], at.shape[1], at.shape[2], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _times(v, scale):
    """I * scale, rounded once, of the bits of M + I."""
    return fma(v.to(tl.float32, bitcast=True), scale, scale * -M)


@jit
def of_digits(high, low):
    """256 I_hi + I_lo, exactly, of the bits of M + I: 256 (M + I_hi) - 257 M is a multiple of 256 below 2^25."""
    one = tl.full((1, 1, 1), 1.0, tl.float32)
    v = fma(high.to(tl.float32, bitcast=True), one * 256.0, one * (-257.0 * M))
    return v + low.to(tl.float32, bitcast=True)


@jit
def usable(v):
    """NaN for scales from 2^104 on: `mmq.wide` adds and takes away 1.5 * 2^23 times the scale."""
    return tl.where(tl.abs(v) < 2.028240960365167e31, v, float("nan"))


@jit
def exact_step(acc, w, x, known, scale, low, step, FORMAT: tl.constexpr, TOKENS: tl.constexpr, TAIL: tl.constexpr,
               FOUR: tl.constexpr, SIDE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """w: uint8 pointers [V, R, 1] to rows; x: int8 pointers [TOKENS, 1]; known: their mask; scale, low: fp32 pointers
    [1, 1, TOKENS] to the tile's first group, as `sides` lays them out. FOUR: blocks of 32 values come in fours."""
    zero = tl.full(acc.shape, M_BITS, tl.int32)
    if FORMAT == "q2_k":
        acc = _q2_k(acc, zero, w + step // 2 * 84, x, known, scale, low, step, TOKENS, TAIL, NATIVE)
    elif FORMAT == "q3_k":
        acc = _q3_k(acc, zero, w + step * 110, x, known, scale, step, TOKENS, SIDE, NATIVE)
    elif FORMAT == "q4_k":
        acc = _q45_k(acc, zero, w + step * 144, x, known, scale, step, False, TOKENS, NATIVE)
    elif FORMAT == "q5_k":
        acc = _q45_k(acc, zero, w + step * 176, x, known, scale, step, True, TOKENS, NATIVE)
    elif FORMAT == "q6_k":
        acc = _q6_k(acc, zero, w + step * 210, x, known, scale, step, TOKENS, NATIVE)
    elif FORMAT == "nvfp4":
        acc = _nvfp4(acc, zero, w + step * 36, x, known, scale, step, TOKENS, NATIVE)
    elif FOUR and SIDE:
        acc = _fours(acc, zero, w, x, known, scale, step, FORMAT, TOKENS, NATIVE)
    elif FOUR:
        for j in tl.static_range(4):
            code, d = codes_of_four(w, step, j, FORMAT, NATIVE)
            t = _times(product_of(code, rows_at(x, known, step * 128 + 32 * j), zero), usable(d))
            acc = fma(t, tl.load(scale + (4 * step + j) * TOKENS), acc)
    else:
        code, d = codes_of_32(w, step, FORMAT, NATIVE)
        t = _times(product_of(code, rows_at(x, known, step * 32), zero), usable(d))
        acc = fma(t, tl.load(scale + step * TOKENS), acc)
    return acc


@jit
def _fours(acc, zero, w, x, known, scale, step, FORMAT: tl.constexpr, TOKENS: tl.constexpr, NATIVE: tl.constexpr):
    """Four blocks of 32 values, which are whole words together."""
    BYTES: tl.constexpr = 34 if FORMAT == "q8_0" else 18 if FORMAT == "q4_0" else 17  # pyright: ignore[reportAssignmentType]
    at: tl.constexpr = 1 if FORMAT == "mxfp4" else 2  # pyright: ignore[reportAssignmentType]
    words = w.to(tl.pointer_type(tl.int32), bitcast=True) + step * BYTES
    w0, w1, w2, w3 = mc.blocks_at(words, at, BYTES, 8 if FORMAT == "q8_0" else 4, NATIVE)
    for j in tl.static_range(4):
        raw, first = w0 if j == 0 else w1 if j == 1 else w2 if j == 2 else w3, tl.load(words + BYTES * j // 4)
        down = 4 * (word() // 4)
        if FORMAT == "mxfp4":
            code = mc.together(mc.doubled_e2m1(mc.apart(raw), down, NATIVE))
            d = e8m0_halved(first >> BYTES * j % 4 * 8 & 0xFF)
        else:
            code, d = raw, half_bits(first >> BYTES * j % 4 * 8)
            if FORMAT == "q4_0":
                code, d = mc.together(mc.nibbles_times_16(mc.apart(raw), down)), d * 0.0625
        t = _times(product_of(code, rows_at(x, known, step * 128 + 32 * j), zero), usable(d))
        acc = fma(t, tl.load(scale + (4 * step + j) * TOKENS), acc)
    return acc


@jit
def codes_of_32(w, step, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Words and scale of block `step` of a format with 32 values a block."""
    i, down = word() % 4, 4 * (word() // 4)  # nibbles: the first sixteen values are the low ones
    if FORMAT == "q8_0":
        b = w + step * 34
        code, d = mc.last_words_at(b + 2, word(), 2), half_at(b)
    elif FORMAT == "q4_0":
        b = w + step * 18
        code, d = mc.nibbles_times_16(mc.last_words_at(b + 2, i, 2), down), half_at(b) * 0.0625
    else:
        tl.static_assert(FORMAT == "mxfp4")
        b = w + step * 17
        code = mc.doubled_e2m1(mc.last_words_at(b + 1, i, 1), down, NATIVE)
        d = e8m0_halved(tl.load(b).to(tl.int32))
    return code, d


@jit
def codes_of_four(w, turn, j: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Words and scale of block j of a turn of four, whose bytes together are whole words that lie on whole words."""
    BYTES: tl.constexpr = 34 if FORMAT == "q8_0" else 18 if FORMAT == "q4_0" else 17  # pyright: ignore[reportAssignmentType]
    at: tl.constexpr = BYTES * j + (1 if FORMAT == "mxfp4" else 2)  # of the codes, behind the scale
    words = w.to(tl.pointer_type(tl.int32), bitcast=True) + turn * BYTES
    i, down = word() if FORMAT == "q8_0" else word() % 4, 4 * (word() // 4)
    raw = mc.apart(mc.words_from(words + at // 4, i, at % 4, NATIVE))
    first = tl.load(words + BYTES * j // 4)
    if FORMAT == "mxfp4":
        code = mc.doubled_e2m1(raw, down, NATIVE)
        d = e8m0_halved(first >> BYTES * j % 4 * 8 & 0xFF)
    else:
        d = half_bits(first >> BYTES * j % 4 * 8)
        code = raw
        if FORMAT == "q4_0":
            code, d = mc.nibbles_times_16(raw, down), d * 0.0625
    return mc.together(code), d


@jit
def codes_of_nvfp4(b, j: tl.constexpr, NATIVE: tl.constexpr):
    """Words of half j of a block of 64 values, the scales of its two sixteens."""
    i = word()
    # of sixteen values eight bytes: the low nibbles of both words, then the high ones
    raw = mc.apart(mc.words_at(b + 4, 4 * j + i // 4 * 2 + i % 2, 4, NATIVE))
    d0, d1 = ue4m3_halved(tl.load(b + 2 * j).to(tl.int32)), ue4m3_halved(tl.load(b + 2 * j + 1).to(tl.int32))
    return mc.doubled_e2m1(raw, i % 4 // 2 * 4, NATIVE), d0, d1  # with an axis more where b has three


@jit
def _nvfp4(acc, zero, b, x, known, scale, step, TOKENS: tl.constexpr, NATIVE: tl.constexpr):
    for j in tl.static_range(2):
        code, d0, d1 = codes_of_nvfp4(b, j, NATIVE)
        rows = rows_at(x, known, step * 64 + 32 * j)
        first, second = mc.together(pick(code, 0)), mc.together(pick(0, code))
        t = _times(product_of(first, rows, zero), d0) + _times(product_of(second, rows, zero), d1)
        acc = fma(t, tl.load(scale + (2 * step + j) * TOKENS), acc)
    return acc


@jit
def _q2_k(acc, zero, b, x, known, scale, low, step, TOKENS: tl.constexpr, TAIL: tl.constexpr, NATIVE: tl.constexpr):
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    both = tl.load(words + 20)
    u, m = place_of(both & 0xFFFF)
    of_two = tl.arange(0, 2)[None, None, :, None]  # which 32 of the 64 values
    above = (m - 1).to(tl.float32) * u
    for j in tl.static_range(2):
        four, g = tl.load(words + step % 2 * 2 + j), 2 * step + j
        raw = mc.words_at(b + 16 + step % 2 * 32, word(), 4, NATIVE)[:, :, None, :]
        raw = raw >> (4 * j + 2 * of_two) & 0x03030303
        up = 16 * of_two + word()[None, None, :, :] // 4 * 8
        sc, beside = four[:, :, :, None] >> up & 15, besides(m, four, NATIVE)[:, :, :, None] >> up & 255
        rows = rows_at(x, known, 64 * g, 64)
        first = product_of(tl.reshape(raw * sc, [b.shape[0], b.shape[1], 16]), rows, zero)
        second = product_of(tl.reshape(raw * beside, [b.shape[0], b.shape[1], 16]), rows, zero)
        t = fma(first.to(tl.float32, bitcast=True) - M, above, _times(second, u))
        dy = tl.load(scale + g * TOKENS)
        m0, m1, m2, m3 = minima_of(both, four, NATIVE)
        sum0, sum1, sum2, sum3 = four_of(low + g * (4 * TOKENS))
        if TAIL and j == 1:
            t = fma(-m3, sum3, fma(-m2, sum2, t))
        acc = fma(-m1, sum1, fma(-m0, sum0, fma(t, dy, acc)))
        if not TAIL or j == 0:
            acc = fma(-m3, sum3, fma(-m2, sum2, acc))
    return acc


@jit
def _q3_k(acc, zero, b, x, known, scale, step, TOKENS: tl.constexpr, SIDE: tl.constexpr, NATIVE: tl.constexpr):
    d = usable(-half_at(b + 108))
    if SIDE:
        third, raw0, raw1, last = mc.quarters(mc.side_by_side(b, 27, NATIVE))
        near, far, top, _ = mc.first_four(last)
        s0, s1, s2, s3 = bytes_of_q3(near, far, top)
    else:
        third = mc.words_at(b, word(), 2, NATIVE)
        raw0, raw1 = mc.words_at(b + 32, word(), 2, NATIVE), mc.words_at(b + 64, word(), 2, NATIVE)
        s0, s1, s2, s3 = scale_words_of_q3(b)
    for p in tl.static_range(8):
        raw, sc = raw0 if p < 4 else raw1, scales_of_q3(s0, s1, s2, s3, p)
        code = mc.together(mc.three_bits(mc.apart(raw), mc.apart(third), p, p % 4, mc.apart(sc)))
        i = product_of(code, rows_at(x, known, step * 256 + 32 * p), zero)
        acc = fma(_times(i, d), tl.load(scale + (8 * step + p) * TOKENS), acc)
    return acc


@jit
def codes_of_q45(b, s: tl.constexpr, FIVE: tl.constexpr, NATIVE: tl.constexpr):
    raw = mc.words_at(b + (48 if FIVE else 16) + 32 * (s // 2), word(), 4, NATIVE)
    code = raw >> (4 * (s % 2)) & 0x0F0F0F0F
    if FIVE:
        code = code | (mc.words_at(b + 16, word(), 4, NATIVE) >> s & 0x01010101) << 4
    return code


@jit
def _q45_k(acc, zero, b, x, known, scale, step, FIVE: tl.constexpr, TOKENS: tl.constexpr, NATIVE: tl.constexpr):
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    both = tl.load(words)
    for s in tl.static_range(8):
        sc, m = scale_of_q45(words, s)
        i = product_of(codes_of_q45(b, s, FIVE, NATIVE), rows_at(x, known, step * 256 + 32 * s), zero)
        dy, total = two_of(scale + (8 * step + s) * (2 * TOKENS))
        acc = fma(_times(i, usable(rounded(half_bits(both) * sc.to(tl.float32)))), dy, acc)
        acc = fma(-rounded(half_bits(both >> 16) * m.to(tl.float32)), total, acc)
    return acc


@jit
def _q6_k(acc, zero, b, x, known, scale, step, TOKENS: tl.constexpr, NATIVE: tl.constexpr):
    """By digits of scale * code: two products over all 32 values serve two scales."""
    d = half_at(b + 208)
    for p in tl.static_range(8):
        raw = mc.words_at(b + p // 4 * 64 + p % 2 * 32, word(), 2, NATIVE) >> p % 4 // 2 * 4 & 0x0F0F0F0F
        top = mc.words_at(b + 128 + p // 4 * 32, word(), 2, NATIVE) >> 2 * (p % 4) & 0x03030303
        both = two_at(b + 192 + 2 * p)
        sc = pick(both << 24 >> 24, both << 16 >> 24)
        high, low = mc.digits(mc.apart(raw | top << 4), mc.apart(sc), 32)
        rows = rows_at(x, known, step * 256 + 32 * p)
        v = of_digits(product_of(mc.together(high), rows, zero), product_of(mc.together(low), rows, zero))
        acc = fma(v * d, tl.load(scale + (8 * step + p) * TOKENS), acc)
    return acc
