"""GGUF's simple 32-value blocks. Now: Q8_0.

Layout (34 bytes, 8.5 bits a weight): d f16 @0, codes int8 @2..33; w = d * q.
"""

import torch

from moe_lab._types import Tensor
from moe_lab.formats.base import BlockFormat, IntegerForm, f16_at, f16_bytes
from moe_lab.formats.kquants_search import divide


def round_half_away(v: Tensor) -> Tensor:
    """C's roundf: nearest, halves away from zero. Exact, unlike floor(|v| + 0.5), which is wrong at 0.49999997."""
    t = v.trunc()
    return t + torch.copysign(((v - t).abs() >= 0.5).to(v.dtype), v)


class Q8_0(BlockFormat):
    """8-bit codes with one half scale per 32 values."""

    name, block, block_bytes, ggml_type = "q8_0", 32, 34, 8

    def dequantize(self, raw: Tensor) -> Tensor:
        """fp32 [.., Kd]: d * q."""
        b = self.blocks(raw)
        return (f16_at(b, 0) * b[..., 2:].contiguous().view(torch.int8).float()).flatten(-2)

    def quantize(self, w: Tensor) -> Tensor:
        """d = amax / 127; q = roundf(w * (1 / d)) with the fp32 d; a block too small to invert becomes zeros."""
        self.row_bytes(w.shape[-1])
        x = w.float().unflatten(-1, (-1, 32))
        d = divide(x.abs().amax(-1, keepdim=True), 127.0)
        inv = torch.where(d > 0, 1.0 / d, torch.zeros_like(d))
        # 1 / d overflows for a block maximum below 3.7e-37; fp16 stores d = 0 there, so the codes must be 0 as well.
        inv = torch.where(torch.isinf(inv), torch.zeros_like(inv), inv)
        q = round_half_away(x * inv).to(torch.int8)
        return torch.cat([f16_bytes(d), q.view(torch.uint8)], -1).flatten(-2)

    def integer_form(self, raw: Tensor) -> IntegerForm:
        """codes = q, one scale per 32."""
        b = self.blocks(raw)
        codes = b[..., 2:].contiguous().view(torch.int8).float().flatten(-2)
        return IntegerForm(codes, f16_at(b, 0).squeeze(-1), 32, None, None)


Q8_0_FORMAT = Q8_0()
