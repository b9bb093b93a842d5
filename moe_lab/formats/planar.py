"""A quantised tensor whose codes, scales and floats lie apart: the planar form of block formats, for kernels to come.

The same bits as the raw blocks in another order, in the same bytes (up to 15 more a plane): `Planar.from_raw(q)` and
`.to_raw()` are inverse to each other. What lies where, and why: `moe_lab_kernels.storage.planar_layout`.
"""

from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats.quant_tensor import QuantTensor
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize import planar as dequantize_planar
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import planes_of


@dataclass(frozen=True, slots=True, eq=False)
class Planar:
    """`data` uint8 [.., bytes]: one buffer a matrix; `shape` the logical shape [.., N, Kd]; `format` as the raw form's.

    Indexing slices leading axes. Work on CUDA, and in the interpreter, is the kernels'; elsewhere torch's.
    """

    data: Tensor
    format: str
    shape: tuple[int, ...]

    @classmethod
    def from_raw(cls, q: QuantTensor) -> "Planar":
        """The planar form of a raw tensor. LabError where its format has none."""
        if len(q.shape) < 2:
            raise LabError(f"a planar tensor is a matrix or a stack of them, got shape {q.shape}.")
        repack = planar.repack_ref if backend.backend_of(q.data) == "torch" else planar.repack
        return cls(repack(q.data.contiguous(), q.format), q.format, q.shape)

    def to_raw(self) -> QuantTensor:
        """The raw blocks again, bit for bit."""
        restore = planar.restore_ref if backend.backend_of(self.data) == "torch" else planar.restore
        return QuantTensor.from_bytes(restore(self.data, self.format, *self.shape[-2:]), self.format, self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of `.shape`: those of the raw form, rounded once to `dtype` (fp32, fp16 or bf16)."""
        n, kd = self.shape[-2:]
        if backend.backend_of(self.data) == "torch":
            return dequantize_planar.dequantize_planar_ref(self.data, self.format, n, kd, dtype)
        return dequantize_planar.dequantize_planar(self.data, self.format, n, kd, dtype)

    def plane(self, name: str) -> Tensor:
        """A plane's bytes, uint8 [.., blocks, bytes a block], as a view. LabError for one that the format lacks."""
        n, kd = self.shape[-2:]
        blocks = n * (kd // BLOCKS[self.format].values)
        planes = {name: p for name, p in planes_of(self.format, blocks)[0].items() if p.bytes}
        if name not in planes:
            raise LabError(f"planar {self.format} has no plane {name!r}; it has {', '.join(planes)}.")
        at = planes[name]
        return self.data[..., at.start : at.start + blocks * at.bytes].unflatten(-1, (blocks, at.bytes))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding included."""
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        """Where the bytes live."""
        return self.data.device

    def to(self, device: "torch.device | str") -> "Planar":
        """The same bytes on `device`."""
        return Planar(self.data.to(device), self.format, self.shape)

    def __getitem__(self, index: int) -> "Planar":
        if len(self.shape) < 3:
            raise LabError(f"indexing slices leading axes, but this tensor of shape {self.shape} is a single matrix.")
        return Planar(self.data[index], self.format, self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]
