"""`opened` for weights in planes: the same codes, scales and minima, byte for byte, of codes that lie in order already.

A word of a plane holds 32 / w neighbouring values, so a thread takes one word and writes its 8 / w words of codes side
by side: no word is loaded twice, none is cut out of two. Reads the planes once; nothing else multiplies planes, so
this serves any number of rows. nvfp4, which raw blocks have no opened form of, has two parts of 32 codes: its first and
its last sixteen, the others zero, each with its own scale.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import e8m0_halved, half_at, ue4m3_halved
from moe_lab_kernels.gemv.planar.steps import behind
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.mmq import codes as mc
from moe_lab_kernels.mmq import scales as ss
from moe_lab_kernels.mmq import steps as ms
from moe_lab_kernels.mmq.opened import ROWS, Opened
from moe_lab_kernels.mmq.places import Places
from moe_lab_kernels.primitives import half_bits, offset64


@jit
def _fields(plane, n, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Words of fields of WIDTH bits, [R, n, PER]: a byte each of four neighbours. plane: pointers [R, 1, 1] to a
    block's; n int32 [1, n, 1]: numbers of its words."""
    raw = tl.load(plane.to(tl.pointer_type(tl.int32), bitcast=True) + n)
    return raw >> WIDTH * tl.arange(0, PER)[None, None, :] & (1 << WIDTH) * 0x01010101 - 0x01010101


@jit
def _bits(plane, q, WIDTH: tl.constexpr):
    """The same for words q, int32 [1, n, k], of four values each."""
    raw = tl.load(plane.to(tl.pointer_type(tl.int32), bitcast=True) + q // (8 // WIDTH))
    return raw >> WIDTH * (q % (8 // WIDTH)) & (1 << WIDTH) * 0x01010101 - 0x01010101


@jit
def _put(codes, words, q, N, mask, part: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Words q of a block's rows, to int8 pointers [R, 1, 1]."""
    to = q // (WIDTH // 4) * (PARTS * (WIDTH // 4)) * N + part * (WIDTH // 4) * N + q % (WIDTH // 4)
    tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + to, words, mask=mask)


@jit
def _put_digits(codes, words, scale, offset: tl.constexpr, q, N, mask, WIDTH: tl.constexpr):
    high, low = mc.digits(words, scale, offset)
    _put(codes, high, q, N, mask, 0, 2, WIDTH)
    _put(codes, low, q, N, mask, 1, 2, WIDTH)


@jit
def _six(low, top, s):
    """Numbers s of a block's sixteen of six bits; low, top: byte pointers to its nibbles and tops."""
    nibble = tl.load(low + s // 8 * 4 + s % 4).to(tl.int32) >> s % 8 // 4 * 4 & 15
    return nibble | (tl.load(top + s % 4).to(tl.int32) >> s // 4 * 2 & 3) << 4


@jit
def _floats(at):
    both = tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True))
    return both, half_bits(both), half_bits(both >> 16)


@jit
def _open_q2(w, blocks, at, codes, scale, low, row, N, step, mask, FOLD: tl.constexpr):
    n = tl.arange(0, 16)[None, :, None]  # a word is a sub-block
    q = n * 4 + tl.arange(0, 4)[None, None, :]
    scales = behind(w, blocks, 64)
    code = _fields(w + offset64(at, 64), n, 2, 4)
    bytes_ = tl.load(scales + offset64(at, 16) + n).to(tl.int32)
    both, d, dmin = _floats(behind(scales, blocks, 16) + offset64(at, 4))
    sc, minimum = bytes_ & 15, bytes_ >> 4
    if FOLD:
        _put(codes, code * sc, q, N, mask, 0, 1, 256)
        tl.store(scale + 2 * (step * N + row), d, mask=mask)
        tl.store(scale + 2 * (step * N + row) + 1, dmin, mask=mask)
        tl.store(low + (step * N + row) * 16 + n, minimum.to(tl.float16), mask=mask)
    else:
        u, m = ss.place_of(both & 0xFFFF)
        _put(codes, code * sc, q, N, mask, 0, 2, 64)
        _put(codes, code * ss.beside(m, sc), q, N, mask, 1, 2, 64)
        tl.store(scale + 2 * (step * N + row), u, mask=mask)
        tl.store(scale + 2 * (step * N + row) + 1, (m - 1).to(tl.float32) * u, mask=mask)
        to = ((4 * step + n // 4) * N + row) * 4 + n % 4
        tl.store(low + to, -ss.rounded(dmin * minimum.to(tl.float32)), mask=mask)


@jit
def _open_q3(w, blocks, at, codes, scale, row, N, step, mask, FOLD: tl.constexpr):
    n = tl.arange(0, 16)[None, :, None]
    q = n * 4 + tl.arange(0, 4)[None, None, :]
    high = behind(w, blocks, 64)
    scales = behind(high, blocks, 32)
    tops = behind(scales, blocks, 8)
    code = _fields(w + offset64(at, 64), n, 2, 4) | _bits(high + offset64(at, 32), q, 1) << 2
    sc = _six(scales + offset64(at, 8), tops + offset64(at, 4), n) - 32
    d = -half_at(behind(tops, blocks, 4) + offset64(at, 2))
    turned = (sc * 0x04040404 - 0x7F7F7F80 - code * sc) ^ -0x7F7F7F80
    _put(codes, turned, q, N, mask, 0, 1, 256 if FOLD else 32)
    tl.store(scale + step * N + row, d if FOLD else ms.usable(d), mask=mask)


@jit
def _open_q45(w, blocks, at, codes, scale, low, row, N, step, mask, FIVE: tl.constexpr, FOLD: tl.constexpr):
    n = tl.arange(0, 32)[None, :, None]
    q, s = n * 2 + tl.arange(0, 2)[None, None, :], tl.arange(0, 8)[None, :, None]
    high = behind(w, blocks, 128)
    scales = behind(high, blocks, 32) if FIVE else high
    tops = behind(scales, blocks, 8)
    code = _fields(w + offset64(at, 128), n, 4, 2)
    if FIVE:
        code = code | _bits(high + offset64(at, 32), q, 1) << 4
    near, top = scales + offset64(at, 8), tops + offset64(at, 4)
    _, d, dmin = _floats(behind(tops, blocks, 4) + offset64(at, 4))
    if FOLD:
        i = tl.arange(0, 16)[None, :, None]
        minimum = _six(near, top, 8 + i // 2).to(tl.float16)
        _put_digits(codes, code, _six(near, top, n // 4), 0, q, N, mask, 256)
        tl.store(scale + 2 * (step * N + row), d, mask=mask)
        tl.store(scale + 2 * (step * N + row) + 1, dmin, mask=mask)
        tl.store(low + (step * N + row) * 16 + i, minimum, mask=mask)
    else:
        sc, m = _six(near, top, s).to(tl.float32), _six(near, top, 8 + s).to(tl.float32)
        _put(codes, code, q, N, mask, 0, 1, 32)
        to = 2 * ((8 * step + s) * N + row)
        tl.store(scale + to, ms.usable(ss.rounded(d * sc)), mask=mask)
        tl.store(scale + to + 1, -ss.rounded(dmin * m), mask=mask)


@jit
def _open_q6(w, blocks, at, codes, scale, row, N, step, mask, WIDTH: tl.constexpr):
    n = tl.arange(0, 32)[None, :, None]
    q = n * 2 + tl.arange(0, 2)[None, None, :]
    high = behind(w, blocks, 128)
    scales = behind(high, blocks, 64)
    code = _fields(w + offset64(at, 128), n, 4, 2) | _bits(high + offset64(at, 64), q, 2) << 4
    sc = tl.load((scales + offset64(at, 16)).to(tl.pointer_type(tl.int8), bitcast=True) + n // 2).to(tl.int32)
    d = half_at(behind(scales, blocks, 16) + offset64(at, 2))
    _put_digits(codes, code, sc, 32, q, N, mask, WIDTH)
    tl.store(scale + step * N + row, d, mask=mask)


@jit
def _open_32(w, blocks, first, last, codes, scale, row, N, step, mask, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """Eight blocks of 32 values, of which the row may have fewer; `first`, `last`: the row's, from `step` on."""
    BYTES: tl.constexpr = 32 if FORMAT == "q8_0" else 16  # pyright: ignore[reportAssignmentType]
    PER: tl.constexpr = 1 if FORMAT == "q8_0" else 2  # pyright: ignore[reportAssignmentType]
    n, g = tl.arange(0, 2 * BYTES)[None, :, None], tl.arange(0, 8)[None, :, None]
    q = n * PER + tl.arange(0, PER)[None, None, :]
    of_n, of_g = tl.minimum(first + n // (BYTES // 4), last), tl.minimum(first + g, last)
    behind_codes = behind(w, blocks, BYTES)
    words = (w + offset64(of_n, BYTES)).to(tl.pointer_type(tl.int32), bitcast=True) + n % (BYTES // 4)
    raw = tl.load(words)
    if FORMAT == "q8_0":
        code, d = raw, half_at(behind_codes + offset64(of_g, 2))
    else:
        raw = raw >> 4 * tl.arange(0, 2)[None, None, :] & 0x0F0F0F0F
        if FORMAT == "q4_0":
            code, d = raw << 4 ^ -0x7F7F7F80, half_at(behind_codes + offset64(of_g, 2)) * 0.0625
        else:
            code = mc.doubled_e2m1(raw, 0, NATIVE)
            d = e8m0_halved(tl.load(behind_codes + of_g).to(tl.int32))
    _put(codes, code, q, N, mask & (first + q // 8 <= last), 0, 1, 32)
    tl.store(scale + (8 * step + g) * N + row, ms.usable(d), mask=mask & (first + g <= last))


@jit
def _open_nvfp4(w, blocks, first, last, codes, scale, row, N, step, mask, NATIVE: tl.constexpr):
    """Four blocks of 64 values."""
    n, g = tl.arange(0, 32)[None, :, None], tl.arange(0, 8)[None, :, None]
    q = n * 2 + tl.arange(0, 2)[None, None, :]
    words = (w + offset64(tl.minimum(first + n // 8, last), 32)).to(tl.pointer_type(tl.int32), bitcast=True) + n % 8
    code = mc.doubled_e2m1(tl.load(words) >> 4 * tl.arange(0, 2)[None, None, :], 0, NATIVE)
    at = behind(w, blocks, 32) + offset64(tl.minimum(first + g // 2, last), 4) + g % 2 * 2
    near, far = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
    there, to = mask & (first + n // 8 <= last), 2 * ((8 * step + g) * N + row)
    _put(codes, tl.where(q % 8 < 4, code, 0), q, N, there, 0, 2, 32)
    _put(codes, tl.where(q % 8 < 4, 0, code), q, N, there, 1, 2, 32)
    tl.store(scale + to, ue4m3_halved(near), mask=mask & (first + g // 2 <= last))
    tl.store(scale + to + 1, ue4m3_halved(far), mask=mask & (first + g // 2 <= last))


@jit(do_not_specialize=["first", "most", "n_slots", "kd"])
def _open_planar(w, codes, scale, low, slots, first, most, n_slots, N, kd, w_slot, c_place, s_place, l_place,
                 FORMAT: tl.constexpr, FOLD: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
                 NATIVE: tl.constexpr):  # fmt: skip
    """Program = (place and block of rows, 256 values). Loads come before stores, which else would part them."""
    of_rows = tl.cdiv(N, ROWS)
    at, step = tl.program_id(0), tl.program_id(1)
    place = at // of_rows
    slot = tl.load(slots + first + place, mask=first + place < most, other=-1)
    if (slot < 0) | (slot >= n_slots):
        return
    row = (at % of_rows * ROWS + tl.arange(0, ROWS))[:, None, None]
    mask = row < N
    row = tl.minimum(row, N - 1)
    w += offset64(slot, w_slot)
    scale += offset64(place, s_place)
    low += offset64(place, l_place)
    WIDTH: tl.constexpr = 256 if FOLD else 64 if FORMAT == "q2_k" else 32
    codes += offset64(place, c_place) + offset64(step, 256 * PARTS * N) + row * WIDTH
    if FORMAT == "q8_0" or FORMAT == "q4_0" or FORMAT == "mxfp4":
        each = kd // 32
        _open_32(w, N * each, row * each + step * 8, row * each + each - 1, codes, scale, row, N, step, mask, FORMAT,
                 NATIVE)  # fmt: skip
    elif FORMAT == "nvfp4":
        each = kd // 64
        _open_nvfp4(w, N * each, row * each + step * 4, row * each + each - 1, codes, scale, row, N, step, mask, NATIVE)
    else:
        blocks, block = N * (kd // 256), row * (kd // 256) + step
        if FORMAT == "q2_k":
            _open_q2(w, blocks, block, codes, scale, low, row, N, step, mask, FOLD)
        elif FORMAT == "q3_k":
            _open_q3(w, blocks, block, codes, scale, row, N, step, mask, FOLD)
        elif FORMAT == "q4_k" or FORMAT == "q5_k":
            _open_q45(w, blocks, block, codes, scale, low, row, N, step, mask, FORMAT == "q5_k", FOLD)
        else:
            tl.static_assert(FORMAT == "q6_k")
            _open_q6(w, blocks, block, codes, scale, row, N, step, mask, WIDTH)


def open_planar(w: Weight, folded: bool, at: Places, first: int, out: Opened) -> None:
    """As `open_weights`, of a weight in layout "planar" (Triton)."""
    on = backend.serve("open_planar", w=w.data, slots=at.slots, codes=out.codes)
    n, many = w.rows, min(len(out.codes), len(at.slots) - first)
    rows = min(ROWS, backend.next_power_of_2(n))
    backend.launch(
        _open_planar,
        (many * -(-n // rows), -(-w.kd // 256)),
        *(w.data, out.codes, out.scale, out.low, at.slots, first, len(at.slots), len(w.data), n, w.kd),
        *(w.data.stride(0), out.codes.stride(0), out.scale.stride(0), out.low.stride(0)),
        *(w.format, folded, out.form.parts, rows, backend.has_dp4a(on)),
        device=w.data.device,
        num_warps=4,
    )
