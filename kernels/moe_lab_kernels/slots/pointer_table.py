"""Where a slot's weights lie: in one arena (base + slot * stride), or wherever a table of addresses says.

An arena is a tensor [S, N, width], of bytes or (dense weights, scales) of numbers. A `PointerTable` stands where that
tensor stands when the matrices live in allocations of their own: the same shape, dtype and row stride, an address a
slot instead of a slot stride. It holds on to the tensors whose addresses it keeps. Knows nothing about experts: a slot
is a slot.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from collections.abc import Sequence

import torch

from moe_lab._types import Int, Shaped, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import offset64


@jit
def slot_base(w, slot, slot_stride, POINTERS: tl.constexpr):
    """The slot's first weight row. POINTERS: w holds addresses; a slot outside the table must not be asked for."""
    return tl.load(w + slot).to(tl.pointer_type(tl.uint8)) if POINTERS else w + offset64(slot, slot_stride)


@jit
def typed_base(w, slot, slot_stride, POINTERS: tl.constexpr, ELEMENT: tl.constexpr, ALIGNMENT: tl.constexpr):
    """The same for elements of any type; ELEMENT, ALIGNMENT: theirs, in bytes, where w holds addresses."""
    if POINTERS:
        out = tl.multiple_of(tl.load(w + slot).to(tl.pointer_type(ELEMENT)), ALIGNMENT)
    else:
        out = w + offset64(slot, slot_stride)
    return out


class PointerTable:
    """S matrices [N, width] of one dtype and row stride on one device: `address` int64 [S] there.

    Answers what launchers ask of a tensor [S, N, width]: shape, dtype, device, strides (0 between slots), length.
    """

    ndim = 3

    def __init__(self, address: Int[Tensor, " S"], sources: tuple[Tensor, ...]) -> None:
        self.address, self.sources = address, sources
        self.shape = torch.Size((len(address), *sources[0].shape[1:]))
        self.dtype, self.device = sources[0].dtype, address.device

    @classmethod
    def of(cls, sources: Sequence[Tensor]) -> "PointerTable":
        """The slots of the sources, [S_i, N, width] each, one after another. LabError when shapes, dtypes, row strides
        or devices differ."""
        if not sources:
            raise LabError("a pointer table wants at least one source of matrices.")
        head = sources[0]
        for i, t in enumerate(sources):
            if t.ndim != 3 or t.dtype != head.dtype or t.shape[1:] != head.shape[1:]:
                wanted = ", ".join(map(str, head.shape[1:])) if head.ndim == 3 else "N, width"
                raise LabError(
                    f"pointer table: source {i} is {t.dtype} {list(t.shape)}; wanted "
                    f"{str(head.dtype).removeprefix('torch.')} [S, {wanted}] as source 0."
                )
            if t.device != head.device or t.stride()[1:] != head.stride()[1:]:
                raise LabError(
                    f"pointer table: source {i} lies on {t.device} with strides {t.stride()[1:]}, source 0 on "
                    f"{head.device} with {head.stride()[1:]}; wanted the same."
                )
        address = [t.data_ptr() + s * t.stride(0) * t.element_size() for t in sources for s in range(len(t))]
        return cls(torch.tensor(address, dtype=torch.int64, device=head.device), tuple(sources))

    def matrix(self, slot: int) -> Shaped[Tensor, "N width"]:
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
        """Elements of all matrices."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """The lowest alignment of any matrix: all addresses joined bit by bit."""
        joined = 0
        for t in self.sources:
            joined |= t.data_ptr() | (t.stride(0) * t.element_size() if len(t) > 1 else 0)
        return joined

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """Elements between slots (0: the table says where they are), rows, elements."""
        strides = (0, *self.sources[0].stride()[1:])
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
