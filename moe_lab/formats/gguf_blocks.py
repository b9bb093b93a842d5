"""What GGUF's block formats share: sizes, decoding and integer view come from `moe_lab_kernels`, one truth for all.

A format of this kind is its name, ggml's number and, where it can be written, its encoder.
"""

from collections.abc import Callable

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats.base import BlockFormat, IntegerForm
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize.dequantize import dequantize, dequantize_ref
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.unpack import unpack_ref

MIN_GROUP = 16  # values a minimum of an IntegerForm is for
QUANTISABLE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "nvfp4")


class GgufBlocks(BlockFormat):
    """A format by its name in `moe_lab_kernels.storage.blocks.BLOCKS`."""

    def __init__(
        self,
        name: str,
        ggml_type: int,
        encode: Callable[[Tensor], Tensor] | None = None,
        largest: float = float("inf"),
    ) -> None:
        """`largest`: the largest size of a weight that the format's scales hold, beyond which its encoder saturates."""
        self.name, self.ggml_type, self._encode, self.largest = name, ggml_type, encode, largest
        self.block, self.block_bytes = BLOCKS[name].values, BLOCKS[name].bytes

    def dequantize(self, raw: Tensor) -> Tensor:
        """fp32 [.., Kd]: (d * scale) * code - dmin * min, each product rounded to fp32 as ggml does.

        The kernel on CUDA, torch elsewhere: the same bits.
        """
        if backend.backend_of(raw) != "cuda":
            return dequantize_ref(raw, self.name)
        at_home = raw.is_contiguous() and raw.data_ptr() % BLOCKS[self.name].alignment == 0
        return dequantize(
            raw if at_home else raw.clone(memory_format=torch.contiguous_format), self.name, torch.float32
        )

    def integer_form(self, raw: Tensor) -> IntegerForm | None:
        """codes = scale * code, mins one for each 16 values."""
        u = unpack_ref(raw, self.name)
        codes = u.codes.float()
        if u.scales is not None:
            codes = codes.unflatten(-1, (u.scales.shape[-1], -1)).mul_(u.scales.unsqueeze(-1)).flatten(-2)
        group = self.block // u.d.shape[-1]
        if u.dmin is None:
            return IntegerForm(codes.flatten(-2), u.d.flatten(-2), group, None, None)
        shape = (*codes.shape[:-1], self.block // MIN_GROUP)
        if u.mins is None:
            mins = torch.ones(shape, device=raw.device)
        else:
            mins = u.mins.float().repeat_interleave(shape[-1] // u.mins.shape[-1], -1)
        return IntegerForm(codes.flatten(-2), u.d.flatten(-2), group, mins.flatten(-2), u.dmin.flatten(-2))

    def quantize(self, w: Tensor) -> Tensor:
        """uint8 [.., row_bytes], the bytes of ggml's reference quantiser without importance matrix (see the encoder).
        LabError: a format that is only decoded has no encoder."""
        if self._encode is None:
            others = ", ".join(QUANTISABLE)
            raise LabError(f"{self.name} is only decoded; quantise to one of {others}, or open a file that holds it.")
        return self._encode(w)


class TableBlocks(GgufBlocks):
    """Codes from a table of uneven values: no arm multiplies them as integers."""

    def integer_form(self, raw: Tensor) -> None:
        """None."""
        return None
