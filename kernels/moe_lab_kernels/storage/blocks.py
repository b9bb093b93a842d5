"""GGUF's block formats as numbers: values and bytes of a block, and what the kernels ask of a row's address.

The one table of block sizes below `formats`; everything that walks raw rows reads it.
"""

from functools import cache
from typing import NamedTuple

from moe_lab.errors import LabError


class Block(NamedTuple):
    """`values` weights in `bytes` bytes, `group` of them under one scale; rows that a kernel reads start at multiples
    of `alignment` bytes (what the block size keeps and the wide loads need)."""

    values: int
    bytes: int
    group: int
    alignment: int


BLOCKS: dict[str, Block] = {
    "q4_0": Block(32, 18, 32, 2),
    "q4_1": Block(32, 20, 32, 2),
    "q5_0": Block(32, 22, 32, 2),
    "q5_1": Block(32, 24, 32, 2),
    "q8_0": Block(32, 34, 32, 2),
    "q2_k": Block(256, 84, 16, 4),
    "q3_k": Block(256, 110, 16, 2),
    "q4_k": Block(256, 144, 32, 4),
    "q5_k": Block(256, 176, 32, 4),
    "q6_k": Block(256, 210, 16, 2),
    "iq4_nl": Block(32, 18, 32, 2),
    "iq4_xs": Block(256, 136, 32, 2),
    "mxfp4": Block(32, 17, 32, 1),
    "nvfp4": Block(64, 36, 16, 4),
}

# those that `gemv.steps.part` multiplies as they lie
GEMV_FORMATS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "mxfp4", "nvfp4")


def block_of(op: str, format: str) -> Block:
    """The format's row of the table. LabError for a name that is not in it."""
    if format not in BLOCKS:
        raise LabError(f"{op}: {format!r} is no block format; there are {', '.join(BLOCKS)}.")
    return BLOCKS[format]


@cache
def gemv_row_bytes(format: str, kd: int) -> int:
    """Bytes of a row of `kd` values. LabError for a format without a GEMV kernel, or a row that is not whole blocks."""
    if format not in GEMV_FORMATS:
        raise LabError(f"no kernel multiplies {format!r} as it lies; there are kernels for {', '.join(GEMV_FORMATS)}.")
    block = BLOCKS[format]
    if kd < block.values or kd % block.values:
        raise LabError(f"{format} rows hold whole blocks of {block.values} values, got Kd={kd}.")
    return kd // block.values * block.bytes


def gemv_alignment(format: str) -> int:
    """Bytes to a multiple of which a GEMV kernel's rows start: q4_k and q5_k are read eight bytes at a time."""
    return 8 if format in ("q4_k", "q5_k") else BLOCKS[format].alignment
