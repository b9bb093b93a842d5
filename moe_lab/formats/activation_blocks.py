"""Quantised activation rows as ggml keeps them in memory, byte for byte, and back.

| layout | block | bytes | fields, in order | array |
|---|---|---|---|---|
| q8_0 | 32 | 34 | d f16, codes int8[32] | [R, Kp / 32, 34] |
| q8_1 | 32 | 36 | d f16, s f16, codes int8[32] | [R, Kp / 32, 36] |
| d4 | 128 | 144 | d f32[4], codes int8[128] | [Kp / 128, R, 144] |
| ds4 | 128 | 144 | (d f16, s f16)[4], codes int8[128] | [Kp / 128, R, 144] |
| d2s6 | 128 | 144 | d f16[2], s f16[6], codes int8[128] | [Kp / 128, R, 144] |
| q8_k | 256 | 292 | d f32, codes int8[256], sums int16[16] | [R, Kp / 256, 292] |

The 144-byte blocks lie k-block major, so that the rows of a tile are one contiguous copy. Little-endian.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab.formats.activations import QuantRows
from moe_lab_kernels.rows.arithmetic import layout_of


class BlockBytes(NamedTuple):
    """Values, bytes and the numbers of scales and sums of a block."""

    values: int
    size: int
    scales: int
    sums: int


BLOCKS = {
    "q8_0": BlockBytes(32, 34, 1, 0),
    "q8_1": BlockBytes(32, 36, 1, 1),
    "d4": BlockBytes(128, 144, 4, 0),
    "ds4": BlockBytes(128, 144, 4, 4),
    "d2s6": BlockBytes(128, 144, 2, 6),
    "q8_k": BlockBytes(256, 292, 1, 16),
}


def to_blocks(rows: QuantRows) -> UInt8[Tensor, "A B block_bytes"]:
    """The rows' blocks as bytes; what was summed and how codes were rounded does not show in them.

    LabError when there are other scales or sums, or of another dtype, than the layout's blocks have room for.
    """
    name, block = rows.layout.name, _block(rows.layout.name)
    own, has = layout_of(name), rows.layout
    same = {
        "block": own.block == has.block,
        "scale_dtype": own.scale_storage == has.scale_storage,
        "sum": (own.adds == "none") == (has.adds == "none") and own.sums_kept == has.sums_kept,
        "sum dtype": own.adds == "none" or own.sum_storage == has.sum_storage,
    }
    if not all(same.values()):
        other = ", ".join(choice for choice, kept in same.items() if not kept)
        raise LabError(f"ggml has no {name} blocks with another {other}; quantise without that choice.")
    d = rows.scale.unflatten(1, (-1, block.scales))
    codes = _bytes(rows.codes.unflatten(1, (-1, block.values)))
    if rows.total is None:
        parts = [_bytes(d), codes]
    else:
        s = rows.total.unflatten(1, (-1, block.sums))
        if name == "ds4":
            parts = [_bytes(torch.stack([d, s], -1).flatten(2)), codes]
        elif name == "q8_k":
            parts = [_bytes(d), codes, _bytes(s)]
        else:
            parts = [_bytes(d), _bytes(s), codes]
    out = torch.cat(parts, -1)
    return out.transpose(0, 1).contiguous() if block.values == 128 else out


def from_blocks(blocks: UInt8[Tensor, "A B block_bytes"], layout: str, width: int | None = None) -> QuantRows:
    """Rows from a layout's blocks, said to be of the layout's own arithmetic (bytes do not tell).

    width: how many of a row's values are no padding (None: all). LabError for another shape, dtype or layout.
    """
    own, block = layout_of(layout), _block(layout)
    if blocks.dtype != torch.uint8 or blocks.ndim != 3 or blocks.shape[-1] != block.size:
        raise LabError(
            f"{layout} blocks are uint8 [.., .., {block.size}], got {blocks.dtype} of shape {list(blocks.shape)}."
        )
    raw = blocks.transpose(0, 1) if block.values == 128 else blocks
    padded = raw.shape[1] * block.values
    if width is not None and not 0 < width <= padded:
        raise LabError(f"width={width}, but {raw.shape[1]} {layout} blocks a row hold {padded} values.")
    total = None
    if layout == "q8_k":
        d, codes, s = raw.split([4, 256, 32], -1)
        d, total = _values(d, own.scale_storage), _values(s, own.sum_storage)
    else:
        header, codes = raw.split([block.size - block.values, block.values], -1)
        d = _values(header, own.scale_storage)
        if block.sums:
            d, total = (d[..., ::2], d[..., 1::2]) if layout == "ds4" else d.split([block.scales, block.sums], -1)
    codes, d = _values(codes, torch.int8).flatten(1), d.flatten(1).contiguous()
    return QuantRows(codes, d, None if total is None else total.flatten(1).contiguous(), own, width or padded)


def _block(name: str) -> BlockBytes:
    if name not in BLOCKS:
        raise LabError(f"ggml has no blocks of layout {name!r}; it has {', '.join(BLOCKS)}.")
    return BLOCKS[name]


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def _values(raw: Tensor, dtype: torch.dtype) -> Tensor:
    return raw.contiguous().view(dtype)
