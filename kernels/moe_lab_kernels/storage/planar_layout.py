"""Planar blocks: codes, scales and floats of a whole weight apart from each other, each where wide loads can take it.

A weight of B blocks is one buffer of *planes*, in this order, each starting at a multiple of 16 bytes:

    plane   bytes a block                                          what
    codes   q2_k q3_k 64; q4_k q5_k q6_k 128; q8_0 nvfp4 32;       the codes' low 2, 4 or 8 bits
            q4_0 mxfp4 16
    high    q3_k q5_k 32; q6_k 64                                  the codes' third bit, fifth bit, fifth and sixth bit
    scales  q2_k q6_k 16; q3_k q4_k q5_k 8; nvfp4 4; mxfp4 1       as in the raw block; 6-bit ones: low nibbles of
                                                                   sixteen (q4_k, q5_k: 8 scales, then 8 mins)
    tops    q3_k q4_k q5_k 4                                       the top two bits of those sixteen
    floats  q2_k q4_k q5_k 4; q3_k q6_k q8_0 q4_0 2                d and dmin, fp16

Fields of w bits (codes, high, 6-bit scales) always lie alike: a 32-bit word holds 32 / w consecutive values, value
4 p + b in byte b at bits w p. So a shift and a mask give four values side by side, ready for a byte dot product, and
the 16 bytes that one thread loads hold 128 / w consecutive values, whole sub-blocks whose scales are neighbours too: 64
values and four scale bytes (one word) of q2_k, 32 values and one scale of q4_k. In a raw block the same 16 bytes belong
to values 32 apart.

No bit is added or lost: the planes take the bytes of the raw blocks, plus at most 15 bytes a plane where B is no
multiple of 16. Padding bytes are 0.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.unpack import fields, pack_fields, pack_scales_and_mins, scales_and_mins

PLANES: tuple[str, ...] = ("codes", "high", "scales", "tops", "floats")
ALIGNMENT = 16
WORD = 4  # bytes of a word: the run of every planar field


class Piece(NamedTuple):
    """Bytes of a raw block that go to one plane: `width`-bit fields with this run (see `unpack`), or whole bytes."""

    plane: str
    bytes: int
    width: int = 8
    run: int = 1


SIX = Piece("six", 12)  # q4_k's scales and mins, split into low nibbles and tops

PIECES: dict[str, tuple[Piece, ...]] = {
    "q4_0": (Piece("floats", 2), Piece("codes", 16, 4, 16)),
    "q8_0": (Piece("floats", 2), Piece("codes", 32)),
    "q2_k": (Piece("scales", 16), Piece("codes", 64, 2, 32), Piece("floats", 4)),
    "q3_k": (
        Piece("high", 32, 1, 32), Piece("codes", 64, 2, 32), Piece("scales", 8, 4, 8), Piece("tops", 4, 2, 4),
        Piece("floats", 2),
    ),
    "q4_k": (Piece("floats", 4), SIX, Piece("codes", 128, 4, 32)),
    "q5_k": (Piece("floats", 4), SIX, Piece("high", 32, 1, 32), Piece("codes", 128, 4, 32)),
    "q6_k": (Piece("codes", 128, 4, 64), Piece("high", 64, 2, 32), Piece("scales", 16), Piece("floats", 2)),
    "mxfp4": (Piece("scales", 1), Piece("codes", 16, 4, 16)),
    "nvfp4": (Piece("scales", 4), Piece("codes", 32, 4, 8)),
}  # fmt: skip


class Plane(NamedTuple):
    """Where a plane starts in the buffer, and its bytes a block (0 where the format has none)."""

    start: int
    bytes: int


def pieces_of(format: str) -> tuple[Piece, ...]:
    """LabError for a format without planes."""
    if format not in PIECES:
        raise LabError(f"there is no planar form of {format!r}; there is one of {', '.join(PIECES)}.")
    return PIECES[format]


def plane_bytes(format: str) -> dict[str, int]:
    """Bytes a block of each plane, in order; planes the format lacks have 0."""
    size: dict[str, int] = dict.fromkeys(PLANES, 0)
    for piece in pieces_of(format):
        for plane, n in (("scales", 8), ("tops", 4)) if piece is SIX else ((piece.plane, piece.bytes),):
            size[plane] += n
    return size


def planes_of(format: str, blocks: int) -> tuple[dict[str, Plane], int]:
    """The planes of a weight of `blocks` blocks, and the bytes of its buffer."""
    at, planes = 0, {}
    for name, size in plane_bytes(format).items():
        planes[name] = Plane(at, size)
        at += -(-blocks * size // ALIGNMENT) * ALIGNMENT
    return planes, at


def rows_in(op: str, format: str, size: int, kd: int) -> int:
    """N of the weight [N, kd] whose buffer takes `size` bytes. LabError where there is none."""
    a_row = blocks_of(op, format, 1, kd)
    n = size // max(1, a_row * sum(plane_bytes(format).values()))  # padding takes less than a row
    if planes_of(format, n * a_row)[1] != size:
        raise LabError(f"{op}: no weight of {format} rows of {kd} values has planes of {size} bytes.")
    return n


def split(b: UInt8[Tensor, "*blocks block_bytes"], format: str) -> list[Tensor]:
    """Raw blocks to the bytes of each plane, [*blocks, plane bytes], in order; planes with no bytes too."""
    parts: dict[str, Tensor] = {name: b[..., :0] for name in PLANES}
    at = 0
    for piece in pieces_of(format):
        own = b[..., at : at + piece.bytes]
        if piece is SIX:
            low, top = scales_and_mins(own)
            parts["scales"], parts["tops"] = pack_fields(low, 4, WORD), pack_fields(top, 2, WORD)
        else:
            same = piece.width == 8
            parts[piece.plane] = own if same else pack_fields(fields(own, piece.width, piece.run), piece.width, WORD)
        at += piece.bytes
    return list(parts.values())


def join(parts: list[Tensor], format: str) -> UInt8[Tensor, "*blocks block_bytes"]:
    """The inverse of `split`."""
    named, out = dict(zip(PLANES, parts, strict=True)), []
    for piece in pieces_of(format):
        if piece is SIX:
            low, top = fields(named["scales"], 4, WORD), fields(named["tops"], 2, WORD)
            out.append(pack_scales_and_mins(low, top))
        else:
            own = named[piece.plane]
            same = piece.width == 8
            out.append(own if same else pack_fields(fields(own, piece.width, WORD), piece.width, piece.run))
    return torch.cat(out, -1)


def blocks_of(op: str, format: str, n: int, kd: int) -> int:
    """Blocks of a weight [n, kd]. LabError when rows are not whole blocks."""
    pieces_of(format)
    values = BLOCKS[format].values
    if n < 0 or kd < 0 or kd % values:
        raise LabError(f"{op}: {format} rows hold whole blocks of {values} values, got a weight of [{n}, {kd}].")
    return n * (kd // values)
