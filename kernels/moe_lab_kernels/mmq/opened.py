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
from moe_lab_kernels.gemv.decode import half_bits
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq import fold as mf
from moe_lab_kernels.mmq import steps as ms
from moe_lab_kernels.mmq.places import Places
from moe_lab_kernels.primitives import offset64

ROWS = 64


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
    form, n = FORMS[w.format, folded], w.data.shape[1]
    low = w.kd // 16 * n * (2 if folded else 4) if form.low else 0
    codes = w.kd * form.parts * n  # W is a multiple of 16
    return codes, -(-(w.kd // form.span * form.kinds * n * 4) // 16) * 16, -(-low // 16) * 16


def room_for(scratch: Tensor, w: Weight, folded: bool) -> Opened:
    """As many opened weights as `scratch` (uint8, flat, 16-byte aligned) holds, uninitialised."""
    form, n, sizes = FORMS[w.format, folded], w.data.shape[1], _sizes(w, folded)
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
def _store_words(at, words, mask):
    """int32 [R, W] to int8 pointers [R, 1] of rows."""
    to = at.to(tl.pointer_type(tl.int32), bitcast=True) + tl.arange(0, words.shape[1])[None, :]
    tl.store(to, words, mask=mask)


@jit
def _digit_codes(b, p: tl.constexpr, FORMAT: tl.constexpr):
    """Code times scale of 32 values, int32 [R, 32]."""
    i = tl.arange(0, 32)[None, :]
    if FORMAT == "q6_k":
        low = tl.load(b + 64 * (p // 4) + 32 * (p % 2) + i).to(tl.int32) >> (4 * (p % 4 // 2)) & 15
        top = tl.load(b + 128 + 32 * (p // 4) + i).to(tl.int32) >> (2 * (p % 4)) & 3
        scale = tl.load(b + 192 + 2 * p + i // 16).to(tl.int32) << 24 >> 24
        out = ((low | top << 4) - 32) * scale
    else:
        code = tl.load(b + (48 if FORMAT == "q5_k" else 16) + 32 * (p // 2) + i).to(tl.int32) >> (4 * (p % 2)) & 15
        if FORMAT == "q5_k":
            code = code | (tl.load(b + 16 + i).to(tl.int32) >> p & 1) << 4
        scale, _ = ms.scale_of_q45(b.to(tl.pointer_type(tl.int32), bitcast=True), p)
        out = code * scale
    return out


@jit
def _digits(codes, b, N, mask, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """A block's 256 values."""
    i = tl.arange(0, 32)[None, :]
    for p in tl.static_range(8):
        v = _digit_codes(b, p, FORMAT)
        low = (v << 24) >> 24
        at = codes + p * 32 // WIDTH * 2 * N * WIDTH + p * 32 % WIDTH + i
        tl.store(at, ((v - low) >> 8).to(tl.int8), mask=mask)
        tl.store(at + N * WIDTH, low.to(tl.int8), mask=mask)


@jit
def _open_q2(b, codes, scale, low, row, N, step, mask, NATIVE: tl.constexpr):
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    both = tl.load(words + 20)
    u, m = ms.place_of(both & 0xFFFF)
    dmin = half_bits(both >> 16)
    tl.store(scale + 2 * (step * N + row), u, mask=mask)
    tl.store(scale + 2 * (step * N + row) + 1, (m - 1).to(tl.float32) * u, mask=mask)
    for g in tl.static_range(4):
        four = tl.load(words + g)
        for half in tl.static_range(2):
            raw = mc.words_at(b + 16 + 32 * (g // 2), tl.arange(0, 8)[None, :], 4, NATIVE)
            raw = raw >> (4 * (g % 2) + 2 * half) & 0x03030303
            sc = ms.of_word(four, 16 * half) & 15
            at = codes + g * 2 * N * 64 + 32 * half
            _store_words(at, raw * sc, mask)
            _store_words(at + N * 64, raw * ms.beside(m, sc), mask)
        for i in tl.static_range(4):
            v = -ms.rounded(dmin * (four >> (8 * i + 4) & 15).to(tl.float32))
            tl.store(low + ((4 * step + g) * N + row) * 4 + i, v, mask=mask)


@jit
def _open_folded(b, codes, scale, low, row, N, step, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    if FORMAT == "q2_k" or FORMAT == "q3_k":
        _store_words(codes, mf.whole_block(b, FORMAT, NATIVE), mask)
    else:
        _digits(codes, b, N, mask, 256, FORMAT)
    if FORMAT == "q3_k" or FORMAT == "q6_k":
        d = -half_at(b + 108) if FORMAT == "q3_k" else half_at(b + 208)
        tl.store(scale + step * N + row, d, mask=mask)
    else:
        floats = tl.load(b.to(tl.pointer_type(tl.int32), bitcast=True) + (20 if FORMAT == "q2_k" else 0))
        tl.store(scale + 2 * (step * N + row), half_bits(floats), mask=mask)
        tl.store(scale + 2 * (step * N + row) + 1, half_bits(floats >> 16), mask=mask)
        to = low + (step * N + row) * 16 + tl.arange(0, 16)[None, :]
        tl.store(to, mf.minima(b, FORMAT).to(tl.float16), mask=mask)


@jit
def _open_block(b, codes, scale, row, N, step, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """256 values of a k-quant but q2_k, eight steps of 32."""
    if FORMAT == "q3_k":
        tl.store(scale + step * N + row, ms.usable(-half_at(b + 108)), mask=mask)
    elif FORMAT == "q6_k":
        tl.store(scale + step * N + row, half_at(b + 208), mask=mask)
        _digits(codes, b, N, mask, 32, FORMAT)
    for p in tl.static_range(0 if FORMAT == "q6_k" else 8):
        at = codes + p * N * 32
        if FORMAT == "q3_k":
            _store_words(at, ms.codes_of_q3(b, p // 4, p % 4, NATIVE), mask)
        else:
            _store_words(at, ms.codes_of_q45(b, p, FORMAT == "q5_k", NATIVE), mask)
            words = b.to(tl.pointer_type(tl.int32), bitcast=True)
            sc, m = ms.scale_of_q45(words, p)
            both, to = tl.load(words), 2 * ((8 * step + p) * N + row)
            tl.store(scale + to, ms.usable(ms.rounded(half_bits(both) * sc.to(tl.float32))), mask=mask)
            tl.store(scale + to + 1, -ms.rounded(half_bits(both >> 16) * m.to(tl.float32)), mask=mask)


@jit
def _open_32(w, codes, scale, row, N, step, steps, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Eight blocks of 32 values."""
    for p in tl.static_range(8):
        g = step * 8 + p
        code, d = ms.codes_of_32(w, tl.minimum(g, steps - 1), FORMAT, NATIVE)
        there = mask & (g < steps)
        _store_words(codes + p * N * 32, code, there)
        tl.store(scale + g * N + row, ms.usable(d), mask=there)


@jit(do_not_specialize=["first", "most", "n_slots", "kd"])
def _open(w, codes, scale, low, slots, first, most, n_slots, N, kd, w_slot, w_row, c_place, s_place, l_place,
          FORMAT: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
          NATIVE: tl.constexpr):  # fmt: skip
    """Program = (place and block of rows, 256 values)."""
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
    if FORMAT == "q8_0" or FORMAT == "q4_0" or FORMAT == "mxfp4":
        _open_32(w, codes, scale, row, N, step, kd // 32, mask, FORMAT, NATIVE)
    else:
        b = w + step * (84 if FORMAT == "q2_k" else 110 if FORMAT == "q3_k" else 144 if FORMAT == "q4_k" else 176
                        if FORMAT == "q5_k" else 210)  # fmt: skip
        if FOLD:
            _open_folded(b, codes, scale, low, row, N, step, mask, FORMAT, NATIVE)
        elif FORMAT == "q2_k":
            _open_q2(b, codes, scale, low, row, N, step, mask, NATIVE)
        else:
            _open_block(b, codes, scale, row, N, step, mask, FORMAT, NATIVE)


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
        *(w.format, folded, out.form.parts, rows, backend.has_dp4a(on)),
        device=w.data.device,
        num_warps=4,
    )
