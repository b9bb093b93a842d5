"""NVFP4 and MXFP4 weights in the plain layout, transposed, or both at once, and what each costs in memory.

Plain rows suit a product with few rows of activations (one weight row is one contiguous read); columns side by side
suit wide tiles over N. Both forms hold the same bytes in another order, so turning one into the other is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_lab._types import Float32, Tensor
from moe_lab.errors import LabError
from moe_lab.formats.quant_tensor import QuantTensor
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize.transposed import dequantize_transposed, dequantize_transposed_ref

FORMATS = ("nvfp4_modelopt", "nvfp4_ct", "mxfp4_oss")
LAYOUTS = ("plain", "transposed")


@dataclass(frozen=True, slots=True, eq=False)
class TransposedTensor:
    """Codes uint8 [.., Kd / 2, N] (byte j: elements 2j, low nibble, and 2j + 1), scales uint8 [.., Kd / group, N],
    global_scale fp32 [..] or None. `shape` stays the logical [.., N, Kd]."""

    data: Tensor
    scales: Tensor
    global_scale: Tensor | None
    format: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, q: QuantTensor) -> "TransposedTensor":
        """The same weights, transposed. LabError for a format without this layout."""
        if q.format not in FORMATS or q.scales is None:
            raise LabError(f"{q.format} has no transposed layout; formats that have: {', '.join(FORMATS)}.")
        return cls(q.data.mT.contiguous(), q.scales.mT.contiguous(), q.global_scale, q.format, q.shape)

    def plain(self) -> QuantTensor:
        """Back to the plain layout, byte for byte."""
        parts = (self.data.mT.contiguous(), self.scales.mT.contiguous(), self.global_scale)
        return QuantTensor.from_parts(*parts, self.format, self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        held = (self.data, self.scales, *(() if self.global_scale is None else (self.global_scale,)))
        return sum(t.numel() * t.element_size() for t in held)

    def columns(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [.., Kd, N], as the layout has them: the operand of a product x [T, Kd] @ columns."""
        op = dequantize_transposed_ref if backend.backend_of(self.data) == "torch" else dequantize_transposed
        return op(self.data, self.scales, self.format, second=self.global_scale, out_dtype=dtype)

    def dequantize(self) -> Float32[Tensor, "*lead N Kd"]:
        """fp32 values of `.shape`: a view of `columns`."""
        return self.columns().mT


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """One weight in the layouts that are kept in memory: plain, transposed or both."""

    plain: QuantTensor | None
    transposed: TransposedTensor | None

    @classmethod
    def of(cls, q: QuantTensor, layouts: Sequence[str] = ("plain",)) -> "Resident":
        """Keep `q` in `layouts`, any of "plain", "transposed". LabError for others, or none."""
        unknown = sorted(set(layouts) - set(LAYOUTS))
        if unknown or not layouts:
            raise LabError(f"layouts is {list(layouts)}; wanted one or both of {', '.join(LAYOUTS)}.")
        turned = TransposedTensor.of(q) if "transposed" in layouts else None
        return cls(q if "plain" in layouts else None, turned)

    @property
    def nbytes_by_layout(self) -> dict[str, int]:
        """Bytes of each layout held."""
        held = {"plain": self.plain, "transposed": self.transposed}
        return {name: t.nbytes for name, t in held.items() if t is not None}

    @property
    def nbytes(self) -> int:
        """Bytes in memory: twice a weight's where both layouts are held."""
        return sum(self.nbytes_by_layout.values())
