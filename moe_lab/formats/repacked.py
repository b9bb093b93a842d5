"""A quantised tensor whose raw blocks lie in another order: what its layouts have in common.

The same bits, so the raw tensor comes back from any of them, and each matrix is repacked by itself: a stack of experts
stays a stack of slots. `Planar` and `Tiled` say what lies where.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats.quant_tensor import QuantTensor

Kind = TypeVar("Kind", bound="Repacked")


@dataclass(frozen=True, slots=True, eq=False)
class Repacked:
    """`data` uint8 [.., *room(N, Kd)]; `shape` the logical shape [.., N, Kd]; `format` as the raw form's.

    Indexing slices leading axes.
    """

    data: Tensor
    format: str
    shape: tuple[int, ...]
    layout: ClassVar[str] = ""

    @staticmethod
    def refusal(format: str, n: int, kd: int) -> str | None:
        """Why weights [n, kd] of a format have no such layout; None when they have."""
        raise NotImplementedError

    @staticmethod
    def room(format: str, n: int, kd: int) -> tuple[int, ...]:
        """Shape of one matrix's bytes."""
        raise NotImplementedError

    @staticmethod
    def pack(raw: Tensor, format: str, kd: int, *, out: Tensor | None = None) -> Tensor:
        """Raw rows uint8 [S, N, row_bytes] as [S, *room(N, Kd)], written to `out` where one is given."""
        raise NotImplementedError

    @staticmethod
    def unpack(data: Tensor, format: str, n: int, kd: int) -> Tensor:
        """The inverse of `pack`."""
        raise NotImplementedError

    @classmethod
    def from_raw(cls: type[Kind], q: QuantTensor) -> Kind:
        """The weights of a raw tensor in this layout. LabError where its format, or its rows, have none."""
        if len(q.shape) < 2:
            raise LabError(f"only matrices, and stacks of them, lie in layout {cls.layout!r}, got shape {q.shape}.")
        *lead, n, kd = q.shape
        why = cls.refusal(q.format, n, kd)
        if why is not None:
            raise LabError(f"layout {cls.layout!r}: {why}.")
        made = cls.pack(q.data.contiguous().view(-1, n, q.data.shape[-1]), q.format, kd)
        return cls(made.view(*lead, *made.shape[1:]), q.format, q.shape)

    def to_raw(self) -> QuantTensor:
        """The raw blocks again, bit for bit."""
        *lead, n, kd = self.shape
        data = self.data.reshape(torch.Size(lead).numel(), *self.room(self.format, n, kd))
        return QuantTensor.from_bytes(self.unpack(data, self.format, n, kd), self.format, self.shape)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the tensor is made of, by name."""
        return {"data": self.data}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, padding included."""
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        """Where the bytes live."""
        return self.data.device

    def to(self: Kind, device: "torch.device | str") -> Kind:
        """The same bytes on `device`."""
        return type(self)(self.data.to(device), self.format, self.shape)

    def stacked(self: Kind) -> Kind:
        """With one more axis in front: a matrix as a stack of one."""
        return type(self)(self.data.unsqueeze(0), self.format, (1, *self.shape))

    def __getitem__(self: Kind, index: int) -> Kind:
        if len(self.shape) < 3:
            raise LabError(f"indexing slices leading axes, but this tensor of shape {self.shape} is a single matrix.")
        return type(self)(self.data[index], self.format, self.shape[1:])

    def __len__(self) -> int:
        return self.shape[0]
