"""Formats whose scales are tensors of their own: what every one of them shares.

Codes, scales and what else belongs to a tensor travel together as `Parts`; `moe_lab_kernels.storage.scaled_layouts`
says what a code and a scale is and how a value comes of them. A format adds its dtypes on the way in, its values'
rules and `encode`.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize.scaled import dequantize_scaled, dequantize_scaled_ref
from moe_lab_kernels.storage import scaled_layouts
from moe_lab_kernels.storage.minifloat import e4m3_values, e8m0_values

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FNUZ = ("float8_e4m3fnuz", "float8_e5m2fnuz")


class Parts(NamedTuple):
    """A tensor's bytes: data uint8 [.., N, row_bytes], scales [.., ceil(N / rows), ceil(Kd / group)], global_scale fp32
    [..] (one a matrix), biases as the scales. None where the format has none."""

    data: Tensor
    scales: Tensor
    global_scale: Tensor | None = None
    biases: Tensor | None = None


class Flaw(NamedTuple):
    """A value that no weight should have: which part, where in it, which block of the format in row order (counted over
    the whole tensor), the value."""

    part: str
    index: tuple[int, ...]
    block: int
    value: float

    def __str__(self) -> str:
        return f"{self.part}{list(self.index)} is {self.value:g} (block {self.block})"


class ScaledFormat:
    """Subclasses give `encode`, and the dtypes that stored codes and scales may come in."""

    ggml_type: int | None = None
    code_dtypes: tuple[torch.dtype, ...] = (torch.uint8,)
    scale_dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    signed_scales = False

    def __init__(self, name: str) -> None:
        self.name, self.layout = name, scaled_layouts.layout_of(name)
        self.block = self.layout.group
        self.block_bytes = self.block * self.layout.code_bits // 8

    @property
    def parts_needed(self) -> tuple[str, ...]:
        """Names of the tensors that belong to one weight beside its codes."""
        extra = {"none": (), "bias": ("biases",)}.get(self.layout.second, ("global_scale",))
        return ("scales", *extra)

    def row_bytes(self, kd: int) -> int:
        """Bytes of a row of `kd` codes, scales not counted. LabError when `kd` is not whole groups and must be."""
        return scaled_layouts.row_bytes(self.name, kd)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of logical `shape` [.., N, Kd]."""
        return scaled_layouts.scale_shape(self.name, shape)

    def encode(self, w: Float[Tensor, "*lead N Kd"]) -> Parts:
        """Quantise whole matrices; `QuantTensor.encode` has checked their shape."""
        raise NotImplementedError

    def decode(self, parts: Parts, kd: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [.., N, Kd]: the kernel where one serves the tensors, torch elsewhere; the bits are the same."""
        op = dequantize_scaled_ref if backend.backend_of(parts.data) == "torch" else dequantize_scaled
        second = parts.biases if self.layout.second == "bias" else parts.global_scale
        return op(parts.data, parts.scales, self.name, kd, second=second, out_dtype=dtype)

    def accept(self, parts: Parts, shape: tuple[int, ...]) -> Parts:
        """Stored tensors as `Parts` proper: bytes and bits viewed, one global scale a matrix. LabError for what does
        not fit `shape`, LabTypeError for a dtype that this format never has."""
        for name, tensor in parts._asdict().items():
            needed = name == "data" or name in self.parts_needed
            if needed != (tensor is not None):
                has = "has no" if tensor is not None else "needs"
                raise LabError(f"{self.name} {has} {name}, and {'one came' if tensor is not None else 'none came'}.")
            if tensor is not None and tensor.device != parts.data.device:
                raise LabError(f"{self.name}: data is on {parts.data.device} but {name} on {tensor.device}.")
        rows = (*shape[:-1], self.row_bytes(shape[-1]))
        data = self._codes(parts.data)
        if data.numel() != torch.Size(rows).numel():
            raise LabError(
                f"{self.name} of shape {shape} takes {torch.Size(rows).numel()} bytes of codes, got {data.numel()} "
                f"(shape {list(parts.data.shape)} of {parts.data.dtype})."
            )
        wanted = self.scale_shape(shape)
        scales = self._scales(self._fitting("scales", parts.scales, wanted, shape))
        biases = None if parts.biases is None else self._fitting("biases", parts.biases, wanted, shape)
        if biases is not None and biases.dtype not in FLOATS:
            raise LabTypeError(f"{self.name} biases are float32, bfloat16 or float16, got {biases.dtype}.")
        return Parts(data.reshape(rows), scales, self._global(parts.global_scale, shape), biases)

    def first_flaw(self, parts: Parts, kd: int) -> Flaw | None:
        """The first NaN, infinite or (where scales are positive) negative value among scales, then biases, then codes
        whose value is NaN. A scale of 0 is none: its block is dead."""
        shape = (*parts.data.shape[:-1], kd)
        read = {"e4m3": e4m3_values, "e8m0": e8m0_values, "float": torch.Tensor.float}[self.layout.scale]
        for name, values in (("global_scale", parts.global_scale), ("scales", read(parts.scales)),
                             ("biases", parts.biases)):  # fmt: skip
            if values is None:
                continue
            bad = ~values.isfinite()
            if name == "global_scale":
                bad |= values <= 0
            elif name == "scales" and not self.signed_scales:
                bad |= values < 0
            if (at := first_true(bad)) is not None:
                per_matrix = self.scale_shape(shape)[-2] * self.scale_shape(shape)[-1]
                index = tuple(torch.unravel_index(torch.tensor(at), bad.shape)) if bad.ndim else ()
                block = at * per_matrix if name == "global_scale" else at
                return Flaw(name, tuple(map(int, index)), block, float(values.reshape(-1)[at]))
        return self._code_flaw(parts, shape) if self.layout.code == "e4m3" else None

    def _code_flaw(self, parts: Parts, shape: tuple[int, ...]) -> Flaw | None:
        at = first_true((parts.data & 0x7F) == 0x7F)
        if at is None:
            return None
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), parts.data.shape))
        grid, layout = self.scale_shape(shape), self.layout
        of_scale = (*index[:-2], index[-2] // layout.rows, index[-1] // layout.group)
        block = 0
        for i, n in zip(of_scale, grid, strict=True):
            block = block * n + i
        return Flaw("data", index, block, float("nan"))

    @property
    def bits_per_weight(self) -> float:
        """Bits a value, its share of a whole block's scales and biases included. Those may come in several dtypes: the
        first of `scale_dtypes` counts. A global scale, one a matrix, does not."""
        return self.layout.code_bits + 8 * self._scale_bytes / (self.layout.group * self.layout.rows)

    def bits_of(self, shape: tuple[int, ...]) -> float:
        """Bits a weight of a tensor of `shape` [.., N, Kd]: short last blocks and global scales counted."""
        extra = 4 * torch.Size(shape[:-2]).numel() if "global_scale" in self.parts_needed else 0
        scales = torch.Size(self.scale_shape(shape)).numel()
        return self.layout.code_bits + 8 * (self._scale_bytes * scales + extra) / torch.Size(shape).numel()

    @property
    def _scale_bytes(self) -> int:
        """Bytes of one block's scale, and of its bias where it has one."""
        each = {"e4m3": 1, "e8m0": 1, "float": self.scale_dtypes[0].itemsize}[self.layout.scale]
        return each * (2 if self.layout.second == "bias" else 1)

    def dequantize(self, raw: Tensor) -> Tensor:
        """Codes alone have no values here. Always a LabError."""
        raise LabError(f"{self.name} codes have no value without {', '.join(self.parts_needed)}: use a QuantTensor.")

    def quantize(self, w: Tensor) -> Tensor:
        """One tensor of bytes cannot hold the result. Always a LabError."""
        raise LabError(f"{self.name} makes codes and {', '.join(self.parts_needed)}: use moe_lab.quantize or encode.")

    def integer_form(self, raw: Tensor) -> None:
        """No integer view: the int8 arms refuse these formats by name."""
        return

    def _codes(self, data: Tensor) -> Tensor:
        if data.dtype not in self.code_dtypes:
            kind = str(data.dtype).removeprefix("torch.")
            other = f" {kind} reads the same bytes as other numbers." if kind in FNUZ else ""
            raise LabTypeError(f"{self.name} codes come as {_names(self.code_dtypes)}, got {kind}.{other}")
        return data.contiguous().view(torch.uint8)

    def _scales(self, scales: Tensor) -> Tensor:
        if scales.dtype not in self.scale_dtypes:
            kind = str(scales.dtype).removeprefix("torch.")
            raise LabTypeError(f"{self.name} scales come as {_names(self.scale_dtypes)}, got {kind}.")
        return scales.contiguous() if scales.dtype in FLOATS else scales.contiguous().view(torch.uint8)

    def _fitting(self, name: str, t: Tensor, wanted: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if tuple(t.shape) != wanted:
            raise LabError(f"{self.name} of shape {shape} wants {name} {list(wanted)}, got {list(t.shape)}.")
        return t

    def _global(self, given: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
        if given is None:
            return None
        lead = tuple(shape[:-2])
        if given.dtype not in FLOATS:
            raise LabTypeError(f"{self.name} global scales are float32, got {given.dtype}.")
        if given.numel() != 1 and tuple(given.shape) != lead:
            raise LabError(
                f"{self.name} of shape {shape} wants one global scale, or one a matrix {list(lead)}, got shape "
                f"{list(given.shape)}."
            )
        given = given.float().reshape(()) if given.numel() == 1 else given.float()
        return given.expand(lead).contiguous()


def first_true(mask: Tensor) -> int | None:
    """Flat index of the first true element, or None."""
    flat = mask.reshape(-1)
    return int(flat.to(torch.uint8).argmax()) if bool(flat.any()) else None


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)
