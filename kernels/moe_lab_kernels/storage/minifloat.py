"""The small floats of weight codes and scales, e4m3, e2m1 and e8m0: as device code, and the same values in torch.

e4m3 (fn): sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN, there is no infinity, the largest is
448 and the smallest step 2^-9. e2m1: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives; no NaN. e8m0: 2^(byte - 127), byte
0 is 2^-127 (an fp32 subnormal) and 255 is NaN. Knows nothing of blocks or formats; GGUF's own readings of these bytes
differ (its e8m0 255 is 2^127) and stand with its formats.
"""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab_kernels.backend import INTERPRETED, jit, tl

E4M3_MAX, E2M1_MAX = 448.0, 6.0
E4M3_EXPONENT = 2.0**120  # between the biases of fp32 and e4m3
E2M1_EXPONENT = 2.0**126
_INTERPRET, _TO_E4M3, _TO_E2M1 = tl.constexpr(INTERPRETED), tl.constexpr(E4M3_EXPONENT), tl.constexpr(E2M1_EXPONENT)
_E2M1_EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


@jit
def e4m3_to_f32(code):
    """uint8 codes -> fp32, exact. Interpreted by hand: its own cast goes through another library."""
    if _INTERPRET:
        c = code.to(tl.int32)
        bits = ((c & 0x7F) << 20) | ((c & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True) * _TO_E4M3
        out = tl.where((c & 0x7F) == 0x7F, float("nan"), value)
    else:
        out = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return out


@jit
def f32_to_e4m3(x):
    """fp32 -> uint8 codes: clamped to +-448 first, nearest even, NaN is 0x7f. Casts to fp8 overflow differently on
    every stack, so none sees a larger value; the interpreter's rounds some values otherwise: there it is integers."""
    held = tl.where(x == x, tl.minimum(tl.maximum(x, -448.0), 448.0), x)
    if _INTERPRET:
        bits = held.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        # below 2^-6 codes count steps of 2^-9; adding 2^14, whose last place that is, rounds to them
        small = (tl.abs(held) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)
        out = tl.where(x == x, code, 0x7F).to(tl.uint8)
    else:
        out = held.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return out


@jit
def e2m1_to_f32(code):
    """Codes 0..15 (int32) -> fp32, exact. One product puts copies of the code at bits 22 and 28."""
    bits = (code * 0x10400000) & (0x81C00000 - 0x100000000)
    return bits.to(tl.float32, bitcast=True) * _TO_E2M1


@jit
def e8m0_to_f32(code):
    """uint8 exponents -> fp32 powers of two, exact; 0 is subnormal, 255 is NaN."""
    c = code.to(tl.int32)
    bits = tl.where(c == 0, 0x00400000, c << 23)
    return tl.where(c == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


def e4m3_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """fp32 values of e4m3 codes."""
    return codes.contiguous().view(torch.float8_e4m3fn).float()


def e4m3_codes(x: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Nearest e4m3 codes (ties to even) of x clamped to +-448; NaN gives 0x7f."""
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(x.isnan(), 0x7F)


def e2m1_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """fp32 values of e2m1 codes 0..15 (sign * 8 + code)."""
    c = codes.int()
    return (((c & 7) << 22) | ((c & 8) << 28)).view(torch.float32) * E2M1_EXPONENT


def e2m1_codes(x: Float32[Tensor, "*shape"]) -> UInt8[Tensor, "*shape"]:
    """Nearest e2m1 codes (ties to the even code), saturating at +-6. There is no NaN code: a NaN gives 0."""
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for i, edge in enumerate(_E2M1_EDGES):
        code += size >= edge if i % 2 else size > edge  # an edge between codes i and i + 1 belongs to the even one
    return code | torch.signbit(x).masked_fill(x.isnan(), False).to(torch.uint8) << 3


def e8m0_values(codes: UInt8[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """fp32 powers of two of e8m0 bytes; 0 is 2^-127, 255 is NaN."""
    c = codes.int()
    bits = torch.where(c == 0, 0x00400000, c << 23)
    return torch.where(c == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
