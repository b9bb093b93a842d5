"""Raw block rows to fp32, fp16 or bf16 values.

Reads every byte of the rows once (a block's scales again by the threads that share them, from the cache), writes Kd
values a row: q2_k to bf16 is 0.33 + 2 bytes a value. One program takes a contiguous run of blocks, a thread units of
eight code bytes (`dequantize.steps`, the only part that knows a format). fp32 arithmetic, one rounding: the launcher,
the interpreter and the reference give the same bits. Offsets are 64-bit: more than 2^31 values are fine.

Knows nothing about experts, and nothing about scales that lie in tensors of their own.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor, UInt8
from moe_lab.errors import LabTypeError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.dequantize.steps import UNITS, runs_of
from moe_lab_kernels.primitives import round_to
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.unpack import check_rows, unpack_ref, values_of


class Cut(NamedTuple):
    """What a program takes: `runs` runs of eight values (a power of two that holds a whole block), in `warps` warps."""

    runs: int
    warps: int


# H200, triton 3.6, 2^29 values to bf16: 1024 runs in 8 warps, four a thread, give q2_k q3_k q4_k q6_k q8_0 mxfp4 0.91
# to 0.95 of a copy's bandwidth each (512 in 4 warps 0.91 to 0.94). Eight runs a thread: 0.82 to 0.95, sixteen: 0.84 to
# 0.94, thirty-two: 0.73 to 0.93; two, which leaves half of the warps idle where a unit makes four: 0.84 to 0.96.
CUT_CUDA, CUT_INTERPRETER = Cut(1024, 8), Cut(16384, 4)


@jit
def unit_at(mine, left, TILE: tl.constexpr):
    """Which unit a thread decodes: past the last one the last again, which is not stored.

    The mask changes nothing; it tells the compiler that no unit is negative, so that // and % are shifts and masks.
    """
    return tl.minimum(mine, left - 1) & (TILE - 1)


@jit(do_not_specialize=["units"], do_not_specialize_on_alignment=["raw"])
def _dequantize(raw, out, units, FORMAT: tl.constexpr, BYTES: tl.constexpr, PER_BLOCK: tl.constexpr,
                RUNS: tl.constexpr, PERIOD: tl.constexpr, TILE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = TILE units, whole blocks. 64-bit numbers say where it starts, 32-bit ones go on from there."""
    first = tl.program_id(0).to(tl.int64) * TILE
    left = tl.minimum(units - first, TILE).to(tl.int32)
    mine, lane = tl.arange(0, TILE)[:, None], tl.arange(0, 8)[None, :]
    unit = unit_at(mine, left, TILE)
    w = raw + first // PER_BLOCK * BYTES + unit // PER_BLOCK * BYTES
    runs = runs_of(w, unit % PER_BLOCK, lane, FORMAT, NATIVE)
    to = out + first * (8 * RUNS) + (mine // PERIOD * (8 * RUNS * PERIOD) + mine % PERIOD * 8 + lane)
    for j in tl.static_range(RUNS):  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(to + j * (8 * PERIOD), round_to(runs[j], out.dtype.element_ty), mask=mine < left)


def dequantize(
    raw: UInt8[Tensor, "*rows row_bytes"],
    format: str,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
) -> Float[Tensor, "*rows Kd"]:
    """Values of contiguous rows in `out_dtype` (bf16, fp16 or fp32), written to `out` where one is given (Triton).

    LabError for a format that is none of `blocks.BLOCKS`, rows of broken blocks, or rows that are not contiguous or
    start at an address the format's loads cannot take; LabTypeError for other dtypes.
    """
    check_rows(raw, format)
    block, units = BLOCKS[format], UNITS[format]
    expect_contiguous("dequantize", "raw", raw)
    out = output_of(
        "dequantize", raw.device, (*raw.shape[:-1], raw.shape[-1] // block.bytes * block.values), out_dtype, out
    )
    expect_rows("dequantize", "raw", raw, block.alignment)
    on = backend.serve("dequantize", raw=raw, out=out)
    count = raw.numel() // block.bytes * units.per_block
    cut = cut or cut_for(on, count * units.runs)
    tile = cut.runs // units.runs
    backend.launch(
        _dequantize,
        (-(-count // tile),),
        *(raw, out, count, format, block.bytes, *units, tile, backend.has_dp4a(on)),
        device=raw.device,
        num_warps=cut.warps,
    )
    return out


def cut_for(on: str, runs: int) -> Cut:
    """The measured cut on a GPU; in the interpreter, where each operation costs, one program for all while it fits."""
    if on == "cuda":
        return CUT_CUDA
    return Cut(min(CUT_INTERPRETER.runs, max(32, backend.next_power_of_2(runs))), CUT_INTERPRETER.warps)


def output_of(op: str, device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Where `op` writes: a new tensor, or the caller's, contiguous both."""
    if dtype not in FLOATS:
        raise LabTypeError(f"{op}: out_dtype must be fp32, fp16 or bf16, got {dtype}.")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    expect(op, "out", out, [dtype], shape)
    expect_contiguous(op, "out", out)
    return out


def dequantize_ref(
    raw: UInt8[Tensor, "*rows row_bytes"], format: str, out_dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*rows Kd"]:
    """The values in torch: fp32 arithmetic as `unpack` states it, then one rounding to `out_dtype`."""
    return values_of(unpack_ref(raw, format)).to(out_dtype)
