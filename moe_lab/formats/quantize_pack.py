"""Codes in element order to packed bytes (layouts: moe_lab.formats.kquants and its neighbours)."""

import torch

from moe_lab._types import Tensor, UInt8


def pack_strided(codes: UInt8[Tensor, "*some n"], bits: int) -> UInt8[Tensor, "*some bytes"]:
    """Neighbouring bytes hold neighbouring elements l; a byte holds elements l, l + 32, l + 64, .. of `bits` each."""
    parts = codes.unflatten(-1, (-1, 8 // bits, 32)).unbind(-2)
    packed = parts[0].clone()
    for i, part in enumerate(parts[1:], 1):
        packed |= part << bits * i
    return packed.flatten(-2)


def pack_halves(codes: UInt8[Tensor, "B n"]) -> UInt8[Tensor, "B bytes"]:
    """Low nibbles the first half of each row, high nibbles the second."""
    low, high = codes.chunk(2, -1)
    return (high << 4).bitwise_or_(low)


def pack_scale_mins(sc: UInt8[Tensor, "B 8"], m: UInt8[Tensor, "B 8"]) -> UInt8[Tensor, "B 12"]:
    """Eight 6-bit scales and mins, q4_k and q5_k: four bytes each of the first halves with the tops of the others."""
    return torch.cat(
        [
            sc[:, :4] | sc[:, 4:] >> 4 << 6,
            m[:, :4] | m[:, 4:] >> 4 << 6,
            (sc[:, 4:] & 15) | m[:, 4:] << 4,
        ], -1,
    )  # fmt: skip


def pack_six_bits(sc: UInt8[Tensor, "B 16"]) -> UInt8[Tensor, "B 12"]:
    """Sixteen 6-bit scales, q3_k: eight bytes of low nibbles, four of two-bit tops."""
    t = (sc >> 4).unflatten(-1, (4, 4))
    tops = t[:, 0] | t[:, 1] << 2 | t[:, 2] << 4 | t[:, 3] << 6
    return torch.cat([(sc[:, :8] & 15) | sc[:, 8:] << 4, tops], -1)
