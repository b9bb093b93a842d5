"""q8_1 rows in the order in which a GEMV's lanes read them.

In value order a warp's load of activation codes takes 8 bytes here and 8 bytes there: 16 cache lines a load for
super-blocks, more than the weights of all rows it serves. In lane order it takes LANES * 8 consecutive bytes. A lane's
U = V / PER_BLOCK values of a block of V are U / 8 units of 8 codes; unit i of lane l in step s lies at byte
s * LANES * U + i * 8 * LANES + 8 * l. Which values a unit holds is the format's matter: `unit_of`, and in torch
`lane_index`. Rows are padded to whole steps; the padding is never read.

R rows of Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales and sums; the bits are q8_1's.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.forms import form_of, format_of, values_of
from moe_lab_kernels.gemv.q8_rows import Empty, Words, check_given, cleared, fresh, quantize
from moe_lab_kernels.gemv.ref import Lanes, lanes_of
from moe_lab_kernels.rows.quantize_rows import quantize_q8_1_ref
from moe_lab_kernels.storage.blocks import gemv_row_bytes


class LaneRows(NamedTuple):
    """codes int8 [R, Kp] in lane order, scale and total fp16 [R, Kd / 32]; the weights' form, how rows are walked."""

    codes: Tensor
    scale: Tensor
    total: Tensor
    form: str
    lanes: Lanes


Rows = Sequence[Tensor] | LaneRows  # (codes, scale[, total]) in value order, or rows in lane order


def quantize_lanes(x: Float[Tensor, "R Kd"], format: str, *, layout: str = "raw", lanes: Lanes | None = None,
                   out: LaneRows | None = None, clear: Words | None = None, pdl: bool = False) -> LaneRows:  # fmt: skip
    """The rows that a GEMV on `format` in `layout` reads (Triton), in `out` where it is given (`lane_rows`).

    `clear`: words of the launch that follows. `pdl`: start while the kernel before still runs, and let the next one do
    so. LabError when Kd is not whole blocks of the format, or `out` is room for other rows.
    """
    form = form_of("quantize_lanes", format, layout)
    made = lane_rows("quantize_lanes", x.shape, form, lanes, x.device) if out is None else out
    out = _check_room("quantize_lanes", x, form, lanes, made)
    check_given("quantize_lanes", x, clear)
    order = (form, values_of(form), *out.lanes)
    quantize("quantize_lanes", x, *out[:3], out.scale, order, clear, pdl)
    return out


def quantize_lanes_ref(x: Float[Tensor, "R Kd"], format: str, *, layout: str = "raw", lanes: Lanes | None = None,
                       out: LaneRows | None = None, clear: Words | None = None,
                       pdl: bool = False) -> LaneRows:  # fmt: skip
    """The same in torch, bit for bit; the padding, which the kernel leaves as it was, is 0."""
    form = form_of("quantize_lanes", format, layout)
    made = to_lanes(quantize_q8_1_ref(x), form, lanes)
    cleared(clear)
    if out is None:
        return made
    for kept, new in zip(_check_room("quantize_lanes", x, form, lanes, out)[:3], made[:3], strict=True):
        kept.copy_(new)
    return out


def _check_room(op: str, x: Tensor, form: str, lanes: Lanes | None, out: LaneRows) -> LaneRows:
    lanes = lanes or lanes_of(form, x.shape[1])
    if (out.form, out.lanes) != (form, lanes):
        raise LabError(f"{op}: out is room for {out.form} and {out.lanes}, asked for {form} and {lanes}.")
    expect(op, "out.codes", out.codes, [torch.int8], [len(x), len(lane_index(form, x.shape[1], lanes))])
    expect_rows(op, "out.codes", out.codes)
    for name, t in (("out.scale", out.scale), ("out.total", out.total)):
        expect(op, name, t, [torch.float16], [len(x), x.shape[1] // 32])
        expect_contiguous(op, name, t)
    return out


def lane_rows(op: str, shape: Sequence[int], form: str, lanes: Lanes | None, device: torch.device, empty: Empty = fresh,
              name: str = "rows") -> LaneRows:  # fmt: skip
    """Room for rows of `shape` [R, Kd], from `empty` as name.codes, name.scale, name.total."""
    rows, kd = shape
    gemv_row_bytes(format_of(form), kd)
    lanes = lanes or lanes_of(form, kd)
    if lanes.block > 4:
        raise LabError(f"{op}: {lanes} has no lane order; walk the row with at most 4 lanes a block.")
    scale, total = (empty(f"{name}.{part}", (rows, kd // 32), torch.float16, device) for part in ("scale", "total"))
    codes = empty(f"{name}.codes", (rows, len(lane_index(form, kd, lanes))), torch.int8, device)
    return LaneRows(codes, scale, total, form, lanes)


def code_bytes(form: str, kd: int, lanes: Lanes) -> int:
    """Bytes of a row's codes, padded to whole steps."""
    return -(-kd // (values_of(form) * lanes.row // lanes.block)) * values_of(form) * lanes.row // lanes.block


@cache
def lane_index(form: str, kd: int, lanes: Lanes) -> Tensor:
    """int64 [Kp]: the value whose code lies at each byte, -1 for padding."""
    values = values_of(form)
    v, each = torch.arange(kd), values // lanes.block
    block, inside = v // values, v % values
    if form in ("q2_k", "q3_k"):
        sub, i = inside // 128 * 2 + inside % 16 // 8, inside % 128 // 16
    elif form == "q6_k":
        sub, i = inside // 128 * 2 + inside % 32 // 16, inside % 128 // 32 * 2 + inside % 16 // 8
    else:
        sub, i = inside // each, inside % each // 8
    per_step = lanes.row // lanes.block
    lane = block % per_step * lanes.block + sub
    steps = -(-(kd // values) // per_step)
    index = torch.full((steps * lanes.row * each,), -1)
    index[(block // per_step * (each // 8) + i) * 8 * lanes.row + lane * 8 + v % 8] = v
    return index


def to_lanes(rows: Sequence[Tensor], form: str, lanes: Lanes | None = None) -> LaneRows:
    """Plain q8_1 rows (codes, scale, total) in lane order."""
    codes, scale, total = rows
    lanes = lanes or lanes_of(form, codes.shape[1])
    index = lane_index(form, codes.shape[1], lanes).to(codes.device)
    return LaneRows(torch.where(index < 0, 0, codes[:, index.clamp(min=0)]), scale, total, form, lanes)


def to_plain(rows: Rows) -> Sequence[Tensor]:
    """(codes, scale, total) in value order again; plain rows as they are."""
    if not isinstance(rows, LaneRows):
        return rows
    index = lane_index(rows.form, rows.scale.shape[1] * 32, rows.lanes).to(rows.codes.device)
    codes = torch.empty(len(rows.codes), rows.scale.shape[1] * 32, dtype=torch.int8, device=rows.codes.device)
    codes[:, index[index >= 0]] = rows.codes[:, index >= 0]
    return codes, rows.scale, rows.total
