"""Encoders of q3_k and q6_k: w = d * scale * q. Bytes equal ggml's without importance matrix.

As in moe_lab.formats.quantize_min no product is fused into a sum on either side, so CPU and CUDA write the same bytes.
"""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.formats.kquants_search import (
    divide,
    half_bytes,
    inverse_or_zero,
    nearest,
    nearest_clamped_,
    signed_peak,
    take_columns_,
)
from moe_lab.formats.quantize_pack import pack_six_bits, pack_strided
from moe_lab.formats.quantize_steps import columns, quantize_blocks, rows
from moe_lab.formats.search_symmetric import GROUP_EPS, search_by_inverse, search_by_moves


def quantize_q3_k(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """110 bytes per 256 values: codes -4..3 moved one by one, scales to 6 bits of the largest. LabError: Kd % 256."""
    return quantize_blocks(w, "q3_k", _encode_q3_k)


def quantize_q6_k(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """210 bytes per 256 values: codes -32..31 from 19 inverse scales, scales to 8 bits. LabError: Kd % 256."""
    return quantize_blocks(w, "q6_k", _encode_q6_k)


def to_signed_steps(scale: Float32[Tensor, "B 16"], top: int) -> tuple[Tensor, Tensor]:
    """Scales as integers -top..top - 1 of -(signed largest) / top: int32 [B, 16], and the unit [B] (0: all are 0)."""
    peak = signed_peak(scale, 1)
    inverse = torch.where(peak == 0, torch.zeros_like(peak), divide(-top, peak))
    codes = nearest(inverse[:, None] * scale).clamp_(-top, top - 1)
    return codes, inverse_or_zero(inverse)


def final_codes(x: Tensor, unit: Tensor, sc: Tensor, searched: Tensor, nmax: int) -> Tensor:
    """Codes [n, S], nmax added, from the rounded scales; columns whose scale became 0 keep the searched ones."""
    scale = (unit[:, None] * sc.float()).flatten()
    zero = scale == 0
    divisor = scale.masked_fill(zero, torch.inf)
    ends = (x.amin(0) / divisor, x.amax(0) / divisor)
    codes = nearest_clamped_(x / divisor, -nmax, nmax - 1, *ends).add_(nmax)
    return take_columns_(codes, searched, zero)


def _encode_q3_k(x: Tensor) -> Tensor:
    c = columns(x, 16)
    scale, searched = search_by_moves(c)
    sc, d = to_signed_steps(scale.view(-1, 16), 32)
    d_bytes, d = half_bytes(d)
    # without a largest scale C stores bytes 0, which read as -32: times d = 0 either way
    stored = torch.where((scale.view(-1, 16) == 0).all(-1, keepdim=True), torch.zeros_like(sc), sc + 32)
    codes = rows(final_codes(c, d, sc, searched, 4), 256)
    return torch.cat(
        [pack_strided(codes >> 2, 1), pack_strided(codes & 3, 2), pack_six_bits(stored.to(torch.uint8)), d_bytes], -1
    )


def _encode_q6_k(x: Tensor) -> Tensor:
    c = columns(x, 16)
    scale, searched = search_by_inverse(c)
    sc, d = to_signed_steps(scale.view(-1, 16), 128)
    d_bytes, d = half_bytes(d)
    codes = rows(final_codes(c, d, sc, searched, 32), 256)
    out = torch.cat(
        [pack_strided_q6(codes & 15), pack_strided(codes >> 4, 2), sc.to(torch.int8).view(torch.uint8), d_bytes], -1
    )
    return out.masked_fill_((scale.view(-1, 16).abs() < GROUP_EPS).all(-1, keepdim=True), 0)


def pack_strided_q6(low: UInt8[Tensor, "B 256"]) -> UInt8[Tensor, "B 128"]:
    """Low nibbles of q6_k: byte l of a 128-half holds elements l and l + 64, l < 64."""
    halves = low.view(-1, 2, 2, 64)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
