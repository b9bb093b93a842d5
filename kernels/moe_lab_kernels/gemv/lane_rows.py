"""q8_1 rows in the order in which a GEMV's lanes read them.

In value order a warp's load of activation codes takes 8 bytes here and 8 bytes there: 16 cache lines a load for
super-blocks, more than the weights of all rows it serves. In lane order it takes LANES * 8 consecutive bytes. A lane's
U = V / PER_BLOCK values of a block of V are U / 8 units of 8 codes; unit i of lane l in step s lies at byte
s * LANES * U + i * 8 * LANES + 8 * l. Which values a unit holds is the format's matter: `unit_of`, and in torch
`lane_index`. Rows are padded to whole steps; the padding is never read.

R rows of Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales and sums; the bits are q8_1's.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.body import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.gemv.decode_ref import Lanes, lanes_of
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.quantize_rows import q8_1_blocks, quantize_q8_1_ref
from moe_lab_kernels.storage.blocks import BLOCKS, gemv_row_bytes


class LaneRows(NamedTuple):
    """codes int8 [R, Kp] in lane order, scale and total fp16 [R, Kd / 32]; the weights' format, how rows are walked."""

    codes: Tensor
    scale: Tensor
    total: Tensor
    format: str
    lanes: Lanes


Rows = Sequence[Tensor] | LaneRows  # (codes, scale[, total]) in value order, or rows in lane order


@jit
def unit_of(v, FORMAT: tl.constexpr, VALUES: tl.constexpr, PER_BLOCK: tl.constexpr):
    """(lane of the block, unit) that hold value v of a block; v a multiple of 8, or anything inside its unit."""
    if FORMAT == "q2_k" or FORMAT == "q3_k":  # lane (h, k), unit (j, g) of value 128 h + 32 j + 16 g + 8 k
        sub, i = v // 128 * 2 + v % 16 // 8, v % 128 // 16
    elif FORMAT == "q6_k":  # lane (n, t), unit (j, half) of value 128 n + 32 j + 16 t + 8 half
        sub, i = v // 128 * 2 + v % 32 // 16, v % 128 // 32 * 2 + v % 16 // 8
    else:  # a lane's values are consecutive
        sub, i = v // (VALUES // PER_BLOCK), v % (VALUES // PER_BLOCK) // 8
    return sub, i


@jit
def place_of(v, FORMAT: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Byte of a row at which value v's code lies."""
    block = v // VALUES
    sub, i = unit_of(v % VALUES, FORMAT, VALUES, PER_BLOCK)
    step, lane = block // (LANES // PER_BLOCK), block % (LANES // PER_BLOCK) * PER_BLOCK + sub
    return (step * (VALUES // PER_BLOCK // 8) + i) * (8 * LANES) + lane * 8 + v % 8


@jit
def _quantize_lanes(x, codes, scale, total, cleared, n_cleared, groups, x_row_stride, codes_stride,
                    FORMAT: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
                    GROUPS: tl.constexpr, CLEAR: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program = (row, GROUPS groups of 32 values), which also clears a share of `cleared`."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    if CLEAR:
        program, programs = row * tl.num_programs(1) + tile, tl.num_programs(0) * tl.num_programs(1)
        for at in range(program * 128, n_cleared, programs * 128):
            i = at + tl.arange(0, 128)
            tl.store(cleared + i, tl.zeros((128,), tl.int32), mask=i < n_cleared)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    v = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = group < groups
    given = to_f32(tl.load(x + (offset64(row, x_row_stride) + v), mask=there[:, None], other=0))
    code, d, s = q8_1_blocks(given)
    to = codes + (offset64(row, codes_stride) + place_of(v, FORMAT, VALUES, LANES, PER_BLOCK))
    tl.store(to, code.to(tl.int8), mask=there[:, None])
    at = offset64(row, groups) + group
    tl.store(scale + at, round_to(tl.reshape(d, [GROUPS]), tl.float16), mask=there)
    tl.store(total + at, round_to(tl.reshape(s, [GROUPS]), tl.float16), mask=there)


def quantize_lanes(
    x: Float[Tensor, "R Kd"],
    format: str,
    *,
    lanes: Lanes | None = None,
    out: LaneRows | None = None,
    clear: Int32[Tensor, " n"] | None = None,
    pdl: bool = False,
) -> LaneRows:
    """The rows that a GEMV on `format` reads (Triton), in `out` where it is given (`lane_rows`).

    `clear`: counters of the launch that follows, set to 0. `pdl`: start while the kernel before still runs, and let
    the next one do so. LabError when Kd is not whole blocks of the format, or `out` is room for other rows.
    """
    made = lane_rows("quantize_lanes", x.shape, format, lanes, x.device) if out is None else out
    out = _check_room("quantize_lanes", x, format, lanes, made)
    if clear is not None:
        expect("quantize_lanes", "clear", clear, [torch.int32], ["n"])
        expect_contiguous("quantize_lanes", "clear", clear)
    expect("quantize_lanes", "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise LabError(f"quantize_lanes: x's last axis must be contiguous, got strides {x.stride()}.")
    if not x.numel():
        return out
    on, groups = backend.serve("quantize_lanes", x=x, clear=clear), out.scale.shape[1]
    at_once = 4 if on == "cuda" else min(256, backend.next_power_of_2(groups))
    backend.launch(
        _quantize_lanes,
        (len(x), -(-groups // at_once)),
        *(x, *out[:3], out.scale if clear is None else clear, 0 if clear is None else len(clear), groups, x.stride(0)),
        *(out.codes.stride(0), format, BLOCKS[format].values, *out.lanes, at_once),
        *(clear is not None, pdl and on == "cuda"),
        device=x.device,
        num_warps=1,
        **backend.early_start(pdl, on),
    )
    return out


def quantize_lanes_ref(
    x: Float[Tensor, "R Kd"],
    format: str,
    *,
    lanes: Lanes | None = None,
    out: LaneRows | None = None,
    clear: Int32[Tensor, " n"] | None = None,
    pdl: bool = False,
) -> LaneRows:
    """The same in torch, bit for bit; the padding, which the kernel leaves as it was, is 0."""
    made = to_lanes(quantize_q8_1_ref(x), format, lanes)
    if clear is not None:
        clear.zero_()
    if out is None:
        return made
    for kept, new in zip(_check_room("quantize_lanes", x, format, lanes, out)[:3], made[:3], strict=True):
        kept.copy_(new)
    return out


def _check_room(op: str, x: Tensor, format: str, lanes: Lanes | None, out: LaneRows) -> LaneRows:
    lanes = lanes or lanes_of(format, x.shape[1])
    if (out.format, out.lanes) != (format, lanes):
        raise LabError(f"{op}: out is room for {out.format} and {out.lanes}, asked for {format} and {lanes}.")
    expect(op, "out.codes", out.codes, [torch.int8], [len(x), len(lane_index(format, x.shape[1], lanes))])
    expect_rows(op, "out.codes", out.codes)
    for name, t in (("out.scale", out.scale), ("out.total", out.total)):
        expect(op, name, t, [torch.float16], [len(x), x.shape[1] // 32])
        expect_contiguous(op, name, t)
    return out


Empty = Callable[[str, Sequence[int], torch.dtype, torch.device], Tensor]  # name, shape, dtype, device -> scratch


def fresh(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scratch of its own: what `Empty` is where nobody keeps a workspace."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def lane_rows(
    op: str,
    shape: Sequence[int],
    format: str,
    lanes: Lanes | None,
    device: torch.device,
    empty: Empty = fresh,
    name: str = "rows",
) -> LaneRows:
    """Room for rows of `shape` [R, Kd], from `empty` as name.codes, name.scale, name.total."""
    rows, kd = shape
    gemv_row_bytes(format, kd)
    lanes = lanes or lanes_of(format, kd)
    if lanes.block > 4:
        raise LabError(f"{op}: {lanes} has no lane order; walk the row with at most 4 lanes a block.")
    scale, total = (empty(f"{name}.{part}", (rows, kd // 32), torch.float16, device) for part in ("scale", "total"))
    codes = empty(f"{name}.codes", (rows, len(lane_index(format, kd, lanes))), torch.int8, device)
    return LaneRows(codes, scale, total, format, lanes)


@cache
def lane_index(format: str, kd: int, lanes: Lanes) -> Tensor:
    """int64 [Kp]: the value whose code lies at each byte, -1 for padding."""
    values = BLOCKS[format].values
    v, each = torch.arange(kd), values // lanes.block
    block, inside = v // values, v % values
    if format in ("q2_k", "q3_k"):
        sub, i = inside // 128 * 2 + inside % 16 // 8, inside % 128 // 16
    elif format == "q6_k":
        sub, i = inside // 128 * 2 + inside % 32 // 16, inside % 128 // 32 * 2 + inside % 16 // 8
    else:
        sub, i = inside // each, inside % each // 8
    per_step = lanes.row // lanes.block
    lane = block % per_step * lanes.block + sub
    steps = -(-(kd // values) // per_step)
    index = torch.full((steps * lanes.row * each,), -1)
    index[(block // per_step * (each // 8) + i) * 8 * lanes.row + lane * 8 + v % 8] = v
    return index


def to_lanes(rows: Sequence[Tensor], format: str, lanes: Lanes | None = None) -> LaneRows:
    """Plain q8_1 rows (codes, scale, total) in lane order."""
    codes, scale, total = rows
    lanes = lanes or lanes_of(format, codes.shape[1])
    index = lane_index(format, codes.shape[1], lanes).to(codes.device)
    return LaneRows(torch.where(index < 0, 0, codes[:, index.clamp(min=0)]), scale, total, format, lanes)


def to_plain(rows: Rows) -> Sequence[Tensor]:
    """(codes, scale, total) in value order again; plain rows as they are."""
    if not isinstance(rows, LaneRows):
        return rows
    index = lane_index(rows.format, rows.scale.shape[1] * 32, rows.lanes).to(rows.codes.device)
    codes = torch.empty(len(rows.codes), rows.scale.shape[1] * 32, dtype=torch.int8, device=rows.codes.device)
    codes[:, index[index >= 0]] = rows.codes[:, index >= 0]
    return codes, rows.scale, rows.total
