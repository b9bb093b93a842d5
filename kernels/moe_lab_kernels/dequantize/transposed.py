"""NVFP4 and MXFP4 held transposed, to floats: codes [Kd / 2, N], scales [Kd / group, N], values [Kd, N].

Byte (j, n) holds elements 2j (low nibble) and 2j + 1 of column n, so that neighbouring threads read neighbouring bytes
and write neighbouring values however long a row is. Moves the bytes that the plain layout moves (a scale is read again
by each program of its group, from the cache). X leading axes (experts). The values have the bits of `dequantize_scaled`
on the plain layout.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_rows
from moe_lab_kernels.dequantize.scaled import UNIT, dequantize_scaled_ref
from moe_lab_kernels.primitives import offset64, round_to
from moe_lab_kernels.storage.minifloat import e2m1_to_f32, e4m3_to_f32, e8m0_to_f32
from moe_lab_kernels.storage.scaled_layouts import ScaledLayout, layout_of

_UNIT = tl.constexpr(UNIT)


class TransposedTile(NamedTuple):
    """A program's share: `pairs` byte rows of one group (a power of two, at most half a group) of `columns` columns.

    256 columns a warp give each thread 8 columns and all of the program's rows of them, so that scales stay in the
    threads that load them.
    """

    pairs: int
    columns: int
    warps: int


# share of a copy's bandwidth on an H200, mxfp4_oss: 2 pairs 0.95, 4 pairs 0.93, 8 pairs 0.83; 256 columns, 4 warps 0.81
TILE = TransposedTile(2, 1024, 4)


@jit
def _dequantize_transposed(data, scales, second, out, N, tiles, parts, data_x, data_row, scale_x, scale_row,
                           SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, PAIRS: tl.constexpr,
                           COLUMNS: tl.constexpr):  # fmt: skip
    """Program = (matrix, PAIRS byte rows, tile of columns)."""
    pid = tl.program_id(0)
    tile, block = pid % tiles, pid // tiles
    part, x = block % parts, block // parts
    n = tile * COLUMNS + tl.arange(0, COLUMNS // _UNIT)[None, :, None] * _UNIT + tl.arange(0, _UNIT)[None, None, :]
    there = n < N
    pair = part * PAIRS + tl.arange(0, PAIRS)[:, None, None]
    group = part * PAIRS * 2 // GROUP
    codes = tl.load(data + (offset64(x, data_x) + offset64(pair, data_row) + n), mask=there, other=0).to(tl.int32)
    stored = tl.load(scales + (offset64(x, scale_x) + offset64(group, scale_row) + n), mask=there, other=0)
    step = e4m3_to_f32(stored) if SCALE == "e4m3" else e8m0_to_f32(stored)
    if SECOND == "multiplier":
        step = step * tl.load(second + x)
    elif SECOND == "divisor":
        step = tl.div_rn(step, tl.load(second + x))
    at = offset64(2 * (x * parts * PAIRS + pair), N) + n
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + at, round_to(e2m1_to_f32(codes & 15) * step, dtype), mask=there)
    tl.store(out + (at + N), round_to(e2m1_to_f32(codes >> 4) * step, dtype), mask=there)


def dequantize_transposed(
    data: UInt8[Tensor, "*lead pairs N"],
    scales: UInt8[Tensor, "*lead groups N"],
    format: str,
    *,
    second: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: TransposedTile | None = None,
) -> Tensor:
    """Values [*lead, Kd, N] of nvfp4_modelopt, nvfp4_ct or mxfp4_oss (Triton). `second`: fp32 [*lead], the global
    scale. LabError for another format, for shapes, dtypes or devices that disagree."""
    layout = _check(data, scales, second, format, out_dtype)
    kd, n = 2 * data.shape[-2], data.shape[-1]
    out = torch.empty((*data.shape[:-2], kd, n), dtype=out_dtype, device=data.device)
    if not out.numel():
        return out
    on = backend.serve("dequantize_transposed", data=data, scales=scales, second=second)
    d, s = (t.reshape(-1, *t.shape[-2:]) for t in (data, scales))
    if tile is None:
        tile = TILE if on == "cuda" else TransposedTile(layout.group // 2, max(256, backend.next_power_of_2(n)), 4)
    tiles, parts = -(-n // tile.columns), kd // 2 // tile.pairs
    backend.launch(
        _dequantize_transposed,
        (d.shape[0] * parts * tiles,),
        *(d, s, s if second is None else second.reshape(-1), out, n, tiles, parts),
        *(d.stride(0), d.stride(1), s.stride(0), s.stride(1)),
        *(layout.scale, layout.second, layout.group, tile.pairs, tile.columns),
        device=data.device,
        num_warps=tile.warps,
    )
    return out


def dequantize_transposed_ref(
    data: UInt8[Tensor, "*lead pairs N"],
    scales: UInt8[Tensor, "*lead groups N"],
    format: str,
    *,
    second: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    tile: TransposedTile | None = None,
) -> Tensor:
    """The same in torch: the plain layout's values, turned round; `tile` changes nothing."""
    _check(data, scales, second, format, out_dtype)
    plain = (data.mT.contiguous(), scales.mT.contiguous(), format, 2 * data.shape[-2])
    return dequantize_scaled_ref(*plain, second=second, out_dtype=out_dtype).mT.contiguous()


def _check(data: Tensor, scales: Tensor, second: Tensor | None, format: str, out_dtype: torch.dtype) -> ScaledLayout:
    op, layout = "dequantize_transposed", layout_of(format)
    if layout.code != "e2m1":
        raise LabError(f"{op} serves nvfp4_modelopt, nvfp4_ct and mxfp4_oss, not {format}.")
    if data.ndim < 2 or 2 * data.shape[-2] % layout.group:
        raise LabError(
            f"{op}: data must be [.., Kd / 2, N] with Kd a multiple of {layout.group}, got {list(data.shape)}."
        )
    *lead, pairs, n = data.shape
    expect(op, "data", data, [torch.uint8], data.shape)
    expect(op, "scales", scales, [torch.uint8], (*lead, 2 * pairs // layout.group, n))
    if (second is None) != (layout.second == "none"):
        raise LabError(
            f"{op}: {format} wants {layout.second} as second, and {'none' if second is None else 'one'} came."
        )
    if second is not None:
        expect(op, "second", second, [torch.float32], lead)
    for name, t in (("data", data), ("scales", scales)):
        expect_rows(op, name, t)
    if out_dtype not in FLOATS:
        raise LabError(f"{op}: out_dtype must be float32, float16 or bfloat16, got {out_dtype}.")
    return layout
