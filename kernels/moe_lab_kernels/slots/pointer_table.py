"""Where a slot's weights lie: in one arena (base + slot * stride), or wherever a table of addresses says.

An arena is a tensor [S, N, row_bytes]. A `PointerTable` stands where that tensor stands when the matrices live in
allocations of their own: the same shape and row stride, an address a slot instead of a slot stride. It holds on to the
tensors whose addresses it keeps. Knows nothing about experts: a slot is a slot.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence

import torch

from moe_lab._types import Int, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import offset64


@jit
def slot_base(w, slot, slot_stride, POINTERS: tl.constexpr):
    """The slot's first weight row. POINTERS: w holds addresses; a slot outside the table must not be asked for."""
    return tl.load(w + slot).to(tl.pointer_type(tl.uint8)) if POINTERS else w + offset64(slot, slot_stride)


class PointerTable:
    """S matrices uint8 [N, row_bytes] of one row stride on one device: `address` int64 [S] there.

    Answers what launchers ask of a tensor [S, N, row_bytes]: shape, dtype, device, strides (0 between slots), length.
    """

    dtype = torch.uint8
    ndim = 3

    def __init__(self, address: Int[Tensor, " S"], shape: tuple[int, int], row_stride: int, sources: tuple) -> None:
        self.address, self.sources = address, sources
        self.shape = torch.Size((len(address), *shape))
        self._row_stride, self.device = row_stride, address.device

    @classmethod
    def of(cls, sources: Sequence[Tensor]) -> "PointerTable":
        """The slots of the sources, uint8 [S_i, N, row_bytes] each, one after another. LabError when shapes, row
        strides or devices differ."""
        if not sources:
            raise LabError("a pointer table wants at least one source of matrices.")
        head = sources[0]
        for i, t in enumerate(sources):
            if t.dtype != torch.uint8 or t.ndim != 3 or t.shape[1:] != head.shape[1:]:
                raise LabError(
                    f"pointer table: source {i} is {t.dtype} {list(t.shape)}; wanted uint8 [S, {head.shape[1]}, "
                    f"{head.shape[2]}] as source 0."
                )
            if t.device != head.device or t.stride()[1:] != head.stride()[1:]:
                raise LabError(
                    f"pointer table: source {i} lies on {t.device} with strides {t.stride()[1:]}, source 0 on "
                    f"{head.device} with {head.stride()[1:]}; wanted the same."
                )
        address = [t.data_ptr() + s * t.stride(0) for t in sources for s in range(len(t))]
        table = torch.tensor(address, dtype=torch.int64, device=head.device)
        return cls(table, (head.shape[1], head.shape[2]), head.stride(1), tuple(sources))

    def matrix(self, slot: int) -> UInt8[Tensor, "N row_bytes"]:
        """One slot's matrix, for the references."""
        for t in self.sources:
            if slot < len(t):
                return t[slot]
            slot -= len(t)
        raise LabError(f"pointer table: slot {slot + len(self)} of {len(self)}.")

    __getitem__ = matrix

    def __len__(self) -> int:
        return self.shape[0]

    def numel(self) -> int:
        """Bytes of all matrices."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Of bytes: 1."""
        return 1

    def data_ptr(self) -> int:
        """The lowest alignment of any matrix: all addresses joined bit by bit."""
        joined = 0
        for t in self.sources:
            joined |= t.data_ptr() | (t.stride(0) if len(t) > 1 else 0)
        return joined

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """Bytes between slots (0: the table says where they are), rows, bytes."""
        strides = (0, self._row_stride, 1)
        return strides if axis is None else strides[axis]


Weights = Tensor | PointerTable


def operand(w: Weights) -> Tensor:
    """What a kernel is given for `w`: the bytes themselves or the addresses."""
    return w.address if isinstance(w, PointerTable) else w


def is_pointers(w: Weights) -> bool:
    """The kernels' POINTERS."""
    return isinstance(w, PointerTable)


def as_tensor(w: Weights) -> Tensor:
    """For checks: they ask a tensor nothing that a table does not answer."""
    return w  # pyright: ignore[reportReturnType]
