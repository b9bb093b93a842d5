"""Weights with separate scales to floats: FP8 blocks, NVFP4, MXFP4, MXFP8, affine INT4 and INT8 (see scaled_layouts).

Leading axes X (experts), N rows, Kd values a row. Reads the codes (1 or 1/2 byte a value) and the scales once, writes
Kd floats a row in `out_dtype`: 3 (8-bit codes) or 2.5 (4-bit) bytes a value move for bf16, so memory is the limit as
long as a value takes fewer than about 18 instructions on an H200. All formats share one body: a program takes a run of
`Tile.values` values of one row, 8 a thread at a time, so that a thread loads 4 or 8 bytes and stores 16. Knows nothing
of files, experts or who made the scales. Values are fp32 products rounded as scaled_layouts says, then once to
`out_dtype`: the reference, the interpreter and the GPU have the same bits (a NaN is a NaN).
"""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.storage.minifloat import (
    e2m1_to_f32,
    e2m1_values,
    e4m3_to_f32,
    e4m3_values,
    e8m0_to_f32,
    e8m0_values,
)
from moe_lab_kernels.storage.scaled_layouts import ScaledLayout, layout_of, row_bytes, scale_shape

UNIT = 8  # values a thread decodes and stores together
_UNIT = tl.constexpr(UNIT)


class Tile(NamedTuple):
    """A program's share: `values` of a row (a power of two >= 256), of `rows` rows (a power of two), over `warps`."""

    values: int
    warps: int
    rows: int = 1


@jit
def _scale(at, there, SCALE: tl.constexpr):
    """Stored scales -> fp32."""
    stored = tl.load(at, mask=there, other=0)
    if SCALE == "e4m3":
        out = e4m3_to_f32(stored)
    elif SCALE == "e8m0":
        out = e8m0_to_f32(stored)
    else:
        out = to_f32(stored)
    return out


@jit
def _dequantize_scaled(data, scales, second, out, rows, N, Kd, tiles, data_x, data_row, scale_x, scale_row, second_x,
                       second_row, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
                       SHARED: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Program = (ROWS rows counted over all matrices, tile of their values). A unit is 8 values of one row."""
    pid = tl.program_id(0)
    unit = tl.arange(0, ROWS * VALUES // _UNIT)
    row = (pid // tiles) * ROWS + unit // (VALUES // _UNIT)
    first = (pid % tiles) * VALUES + (unit % (VALUES // _UNIT)) * _UNIT
    there = (row < rows) & (first < Kd)
    x, n = row // N, row % N
    codes = (offset64(x, data_x) + offset64(n, data_row))[:, None]
    at = first[:, None] + tl.arange(0, _UNIT)[None, :]
    inside = (row < rows)[:, None] & (at < Kd)
    if CODE == "e2m1" or CODE == "u4":
        byte = (first // 2)[:, None] + tl.arange(0, _UNIT // 2)[None, :]
        pairs = tl.load(data + (codes + byte), mask=there[:, None], other=0)  # Kd is whole groups of at least 16
        pairs = pairs.to(tl.int32)  # bytes are 16-bit registers to the compiler, each shift then wants a mask
        q = tl.reshape(tl.join(pairs & 15, pairs >> 4), [ROWS * VALUES // _UNIT, _UNIT])
    else:
        q = tl.load(data + (codes + at), mask=inside, other=0)
    group = first // GROUP
    step = _scale(scales + (offset64(x, scale_x) + offset64(n // SHARED, scale_row) + group), there, SCALE)
    if SECOND == "multiplier":
        step = step * tl.load(second + offset64(x, second_x), mask=there, other=1)
    elif SECOND == "divisor":
        step = tl.div_rn(step, tl.load(second + offset64(x, second_x), mask=there, other=1))
    if CODE == "e4m3":
        value = e4m3_to_f32(q)
    elif CODE == "e2m1":
        value = e2m1_to_f32(q)
    else:
        value = q.to(tl.float32)
    value = value * step[:, None]
    if SECOND == "bias":
        bias = second + (offset64(x, second_x) + offset64(n, second_row) + group)
        value = value + to_f32(tl.load(bias, mask=there, other=0))[:, None]
    tl.store(out + (offset64(row, Kd)[:, None] + at), round_to(value, out.dtype.element_ty), mask=inside)


def dequantize_scaled(
    data: UInt8[Tensor, "*lead N row_bytes"],
    scales: Tensor,
    format: str,
    kd: int,
    *,
    second: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Values [*lead, N, Kd] in fp32, fp16 or bf16, written to contiguous `out` where one is given (Triton).

    `scales`: uint8 bits of e4m3 or e8m0, or fp32, fp16, bf16, of `scale_shape`; `second`: fp32 [*lead] (global scale)
    or floats shaped as the scales (bias). Rows contiguous, other strides free. LabError for shapes, dtypes or devices
    that disagree.
    """
    layout, shape = _check(data, scales, second, format, kd, out_dtype)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=data.device)
    expect("dequantize_scaled", "out", out, [out_dtype], shape)
    expect_contiguous("dequantize_scaled", "out", out)
    if not out.numel():
        return out
    on = backend.serve("dequantize_scaled", data=data, scales=scales, second=second, out=out)
    d, s = (t.reshape(-1, *t.shape[-2:]) for t in (data, scales))
    if second is None:
        g, g_strides = s, (0, 0)
    elif layout.second == "bias":
        g = second.reshape(-1, *second.shape[-2:])
        g_strides = (g.stride(0), g.stride(1))
    else:
        g = second.reshape(-1)
        g_strides = (g.stride(0), 0)
    tile = tile or tile_for(kd, on)
    tiles, rows = -(-kd // tile.values), d.shape[0] * d.shape[1]
    backend.launch(
        _dequantize_scaled,
        (-(-rows // tile.rows) * tiles,),
        *(d, s, g, out, rows, d.shape[1], kd, tiles),
        *(d.stride(0), d.stride(1), s.stride(0), s.stride(1), *g_strides),
        *(layout.code, layout.scale, layout.second, layout.group, layout.rows, tile.values, tile.rows),
        device=data.device,
        num_warps=tile.warps,
    )
    return out


def dequantize_scaled_ref(
    data: UInt8[Tensor, "*lead N row_bytes"],
    scales: Tensor,
    format: str,
    kd: int,
    *,
    second: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor:
    """The same in torch; `tile` changes nothing."""
    layout, _ = _check(data, scales, second, format, kd, out_dtype)
    step = {"e4m3": e4m3_values, "e8m0": e8m0_values, "float": torch.Tensor.float}[layout.scale](scales)
    if second is not None and layout.second != "bias":
        g = second.float()[..., None, None]
        step = step * g if layout.second == "multiplier" else step / g
    value = _code_values(data, layout)
    value = value * _spread(step, layout, data.shape[-2], kd)
    if second is not None and layout.second == "bias":
        value = value + _spread(second.float(), layout, data.shape[-2], kd)
    return value.to(out_dtype)


def tile_for(kd: int, on: str = "cuda") -> Tile:
    """32 values a thread: the widest run of which a row's last one wastes at most an eighth, else short runs, 16 rows.

    On an H200 all of these decode mxfp4_oss at 0.93 to 0.95 of a copy's bandwidth for rows of 768 to 7,168; 8 values a
    thread gave 0.65 to 0.75, and four rows of one warp 0.88 at 768. The interpreter pays for programs, not for values.
    """
    if on == "interpreter":
        values = max(256, backend.next_power_of_2(kd))
        return Tile(values, 4, max(1, (1 << 17) // values))
    for values in (4096, 2048, 1024):
        if -(-kd // values) * values <= kd * 9 // 8:
            return Tile(values, values // 1024)
    return Tile(256, 4, 16)


def _code_values(data: Tensor, layout: ScaledLayout) -> Tensor:
    if layout.code_bits == 4:
        data = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    read = {"e4m3": e4m3_values, "e2m1": e2m1_values}.get(layout.code, torch.Tensor.float)
    return read(data)


def _spread(per_block: Tensor, layout: ScaledLayout, n: int, kd: int) -> Tensor:
    """One a block -> one a value [.., N, Kd]; short last blocks are cut."""
    if layout.rows > 1:
        per_block = per_block.repeat_interleave(layout.rows, -2)[..., :n, :]
    return per_block.repeat_interleave(layout.group, -1)[..., :kd]


def _check(
    data: Tensor, scales: Tensor, second: Tensor | None, format: str, kd: int, out_dtype: torch.dtype
) -> tuple[ScaledLayout, tuple[int, ...]]:
    op, layout = "dequantize_scaled", layout_of(format)
    if data.ndim < 2:
        raise LabError(f"{op}: data must be [.., N, row_bytes], got shape {list(data.shape)}.")
    lead, n = data.shape[:-2], data.shape[-2]
    shape = (*lead, n, kd)
    expect(op, "data", data, [torch.uint8], (*lead, n, row_bytes(format, kd)))
    wanted = scale_shape(format, shape)
    expect(op, "scales", scales, FLOATS if layout.scale == "float" else [torch.uint8], wanted)
    if (second is None) != (layout.second == "none"):
        raise LabError(
            f"{op}: {format} wants {layout.second} as second, and {'none' if second is None else 'one'} came."
        )
    if second is not None:
        bias = layout.second == "bias"
        expect(op, "second", second, FLOATS if bias else [torch.float32], wanted if bias else lead)
    for name, t in (("data", data), ("scales", scales), ("biases", second if layout.second == "bias" else None)):
        if t is not None:
            expect_rows(op, name, t)
    if out_dtype not in FLOATS:
        raise LabError(f"{op}: out_dtype must be float32, float16 or bfloat16, got {out_dtype}.")
    return layout, shape
