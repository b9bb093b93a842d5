"""Planar blocks to fp32, fp16 or bf16 values.

Reads every byte of the planes once (scales and floats again by the threads that share them), writes Kd values a row.
A thread makes eight consecutive values: whole 16 bytes of bf16, and neighbours in a warp store and load neighbours.
fp32 arithmetic as `unpack` states it, one rounding: launcher, interpreter, reference and the raw blocks' kernel give
the same bits. What lies where: `planar_layout`.
"""

import torch

from moe_lab._types import Float, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect_rows
from moe_lab_kernels.dequantize.dequantize import Cut, cut_for, dequantize_ref, output_of, unit_at
from moe_lab_kernels.dequantize.steps import byte_of, doubled_e2m1, e8m0_halved, half_at, number, ue4m3_halved
from moe_lab_kernels.primitives import half_bits, round_to
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar import MAX_GRID_Y, check_planar, restore_ref
from moe_lab_kernels.storage.planar_layout import ALIGNMENT, planes_of


@jit(do_not_specialize=["units", "weight", "high", "scales", "tops", "floats"])
def _dequantize_planar(planar, out, units, weight, high, scales, tops, floats, FORMAT: tl.constexpr,
                       VALUES: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (TILE units of eight values, weight); `weight`: bytes from one to the next; then starts of planes."""
    first, per_block = tl.program_id(0).to(tl.int64) * TILE, VALUES // 8
    left = tl.minimum(units - first, TILE).to(tl.int32)
    mine, lane = tl.arange(0, TILE)[:, None], tl.arange(0, 8)[None, :]
    u = unit_at(mine, left, TILE)
    base = planar + tl.program_id(1).to(tl.int64) * weight
    block = first // per_block
    v = _values(base, base + high, base + scales, base + tops, base + floats, first, block, u, lane, FORMAT, NATIVE)
    to = out + (tl.program_id(1).to(tl.int64) * units + first) * 8 + (mine * 8 + lane)
    tl.store(to, round_to(v, out.dtype.element_ty), mask=mine < left)


@jit
def _values(codes, high, scales, tops, floats, first, block, u, lane, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 [U, 8] of units `first` + u, `first` being the first of `block`."""
    if FORMAT == "q2_k":
        x = _words(codes + first * 2, u // 2) >> (4 * (u % 2))
        q = number(x & 0x03030303, x >> 2 & 0x03030303, lane, 0, NATIVE)
        sc, both = tl.load(scales + first // 2 + u // 2).to(tl.int32), _words(floats + block * 4, u // 32)
        out = half_bits(both) * (sc & 15).to(tl.float32) * q - half_bits(both >> 16) * (sc >> 4).to(tl.float32)
    elif FORMAT == "q3_k":
        x, h = _words(codes + first * 2, u // 2) >> (4 * (u % 2)), _words(high + first, u // 4) >> (2 * (u % 4))
        low, top = x & 0x03030303 | h << 2 & 0x04040404, x >> 2 & 0x03030303 | h << 1 & 0x04040404
        sc = _six_bits(scales + block * 8, tops + block * 4, u // 32, u % 32 // 2) - 32
        out = half_at(floats + block * 2 + u // 32 * 2) * sc.to(tl.float32) * number(low, top, lane, 4, NATIVE)
    elif FORMAT == "q4_k" or FORMAT == "q5_k":
        x = _words(codes + first * 4, u)
        low, top = x & 0x0F0F0F0F, x >> 4 & 0x0F0F0F0F
        if FORMAT == "q5_k":
            h = _words(high + first, u // 4) >> (2 * (u % 4))
            low, top = low | h << 4 & 0x10101010, top | h << 3 & 0x10101010
        both, sub = _words(floats + block * 4, u // 32), u % 32 // 4
        sc = _six_bits(scales + block * 8, tops + block * 4, u // 32, sub).to(tl.float32)
        m = _six_bits(scales + block * 8, tops + block * 4, u // 32, sub + 8).to(tl.float32)
        out = half_bits(both) * sc * number(low, top, lane, 0, NATIVE) - half_bits(both >> 16) * m
    elif FORMAT == "q6_k":
        x, h = _words(codes + first * 4, u), _words(high + first * 2, u // 2) >> (4 * (u % 2))
        low, top = x & 0x0F0F0F0F | h << 4 & 0x30303030, x >> 4 & 0x0F0F0F0F | h << 2 & 0x30303030
        sc = tl.load((scales + first // 2 + u // 2).to(tl.pointer_type(tl.int8), bitcast=True)).to(tl.float32)
        out = half_at(floats + block * 2 + u // 32 * 2) * sc * number(low, top, lane, 32, NATIVE)
    elif FORMAT == "q8_0":
        a, b = _words(codes + first * 8, 2 * u), _words(codes + first * 8, 2 * u + 1)
        q = number(a ^ -0x7F7F7F80, b ^ -0x7F7F7F80, lane, 128, NATIVE)
        out = half_at(floats + block * 2 + u // 4 * 2) * q
    elif FORMAT == "q4_0":
        x = _words(codes + first * 4, u)
        out = half_at(floats + block * 2 + u // 4 * 2) * number(x & 0x0F0F0F0F, x >> 4 & 0x0F0F0F0F, lane, 8, NATIVE)
    elif FORMAT == "mxfp4":
        x = _words(codes + first * 4, u)
        out = e8m0_halved(tl.load(scales + block + u // 4).to(tl.int32)) * doubled_e2m1(byte_of(x, x >> 4, lane))
    else:
        tl.static_assert(FORMAT == "nvfp4")
        x = _words(codes + first * 4, u)
        d = ue4m3_halved(tl.load(scales + first // 2 + u // 2).to(tl.int32))
        out = d * doubled_e2m1(byte_of(x, x >> 4, lane))
    return out


@jit
def _words(base, index):
    """The 32-bit words at `index` from an address that is a multiple of four."""
    return tl.load(base.to(tl.pointer_type(tl.int32), bitcast=True) + index)


@jit
def _six_bits(low, top, block, s):
    """Number s of a block's sixteen: value 4 p + b of a word of w-bit fields lies in byte b at bits w p."""
    nibble = tl.load(low + block * 8 + s // 8 * 4 + s % 4).to(tl.int32) >> (s % 8 // 4 * 4)
    return nibble & 15 | (tl.load(top + block * 4 + s % 4).to(tl.int32) >> (s // 4 * 2) & 3) << 4


def dequantize_planar(
    planar: UInt8[Tensor, "*weights bytes"],
    format: str,
    n: int,
    kd: int,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
) -> Float[Tensor, "*weights N Kd"]:
    """Values of weights [n, kd] in `out_dtype` (bf16, fp16 or fp32), written to `out` where one is given (Triton).

    Buffers lie one after another, with one leading axis at any distance. LabError for a format without planes, a buffer
    of another size, buffers that lie otherwise or do not start at multiples of 16 bytes, or an `out` that does not fit;
    LabTypeError for other dtypes.
    """
    blocks, lead = check_planar("dequantize_planar", planar, format, n, kd, gaps=planar.ndim == 2)
    expect_rows("dequantize_planar", "planar", planar, ALIGNMENT)
    out = output_of("dequantize_planar", planar.device, (*planar.shape[:-1], n, kd), out_dtype, out)
    if lead > MAX_GRID_Y:
        raise LabError(f"dequantize_planar: {lead} weights at once pass the grid's {MAX_GRID_Y}; take fewer.")
    on = backend.serve("dequantize_planar", planar=planar, out=out)
    planes, size = planes_of(format, blocks)
    apart = planar.stride(0) if planar.ndim == 2 else size
    units = blocks * BLOCKS[format].values // 8
    cut = cut or cut_for(on, units)
    starts = [planes[name].start for name in ("high", "scales", "tops", "floats")]
    backend.launch(
        _dequantize_planar,
        (-(-units // cut.runs), lead),
        *(planar, out, units, apart, *starts, format, BLOCKS[format].values, cut.runs, backend.has_dp4a(on)),
        device=planar.device,
        num_warps=cut.warps,
    )
    return out


def dequantize_planar_ref(
    planar: UInt8[Tensor, "*weights bytes"], format: str, n: int, kd: int, out_dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*weights N Kd"]:
    """The values in torch, by way of the raw blocks."""
    return dequantize_ref(restore_ref(planar, format, n, kd), format, out_dtype)
