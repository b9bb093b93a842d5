"""Plain floating point: f32, f16, bf16. One value a block; decoding is a view and a cast."""

import torch

from moe_lab._types import Tensor
from moe_lab.formats.base import BlockFormat


class DenseFormat(BlockFormat):
    """Little-endian floats of one torch dtype. `quantize` rounds to nearest even."""

    block = 1

    def __init__(self, name: str, dtype: torch.dtype, ggml_type: int) -> None:
        self.name, self.dtype, self.ggml_type = name, dtype, ggml_type
        self.block_bytes = dtype.itemsize

    def values(self, raw: Tensor) -> Tensor:
        """[.., row_bytes] uint8 -> [.., Kd] of the format's own dtype."""
        return raw.contiguous().view(self.dtype)

    def dequantize(self, raw: Tensor) -> Tensor:
        """fp32 [.., Kd]."""
        return self.values(raw).float()

    def quantize(self, w: Tensor) -> Tensor:
        """uint8 [.., row_bytes]."""
        return w.to(self.dtype).contiguous().view(torch.uint8)


F32 = DenseFormat("f32", torch.float32, 0)
F16 = DenseFormat("f16", torch.float16, 1)
BF16 = DenseFormat("bf16", torch.bfloat16, 30)
