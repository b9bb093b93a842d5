"""GGUF k-quants: 256-value super-blocks of sixteen 16-value sub-blocks. Now: Q2_K and Q3_K.

Q2_K (84 bytes, 2.625 bits a weight): scales u8 @0..15 (low nibble scale, high nibble min), codes 2-bit @16..79,
d f16 @80, dmin f16 @82; w = d * sc * q - dmin * m.
Q3_K (110 bytes, 3.4375 bits): high bits @0..31, low 2 bits @32..95, sixteen 6-bit scales @96..107, d f16 @108;
w = d * (sc - 32) * (q - 4).
A code byte holds elements l, l+32, l+64, l+96 of its 128-half. Bit-equal with ggml both ways (tests/oracles).
"""

import torch

from moe_lab._types import Tensor
from moe_lab.formats.base import BlockFormat, IntegerForm, f16_at, f16_bytes
from moe_lab.formats.kquants_search import divide, search_scale_min, search_scale_symmetric

SUPER, SUB = 256, 16


def unpack_2bit(packed: Tensor) -> Tensor:
    """[.., 64] bytes -> [.., 256] codes 0..3 in element order."""
    halves = packed.unflatten(-1, (2, 1, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(4, 1)
    return ((halves >> shifts) & 3).flatten(-3)


def pack_2bit(codes: Tensor) -> Tensor:
    """[.., 256] codes 0..3 (uint8) -> [.., 64] bytes."""
    q = codes.unflatten(-1, (2, 4, 32))
    return (q[..., 0, :] | q[..., 1, :] << 2 | q[..., 2, :] << 4 | q[..., 3, :] << 6).flatten(-2)


def per_sub_block(values: Tensor) -> Tensor:
    """[.., 16] one a sub-block -> [.., 256] one an element."""
    return values.repeat_interleave(SUB, -1)


def round_codes(x: Tensor, step: Tensor) -> Tensor:
    """nearest-even x / step; elements whose step is 0 give 0 (the caller keeps their searched code)."""
    zero = step == 0
    return torch.round(x / torch.where(zero, torch.ones_like(step), step))


class Q2_K(BlockFormat):
    """2-bit codes, 4-bit scales and mins, one half scale for each kind a super-block."""

    name, block, block_bytes, ggml_type = "q2_k", SUPER, 84, 10

    def _parts(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        b = self.blocks(raw)
        scales = b[..., :16]
        return unpack_2bit(b[..., 16:80]), scales & 15, scales >> 4, f16_at(b, 80), f16_at(b, 82)

    def dequantize(self, raw: Tensor) -> Tensor:
        """fp32 [.., Kd]: (d * sc) * q - (dmin * m), each product rounded to fp32 as ggml does."""
        q, sc, m, d, dmin = self._parts(raw)
        return (per_sub_block(d * sc.float()) * q.float() - per_sub_block(dmin * m.float())).flatten(-2)

    def integer_form(self, raw: Tensor) -> IntegerForm:
        """codes = sc * q (0..45), mins = m a sub-block."""
        q, sc, m, d, dmin = self._parts(raw)
        codes = (per_sub_block(sc) * q).float().flatten(-2)
        return IntegerForm(codes, d.squeeze(-1), SUPER, m.float().flatten(-2), dmin.squeeze(-1))

    def quantize(self, w: Tensor) -> Tensor:
        """Least-absolute-error search a sub-block, scales and mins to 4 bits, codes again with the rounded scales."""
        self.row_bytes(w.shape[-1])
        x = w.float().unflatten(-1, (-1, SUPER))
        shape = (*x.shape[:-1], SUB)
        scale, low, searched = search_scale_min(x.reshape(-1, SUB), 3)
        scale, low = scale.view(shape), low.view(shape)

        def nibbles(v: Tensor) -> tuple[Tensor, Tensor]:
            # C starts its maximum at 0, so negative scales never win, and codes them modulo 256 (they do not occur)
            top = v.amax(-1, keepdim=True).clamp(min=0.0)
            some = top > 0
            inverse = torch.where(
                some, divide(15.0, torch.where(some, top, torch.ones_like(top))), torch.zeros_like(top)
            )
            return torch.round(inverse * v).to(torch.uint8), torch.where(some, divide(top, 15.0), torch.zeros_like(top))

        (sc, d), (m, dmin) = nibbles(scale), nibbles(low)
        d16, dmin16 = f16_bytes(d), f16_bytes(dmin)
        step = per_sub_block(d.half().float() * sc.float())
        offset = per_sub_block(dmin.half().float() * m.float())
        codes = round_codes(x + offset, step).clamp(0, 3).to(torch.uint8)
        codes = torch.where(step == 0, searched.view(x.shape).to(torch.uint8), codes)
        return torch.cat([sc | m << 4, pack_2bit(codes), d16, dmin16], -1).flatten(-2)


class Q3_K(BlockFormat):
    """3-bit codes (two low bits and a mask bit), 6-bit signed scales, one half scale a super-block."""

    name, block, block_bytes, ggml_type = "q3_k", SUPER, 110, 11

    def _parts(self, raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b = self.blocks(raw)
        bits = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
        high = ((b[..., None, :32] >> bits) & 1).flatten(-2)
        codes = unpack_2bit(b[..., 32:96]).to(torch.int8) + (high.to(torch.int8) << 2) - 4
        s = b[..., 96:108]
        low = torch.cat([s[..., :8] & 15, s[..., :8] >> 4], -1)
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=raw.device).view(4, 1)
        top = ((s[..., None, 8:12] >> shifts) & 3).flatten(-2)
        return codes, (low | top << 4).to(torch.int8) - 32, f16_at(b, 108)

    def dequantize(self, raw: Tensor) -> Tensor:
        """fp32 [.., Kd]: (d * sc) * q."""
        q, sc, d = self._parts(raw)
        return (per_sub_block(d * sc.float()) * q.float()).flatten(-2)

    def integer_form(self, raw: Tensor) -> IntegerForm:
        """codes = sc * q (-124..128)."""
        q, sc, d = self._parts(raw)
        return IntegerForm((per_sub_block(sc.float()) * q.float()).flatten(-2), d.squeeze(-1), SUPER, None, None)

    def quantize(self, w: Tensor) -> Tensor:
        """x^2-weighted search a sub-block, scales to 6 bits against the largest, codes again with rounded scales."""
        self.row_bytes(w.shape[-1])
        x = w.float().unflatten(-1, (-1, SUPER))
        scale, searched = search_scale_symmetric(x.reshape(-1, SUB), 4)
        scale = scale.view(*x.shape[:-1], SUB)
        peak = scale.gather(-1, scale.abs().argmax(-1, keepdim=True))
        some = peak != 0
        inverse = torch.where(
            some, divide(-32.0, torch.where(some, peak, torch.ones_like(peak))), torch.zeros_like(peak)
        )
        stored = torch.where(some, torch.round(inverse * scale).clamp(-32, 31) + 32, torch.zeros_like(scale))
        sc = stored.to(torch.uint8)
        d = torch.where(some, 1.0 / torch.where(some, inverse, torch.ones_like(inverse)), torch.zeros_like(inverse))
        step = per_sub_block(d.half().float() * (stored - 32.0))
        codes = (round_codes(x, step).clamp(-4, 3) + 4).to(torch.uint8)
        codes = torch.where(step == 0, searched.view(x.shape).to(torch.uint8), codes)
        return torch.cat([self._mask(codes), pack_2bit(codes & 3), self._pack_scales(sc), f16_bytes(d)], -1).flatten(-2)

    @staticmethod
    def _mask(codes: Tensor) -> Tensor:
        """Bit b of mask byte l is the third bit of element 32 b + l."""
        high = (codes >> 2).unflatten(-1, (8, 32))
        mask = high[..., 0, :]
        for bit in range(1, 8):
            mask = mask | high[..., bit, :] << bit
        return mask

    @staticmethod
    def _pack_scales(sc: Tensor) -> Tensor:
        """Sixteen 6-bit values -> 12 bytes: eight of low nibbles, four of two-bit tops."""
        low = (sc[..., :8] & 15) | (sc[..., 8:] & 15) << 4
        t = (sc >> 4).unflatten(-1, (4, 4))
        return torch.cat([low, t[..., 0, :] | t[..., 1, :] << 2 | t[..., 2, :] << 4 | t[..., 3, :] << 6], -1)


Q2_K_FORMAT, Q3_K_FORMAT = Q2_K(), Q3_K()
