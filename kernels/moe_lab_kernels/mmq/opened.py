"""Weights opened for the wide product: every code a byte in the order the tensor cores read them, every scale fp32.

A block is taken apart once for all tiles that multiply it. What becomes of P weights [N, Kd] of a format, by the number
of values W that one step of the product takes:

    codes  int8 [P, Kd / W, parts, N, W]
    scale  fp32 [P, Kd / span, N, kinds]     one or two numbers for each `span` values
    low    minima: fp32 [P, Kd / 64, N, 4], what S is multiplied with; folded: fp16 [P, Kd / 256, N, 16], as they are

    format               W    parts                        scale                 low
    q3_k                 32   scale * code, sign turned    -d of 256
    q4_k q5_k            32   code                         A, -Mn of 32
    q8_0 q4_0 mxfp4      32   code                         d of 32
    nvfp4                32   code, zeros beside          d of 16 and 16
    q6_k                 32   digits of scale * code       d of 256
    q2_k                 64   code * sc, code * e          u, (m - 1) u of 256   -Mn of 16, four of 64
    folded: q2_k q3_k   256   scale * code (q3_k: turned)  d (and dmin) of 256   minima of 16
    folded: the others  256   digits of scale * code       d (and dmin) of 256   minima of 16

Letters as in `mmq.steps`. The digits of v are (hi, lo), v = 256 hi + lo, lo in -128..127. A scale from 2^104 on is NaN:
the product adds and takes away 1.5 * 2^23 times the scale. Reads the raw blocks once; writes 1.1 to 2.3 bytes a weight.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import half_at
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq import fold as mf
from moe_lab_kernels.mmq import scales as ss
from moe_lab_kernels.mmq import steps as ms
from moe_lab_kernels.mmq.operands import in_fours
from moe_lab_kernels.mmq.places import Places
from moe_lab_kernels.primitives import half_bits, offset64

ROWS = 64
# Words of codes a lane writes side by side. With one, q2_k was opened at 632 GB/s and q3_k at 1,925, with two at 3,099
# and 2,908; with four, loads lie in twice as many cache lines, unless they are as wide themselves.
WORDS_A_LANE = {"q4_k": 4, "q5_k": 4}


class Form(NamedTuple):
    """How a format is opened: `step` names the product's step; W, parts, span and kinds as above; whether there is a
    `low`."""

    step: str
    width: int
    parts: int
    span: int
    kinds: int
    low: bool


FORMS = {
    ("q3_k", False): Form("one", 32, 1, 256, 1, False),
    **{(f, False): Form("one", 32, 1, 32, 2, False) for f in ("q4_k", "q5_k")},
    **{(f, False): Form("one", 32, 1, 32, 1, False) for f in ("q8_0", "q4_0", "mxfp4")},
    ("nvfp4", False): Form("halves", 32, 2, 32, 2, False),
    ("q6_k", False): Form("digits", 32, 2, 256, 1, False),
    ("q2_k", False): Form("pair", 64, 2, 256, 2, True),
    ("q2_k", True): Form("fold", 256, 1, 256, 2, True),
    ("q3_k", True): Form("fold", 256, 1, 256, 1, False),
    **{(f, True): Form("fold", 256, 2, 256, 2, True) for f in ("q4_k", "q5_k")},
    ("q6_k", True): Form("fold", 256, 2, 256, 1, False),
}


class Opened(NamedTuple):
    """See the module's first lines; `low` is `scale` where there is none."""

    codes: Tensor
    scale: Tensor
    low: Tensor
    form: Form


def opened_bytes(w: Weight, folded: bool) -> int:
    """Bytes of one opened weight, a multiple of 16."""
    return sum(_sizes(w, folded))


def _sizes(w: Weight, folded: bool) -> tuple[int, int, int]:
    """Bytes of codes, scales, minima of one weight, each a multiple of 16."""
    form, n = FORMS[w.format, folded], w.rows
    low = w.kd // 16 * n * (2 if folded else 4) if form.low else 0
    codes = w.kd * form.parts * n  # W is a multiple of 16
    return codes, -(-(w.kd // form.span * form.kinds * n * 4) // 16) * 16, -(-low // 16) * 16


def room_for(scratch: Tensor, w: Weight, folded: bool) -> Opened:
    """As many opened weights as `scratch` (uint8, flat, 16-byte aligned) holds, uninitialised."""
    form, n, sizes = FORMS[w.format, folded], w.rows, _sizes(w, folded)
    many, kd = len(scratch) // sum(sizes), w.kd
    parts, at = [], 0
    for size in sizes:
        parts.append(scratch[at : at + many * size].view(many, size))
        at += many * size
    codes = parts[0].view(torch.int8).view(many, kd // form.width, form.parts, n, form.width)
    scale = parts[1].view(torch.float32)[:, : kd // form.span * form.kinds * n].unflatten(1, (-1, n, form.kinds))
    if not form.low:
        return Opened(codes, scale, scale, form)
    low = parts[2].view(torch.float16 if folded else torch.float32)[:, : kd // 16 * n]
    return Opened(codes, scale, low.unflatten(1, (-1, n, 16 if folded else 4)), form)


@jit
def _put(codes, words, N, mask, p: tl.constexpr, part: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
         NEAR: tl.constexpr):  # fmt: skip
    """int32 [R, 8], codes of values 32 p .. 32 p + 31, to int8 pointers [R, 1] of a block's rows, NEAR words a lane:
    with more, stores are wider, but loads lie in more cache lines."""
    at = codes + (p * 32 // WIDTH * PARTS + part) * N * WIDTH + p * 32 % WIDTH
    to = at.to(tl.pointer_type(tl.int32), bitcast=True) + mc.word()
    tl.store(tl.max_contiguous(to, [1, NEAR]), words, mask=mask)


@jit
def _put_digits(codes, words, scale, offset: tl.constexpr, N, mask, p: tl.constexpr, WIDTH: tl.constexpr,
                NEAR: tl.constexpr):  # fmt: skip
    """Digits of (code - offset) * scale (`codes.digits`)."""
    high, low = mc.digits(words, scale, offset)
    _put(codes, high, N, mask, p, 0, 2, WIDTH, NEAR)
    _put(codes, low, N, mask, p, 1, 2, WIDTH, NEAR)


@jit
def _open_q2(b, codes, scale, low, row, N, step, mask, FOLD: tl.constexpr, NATIVE: tl.constexpr, NEAR: tl.constexpr):
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    raw0, raw1 = mc.words_at(b + 16, mc.word(), 4, NATIVE), mc.words_at(b + 48, mc.word(), 4, NATIVE)
    four0, four1, four2, four3 = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    both = tl.load(words + 20)
    u, m = ss.place_of(both & 0xFFFF)
    if FOLD:
        _put_floats(scale, both, row, N, step, mask)
        to = low + (step * N + row) * 16 + tl.arange(0, 16)[None, :]
        tl.store(to, mf.minima(b, "q2_k").to(tl.float16), mask=mask)
    else:
        tl.store(scale + 2 * (step * N + row), u, mask=mask)
        tl.store(scale + 2 * (step * N + row) + 1, (m - 1).to(tl.float32) * u, mask=mask)
    for p in tl.static_range(8):
        four = four0 if p // 2 == 0 else four1 if p // 2 == 1 else four2 if p // 2 == 2 else four3
        sc = mc.of_word(four, 16 * (p % 2)) & 15
        raw = (raw0 if p < 4 else raw1) >> 2 * (p % 4) & 0x03030303
        _put(codes, raw * sc, N, mask, p, 0, 1 if FOLD else 2, 256 if FOLD else 64, NEAR)
        if not FOLD:
            beside = mc.of_word(ss.besides(m, four, NATIVE), 16 * (p % 2)) & 255
            _put(codes, raw * beside, N, mask, p, 1, 2, 64, NEAR)
            if p % 2 == 0:
                m0, m1, m2, m3 = ss.minima_of(both, four, NATIVE)
                at = low + ((4 * step + p // 2) * N + row) * 4
                tl.store(at, -m0, mask=mask)
                tl.store(at + 1, -m1, mask=mask)
                tl.store(at + 2, -m2, mask=mask)
                tl.store(at + 3, -m3, mask=mask)


@jit
def _put_floats(scale, both, row, N, step, mask):
    """d and dmin of a block."""
    tl.store(scale + 2 * (step * N + row), half_bits(both), mask=mask)
    tl.store(scale + 2 * (step * N + row) + 1, half_bits(both >> 16), mask=mask)


@jit
def _open_q3(b, codes, scale, row, N, step, mask, FOLD: tl.constexpr, NATIVE: tl.constexpr, NEAR: tl.constexpr):
    raw0, raw1 = mc.words_at(b + 32, mc.word(), 2, NATIVE), mc.words_at(b + 64, mc.word(), 2, NATIVE)
    third = mc.words_at(b, mc.word(), 2, NATIVE)
    s0, s1, s2, s3 = ss.scale_words_of_q3(b)
    d = -half_at(b + 108)
    tl.store(scale + step * N + row, d if FOLD else ms.usable(d), mask=mask)
    for p in tl.static_range(8):
        sc = ss.scales_of_q3(s0, s1, s2, s3, p)
        words = mc.three_bits(raw0 if p < 4 else raw1, third, p, p % 4, sc)
        _put(codes, words, N, mask, p, 0, 1, 256 if FOLD else 32, NEAR)


@jit
def _open_q45(b, codes, scale, low, row, N, step, mask, FIVE: tl.constexpr, FOLD: tl.constexpr,
              NATIVE: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    both, first, second, last = tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)
    at: tl.constexpr = 48 if FIVE else 16  # pyright: ignore[reportAssignmentType]
    raw0, raw1 = mc.words_at(b + at, mc.word(), 4, NATIVE), mc.words_at(b + at + 32, mc.word(), 4, NATIVE)
    raw2, raw3 = mc.words_at(b + at + 64, mc.word(), 4, NATIVE), mc.words_at(b + at + 96, mc.word(), 4, NATIVE)
    fifth = mc.words_at(b + 16, mc.word(), 4, NATIVE) if FIVE else raw0
    if FOLD:
        _put_floats(scale, both, row, N, step, mask)
        mins = mf.minima(b, "q5_k" if FIVE else "q4_k").to(tl.float16)
        tl.store(low + (step * N + row) * 16 + tl.arange(0, 16)[None, :], mins, mask=mask)
    for p in tl.static_range(8):
        raw = (raw0 if p // 2 == 0 else raw1 if p // 2 == 1 else raw2 if p // 2 == 2 else raw3) >> 4 * (p % 2)
        code = raw & 0x0F0F0F0F
        if FIVE:
            code = code | (fifth >> p & 0x01010101) << 4
        sc, m = ss.pair_of_q45(first, second, last, p)
        if FOLD:
            _put_digits(codes, code, sc, 0, N, mask, p, 256, NEAR)
        else:
            to = 2 * ((8 * step + p) * N + row)
            tl.store(scale + to, ms.usable(ss.rounded(half_bits(both) * sc.to(tl.float32))), mask=mask)
            tl.store(scale + to + 1, -ss.rounded(half_bits(both >> 16) * m.to(tl.float32)), mask=mask)
            _put(codes, code, N, mask, p, 0, 1, 32, NEAR)


@jit
def _open_q6(b, codes, scale, row, N, step, mask, WIDTH: tl.constexpr, NATIVE: tl.constexpr, NEAR: tl.constexpr):
    raw0, raw1 = mc.words_at(b, mc.word(), 2, NATIVE), mc.words_at(b + 32, mc.word(), 2, NATIVE)
    raw2, raw3 = mc.words_at(b + 64, mc.word(), 2, NATIVE), mc.words_at(b + 96, mc.word(), 2, NATIVE)
    top0, top1 = mc.words_at(b + 128, mc.word(), 2, NATIVE), mc.words_at(b + 160, mc.word(), 2, NATIVE)
    s0, s1, s2, s3 = ss.two_at(b + 192), ss.two_at(b + 194), ss.two_at(b + 196), ss.two_at(b + 198)
    s4, s5, s6, s7 = ss.two_at(b + 200), ss.two_at(b + 202), ss.two_at(b + 204), ss.two_at(b + 206)
    tl.store(scale + step * N + row, half_at(b + 208), mask=mask)
    for p in tl.static_range(8):
        even, odd = raw0 if p < 4 else raw2, raw1 if p < 4 else raw3
        words = ((even if p % 2 == 0 else odd) >> 4 * (p % 4 // 2) & 0x0F0F0F0F) | (
            (top0 if p < 4 else top1) >> 2 * (p % 4) & 0x03030303) << 4  # fmt: skip
        near = s0 if p == 0 else s1 if p == 1 else s2 if p == 2 else s3
        far = s4 if p == 4 else s5 if p == 5 else s6 if p == 6 else s7
        both = near if p < 4 else far
        _put_digits(codes, words, mc.pick(both << 24 >> 24, both << 16 >> 24), 32, N, mask, p, WIDTH, NEAR)


@jit
def _open_32(w, codes, scale, row, N, step, steps, mask, FORMAT: tl.constexpr, FOUR: tl.constexpr,
             NATIVE: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Eight blocks of 32 values, four together where they are."""
    for p in tl.static_range(8):
        g = step * 8 + p
        if FOUR:
            there = mask & (step * 8 + p // 4 * 4 < steps)
            code, d = ms.codes_of_four(w, tl.minimum(step * 2 + p // 4, steps // 4 - 1), p % 4, FORMAT, NATIVE)
        else:
            there = mask & (g < steps)
            code, d = ms.codes_of_32(w, tl.minimum(g, steps - 1), FORMAT, NATIVE)
        _put(codes, code, N, there, p, 0, 1, 32, NEAR)
        tl.store(scale + g * N + row, ms.usable(d), mask=there)


@jit
def _open_nvfp4(w, codes, scale, row, N, step, steps, mask, NATIVE: tl.constexpr, NEAR: tl.constexpr):
    """Four blocks of 64 values; each half of 32 has a scale of its own, and so a product."""
    for p in tl.static_range(8):
        g = step * 8 + p
        there = mask & (g < steps)
        code, d0, d1 = ms.codes_of_nvfp4(w + tl.minimum(g // 2, steps // 2 - 1) * 36, p % 2, NATIVE)
        _put(codes, mc.pick(code, 0), N, there, p, 0, 2, 32, NEAR)
        _put(codes, mc.pick(0, code), N, there, p, 1, 2, 32, NEAR)
        tl.store(scale + 2 * (g * N + row), d0, mask=there)
        tl.store(scale + 2 * (g * N + row) + 1, d1, mask=there)


@jit(do_not_specialize=["first", "most", "n_slots", "kd"])
def _open(w, codes, scale, low, slots, first, most, n_slots, N, kd, w_slot, w_row, c_place, s_place, l_place,
          FORMAT: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, FOUR: tl.constexpr, ROWS: tl.constexpr,
          NATIVE: tl.constexpr, NEAR: tl.constexpr):  # fmt: skip
    """Program = (place and block of rows, 256 values). Loads come before stores, which else would part them."""
    blocks = tl.cdiv(N, ROWS)
    at, step = tl.program_id(0), tl.program_id(1)
    place = at // blocks
    slot = tl.load(slots + first + place, mask=first + place < most, other=-1)
    if (slot < 0) | (slot >= n_slots):
        return
    row = (at % blocks * ROWS + tl.arange(0, ROWS))[:, None]
    mask = row < N
    row = tl.minimum(row, N - 1)
    w += offset64(slot, w_slot) + offset64(row, w_row)
    scale += offset64(place, s_place)
    low += offset64(place, l_place)
    WIDTH: tl.constexpr = 256 if FOLD else 64 if FORMAT == "q2_k" else 32
    codes += offset64(place, c_place) + offset64(step, 256 * PARTS * N) + row * WIDTH
    b = w + step * (84 if FORMAT == "q2_k" else 110 if FORMAT == "q3_k" else 144 if FORMAT == "q4_k" else 176
                    if FORMAT == "q5_k" else 210 if FORMAT == "q6_k" else 0)  # fmt: skip
    if FORMAT == "q2_k":
        _open_q2(b, codes, scale, low, row, N, step, mask, FOLD, NATIVE, NEAR)
    elif FORMAT == "q3_k":
        _open_q3(b, codes, scale, row, N, step, mask, FOLD, NATIVE, NEAR)
    elif FORMAT == "q4_k" or FORMAT == "q5_k":
        _open_q45(b, codes, scale, low, row, N, step, mask, FORMAT == "q5_k", FOLD, NATIVE, NEAR)
    elif FORMAT == "q6_k":
        _open_q6(b, codes, scale, row, N, step, mask, WIDTH, NATIVE, NEAR)
    elif FORMAT == "nvfp4":
        _open_nvfp4(w, codes, scale, row, N, step, kd // 32, mask, NATIVE, NEAR)
    else:
        _open_32(w, codes, scale, row, N, step, kd // 32, mask, FORMAT, FOUR, NATIVE, NEAR)


def open_weights(w: Weight, folded: bool, at: Places, first: int, out: Opened) -> None:
    """Open the weights at places first, first + 1, .. into `out`, as many as it holds (Triton)."""
    on = backend.serve("open_weights", w=w.data, slots=at.slots, codes=out.codes)
    n, many = w.data.shape[1], min(len(out.codes), len(at.slots) - first)
    rows = min(ROWS, backend.next_power_of_2(n))
    backend.launch(
        _open,
        (many * -(-n // rows), -(-w.kd // 256)),
        *(w.data, out.codes, out.scale, out.low, at.slots, first, len(at.slots), len(w.data), n, w.kd),
        *(*w.data.stride()[:2], out.codes.stride(0), out.scale.stride(0), out.low.stride(0)),
        *(w.format, folded, out.form.parts, in_fours(w), rows, backend.has_dp4a(on)),
        WORDS_A_LANE.get(w.format, 2),
        device=w.data.device,
        num_warps=4,
    )
