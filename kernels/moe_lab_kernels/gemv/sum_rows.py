"""q8_1 rows as the tensor-core GEMV reads them: codes in value order, and their exact sums by 16 beside ggml's scales.

Formats with mins (q2_k, q4_k, q5_k) and q6_k need the codes' own sums, for every tile of weight rows anew; made here
they cost once. R rows of Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales, totals and pairs of
sums; the bits are q8_1's.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.body import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.gemv.lane_rows import Empty, fresh
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.quantize_rows import q8_1_blocks, quantize_q8_1_ref


class SumRows(NamedTuple):
    """codes int8 [R, Kd], scale and total fp16 [R, Kd / 32] (total: the scaled sum of 32, as q8_1 has it), sums int32
    [R, Kd / 32]: the codes' sums over the first 16 of 32 in the low half, over the others in the high half."""

    codes: Tensor
    scale: Tensor
    total: Tensor
    sums: Tensor


@jit
def sums_by_16(code):
    """Of int32 codes [G, 32], the two sums of each group as halves of an int32 [G]."""
    first, second = tl.split(tl.permute(tl.reshape(code, [code.shape[0], 2, 16]), (0, 2, 1)))
    return tl.sum(first, 1) & 0xFFFF | tl.sum(second, 1) << 16


@jit
def _quantize_sums(x, codes, scale, total, sums, cleared, n_cleared, groups, x_row_stride, codes_stride,
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
    code = code.to(tl.int32)
    tl.store(codes + (offset64(row, codes_stride) + v), code.to(tl.int8), mask=there[:, None])
    at = offset64(row, groups) + group
    tl.store(scale + at, round_to(tl.reshape(d, [GROUPS]), tl.float16), mask=there)
    tl.store(total + at, round_to(tl.reshape(s, [GROUPS]), tl.float16), mask=there)
    tl.store(sums + at, sums_by_16(code), mask=there)


def quantize_sums(
    x: Float[Tensor, "R Kd"],
    *,
    out: SumRows | None = None,
    clear: Int32[Tensor, " n"] | None = None,
    pdl: bool = False,
) -> SumRows:
    """The rows that `gemv_tiled` reads (Triton), in `out` where it is given (`sum_rows`). clear, pdl: as in
    `quantize_lanes`. LabError when Kd is no multiple of 32, or `out` is room for other rows."""
    made = _check("quantize_sums", x, out, clear)
    if not x.numel():
        return made
    on, groups = backend.serve("quantize_sums", x=x, clear=clear), made.scale.shape[1]
    at_once = 4 if on == "cuda" else min(256, backend.next_power_of_2(groups))
    backend.launch(
        _quantize_sums,
        (len(x), -(-groups // at_once)),
        *(x, *made, made.sums if clear is None else clear, 0 if clear is None else len(clear), groups, x.stride(0)),
        *(made.codes.stride(0), at_once, clear is not None, pdl and on == "cuda"),
        device=x.device,
        num_warps=1,
        **backend.early_start(pdl, on),
    )
    return made


def quantize_sums_ref(
    x: Float[Tensor, "R Kd"],
    *,
    out: SumRows | None = None,
    clear: Int32[Tensor, " n"] | None = None,
    pdl: bool = False,
) -> SumRows:
    """The same in torch, bit for bit."""
    made = _check("quantize_sums", x, out, clear)
    if clear is not None:
        clear.zero_()
    for kept, new in zip(made, with_sums(quantize_q8_1_ref(x)), strict=True):
        kept.copy_(new)
    return made


def with_sums(rows: Sequence[Tensor]) -> SumRows:
    """Plain q8_1 rows (codes, scale, total) with their sums."""
    codes, scale, total = rows
    sums = codes.unflatten(-1, (-1, 2, 16)).sum(-1, dtype=torch.int32)
    return SumRows(codes, scale, total, sums[..., 0] & 0xFFFF | sums[..., 1] << 16)


def sum_rows(shape: Sequence[int], device: torch.device, empty: Empty = fresh, name: str = "rows") -> SumRows:
    """Room for rows of `shape` [R, Kd], from `empty` as name.codes, name.scale, name.total, name.sums."""
    rows, kd = shape
    scale, total = (empty(f"{name}.{part}", (rows, kd // 32), torch.float16, device) for part in ("scale", "total"))
    sums = empty(f"{name}.sums", (rows, kd // 32), torch.int32, device)
    return SumRows(empty(f"{name}.codes", (rows, kd), torch.int8, device), scale, total, sums)


def check_sum_rows(op: str, rows: SumRows) -> None:
    """Activation rows: dtypes, shapes, strides."""
    codes = rows.codes
    expect(op, "codes", codes, [torch.int8], ["R", "Kd"])
    expect_rows(op, "codes", codes, 4)
    if codes.shape[1] % 32:
        raise LabError(f"{op}: rows hold groups of 32 values, got Kd={codes.shape[1]}.")
    for name, dtype in (("scale", torch.float16), ("total", torch.float16), ("sums", torch.int32)):
        expect(op, name, getattr(rows, name), [dtype], [len(codes), codes.shape[1] // 32])
        expect_contiguous(op, name, getattr(rows, name))


def _check(op: str, x: Tensor, out: SumRows | None, clear: Tensor | None) -> SumRows:
    expect(op, "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] % 32:
        raise LabError(f"{op}: rows hold groups of 32 values, got Kd={x.shape[1]}.")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise LabError(f"{op}: x's last axis must be contiguous, got strides {x.stride()}.")
    made = sum_rows(x.shape, x.device) if out is None else out
    check_sum_rows(op, made)
    if made.codes.shape != x.shape:
        raise LabError(f"{op}: out is room for {list(made.codes.shape)} codes, x is {list(x.shape)}.")
    if clear is not None:
        expect(op, "clear", clear, [torch.int32], ["n"])
        expect_contiguous(op, "clear", clear)
    return made
