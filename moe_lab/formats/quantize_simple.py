"""Encoders of q4_0 and q8_0: one half scale per 32 values. Bytes equal ggml's reference."""

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.formats.kquants_search import divide, half_bytes, inverse_or_zero, largest_size, signed_peak
from moe_lab.formats.quantize_pack import pack_halves
from moe_lab.formats.quantize_steps import quantize_blocks, small_bytes

BELOW_HALF = 0.49999997  # the float below 0.5: added before truncation it rounds halves away and nothing else


def quantize_q4_0(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """18 bytes per 32 values: d = (signed peak) / -8, q = trunc(x * (1 / d) + 8.5) up to 15. LabError: Kd % 32.

    Where 1 / d overflows (peak below 2.4e-38) codes are 0, as x86 converts infinities, and the stored half of d is 0.
    """
    return quantize_blocks(w, "q4_0", _encode_q4_0)


def quantize_q8_0(w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
    """34 bytes per 32 values: d = amax / 127, q = x * (1 / d) with halves away from zero. LabError: Kd % 32.

    Where 1 / d overflows (amax below 3.7e-37) codes are 0, and the stored half of d is 0.
    """
    return quantize_blocks(w, "q8_0", _encode_q8_0)


def _encode_q4_0(x: Tensor) -> Tensor:
    d = divide(signed_peak(x, 1), -8.0)
    inverse = inverse_or_zero(d)
    lost = inverse.isinf()
    offset = torch.full_like(d, 8.5).masked_fill_(lost, 0.0)
    q = (x * inverse.masked_fill_(lost, 0.0)[:, None]).add_(offset[:, None]).clamp_(max=15.5)
    return torch.cat([half_bytes(d)[0], pack_halves(small_bytes(q))], -1)


def _encode_q8_0(x: Tensor) -> Tensor:
    d = divide(largest_size(x, 1), 127.0)
    inverse = inverse_or_zero(d)
    v = x * inverse.masked_fill_(inverse.isinf(), 0.0)[:, None]
    q = v.add_(torch.copysign(torch.full((), BELOW_HALF, device=x.device), v))
    return torch.cat([half_bytes(d)[0], small_bytes(q)], -1)
