"""Raw blocks to planes and back: a permutation of every block's bits (`planar_layout` says which).

Reads and writes every byte of a weight once. To planes, which is on the way of every expert that is fetched, by pieces
(`planar_pack`). Back, which is seldom, one kernel gathers each output byte's fields from wherever a table says they
come from; the table is read off `split` itself, run on blocks of one bit.

One buffer is one weight [N, Kd], whatever leading axes there are: an arena's slot holds it, as its raw form.
"""

from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous
from moe_lab_kernels.storage import planar_pack
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import blocks_of, join, pieces_of, planes_of, split
from moe_lab_kernels.storage.unpack import check_rows

TILE_CUDA, TILE_INTERPRETER = 1024, 1 << 15
MAX_GRID_Y = 65_535


class Side(NamedTuple):
    """Where byte i of a block lies: block n's is at start[i] + n * stride[i]. int64 and int32 [block_bytes]."""

    start: Tensor
    stride: Tensor


class Tables(NamedTuple):
    """Both sides, and the field of planes (counted in fields of `width` bits) that each field of a raw block is."""

    raw: Side
    planar: Side
    width: int
    to_raw: Tensor


@jit(do_not_specialize=["total", "from_weight", "to_weight"], do_not_specialize_on_alignment=["source", "target"])
def _permute(source, target, source_start, source_stride, target_start, target_stride, table, total, from_weight,
             to_weight, BYTES: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Program = (TILE output bytes of a weight, weight). `total`: bytes of a weight's blocks."""
    first = tl.program_id(0).to(tl.int64) * TILE
    source += tl.program_id(1).to(tl.int64) * from_weight
    target += tl.program_id(1).to(tl.int64) * to_weight
    i = tl.arange(0, TILE)
    there = i < total - first
    local = (first % BYTES).to(tl.int32) + i
    block, byte = (first // BYTES) + local // BYTES, local % BYTES
    per_byte: tl.constexpr = 8 // WIDTH
    out = tl.zeros((TILE,), tl.int32)
    for field in tl.static_range(per_byte):  # pyright: ignore[reportGeneralTypeIssues]
        origin = tl.load(table + byte * per_byte + field)
        at = origin // per_byte
        where = tl.load(source_start + at) + block * tl.load(source_stride + at)
        bits = tl.load(source + where, mask=there, other=0).to(tl.int32) >> (origin % per_byte * WIDTH)
        out |= (bits & ((1 << WIDTH) - 1)) << (field * WIDTH)
    to = tl.load(target_start + byte) + block * tl.load(target_stride + byte)
    tl.store(target + to, out.to(tl.uint8), mask=there)


def repack(
    raw: UInt8[Tensor, "*weights N row_bytes"], format: str, *, out: Tensor | None = None
) -> UInt8[Tensor, "*weights bytes"]:
    """Raw rows to planes, one buffer a weight, written to `out` where one is given (Triton).

    LabError for a format without planes, rows that are not contiguous, or an `out` of another size.
    """
    out, lead, blocks = _planar_output("repack", raw, format, out)
    on = backend.serve("repack", raw=raw, out=out)
    if lead > MAX_GRID_Y:
        raise LabError(f"repack: {lead} weights at once pass the grid's {MAX_GRID_Y}; take fewer.")
    each = planar_pack.blocks_a_program(format, blocks, on != "cuda")
    backend.launch(
        planar_pack.pack,
        (-(-blocks // each), lead),
        *(raw, out, blocks, blocks * BLOCKS[format].bytes, out.shape[-1], *planar_pack.starts_for(format, blocks)),
        *(BLOCKS[format].bytes, each, *(n for piece in planar_pack.pieces_for(format) for n in piece)),
        device=raw.device,
        num_warps=4,
    )
    return out


def restore(
    planar: UInt8[Tensor, "*weights bytes"], format: str, n: int, kd: int, *, out: Tensor | None = None
) -> UInt8[Tensor, "*weights N row"]:
    """The raw rows of weights [n, kd] again (Triton). LabError when a buffer has another size."""
    out, lead, blocks = _raw_output("restore", planar, format, n, kd, out)
    on = backend.serve("restore", planar=planar, out=out)
    t = tables(format, blocks, planar.device)
    _launch(on, planar, out, t.planar, t.raw, t.to_raw, t.width, lead, blocks, format)
    return out


def repack_ref(
    raw: UInt8[Tensor, "*weights N row_bytes"], format: str, *, out: Tensor | None = None
) -> UInt8[Tensor, "*weights bytes"]:
    """The same in torch."""
    out, _, blocks = _planar_output("repack", raw, format, out)
    parts = split(raw.reshape(*raw.shape[:-2], blocks, BLOCKS[format].bytes), format)
    for plane, part in zip(planes_of(format, blocks)[0].values(), parts, strict=True):
        out[..., plane.start : plane.start + blocks * plane.bytes] = part.flatten(-2)
    return out


def restore_ref(
    planar: UInt8[Tensor, "*weights bytes"], format: str, n: int, kd: int, *, out: Tensor | None = None
) -> UInt8[Tensor, "*weights N row"]:
    """The same in torch."""
    out, _, blocks = _raw_output("restore", planar, format, n, kd, out)
    parts = [
        planar[..., p.start : p.start + blocks * p.bytes].unflatten(-1, (blocks, p.bytes))
        for p in planes_of(format, blocks)[0].values()
    ]
    return out.copy_(join(parts, format).view(out.shape))


@cache
def tables(format: str, blocks: int, device: torch.device) -> Tables:
    """The kernel's tables for weights of `blocks` blocks. Kept (20 KB at most), so that a captured graph finds them."""
    size = BLOCKS[format].bytes
    at = torch.arange(size)
    planes = [p for p in planes_of(format, blocks)[0].values() if p.bytes]
    start = torch.cat([p.start + torch.arange(p.bytes) for p in planes])
    stride = torch.cat([torch.full((p.bytes,), p.bytes) for p in planes])
    # planar bit that raw bit k becomes
    bits = torch.arange(8 * size)
    alone = torch.zeros(8 * size, size, dtype=torch.uint8)
    alone[bits, bits // 8] = (1 << bits % 8).to(torch.uint8)
    moved = torch.cat(split(alone, format), -1)
    byte = moved.argmax(-1)
    goes_to = 8 * byte + moved.gather(-1, byte[:, None]).squeeze(-1).float().log2().long()
    width = next(w for w in (8, 4, 2, 1) if _stay_whole(goes_to, w))
    raw = Side(at.to(device), torch.full((size,), size, dtype=torch.int32, device=device))
    planar = Side(start.to(device), stride.to(device, torch.int32))
    to_raw = goes_to[::width].div(width, rounding_mode="floor").to(device, torch.int32)
    return Tables(raw, planar, width, to_raw)


def _stay_whole(goes_to: Tensor, width: int) -> bool:
    """Whether aligned fields of `width` bits move as one."""
    parts = goes_to.view(-1, width)
    return bool(((parts[:, :1] % width == 0) & (parts == parts[:, :1] + torch.arange(width))).all())


def _launch(on: str, source: Tensor, target: Tensor, origin: Side, goal: Side, table: Tensor, width: int, lead: int,
            blocks: int, format: str) -> None:  # fmt: skip
    size = BLOCKS[format].bytes
    total, tile = blocks * size, TILE_CUDA
    if on != "cuda":
        tile = min(TILE_INTERPRETER, backend.next_power_of_2(total))
    if lead > MAX_GRID_Y:
        raise LabError(f"restore: {lead} weights at once pass the grid's {MAX_GRID_Y}; take fewer.")
    backend.launch(
        _permute,
        (-(-total // tile), lead),
        *(source, target, *origin, *goal, table, total, source.numel() // max(1, lead), target.numel() // max(1, lead)),
        *(size, width, tile),
        device=source.device,
        num_warps=4,
    )


def _planar_output(op: str, raw: Tensor, format: str, out: Tensor | None) -> tuple[Tensor, int, int]:
    """Buffers whose padding is 0, how many weights there are, and blocks a weight."""
    pieces_of(format)
    check_rows(raw, format)
    if raw.ndim < 2:
        raise LabError(f"{op}: raw must have shape [.., N, row_bytes], got {list(raw.shape)}.")
    expect_contiguous(op, "raw", raw)
    blocks = raw.shape[-2] * (raw.shape[-1] // BLOCKS[format].bytes)
    planes, size = planes_of(format, blocks)
    out = _given_or_new(op, out, (*raw.shape[:-2], size), raw.device)
    ends = [*(p.start for p in planes.values()), size][1:]
    for plane, end in zip(planes.values(), ends, strict=True):
        if plane.start + blocks * plane.bytes < end:
            out[..., plane.start + blocks * plane.bytes : end] = 0
    return out, raw.shape[:-2].numel(), blocks


def _raw_output(op: str, planar: Tensor, format: str, n: int, kd: int, out: Tensor | None) -> tuple[Tensor, int, int]:
    blocks, lead = check_planar(op, planar, format, n, kd)
    row = kd // BLOCKS[format].values * BLOCKS[format].bytes
    return _given_or_new(op, out, (*planar.shape[:-1], n, row), planar.device), lead, blocks


def _given_or_new(op: str, out: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.uint8, device=device)
    expect(op, "out", out, [torch.uint8], shape)
    expect_contiguous(op, "out", out)
    return out


def check_planar(op: str, planar: Tensor, format: str, n: int, kd: int, gaps: bool = False) -> tuple[int, int]:
    """Blocks a weight, and how many weights; errors as `restore` says. `gaps`: buffers may lie apart."""
    blocks = blocks_of(op, format, n, kd)
    size = planes_of(format, blocks)[1]
    expect(op, "planar", planar, [torch.uint8], [*planar.shape[:-1], size] if planar.ndim else [size])
    if not gaps:
        expect_contiguous(op, "planar", planar)
    return blocks, planar.shape[:-1].numel()
