"""q8_1 rows as the tensor-core GEMV reads them: codes in value order, and their exact sums by 16 beside ggml's scales.

Formats with mins (q2_k, q4_k, q5_k) and q6_k need the codes' own sums, for every tile of weight rows anew; made here
they cost once. R rows of Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales, totals and pairs of
sums; the bits are q8_1's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.q8_rows import Empty, Words, check_given, cleared, fresh, quantize
from moe_lab_kernels.rows.quantize_rows import quantize_q8_1_ref

IN_VALUE_ORDER = ("q8_0", 32, 0, 1)  # no lane order: the format does not matter


class SumRows(NamedTuple):
    """codes int8 [R, Kd], scale and total fp16 [R, Kd / 32] (total: the scaled sum of 32, as q8_1 has it), sums int32
    [R, Kd / 32]: the codes' sums over the first 16 of 32 in the low half, over the others in the high half."""

    codes: Tensor
    scale: Tensor
    total: Tensor
    sums: Tensor


def quantize_sums(x: Float[Tensor, "R Kd"], *, out: SumRows | None = None, clear: Words | None = None,
                  pdl: bool = False) -> SumRows:  # fmt: skip
    """The rows that `gemv_tiled` reads (Triton), in `out` where it is given (`sum_rows`). clear, pdl: as in
    `quantize_lanes`. LabError when Kd is no multiple of 32, or `out` is room for other rows."""
    made = _check("quantize_sums", x, out, clear)
    quantize("quantize_sums", x, *made, IN_VALUE_ORDER, clear, pdl)
    return made


def quantize_sums_ref(x: Float[Tensor, "R Kd"], *, out: SumRows | None = None, clear: Words | None = None,
                      pdl: bool = False) -> SumRows:  # fmt: skip
    """The same in torch, bit for bit."""
    made = _check("quantize_sums", x, out, clear)
    cleared(clear)
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


def _check(op: str, x: Tensor, out: SumRows | None, clear: Words | None) -> SumRows:
    check_given(op, x, clear)
    if x.shape[1] % 32:
        raise LabError(f"{op}: rows hold groups of 32 values, got Kd={x.shape[1]}.")
    made = sum_rows(x.shape, x.device) if out is None else out
    check_sum_rows(op, made)
    if made.codes.shape != x.shape:
        raise LabError(f"{op}: out is room for {list(made.codes.shape)} codes, x is {list(x.shape)}.")
    return made
