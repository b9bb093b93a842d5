"""The decode step of the grouped GEMM: a few dozen consecutive values of some weight rows, as fp32.

A program walks Kd in steps; a step is cut into parts of as many values as one product takes, so that the bytes of codes
that several parts share are loaded once (the parts' loads have one address, and the compiler keeps one of them).
`STEPS` says how a format is cut. Sub-blocks inside a part take their scales by a comparison with the column, which the
compiler decides. Codes become floats under the exponent of 2^23: an OR and a subtraction.

Products and differences are those of `unpack.values_of` and `dequantize_scaled`, each rounded to fp32, so that after
one rounding more the weights are those of the decoding kernels, bit for bit.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from typing import NamedTuple

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.steps import doubled_e2m1, e8m0_halved, half_at, ue4m3_halved
from moe_lab_kernels.primitives import half_bits, to_f32
from moe_lab_kernels.storage.minifloat import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32


class Step(NamedTuple):
    """Values of a row that one turn of the loop takes, and of them those of one product."""

    values: int
    part: int


STEPS = {
    "bf16": Step(64, 64),
    "f16": Step(64, 64),
    "q2_k": Step(128, 32),
    "q3_k": Step(128, 32),
    "q4_k": Step(64, 32),
    "q5_k": Step(64, 32),
    "q6_k": Step(128, 32),
    **{f: Step(32, 32) for f in ("q8_0", "q4_0", "mxfp4", "nvfp4", "mxfp8", "nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss")},
    **{f"int{bits}_g{group}": Step(32, 32) for bits in (4, 8) for group in (32, 64, 128)},
    "fp8_block": Step(128, 64),
}


@jit
def block_values(w, step, j: tl.constexpr, lane, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [R, part]: part j of step `step`. w: uint8 pointers [R, 1] to raw rows; lane int32 [1, part]."""
    if FORMAT == "q2_k":
        out = _q2_k(w + step // 2 * 84, step % 2, j, lane, NATIVE)
    elif FORMAT == "q3_k":
        out = _q3_k(w + step // 2 * 110, step % 2, j, lane, NATIVE)
    elif FORMAT == "q4_k":
        out = _q45_k(w + step // 4 * 144, step % 4, j, lane, False)
    elif FORMAT == "q5_k":
        out = _q45_k(w + step // 4 * 176, step % 4, j, lane, True)
    elif FORMAT == "q6_k":
        out = _q6_k(w + step // 2 * 210, step % 2, j, lane)
    elif FORMAT == "q8_0":
        b = w + step * 34
        code = tl.load(b + 2 + lane).to(tl.int32)
        out = half_at(b) * _number(code ^ 128, 128)
    elif FORMAT == "q4_0":
        b = w + step * 18
        code = tl.load(b + 2 + lane % 16).to(tl.int32) >> (lane // 16 * 4)
        out = half_at(b) * _number(code & 15, 8)
    elif FORMAT == "mxfp4":
        b = w + step * 17
        code = tl.load(b + 1 + lane % 16).to(tl.int32) >> (lane // 16 * 4)
        out = e8m0_halved(tl.load(b).to(tl.int32)) * doubled_e2m1(code)
    else:
        tl.static_assert(FORMAT == "nvfp4")
        b, sub = w + step // 2 * 36, step % 2 * 2
        code = tl.load(b + 4 + 8 * sub + lane // 16 * 8 + lane % 8).to(tl.int32) >> (lane % 16 // 8 * 4)
        s0, s1 = tl.load(b + sub).to(tl.int32), tl.load(b + sub + 1).to(tl.int32)
        out = tl.where(lane < 16, ue4m3_halved(s0), ue4m3_halved(s1)) * doubled_e2m1(code)
    return out


@jit
def _number(code, less):
    """An int32 from 0 to 255, less `less`, as fp32."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + less)


@jit
def of_part(v, j: tl.constexpr):
    """[R, 2] from [R, 8]: sub-blocks 2 j and 2 j + 1."""
    R: tl.constexpr = v.shape[0]
    even, odd = tl.split(tl.permute(tl.reshape(v, [R, 2, 2, 2]), [0, 3, 1, 2]))
    half = odd if j % 2 else even
    low, high = tl.split(half)
    return high if j // 2 else low


@jit
def spread(v):
    """[R, 32] from [R, 2]."""
    R: tl.constexpr = v.shape[0]
    return tl.reshape(tl.broadcast_to(v[:, :, None], [R, 2, 16]), [R, 32])


def _move(mask: int) -> str:
    """Four bytes under one mask, each moved under the exponent of 2^23 at once."""
    moves = "".join(f"prmt.b32 ${i}, t, 0x4B000000, {0x7540 + i}; " for i in range(4))
    return "{ .reg .b32 t; and.b32 t, $4, " + hex(mask * 0x01010101) + "; " + moves + "}"


_MOVE_3, _MOVE_12, _MOVE_48, _MOVE_192 = (tl.constexpr(_move(mask)) for mask in (3, 12, 48, 192))


@jit
def _product(code, MASK: tl.constexpr, scale, NATIVE: tl.constexpr):
    """(uint8 & MASK) * scale, rounded once. (2^23 + c) * scale - 2^23 * scale in one fused step rounds c * scale alone,
    as the second product is exact; the plain twin subtracts first."""
    if not NATIVE:
        out = (code.to(tl.int32) & MASK).to(tl.float32) * scale
    else:
        move: tl.constexpr = (
            _MOVE_3 if MASK == 3 else (_MOVE_12 if MASK == 12 else (_MOVE_48 if MASK == 48 else _MOVE_192))
        )
        moved = tl.inline_asm_elementwise(move, "=r,=r,=r,=r,r", [code], dtype=tl.float32, is_pure=True, pack=4)
        out = tl.fma(moved, scale, scale * -8388608.0)
    return out


@jit
def _q2_k(b, half, j: tl.constexpr, lane, NATIVE: tl.constexpr):
    """Sub-blocks 8 half + 2 j and the next. Codes stay where they are in their byte, 4^j times too large, and the scale
    is as much smaller."""
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    code = tl.load(b + 16 + 32 * half + lane)
    both, sc = tl.load(words + 20), tl.load(b + 8 * half + tl.arange(0, 8)[None, :]).to(tl.int32)
    scale = half_bits(both) * (sc & 15).to(tl.float32)
    less = half_bits(both >> 16) * (sc >> 4).to(tl.float32)
    return _product(code, 3 << 2 * j, spread(of_part(scale, j) * 0.25**j), NATIVE) - spread(of_part(less, j))


def _join(j: int) -> str:
    """Four codes of q3_k at once: two bits of one word, a third of another, under the exponent of 2^23."""
    moves = "".join(f"prmt.b32 ${i}, t, 0x4B000000, {0x7540 + i}; " for i in range(4))
    low = f"shr.b32 t, $4, {2 * j}; and.b32 t, t, 0x03030303; "
    third = "shr.b32 u, $5, $6; and.b32 u, u, 0x01010101; shl.b32 u, u, 2; or.b32 t, t, u; "
    return "{ .reg .b32 t, u; " + low + third + moves + "}"


_JOIN_0, _JOIN_1, _JOIN_2, _JOIN_3 = (tl.constexpr(_join(j)) for j in range(4))
_JOIN_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r")


@jit
def _q3_k(b, half, j: tl.constexpr, lane, NATIVE: tl.constexpr):
    """The sixteen 6-bit scales: low nibbles of 8 bytes (first eight, then the others), the tops two bits each."""
    low, high, up = tl.load(b + 32 + 32 * half + lane), tl.load(b + lane), 4 * half
    if not NATIVE:
        number = _number(low.to(tl.int32) >> (2 * j) & 3 | (high.to(tl.int32) >> (up + j) & 1) << 2, 4)
    else:
        join: tl.constexpr = _JOIN_0 if j == 0 else (_JOIN_1 if j == 1 else (_JOIN_2 if j == 2 else _JOIN_3))
        moved = tl.inline_asm_elementwise(join, _JOIN_REGISTERS, [low, high, up + j], tl.float32, True, 4)
        number = moved - 8388612.0
    s, d = tl.arange(0, 8)[None, :], half_at(b + 108)
    n, t = tl.load(b + 96 + s).to(tl.int32) >> up, tl.load(b + 104 + s % 4).to(tl.int32) >> (up + s // 4 * 2)
    scale = d * ((n & 15 | (t & 3) << 4) - 32).to(tl.float32)
    return spread(of_part(scale, j)) * number


@jit
def _q45_k(b, g, j: tl.constexpr, lane, FIVE: tl.constexpr):
    """Sub-block 2 g + j; the first four of eight keep their six bits together."""
    words = b.to(tl.pointer_type(tl.int32), bitcast=True)
    both, up = tl.load(words), 16 * (g % 2) + 8 * j
    s, m, rest = tl.load(words + 1) >> up, tl.load(words + 2) >> up, tl.load(words + 3) >> up
    near = g < 2
    scale = tl.where(near, s & 63, rest & 15 | s >> 2 & 0x30).to(tl.float32)
    less = tl.where(near, m & 63, rest >> 4 & 15 | m >> 2 & 0x30).to(tl.float32)
    code = tl.load(b + (48 if FIVE else 16) + 32 * g + lane).to(tl.int32) >> (4 * j) & 15
    if FIVE:
        code = code | (tl.load(b + 16 + lane).to(tl.int32) >> (2 * g + j) & 1) << 4
    return half_bits(both) * scale * _number(code, 0) - half_bits(both >> 16) * less


@jit
def _q6_k(b, half, j: tl.constexpr, lane):
    """Values 32 j .. of a half: nibble j // 2 of the 32 bytes j % 2, two bits of the half's other 32."""
    code = tl.load(b + 64 * half + 32 * (j % 2) + lane).to(tl.int32) >> (4 * (j // 2)) & 15
    top = tl.load(b + 128 + 32 * half + lane).to(tl.int32) >> (2 * j) & 3
    at = (b + 192 + 8 * half).to(tl.pointer_type(tl.int8), bitcast=True) + tl.arange(0, 8)[None, :]
    scale = half_at(b + 208) * tl.load(at).to(tl.float32)
    return spread(of_part(scale, j)) * _number(code | top << 4, 32)


@jit
def scaled_values(w, scale, second, k, lane, Kd, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr,
                  GROUP: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """fp32 [R, part]: values k .. k + part - 1; what lies past Kd is anything. w, scale: pointers [R, 1] to rows of
    codes and scales; second: to rows of biases, or to the matrix's one multiplier or divisor. EVEN: no part is cut."""
    if CODE == "e2m1" or CODE == "u4":
        byte = k // 2 + tl.arange(0, 16)[None, :]  # of parts of 32 values
        pairs = tl.load(w + byte) if EVEN else tl.load(w + byte, mask=2 * byte < Kd, other=0)
        code = tl.join(pairs.to(tl.int32) & 15, pairs.to(tl.int32) >> 4)
        code = tl.reshape(code, [code.shape[0], 32])
        value = e2m1_to_f32(code) if CODE == "e2m1" else _number(code, 0)
    else:
        code = tl.load(w + k + lane) if EVEN else tl.load(w + k + lane, mask=k + lane < Kd, other=0)
        value = e4m3_to_f32(code) if CODE == "e4m3" else _number(code.to(tl.int32), 0)
    group = k // GROUP
    step = _scale(scale + group, SCALE)
    if GROUP == 16:
        step = tl.where(lane < 16, step, _scale(scale + tl.minimum(group + 1, Kd // GROUP - 1), SCALE))
    if SECOND == "multiplier":
        step = step * tl.load(second)
    elif SECOND == "divisor":
        step = tl.div_rn(step, tl.load(second))
    value = value * step
    if SECOND == "bias":
        value = value + to_f32(tl.load(second + group))
    return value


@jit
def _scale(at, SCALE: tl.constexpr):
    """Stored scales as fp32."""
    if SCALE == "e4m3":
        out = e4m3_to_f32(tl.load(at))
    elif SCALE == "e8m0":
        out = e8m0_to_f32(tl.load(at))
    else:
        out = to_f32(tl.load(at))
    return out
