"""The step of the folded form: a block of 256 values against q8_k rows, ggml's arithmetic for the CPU.

Sub-block scales stay in integers over the block, with letters as in `mmq.steps`:

    q2_k q3_k q4_k q5_k q6_k   acc = (I * d - L * dmin) * dy + acc

I sums scale * dot, L minimum * sum of codes; both exact (L in fp16 products, below 2^24).
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import half_at
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq.codes import pick, word
from moe_lab_kernels.mmq.scales import scale_of_q45
from moe_lab_kernels.mmq.steps import codes_of_q45, product_of, rows_at
from moe_lab_kernels.primitives import INTERPRET, fma, half_bits


@jit
def codes_of_q6(b, half: tl.constexpr, j: tl.constexpr, NATIVE: tl.constexpr):
    raw = mc.words_at(b + 64 * half + 32 * (j % 2), word(), 2, NATIVE)
    return mc.six_bits_times_4(raw, mc.words_at(b + 128 + 32 * half, word(), 2, NATIVE), j)


@jit
def scales_of_q6(b, p: tl.constexpr):
    both = tl.load((b + 192 + 2 * p).to(tl.pointer_type(tl.int16), bitcast=True)).to(tl.int32)
    return both << 24 >> 24, both >> 8


@jit
def whole_block(b, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Words [R, 64] of a block's 256 codes times their scales, of q3_k with the sign turned. Axes before the last
    reshape: row, half of the block, 32 values of it, 16 of those, word."""
    R: tl.constexpr = b.shape[0]
    s, j = tl.arange(0, 16)[None, :], tl.reshape(tl.arange(0, 4), [1, 1, 4, 1, 1])
    if FORMAT == "q2_k":
        raw = tl.reshape(mc.words_at(b + 16, s, 4, NATIVE), [R, 2, 1, 2, 4])
        scale = tl.reshape(tl.load(b + s).to(tl.int32) & 15, [R, 2, 4, 2, 1])
        code = (raw >> 2 * j & 0x03030303) * scale
    else:
        raw = tl.reshape(mc.words_at(b + 32, s, 2, NATIVE), [R, 2, 1, 2, 4])
        third = tl.reshape(mc.words_at(b, word(), 2, NATIVE), [R, 1, 1, 2, 4])
        low, top = (
            tl.load(b + 96 + s % 8).to(tl.int32) >> s // 8 * 4,
            tl.load(b + 104 + s % 4).to(tl.int32) >> s // 4 * 2,
        )
        scale = tl.reshape((low & 15 | (top & 3) << 4) - 32, [R, 2, 4, 2, 1])
        up = j + 4 * tl.reshape(tl.arange(0, 2), [1, 2, 1, 1, 1])
        code = mc.three_bits(raw >> 2 * j, third, up, 0, scale)
    return tl.reshape(code, [R, 64])


@jit
def fold_step(acc, w, x, known, scale, low, block, FORMAT: tl.constexpr, TOKENS: tl.constexpr, NATIVE: tl.constexpr):
    """A block of 256 values against q8_k rows. low: fp16 pointers [TOKENS, 1] to the tile's sums of 16 codes."""
    total = tl.zeros(acc.shape, tl.int32)
    b = w + block * (84 if FORMAT == "q2_k" else 110 if FORMAT == "q3_k" else 144 if FORMAT == "q4_k" else 176
                     if FORMAT == "q5_k" else 210)  # fmt: skip
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    if FORMAT == "q2_k" or FORMAT == "q3_k":
        total = product_of(whole_block(b, FORMAT, NATIVE), rows_at(x, known, block * 256, 256), total)
    for p in tl.static_range(0 if FORMAT == "q2_k" or FORMAT == "q3_k" else 8):
        rows, zero = rows_at(x, known, block * 256 + 32 * p), tl.zeros(acc.shape, tl.int32)
        if FORMAT == "q6_k":
            s0, s1 = scales_of_q6(b, p)
            code = codes_of_q6(b, p // 4, p % 4, NATIVE)
            total += product_of(pick(code, 0), rows, zero) * s0
            total += product_of(pick(0, code), rows, zero) * s1
        else:
            sc, _ = scale_of_q45(words, p)
            total += product_of(codes_of_q45(b, p, FORMAT == "q5_k", NATIVE), rows, zero) * sc
    if FORMAT == "q3_k":
        part = total.to(tl.float32) * -half_at(b + 108)
    elif FORMAT == "q6_k":
        part = total.to(tl.float32) * (half_at(b + 208) * 0.25)
    else:
        floats = tl.load(words + (20 if FORMAT == "q2_k" else 0))
        sums = tl.trans(tl.load(low + (block * (16 * TOKENS) + tl.arange(0, 16)[None, :])))
        mins = minima(b, FORMAT).to(tl.float16)
        if INTERPRET:
            lows = tl.dot(mins.to(tl.float32), sums.to(tl.float32), input_precision="ieee")
        else:
            lows = tl.dot(mins, sums)
        part = total.to(tl.float32) * half_bits(floats) - lows * half_bits(floats >> 16)
    return fma(part, tl.load(scale + block * TOKENS), acc)


@jit
def minima(b, FORMAT: tl.constexpr):
    """Minima of a block's sixteen runs of 16 values, int32 [R, 16]."""
    i = tl.arange(0, 16)[None, :]
    if FORMAT == "q2_k":
        out = tl.load(b + i).to(tl.int32) >> 4
    else:  # of eight sub-blocks of 32
        s = i // 2
        low, near = tl.load(b + 8 + s).to(tl.int32), s < 4
        out = tl.where(near, low & 63, low >> 4 | tl.load(b + 4 + s).to(tl.int32) >> 6 << 4)
    return out
