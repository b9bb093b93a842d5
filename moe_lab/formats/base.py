"""What a weight format is.

A format knows one block: how many values it holds, how many bytes, how to decode and to encode it. It never knows
about files, experts or devices; everything here runs on whatever device its tensors live on.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab.errors import LabError, LabTypeError
from moe_lab.protocols import called, check_new_name, check_object


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
    """One block format. `block` values occupy `block_bytes` bytes; rows are whole blocks.

    A user's own may be passed wherever a format's name is taken. `BlockFormat` brings all but name, block, block_bytes,
    dequantize and quantize.
    """

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


class OwnFormat(WeightFormat, Protocol):
    """A format of the table `FORMATS`, which says its size too; a user's own need not."""

    @property
    def bits_per_weight(self) -> float:
        """Bits a value, scales included."""
        ...


def check_whole_blocks(name: str, block: int, kd: int) -> None:
    """LabError unless a row of `kd` values is whole blocks."""
    if kd < block or kd % block:
        raise LabError(
            f"{name} rows hold whole blocks of {block} values, but a row has {kd}. Pad it or pick another format."
        )


class BlockFormat:
    """What every block format shares: the row arithmetic. Subclasses set the four attributes."""

    name: str
    block: int
    block_bytes: int
    ggml_type: int | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits a value, the block's scales included."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, kd: int) -> int:
        """Bytes of a row of `kd` values."""
        check_whole_blocks(self.name, self.block, kd)
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


def lookup(table: Mapping[str, WeightFormat], format: "str | WeightFormat") -> WeightFormat:
    """A format by name (in any case: model cards write Q2_K), or the user's own object unchanged. LabError for an
    unknown name, sizes below 1, or a name that one of the lab's has; LabTypeError for what lacks a member of
    `WeightFormat`."""
    if isinstance(format, str):
        if format.lower() not in table:
            raise LabError(f"no weight format is called {format!r}; known: {', '.join(table)}.")
        return table[format.lower()]
    if not any(format is own for own in table.values()):
        brings = "moe_lab.formats.BlockFormat as a base class brings ggml_type, row_bytes and integer_form."
        check_object(format, WeightFormat, "weight format", table, hint=brings)
        check_new_name(format.name, "weight format", table)
        if format.block < 1 or format.block_bytes < 1:
            sizes = f"block {format.block} and block_bytes {format.block_bytes}"
            raise LabError(f"weight format {called(format)} has {sizes}; wanted at least one value and one byte.")
    return format


def expect_rows(format: WeightFormat, made: object, shape: tuple[int, ...], dtype: torch.dtype, by: str) -> Tensor:
    """What a format's `dequantize` or `quantize` (`by`) gave. LabTypeError for anything but `dtype` of `shape`."""
    if isinstance(made, Tensor) and tuple(made.shape) == shape and made.dtype == dtype:
        return made
    came = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
    raise LabTypeError(f"weight format {called(format)}: {by} gave {came}; wanted {dtype} {shape}.")
