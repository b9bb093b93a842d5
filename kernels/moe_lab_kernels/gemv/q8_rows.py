"""The launch that makes q8_1 rows for a GEMV, in either order, and clears scratch of the launch that follows.

`lane_rows` has codes in the order in which lanes read them, `sum_rows` in value order with their sums by 16. R rows of
Kd values. Reads R * Kd elements, writes R * Kd codes, R * Kd / 32 scales, totals and, in value order, pairs of sums;
the bits are q8_1's.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous
from moe_lab_kernels.primitives import let_the_next_kernel_start, offset64, round_to, to_f32, wait_for_the_kernel_before
from moe_lab_kernels.rows.quantize_rows import q8_1_blocks

Empty = Callable[[str, Sequence[int], torch.dtype, torch.device], Tensor]  # name, shape, dtype, device -> scratch


def fresh(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scratch of its own: what `Empty` is where nobody keeps a workspace."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


class Words(NamedTuple):
    """int32 scratch of the launch that follows, whose first `n` words it wants as 0."""

    words: Tensor
    n: int


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
    """Byte of a row at which value v's code lies; LANES 0: rows in value order."""
    if LANES == 0:
        place = v
    else:
        block = v // VALUES
        sub, i = unit_of(v % VALUES, FORMAT, VALUES, PER_BLOCK)
        step, lane = block // (LANES // PER_BLOCK), block % (LANES // PER_BLOCK) * PER_BLOCK + sub
        place = (step * (VALUES // PER_BLOCK // 8) + i) * (8 * LANES) + lane * 8 + v % 8
    return place


@jit
def sums_by_16(code):
    """Of int32 codes [G, 32], the two sums of each group as halves of an int32 [G]."""
    first, second = tl.split(tl.permute(tl.reshape(code, [code.shape[0], 2, 16]), (0, 2, 1)))
    return tl.sum(first, 1) & 0xFFFF | tl.sum(second, 1) << 16


@jit
def keep(v, codes, scale, total, sums, place, group, there, FORMAT: tl.constexpr, VALUES: tl.constexpr,
         LANES: tl.constexpr, PER_BLOCK: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """Quantise G groups of 32 fp32 values [G, 32] and store them: codes at `place`'s bytes from `codes` on, the rest at
    `group` of its array."""
    code, d, s = q8_1_blocks(v)
    code = code.to(tl.int32)
    tl.store(codes + place, code.to(tl.int8), mask=there[:, None])
    tl.store(scale + group, round_to(tl.reshape(d, [G]), tl.float16), mask=there)
    tl.store(total + group, round_to(tl.reshape(s, [G]), tl.float16), mask=there)
    if LANES == 0:
        tl.store(sums + group, sums_by_16(code), mask=there)


@jit
def _quantize(x, codes, scale, total, sums, words, n_words, groups, x_row_stride, codes_stride,
              FORMAT: tl.constexpr, VALUES: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
              GROUPS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program = (row, GROUPS groups of 32 values), which also clears a share of `words`."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    group = tile * GROUPS + tl.arange(0, GROUPS)
    v = group[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = group < groups
    given = to_f32(tl.load(x + (offset64(row, x_row_stride) + v), mask=there[:, None], other=0))
    program, programs = row * tl.num_programs(1) + tile, tl.num_programs(0) * tl.num_programs(1)
    for at in range(program * 128, n_words, programs * 128):
        i = at + tl.arange(0, 128)
        tl.store(words + i, tl.zeros((128,), tl.int32), mask=i < n_words)
    place = offset64(row, codes_stride) + place_of(v, FORMAT, VALUES, LANES, PER_BLOCK)
    keep(given, codes, scale, total, sums, place, offset64(row, groups) + group, there, FORMAT, VALUES, LANES,
         PER_BLOCK, GROUPS)  # fmt: skip


def quantize(
    op: str, x: Tensor, codes: Tensor, scale: Tensor, total: Tensor, sums: Tensor, order: tuple[str | int, ...],
    clear: Words | None, pdl: bool,
) -> None:  # fmt: skip
    """Fill the rows from x (Triton). order: format, values of its block, lanes a row (0: value order) and a block."""
    if not x.numel():
        return
    words, n = (scale, 0) if clear is None else clear
    on, groups = backend.serve(op, x=x, words=words), scale.shape[1]
    at_once = 4 if on == "cuda" else min(256, backend.next_power_of_2(groups))
    backend.launch(
        _quantize,
        (len(x), -(-groups // at_once)),
        *(x, codes, scale, total, sums, words, n, groups, x.stride(0), codes.stride(0)),
        *(*order, at_once, pdl and on == "cuda"),
        device=x.device,
        num_warps=1,
        **backend.early_start(pdl, on),
    )


def check_given(op: str, x: Tensor, clear: Words | None) -> None:
    """LabError where x or the words to mark cannot be read or written as rows."""
    expect(op, "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise LabError(f"{op}: x's last axis must be contiguous, got strides {x.stride()}.")
    if clear is not None:
        expect(op, "clear.words", clear.words, [torch.int32], ["n"])
        expect_contiguous(op, "clear.words", clear.words)
        if not 0 <= clear.n <= len(clear.words):
            raise LabError(f"{op}: {clear.n} words are to be cleared, of {len(clear.words)}.")


def cleared(clear: Words | None) -> None:
    """Their first words as 0, in torch."""
    if clear is not None:
        clear.words[: clear.n] = 0
