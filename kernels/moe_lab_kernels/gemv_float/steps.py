"""The float GEMV's decode steps: what a lane takes of a weight row at once, as runs of eight numbers.

A *unit* is what one lane multiplies in one step: `runs` runs of eight consecutive values. Of floats it is eight values,
of formats with separate scales 16 bytes of a row (one load a lane, neighbouring lanes side by side), of NVFP4, whose 16
values have a scale, 8 bytes; of GGUF blocks it is the decoding kernels' unit (`dequantize.steps`). `WALKS` says which.
A format contributes one branch of `fetch` (what is loaded, a step ahead of its use) and of `numbers`; nothing else
knows it. A lane's sum becomes

    floats, blocks     acc + w_0 x_0 + w_1 x_1 + ..             w: the values of the decoding kernels
    separate scales    acc + scale * (c_0 x_0 + c_1 x_1 + ..)   c: the codes' numbers
    affine             acc + (scale * (c_0 x_0 + ..) + bias * (x_0 + x_1 + ..))
    of 4 bits          the dot is (c_0 x_0 + c_2 x_2 + ..) + (c_1 x_1 + c_3 x_3 + ..)

from left to right; a unit's part is multiplied by the activations' own scale where they have one, a row's sum by (or
over) the slot's global scale. Where every product is exact in fp32 (codes or halves times halves or e4m3) it is fused
into its addition, which changes no bit; elsewhere product and addition are rounded apart. (Products below 2^-126 are
not exact: bits are promised for activations of at least 2^-100, or 0.) Codes become fp16 bits two at a time, in whose
lowest places E2M1 is 2^-14 of its value and an integer 2^-24 of itself; one conversion a code makes fp32 of them, and
the row's sum is made whole at its end: 2.4 (E2M1), 1.6 (4-bit integers), 1.5 (bytes, E4M3) instructions a weight.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

from typing import NamedTuple

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import UNITS, runs_of
from moe_lab_kernels.primitives import offset64, to_f32
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.minifloat import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS


class Walk(NamedTuple):
    """How a row is cut into units: `block` values hold `per_block` units of `runs` runs of eight; run j of unit u of a
    block starts at its value 8 (runs period (u // period) + u % period + period j)."""

    block: int
    per_block: int
    runs: int
    period: int


DENSE_FORMATS = ("f32", "f16", "bf16")
WALKS: dict[str, Walk] = {
    **{f: Walk(8, 1, 1, 1) for f in DENSE_FORMATS},
    **{f: Walk(n, 1, n // 8, 1) for f, n in ((f, min(128 // v.code_bits, v.group)) for f, v in LAYOUTS.items())},
    **{f: Walk(BLOCKS[f].values, *units) for f, units in UNITS.items()},
}


def _pairs(pair: str, first: int, second: int) -> str:
    """PTX of two fp32 out of a pair of fp16."""
    return f"mov.b32 {{p, q}}, {pair}; cvt.f32.f16 ${first}, p; cvt.f32.f16 ${second}, q; "


def _nibbles_of() -> str:
    """PTX of the eight nibbles of $8, 2^-24 of each even one and 2^-20 of each odd one: codes i and i + 4 are a pair,
    and odd ones are masked where they lie."""
    body = "shr.b32 s, a, 8; "
    for i in range(4):
        mask = "0x00F000F0" if i % 2 else "0x000F000F"
        body += f"and.b32 t, {'s' if i >= 2 else 'a'}, {mask}; " + _pairs("t", i, i + 4)
    return "{ .reg .b32 a, s, t; .reg .b16 p, q; mov.b32 a, $8; " + body + "}"


def _bytes_of() -> str:
    """PTX of the eight bytes of $8 and $9, 2^-24 of each: codes i and i + 2 of a word are a pair."""
    body = ""
    for word in range(2):
        body += f"prmt.b32 t, {'ab'[word]}, 0, 0x4240; " + _pairs("t", 4 * word, 4 * word + 2)
        body += f"prmt.b32 t, {'ab'[word]}, 0, 0x4341; " + _pairs("t", 4 * word + 1, 4 * word + 3)
    return "{ .reg .b32 a, b, t; .reg .b16 p, q; mov.b32 a, $8; mov.b32 b, $9; " + body + "}"


def _e2m1_of() -> str:
    """PTX of the eight E2M1 codes of $8, 2^-14 of each: four at a time become the upper bytes of fp16."""
    body = "shl.b32 t, a, 1; shl.b32 s, a, 4; "
    for odd in range(2):
        body += "shr.b32 t, a, 3; mov.b32 s, a; " if odd else ""
        body += "and.b32 t, t, 0x0E0E0E0E; lop3.b32 t, s, 0x80808080, t, 0xEA; "
        body += "prmt.b32 s, t, 0, 0x1404; " + _pairs("s", odd, 2 + odd)
        body += "prmt.b32 s, t, 0, 0x3424; " + _pairs("s", 4 + odd, 6 + odd)
    return "{ .reg .b32 a, t, s; .reg .b16 p, q; mov.b32 a, $8; " + body + "}"


def _e4m3_of() -> str:
    """PTX of the eight E4M3 codes of $8 and $9."""
    body = ""
    for word in range(2):
        body += f"mov.b32 {{p, q}}, {'ab'[word]}; cvt.rn.f16x2.e4m3x2 t, p; cvt.rn.f16x2.e4m3x2 s, q; "
        body += _pairs("t", 4 * word, 4 * word + 1) + _pairs("s", 4 * word + 2, 4 * word + 3)
    return "{ .reg .b32 a, b, t, s; .reg .b16 p, q; mov.b32 a, $8; mov.b32 b, $9; " + body + "}"


def _e4m3_quad() -> str:
    """PTX of the four E4M3 codes of $4."""
    body = "mov.b32 {p, q}, $4; cvt.rn.f16x2.e4m3x2 t, p; cvt.rn.f16x2.e4m3x2 s, q; "
    return "{ .reg .b32 t, s; .reg .b16 p, q; " + body + _pairs("t", 0, 1) + _pairs("s", 2, 3) + "}"


_BF16_PAIR = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")
_E4M3_QUAD = tl.constexpr(_e4m3_quad())
_NIBBLES, _BYTES, _E2M1, _E4M3 = (tl.constexpr(v()) for v in (_nibbles_of, _bytes_of, _e2m1_of, _e4m3_of))
_EIGHT_OF_ONE, _EIGHT_OF_TWO = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r"), tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r")
CODE_PARTS = {"e2m1": 2.0**-14, "u4": 2.0**-24, "u8": 2.0**-24, "e4m3": 1.0}  # of a code is its number


@jit
def eight(v):
    """The eight parts of the last of four axes, in order. Nothing moves: a thread holds all eight."""
    A: tl.constexpr = v.shape[0]
    B: tl.constexpr = v.shape[1]
    even, odd = tl.split(tl.reshape(v, [A, B, 32, 4, 2]))
    v04, v26 = tl.split(tl.reshape(even, [A, B, 32, 2, 2]))
    v15, v37 = tl.split(tl.reshape(odd, [A, B, 32, 2, 2]))
    v0, v4 = tl.split(v04)
    v2, v6 = tl.split(v26)
    v1, v5 = tl.split(v15)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@jit
def chain(acc, w, x, EXACT: tl.constexpr):
    """acc + w_0 x_0 + w_1 x_1 + .. + w_7 x_7, from left to right."""
    for i in tl.static_range(8):
        acc = tl.fma(w[i], x[i], acc) if EXACT else acc + w[i] * x[i]
    return acc


@jit
def chain_of_four(acc, w, x, FIRST: tl.constexpr, EXACT: tl.constexpr):
    """The same over numbers FIRST, FIRST + 2, .. alone."""
    for i in tl.static_range(4):
        acc = tl.fma(w[FIRST + 2 * i], x[FIRST + 2 * i], acc) if EXACT else acc + w[FIRST + 2 * i] * x[FIRST + 2 * i]
    return acc


@jit
def run_start(u, j: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, RUNS: tl.constexpr,
              PERIOD: tl.constexpr):  # fmt: skip
    """The value at which run j of unit u of a row starts."""
    inside = u % PER_BLOCK
    return u // PER_BLOCK * BLOCK + 8 * (RUNS * PERIOD * (inside // PERIOD) + inside % PERIOD + PERIOD * j)


@jit
def widened(v, NATIVE: tl.constexpr):
    """fp32 of bf16, fp16, fp32 or E4M3 codes (uint8). Left to itself the compiler takes three instructions for two
    bf16, and a dozen for an E4M3."""
    if NATIVE and v.dtype == tl.bfloat16:
        out = tl.inline_asm_elementwise(_BF16_PAIR, "=r,=r,r", [v], dtype=tl.float32, is_pure=True, pack=2)
    elif NATIVE and v.dtype == tl.uint8:
        out = tl.inline_asm_elementwise(_E4M3_QUAD, "=r,=r,=r,=r,r", [v], dtype=tl.float32, is_pure=True, pack=4)
    elif v.dtype == tl.uint8:
        out = e4m3_to_f32(v)
    else:
        out = to_f32(v)
    return out


@jit
def x_run(x, start, there, NATIVE: tl.constexpr):
    """Eight activations from `start` on as fp32 [R, 1, 32] each; zeros where not `there`. x: pointers [R, 1, 1]."""
    at = (x + start)[:, :, :, None] + tl.arange(0, 8)[None, None, None, :]
    v = tl.load(tl.max_contiguous(at, [1, 1, 2, 8]), mask=there[:, :, :, None], other=0)
    return eight(widened(v, NATIVE))


@jit
def fetch(w, scale, second, n_row, u, s_row, g_row, FORMAT: tl.constexpr, CODE: tl.constexpr, SECOND: tl.constexpr,
          GROUP: tl.constexpr, SHARED: tl.constexpr, RUNS: tl.constexpr):  # fmt: skip
    """What unit u of each lane needs as it is stored: codes, scales, biases; zeros in the place of what there is not.

    w: pointers [1, B, 1] to rows of codes; scale, second: to the slot's scales and what else enters a value; n_row
    int32 [1, B, 1]; u int32 [1, 1, 32]. Blocks are loaded where they are decoded.
    """
    codes, stored, bias = 0, 0, 0
    if FORMAT == "f32" or FORMAT == "f16" or FORMAT == "bf16":
        at = (w + u * 8)[:, :, :, None] + tl.arange(0, 8)[None, None, None, :]
        codes = tl.load(tl.max_contiguous(at, [1, 1, 2, 8]))
    elif CODE != "":
        value = u * (8 * RUNS)
        if GROUP == 16:
            codes = tl.load(tl.max_contiguous((w + u * 8).to(tl.pointer_type(tl.int64), bitcast=True), [1, 1, 2]))
        else:
            at = (w + u * 16).to(tl.pointer_type(tl.int64), bitcast=True)
            at = at[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
            codes = tl.load(tl.max_contiguous(at, [1, 1, 2, 2]))
        stored = tl.load(tl.max_contiguous(scale + offset64(n_row // SHARED, s_row) + value // GROUP, [1, 1, 2]))
        if SECOND == "bias":
            bias = tl.load(tl.max_contiguous(second + offset64(n_row, g_row) + value // GROUP, [1, 1, 2]))
    return codes, stored, bias


@jit
def numbers(codes, runs, j: tl.constexpr, FORMAT: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr,
            NATIVE: tl.constexpr):  # fmt: skip
    """The eight numbers of run j as fp32 [1, B, 32] each: values of floats and blocks, else codes' numbers short of a
    power of two (`CODE_PARTS`; odd ones of u4 are 16 times that). codes: of `fetch`; runs: a block's values, where
    there are blocks."""
    if FORMAT == "f32" or FORMAT == "f16" or FORMAT == "bf16":
        out = eight(widened(codes, NATIVE))
    elif CODE == "":
        out = eight(runs[j])
    elif CODE == "e4m3" or CODE == "u8":
        near, far = tl.split(codes)
        out = _of_bytes(far if j == 1 else near, CODE, NATIVE)
    else:
        words = codes
        if GROUP != 16:
            near, far = tl.split(codes)
            words = far if j >= 2 else near
        word = (words >> (32 * (j % 2))).to(tl.int32)
        out = _of_nibbles(word, CODE, NATIVE)
    return out


@jit
def scaled(dot, sums, stored, bias, x_step, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr,
           X_SCALED: tl.constexpr):  # fmt: skip
    """What a unit adds to its lane's sum, as short of its number as its dot is: the dot scaled, and of affine codes the
    bias times `sums`, the sum of the unit's activations. x_step: the activations' own scales."""
    out = dot * _number_of(stored, SCALE)
    if SECOND == "bias":
        part: tl.constexpr = 1.0 if CODE == "e4m3" else (6.103515625e-05 if CODE == "e2m1" else 5.9604644775390625e-08)
        out = out + (sums * part) * to_f32(bias)
    return out * x_step if X_SCALED else out


@jit
def finished(acc, second, CODE: tl.constexpr, SECOND: tl.constexpr):
    """A row's sum made whole: `CODE_PARTS` taken off, and the slot's global scale put on."""
    whole: tl.constexpr = 1.0 if CODE == "" or CODE == "e4m3" else (16384.0 if CODE == "e2m1" else 16777216.0)
    out = acc * whole
    if SECOND == "multiplier":
        out = out * tl.load(second)
    elif SECOND == "divisor":
        out = tl.div_rn(out, tl.load(second))
    return out


@jit
def sum_on(sums, x):
    """sums + x_0 + .. + x_7, from left to right."""
    for i in tl.static_range(8):
        sums = sums + x[i]
    return sums


@jit
def block_runs(w, u, FORMAT: tl.constexpr, BYTES: tl.constexpr, PER_BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """The runs of unit u of a row of blocks, fp32 [1, B, 32, 8] each. BYTES: of a block."""
    of_block = (w + u // PER_BLOCK * BYTES)[:, :, :, None]
    return runs_of(of_block, (u % PER_BLOCK)[:, :, :, None], tl.arange(0, 8)[None, None, None, :], FORMAT, NATIVE)


@jit
def _number_of(stored, SCALE: tl.constexpr):
    """Stored scales as fp32."""
    if SCALE == "e4m3":
        out = e4m3_to_f32(stored)
    elif SCALE == "e8m0":
        out = e8m0_to_f32(stored)
    else:
        out = to_f32(stored)
    return out


@jit
def _of_bytes(words, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """The eight bytes of an int64, u8 (2^-24 of each) or E4M3."""
    low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    if NATIVE:
        how: tl.constexpr = _E4M3 if CODE == "e4m3" else _BYTES
        out = tl.inline_asm_elementwise(how, _EIGHT_OF_TWO, [low, high], dtype=(tl.float32,) * 8, is_pure=True, pack=1)
    else:
        out = (
            _of_byte(low, CODE), _of_byte(low >> 8, CODE), _of_byte(low >> 16, CODE), _of_byte(low >> 24, CODE),
            _of_byte(high, CODE), _of_byte(high >> 8, CODE), _of_byte(high >> 16, CODE), _of_byte(high >> 24, CODE),
        )  # fmt: skip
    return out


@jit
def _of_byte(word, CODE: tl.constexpr):
    if CODE == "e4m3":
        out = e4m3_to_f32((word & 255).to(tl.uint8))
    else:
        out = (word & 255).to(tl.float32) * 5.9604644775390625e-08
    return out


@jit
def _of_nibbles(word, CODE: tl.constexpr, NATIVE: tl.constexpr):
    """The eight nibbles of an int32, low ones first: u4 (2^-24 of even ones, 2^-20 of odd ones) or E2M1 (2^-14)."""
    if NATIVE:
        how: tl.constexpr = _E2M1 if CODE == "e2m1" else _NIBBLES
        out = tl.inline_asm_elementwise(how, _EIGHT_OF_ONE, [word], dtype=(tl.float32,) * 8, is_pure=True, pack=1)
    else:
        odd: tl.constexpr = 1.0 if CODE == "e2m1" else 16.0
        out = (
            _of_nibble(word, CODE), odd * _of_nibble(word >> 4, CODE), _of_nibble(word >> 8, CODE),
            odd * _of_nibble(word >> 12, CODE), _of_nibble(word >> 16, CODE), odd * _of_nibble(word >> 20, CODE),
            _of_nibble(word >> 24, CODE), odd * _of_nibble(word >> 28, CODE),
        )  # fmt: skip
    return out


@jit
def _of_nibble(word, CODE: tl.constexpr):
    if CODE == "e2m1":
        out = e2m1_to_f32(word & 15) * 6.103515625e-05
    else:
        out = (word & 15).to(tl.float32) * 5.9604644775390625e-08
    return out
