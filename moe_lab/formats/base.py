"""What a weight format is, and a tensor that carries one.

A format knows one block: how many values it holds, how many bytes, how to decode and to encode it. It never knows
about files, experts or devices; everything here runs on whatever device its tensors live on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.errors import LabError, LabTypeError


class IntegerForm(NamedTuple):
    """Weights as the int8 arms multiply them: w = scale * code - min_scale * min, all codes small integers.

    codes [.., N, Kd] fp32 holding integers (sub-block scale already folded in; |code| <= 4096, so 32-wide dots with
    int8 activations stay exact in fp32); scale [.., N, Kd / group] fp32; `group` values share one scale;
    mins [.., N, Kd / 16] fp32 integers and min_scale [.., N, Kd / group] fp32, or None for symmetric formats.
    """

    codes: Tensor
    scale: Tensor
    group: int
    mins: Tensor | None
    min_scale: Tensor | None


@runtime_checkable
class WeightFormat(Protocol):
    """One block format. `block` values occupy `block_bytes` bytes; rows are whole blocks."""

    @property
    def name(self) -> str:
        """The format's name."""
        ...

    @property
    def block(self) -> int:
        """Values a block."""
        ...

    @property
    def block_bytes(self) -> int:
        """Bytes a block."""
        ...

    @property
    def ggml_type(self) -> int | None:
        """ggml's number for it, or None."""
        ...

    def row_bytes(self, kd: int) -> int:
        """Bytes of a row of `kd` values; LabError when `kd` is no multiple of the block."""
        ...

    def dequantize(self, raw: UInt8[Tensor, "*rows row_bytes"]) -> Float32[Tensor, "*rows Kd"]:
        """Decode whole rows to fp32."""
        ...

    def quantize(self, w: Float32[Tensor, "*rows Kd"]) -> UInt8[Tensor, "*rows row_bytes"]:
        """Encode whole rows of fp32."""
        ...

    def integer_form(self, raw: UInt8[Tensor, "*rows row_bytes"]) -> IntegerForm | None:
        """The integer view that the int8 arms use, or None when the format has none."""
        ...


class BlockFormat:
    """What every block format shares: the row arithmetic. Subclasses set the four attributes."""

    name: str
    block: int
    block_bytes: int
    ggml_type: int | None = None

    def row_bytes(self, kd: int) -> int:
        """Bytes of a row of `kd` values."""
        if kd < self.block or kd % self.block:
            raise LabError(
                f"{self.name} rows hold whole blocks of {self.block} values, but a row has {kd}. "
                "Pad it or pick another format."
            )
        return kd // self.block * self.block_bytes

    def blocks(self, raw: Tensor) -> Tensor:
        """[.., row_bytes] uint8 -> [.., blocks, block_bytes]."""
        if raw.dtype != torch.uint8:
            raise LabTypeError(f"{self.name} blocks are uint8 bytes, got {raw.dtype}.")
        if raw.shape[-1] % self.block_bytes:
            raise LabError(f"{self.name} rows are multiples of {self.block_bytes} bytes, got {raw.shape[-1]}.")
        return raw.reshape(*raw.shape[:-1], -1, self.block_bytes)

    def integer_form(self, raw: Tensor) -> IntegerForm | None:
        """No integer view unless the format defines one."""
        return None


def f16_at(blocks: Tensor, offset: int) -> Tensor:
    """The little-endian half at byte `offset` of each block, as fp32 [.., 1]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).float()


def f16_bytes(value: Tensor) -> Tensor:
    """fp32 [.., 1] -> the two bytes of its half, rounded to nearest even: uint8 [.., 2]."""
    return value.to(torch.float16).contiguous().view(torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A tensor kept as its format's raw bytes.

    `data` uint8 [.., N, row_bytes]; `shape` is the logical shape [.., N, Kd] in numpy order. Indexing slices leading
    axes (never the row). `scales` and `global_scale` are for formats that keep them apart; block formats have None.
    """

    data: Tensor
    format: str
    shape: tuple[int, ...]
    codec: WeightFormat
    scales: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def from_bytes(cls, data: Tensor, format: "str | WeightFormat", shape: tuple[int, ...]) -> "QuantTensor":
        """Wrap raw bytes of logical `shape` [.., N, Kd]. LabError when the byte count disagrees with the shape."""
        from moe_lab.formats import get_format

        codec, shape = get_format(format), tuple(int(n) for n in shape)
        if not shape or min(shape) < 0:
            raise LabError(f"a quantised tensor needs at least one axis and no negative length, got shape {shape}.")
        if data.dtype != torch.uint8:
            raise LabTypeError(f"raw {codec.name} data is uint8, got {data.dtype}.")
        wanted = (*shape[:-1], codec.row_bytes(shape[-1]))
        if data.numel() != torch.Size(wanted).numel():
            raise LabError(
                f"{codec.name} of shape {shape} takes {torch.Size(wanted).numel()} bytes, got {data.numel()}."
            )
        return cls(data.reshape(wanted), codec.name, shape, codec)

    @property
    def nbytes(self) -> int:
        """Bytes of the raw data."""
        return self.data.numel()

    @property
    def device(self) -> torch.device:
        """Where the bytes live."""
        return self.data.device

    def dequantize(self) -> Tensor:
        """fp32 values of `.shape`."""
        return self.codec.dequantize(self.data)

    def to(self, device: "torch.device | str") -> "QuantTensor":
        """The same bytes on `device`."""
        return QuantTensor(self.data.to(device), self.format, self.shape, self.codec)

    def __getitem__(self, index: int) -> "QuantTensor":
        if len(self.shape) < 3:
            raise LabError(f"indexing slices leading axes, but this tensor of shape {self.shape} is a single matrix.")
        return QuantTensor(self.data[index], self.format, self.shape[1:], self.codec)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        bits = 8 * self.nbytes / max(1, torch.Size(self.shape).numel())
        return f"QuantTensor({self.format}, shape={self.shape}, {bits:.4g} bits a weight, device={self.device})"


def lookup(table: Mapping[str, WeightFormat], format: "str | WeightFormat") -> WeightFormat:
    """A format by name, or the user's own object unchanged."""
    if isinstance(format, str):
        if format not in table:
            raise LabError(f"no weight format is called {format!r}; known: {', '.join(table)}.")
        return table[format]
    if not isinstance(format, WeightFormat):
        raise LabTypeError(
            f"a weight format is a name or an object with dequantize and quantize, got {type(format).__name__}."
        )
    return format
