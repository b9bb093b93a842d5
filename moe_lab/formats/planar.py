"""A quantised tensor whose codes, scales and floats lie apart: the planar form of block formats.

The same bits as the raw blocks in another order, in the same bytes (up to 15 more a plane): `Planar.from_raw(q)` and
`.to_raw()` are inverse to each other. What lies where, and why: `moe_lab_kernels.storage.planar_layout`.
"""

from typing import ClassVar

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats.repacked import Repacked
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize import planar as dequantize_planar
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES, planes_of


class Planar(Repacked):
    """`data` uint8 [.., bytes]: one buffer a matrix.

    Work on CUDA, and in the interpreter, is the kernels'; elsewhere torch's.
    """

    __slots__ = ()
    layout: ClassVar[str] = "planar"

    @staticmethod
    def refusal(format: str, n: int, kd: int) -> str | None:
        """See `Repacked.refusal`."""
        return None if format in PIECES else f"{format} has no planes; formats that have: {', '.join(PIECES)}"

    @staticmethod
    def room(format: str, n: int, kd: int) -> tuple[int, ...]:
        """Bytes of the planes."""
        return (planes_of(format, n * (kd // BLOCKS[format].values))[1],)

    @staticmethod
    def pack(raw: Tensor, format: str, kd: int, *, out: Tensor | None = None) -> Tensor:
        """See `Repacked.pack`."""
        repack = planar.repack_ref if backend.backend_of(raw) == "torch" else planar.repack
        return repack(raw, format, out=out)

    @staticmethod
    def unpack(data: Tensor, format: str, n: int, kd: int) -> Tensor:
        """See `Repacked.unpack`."""
        restore = planar.restore_ref if backend.backend_of(data) == "torch" else planar.restore
        return restore(data, format, n, kd)

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
