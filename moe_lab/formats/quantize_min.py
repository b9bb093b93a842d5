"""Encoders of q2_k, q4_k and q5_k: w = d * scale * q - dmin * min. Bytes equal ggml's without importance matrix.

ggml's reference C code, built for plain x86-64, fuses no product into a sum (its library holds no FMA instruction), nor
does torch between operations: the bytes are equal on the CPU and on CUDA, for every finite input whose scales are
finite as halves.
"""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.formats.kquants_search import divide, half_bytes, nearest, nearest_clamped_, ordered_sum, take_columns_
from moe_lab.formats.quantize_pack import pack_scale_mins, pack_strided
from moe_lab.formats.quantize_steps import columns, quantize_blocks, rows
from moe_lab.formats.search_min import MinSearch, search_scale_min

Q2, Q4, Q5 = MinSearch(3, -0.5, 15, False), MinSearch(15, -1.0, 20, True), MinSearch(31, -0.5, 15, True)


def quantize_q2_k(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """84 bytes per 256 values: search on |x| * |error| per 16, scales and mins to 4 bits. LabError: Kd % 256."""
    return quantize_blocks(w, "q2_k", _encode_q2_k)


def quantize_q4_k(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """144 bytes per 256 values: search on (rms + |x|) error^2 per 32, scales and mins to 6 bits. LabError: Kd % 256."""
    return quantize_blocks(w, "q4_k", _encode_q4_k)


def quantize_q5_k(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """176 bytes per 256 values: as q4_k with codes 0..31 and fewer tries. LabError: Kd % 256."""
    return quantize_blocks(w, "q5_k", _encode_q5_k)


def to_steps(v: Float32[Tensor, "B subs"], top: int) -> tuple[Tensor, Tensor]:
    """Scales (or mins) as integers of the largest / top: uint8 bytes [B, subs] as C stores them, and the unit [B].

    C's maximum starts at 0 and its bytes keep an integer's low 8 bits.
    """
    peak = v.amax(-1, keepdim=True)
    peak = torch.where(peak > 0, peak, torch.zeros_like(peak))  # -0 becomes +0
    inverse = torch.where(peak > 0, divide(top, peak), torch.zeros_like(peak))
    return (nearest(inverse * v) & 255).to(torch.uint8), divide(peak, float(top)).squeeze(-1)


def final_codes(x: Tensor, unit: Tensor, min_unit: Tensor, sc: Tensor, m: Tensor, searched: Tensor, top: int) -> Tensor:
    """Codes [n, S] again from the rounded scales; columns whose scale became 0 keep the searched ones."""
    scale, offset = (unit[:, None] * sc.float()).flatten(), (min_unit[:, None] * m.float()).flatten()
    zero = scale == 0
    divisor = scale.masked_fill(zero, torch.inf)
    ends = ((x.amin(0) + offset) / divisor, (x.amax(0) + offset) / divisor)
    codes = nearest_clamped_((x + offset).div_(divisor), 0, top, *ends)
    return take_columns_(codes, searched, zero)


def _encode_q2_k(x: Tensor) -> Tensor:
    c = columns(x, 16)
    scale, low, searched = search_scale_min(c, c.abs(), Q2)
    (sc, d), (m, dmin) = (to_steps(v.view(-1, 16), 15) for v in (scale, low))
    both = sc | m << 4
    (d_bytes, d), (dmin_bytes, dmin) = half_bytes(d), half_bytes(dmin)
    codes = rows(final_codes(c, d, dmin, both & 15, both >> 4, searched, 3), 256)
    return torch.cat([both, pack_strided(codes, 2), d_bytes, dmin_bytes], -1)


def _encode_32(x: Tensor, how: MinSearch) -> tuple[Tensor, Tensor]:
    """What q4_k and q5_k share: the 16 bytes of scales, and the codes in element order."""
    c = columns(x, 32)
    # torch's fp32 sqrt on the CPU may be a vector library's, one unit off; rounded from fp64 it is C's
    rms = (ordered_sum(c * c) * (1 / 32)).double().sqrt_().float()
    scale, low, searched = search_scale_min(c, c.abs().add_(rms), how)
    (sc, d), (m, dmin) = (to_steps(v.view(-1, 8), 63) for v in (scale, low))
    sc, m = sc.clamp_(max=63), m.clamp_(max=63)
    (d_bytes, d), (dmin_bytes, dmin) = half_bytes(d), half_bytes(dmin)
    codes = final_codes(c, d, dmin, sc, m, searched, how.top)
    return torch.cat([d_bytes, dmin_bytes, pack_scale_mins(sc, m)], -1), rows(codes, 256)


def _encode_q4_k(x: Tensor) -> Tensor:
    head, codes = _encode_32(x, Q4)
    return torch.cat([head, pack_strided(codes, 4)], -1)


def _encode_q5_k(x: Tensor) -> Tensor:
    head, codes = _encode_32(x, Q5)
    return torch.cat([head, pack_strided(codes >> 4, 1), pack_strided(codes & 15, 4)], -1)
