"""q8_1 rows in the order in which a GEMV's lanes read them.

In value order a warp's load of activation codes takes 8 bytes here and 8 bytes there: 16 cache lines a load for
super-blocks, more than the weights of all rows it serves. In lane order it takes LANES * 8 consecutive bytes. A lane's
U = V / PER_BLOCK values of a block of V are U / 8 units of 8 codes; unit i of lane l in step s lies at byte
s * LANES * U + i * 8 * LANES + 8 * l. Which values a unit holds is the format's matter: `unit_of`, and in torch
`lane_index`. Rows are padded to whole steps; the padding is never read.

R rows of Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales and sums; the bits are q8_1's.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.blocks import BLOCKS, gemv_row_bytes
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.decode_ref import Lanes, lanes_of
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.quantize_rows import q8_1_blocks, quantize_q8_1_ref


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
def _quantize_lanes(x, codes, scale, total, groups, x_row_stride, codes_stride, FORMAT: tl.constexpr,
                    VALUES: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
                    GROUPS: tl.constexpr):  # fmt: skip
    """Program = (row, GROUPS groups of 32 values)."""
    row, tile = tl.program_id(0), tl.program_id(1)
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


def quantize_lanes(x: Float[Tensor, "R Kd"], format: str, *, lanes: Lanes | None = None) -> LaneRows:
    """The rows that a GEMV on `format` reads (Triton). LabError when Kd is not whole blocks of it."""
    out = lane_rows("quantize_lanes", x.shape, format, lanes, x.device)
    expect("quantize_lanes", "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise LabError(f"quantize_lanes: x's last axis must be contiguous, got strides {x.stride()}.")
    if not x.numel():
        return out
    on, groups = backend.serve("quantize_lanes", x=x), out.scale.shape[1]
    at_once = 4 if on == "cuda" else min(256, backend.next_power_of_2(groups))
    backend.launch(
        _quantize_lanes,
        (len(x), -(-groups // at_once)),
        *(x, *out[:3], groups, x.stride(0), out.codes.stride(0), format, BLOCKS[format].values, *out.lanes, at_once),
        device=x.device,
        num_warps=1,
    )
    return out


def quantize_lanes_ref(x: Float[Tensor, "R Kd"], format: str, *, lanes: Lanes | None = None) -> LaneRows:
    """The same in torch, bit for bit; the padding, which the kernel leaves as it was, is 0."""
    return to_lanes(quantize_q8_1_ref(x), format, lanes)


def lane_rows(op: str, shape: Sequence[int], format: str, lanes: Lanes | None, device: torch.device) -> LaneRows:
    """Room for rows of `shape` [R, Kd]."""
    rows, kd = shape
    gemv_row_bytes(format, kd)
    lanes = lanes or lanes_of(format, kd)
    if lanes.block > 4:
        raise LabError(f"{op}: {lanes} has no lane order; walk the row with at most 4 lanes a block.")
    scale, total = (torch.empty(rows, kd // 32, dtype=torch.float16, device=device) for _ in range(2))
    codes = torch.empty(rows, len(lane_index(format, kd, lanes)), dtype=torch.int8, device=device)
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
