"""Weights in planes for tests of kernels that read them: slots lie apart, amid bytes that would show in a result."""

import torch

from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.storage.planar import repack_ref

GAP = 48


def planes(raw: torch.Tensor, format: str) -> torch.Tensor:
    """Raw blocks [S, N, row_bytes] as planes [S, 1, bytes]; slots start at multiples of 16 bytes, GAP or more apart."""
    packed = repack_ref(raw.cpu(), format)
    step = -(-(packed.shape[1] + GAP) // 16) * 16
    whole = torch.full((len(packed) * step + 32,), 255, dtype=torch.uint8, device=raw.device)
    start = -whole.data_ptr() % 16
    room = whole[start:].as_strided((len(packed), 1, packed.shape[1]), (step, 1, 1))
    return room.copy_(packed[:, None])


def in_planes(w: Weight) -> Weight:
    """The same weights in planes."""
    return Weight(planes(w.data, w.format), w.format, w.kd, layout="planar")
