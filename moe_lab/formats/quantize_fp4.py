"""Encoders of mxfp4 and nvfp4: E2M1 codes under an E8M0 or a UE4M3 scale. Bytes equal ggml's reference.

A code is sign * 8 + the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6, of two equally near the smaller; -0 is never written.
ggml finds it by comparing |value - x| over the table in fp32. That comparison is exact for neighbours (each difference
is exact within a factor of two), so counting the midpoints below |x| gives the same code while |x| < 2^22 scales; only
nvfp4 can be beyond (weights above 4e8, whose scale saturates), where ggml's differences drown: we give 7, the largest.
"""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.formats.kquants_search import divide, largest_size
from moe_lab.formats.quantize_pack import pack_halves
from moe_lab.formats.quantize_steps import quantize_blocks, small_bytes

MIDPOINTS = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)  # of the doubled values 0, 1, 2, 3, 4, 6, 8, 12


def quantize_mxfp4(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """17 bytes per 32 values: E = floor(log2 amax) + 125, E8M0 (0 for a zero block). LabError: Kd % 32.

    C keeps the low byte of E: a block maximum below 2^-125 wraps to 255, 254, .. with all codes 0. It decodes to 0 here
    and in ggml's C; a reader that takes E8M0 255 for NaN sees NaN.
    """
    return quantize_blocks(w, "mxfp4", _encode_mxfp4)


def quantize_nvfp4(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """36 bytes per 64 values: scale = ue4m3(amax / 6) per 16. LabError: Kd % 64.

    No tensor scale: values beyond 6 * 448 saturate, sub-blocks below 0.0059 (amax / 6 < 2^-10) become zeros.
    """
    return quantize_blocks(w, "nvfp4", _encode_nvfp4)


def fp4_codes(x: Float32[Tensor, "S n"], half_scale: Float32[Tensor, " S"]) -> UInt8[Tensor, "S n"]:
    """E2M1 codes 0..15 of x / (2 half_scale). half_scale 0 gives zeros."""
    size, code, above = x.abs(), torch.zeros_like(x), torch.empty_like(x)
    step = half_scale.masked_fill(half_scale == 0, torch.inf)[:, None]
    for midpoint in MIDPOINTS:  # floats 0 and 1, not bools: torch compares four times as fast on a CPU
        code += torch.gt(size, step * midpoint, out=above)
    negative = torch.lt(x, 0.0, out=above).mul_(code.clamp(max=1.0))
    return small_bytes(code.add_(negative, alpha=8))


def log2_floor(amax: Float32[Tensor, " S"]) -> Float32[Tensor, " S"]:
    """floor of log2 as C's float function rounds it: just below a power of two it gives the power's own exponent."""
    return amax.double().log2().float().floor()


def ue4m3_bytes(v: Float32[Tensor, " S"]) -> UInt8[Tensor, " S"]:
    """fp32 >= 0 to exponent (bias 7) and 3 mantissa bits, halves up; what rounds to 256 or more is 448 (0x7e).

    Below 2^-6: man * 2^-9, at most 7, so what would round to 8 stays 7.
    """
    bits = v.clamp(max=448.0).view(torch.int32)
    normal = ((bits >> 19) + 1 >> 1) - (120 << 3)  # exponent and mantissa with the next bit rounded up, rebiased
    normal.masked_fill_(normal >= 15 << 3, 0x7E)
    small = (v * 512.0 + 0.5).clamp_(max=7.0).to(torch.int32)
    return torch.where(bits >> 23 <= 127 - 7, small, normal).to(torch.uint8)


def ue4m3_halves(code: UInt8[Tensor, " S"]) -> Float32[Tensor, " S"]:
    """Half of what a scale byte 0..0x7e stands for, fp32."""
    exponent, mantissa = (code >> 3).to(torch.int32), (code & 7).float()
    power = (exponent.clamp(min=1) + (127 - 7 - 3 - 1) << 23).view(torch.float32)
    return torch.where(exponent == 0, mantissa, mantissa + 8.0) * power


def _encode_mxfp4(x: Tensor) -> Tensor:
    amax = largest_size(x, 1)
    e = torch.where(amax > 0, log2_floor(amax) + 125, torch.zeros_like(amax)).to(torch.int32) & 255
    half = torch.where(e < 2, 1 << 21 << e.clamp(max=1), e - 1 << 23).to(torch.int32).view(torch.float32)
    return torch.cat([e.to(torch.uint8)[:, None], pack_halves(fp4_codes(x, half))], -1)


def _encode_nvfp4(x: Tensor) -> Tensor:
    x = x.view(-1, 16)
    scale = ue4m3_bytes(divide(largest_size(x, 1), 6.0))
    packed = pack_halves(fp4_codes(x, ue4m3_halves(scale)))
    return torch.cat([scale.view(-1, 4), packed.view(-1, 32)], -1)
