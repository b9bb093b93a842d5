"""Raw blocks of 16 rows side by side, each byte where the lane that needs it finds it: what `gemv.tiled` reads.

A weight [N, Kd] of raw blocks becomes N / 16 tiles of *steps*: 256 values of a super-block, else 128 values (four
blocks of 32), of 16 rows. The tensor core's instruction gives rows g and g + 8 to lane 4 g + q of a warp, so
a step holds, in this order:

    quads    512 bytes each: a lane's four words, of row g, of row g + 8, then further ones of both: one 16-byte load
    pairs    1 or 2 bytes of row g and the same of row g + 8, for each of a row's 4, 2 or 1 lanes that differ in them

In a raw block these bytes belong to rows that lie kilobytes apart, and blocks of 18, 34, 84, 110 or 210 bytes start
anywhere. No bit is added or lost, and a tile takes the bytes of its 16 rows. Where a row of small blocks is no whole
number of steps, its last step starts earlier and repeats up to three blocks of the one before.

Not for rows of fewer values than a step, nor for N that is no multiple of 16, nor for FP4 formats, whose products are
quicker from raw blocks (`docs/kernels.md`).
"""

from collections.abc import Callable
from functools import cache

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels.checks import expect
from moe_lab_kernels.storage.blocks import BLOCKS, gemv_row_bytes

TILE_FORMATS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0")
ROWS = 16
Place = Callable[[int], int]  # lane of a row -> byte of the row's step


def step_blocks(format: str) -> int:
    """Blocks of a row in a step."""
    return max(1, 128 // BLOCKS[format].values)


def steps_of(format: str, kd: int) -> int:
    """Steps of a row of `kd` values."""
    return -(-kd // (BLOCKS[format].values * step_blocks(format)))


def tile_bytes(format: str, kd: int) -> int:
    """Bytes of a tile."""
    return steps_of(format, kd) * ROWS * step_blocks(format) * BLOCKS[format].bytes


def refusal(format: str, n: int, kd: int) -> str | None:
    """Why [n, kd] weights of this format have no tiles; None when they have."""
    if format not in TILE_FORMATS:
        return f"{format} has no tiles; formats that have: {', '.join(TILE_FORMATS)}"
    if n % ROWS:
        return f"tiles hold {ROWS} rows, and N={n} is no multiple of that"
    if kd < BLOCKS[format].values * step_blocks(format):
        return f"a step of {format} holds {BLOCKS[format].values * step_blocks(format)} values of a row, and Kd={kd}"
    return None


def _quads(near: Place, far: Place) -> list[tuple[int, int]]:
    """(row, byte) in the order of a tile: for each lane, the words of both rows at both places."""
    lanes = [(g, q) for g in range(8) for q in range(4)]
    return [(row, at(q) + i) for g, q in lanes for at in (near, far) for row in (g, g + 8) for i in range(4)]


def _pairs(place: Place, bytes: int, lanes: int = 4) -> list[tuple[int, int]]:
    return [(row, place(q) + i) for g in range(8) for q in range(lanes) for row in (g, g + 8) for i in range(bytes)]


def _order(format: str) -> list[tuple[int, int]]:
    """(row, byte of its step) of each byte of a tile's step; offsets into blocks as `unpack` has them."""
    size, out = BLOCKS[format].bytes, []
    if format == "q2_k":
        for h in range(2):
            out += _quads(lambda q, h=h: 16 + 32 * h + 4 * q, lambda q, h=h: 32 + 32 * h + 4 * q)
        for h in range(2):
            out += _pairs(lambda q, h=h: 8 * h + 2 * q, 2)
        out += _pairs(lambda q: 80, 2, 1) + _pairs(lambda q: 82, 2, 1)
    elif format == "q3_k":
        for h in range(2):
            out += _quads(lambda q, h=h: 32 + 32 * h + 4 * q, lambda q, h=h: 48 + 32 * h + 4 * q)
        out += _quads(lambda q: 4 * q, lambda q: 16 + 4 * q)
        out += _pairs(lambda q: 96 + 2 * q, 2) + _pairs(lambda q: 104 + 2 * q, 2, 2) + _pairs(lambda q: 108, 2, 1)
    elif format in ("q4_k", "q5_k"):
        codes = 48 if format == "q5_k" else 16
        for m in range(4):
            out += _quads(lambda q, m=m: codes + 32 * m + 8 * q, lambda q, m=m: codes + 32 * m + 8 * q + 4)
        if format == "q5_k":
            out += _quads(lambda q: 16 + 8 * q, lambda q: 20 + 8 * q)
        for first in (4, 8, 12):
            out += _pairs(lambda q, first=first: first + q, 1)
        out += _pairs(lambda q: 0, 2, 1) + _pairs(lambda q: 2, 2, 1)
    elif format == "q6_k":
        for at in (0, 32, 64, 96, 128, 160):
            out += _quads(lambda q, at=at: at + 4 * q, lambda q, at=at: at + 16 + 4 * q)
        for h in range(2):
            out += _pairs(lambda q, h=h: 192 + 8 * h + 2 * q, 2)
        out += _pairs(lambda q: 208, 2, 1)
    elif format == "q8_0":
        for j in range(4):
            out += _quads(lambda q, j=j: 34 * j + 2 + 4 * q, lambda q, j=j: 34 * j + 18 + 4 * q)
        out += _pairs(lambda q: 34 * q, 2)
    else:  # q4_0
        for i in (0, 2):
            out += _quads(lambda q, i=i: size * i + 2 + 4 * q, lambda q, i=i: size * (i + 1) + 2 + 4 * q)
        out += _pairs(lambda q: size * q, 2)
    return out


@cache
def _sources(format: str) -> Tensor:
    """int64 [step's bytes]: the byte of 16 rows' steps that each byte of a tile's step is."""
    width = step_blocks(format) * BLOCKS[format].bytes
    return torch.tensor([row * width + byte for row, byte in _order(format)])


@cache
def _blocks_read(format: str, blocks: int) -> Tensor:
    """int64 [steps * blocks of a step]: the block at each place."""
    each = step_blocks(format)
    start = (torch.arange(-(-blocks // each)) * each).clamp(max=blocks - each)
    return (start[:, None] + torch.arange(each)).flatten()


def to_tiles(
    raw: UInt8[Tensor, "S N row_bytes"], format: str, kd: int, *, out: Tensor | None = None
) -> UInt8[Tensor, "S tiles tile_bytes"]:
    """The same weights in tiles, written to `out` where one is given, slot after slot: beside both, no more than one
    slot is held. LabError where there are none, or for an `out` of another size."""
    n = raw.shape[1]
    why = refusal(format, n, kd)
    if why is not None:
        raise LabError(f"to_tiles: {why}.")
    if raw.shape[2] != gemv_row_bytes(format, kd):
        wanted = gemv_row_bytes(format, kd)
        raise LabError(f"to_tiles: rows of {kd} {format} values take {wanted} bytes, got {raw.shape[2]}.")
    size, each = BLOCKS[format].bytes, step_blocks(format)
    blocks, steps = kd // BLOCKS[format].values, steps_of(format, kd)
    read, sources = _blocks_read(format, blocks).to(raw.device), _sources(format).to(raw.device)
    shape = (len(raw), n // ROWS, tile_bytes(format, kd))
    out = torch.empty(shape, dtype=torch.uint8, device=raw.device) if out is None else out
    expect("to_tiles", "out", out, [torch.uint8], shape)
    for slot, rows in enumerate(raw):
        parts = rows.unflatten(-1, (blocks, size))
        parts = parts[:, read] if steps * each != blocks else parts
        parts = parts.reshape(n // ROWS, ROWS, steps, each * size).transpose(1, 2).flatten(-2)
        out[slot] = parts[:, :, sources].flatten(1)
    return out


def from_tiles(tiles: UInt8[Tensor, "S tiles tile_bytes"], format: str, kd: int) -> UInt8[Tensor, "S N row_bytes"]:
    """Raw rows again, byte for byte."""
    size, each = BLOCKS[format].bytes, step_blocks(format)
    blocks, steps = kd // BLOCKS[format].values, steps_of(format, kd)
    read, sources = _blocks_read(format, blocks).to(tiles.device), _sources(format).to(tiles.device)
    s, count = tiles.shape[:2]
    parts = torch.empty_like(tiles).view(s, count, steps, ROWS * each * size)
    parts[..., sources] = tiles.view(parts.shape)
    parts = parts.unflatten(-1, (ROWS, each, size)).transpose(2, 3).flatten(3, 4)
    out = torch.empty(s, count, ROWS, blocks, size, dtype=torch.uint8, device=tiles.device)
    out[:, :, :, read] = parts
    return out.view(s, count * ROWS, blocks * size)
