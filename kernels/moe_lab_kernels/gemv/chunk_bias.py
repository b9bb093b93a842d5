"""Add each pair's expert bias: out[to of p] = y[p] + bias[row of p's chunk], rounded once to out's dtype.

P pairs of N values, X biases. Reads P * N fp32 and the biases (from the cache), writes P * N. For products whose kernel
has no bias of its own; chunks and pairs as in `gemv`. Pairs in no chunk keep what `out` held before, and chunks that
mean nothing (a slot outside 0..n_slots-1, no rows) are skipped, their row of the bias unread. The reference has the
same bits.
"""

import torch

from moe_lab._types import Float, Float32, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.primitives import offset64, round_to, to_f32

MOST_ROWS = 8
BLOCK_CUDA, BLOCK_INTERPRETER = 512, 4096


@jit(do_not_specialize=["N", "n_slots", "n_pairs"])
def _chunk_bias(y, chunks, bias, row_of, out, to, N, n_slots, n_pairs, y_row, bias_row, out_row, ROW_OF: tl.constexpr,
                SCATTER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program = (chunk, tile of N)."""
    chunk, n = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot, first, count = tl.load(chunks + 3 * chunk), tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if (slot >= 0) & (slot < n_slots) & (count > 0):
        whose = slot
        if ROW_OF:
            whose = tl.load(row_of + chunk)
        extra = to_f32(tl.load(bias + offset64(whose, bias_row) + n, mask=n < N, other=0))
        for begin in range(0, count, ROWS):
            p = first + begin + tl.arange(0, ROWS)[:, None]
            mine = (p < first + count) & (p >= 0) & (p < n_pairs)
            given = tl.load(y + offset64(p, y_row) + n, mask=mine & (n < N), other=0)
            at = p
            if SCATTER:
                at = tl.load(to + p, mask=mine, other=0)
            where = out + offset64(at, out_row) + n
            tl.store(where, round_to(given + extra, out.dtype.element_ty), mask=mine & (n < N))


def chunk_bias(y: Float32[Tensor, "P N"], chunks: Int32[Tensor, "C 3"], bias: Float[Tensor, "X N"], out: Tensor, *,
               row_of: Int32[Tensor, " C"] | None = None, to: Int32[Tensor, " P"] | None = None,
               n_slots: int | None = None) -> Tensor:  # fmt: skip
    """Write y + bias for every pair of every chunk (Triton). `row_of`: each chunk's row of the bias (None: its slot);
    `n_slots`: slots that mean something (None: X). Returns `out`. LabError when shapes, strides or devices disagree."""
    slots = _check(y, chunks, bias, out, row_of, to, n_slots)
    on = backend.serve("chunk_bias", y=y, chunks=chunks, bias=bias, out=out, row_of=row_of, to=to)
    n = y.shape[1]
    block = min(BLOCK_CUDA if on == "cuda" else BLOCK_INTERPRETER, backend.next_power_of_2(n))
    backend.launch(
        _chunk_bias,
        (len(chunks), -(-n // block)),
        *(y, chunks, bias, chunks if row_of is None else row_of, out, chunks if to is None else to),
        *(n, slots, len(y), y.stride(0), bias.stride(0), out.stride(0)),
        *(row_of is not None, to is not None, 1 if on == "cuda" else MOST_ROWS, block),
        device=y.device,
        num_warps=4,
    )
    return out


def chunk_bias_ref(y: Float32[Tensor, "P N"], chunks: Int32[Tensor, "C 3"], bias: Float[Tensor, "X N"], out: Tensor, *,
                   row_of: Int32[Tensor, " C"] | None = None, to: Int32[Tensor, " P"] | None = None,
                   n_slots: int | None = None) -> Tensor:  # fmt: skip
    """The same in torch, bit for bit."""
    slots = _check(y, chunks, bias, out, row_of, to, n_slots)
    for c, (slot, first, count) in enumerate(chunks.tolist()):
        p = torch.arange(max(first, 0), max(min(first + count, len(y)), max(first, 0)), device=y.device)
        if 0 <= slot < slots and len(p):
            whose = slot if row_of is None else int(row_of[c])
            out[p if to is None else to[p].long()] = (y[p] + bias[whose].float()).to(out.dtype)
    return out


def _check(y: Tensor, chunks: Tensor, bias: Tensor, out: Tensor, row_of: Tensor | None, to: Tensor | None,
           n_slots: int | None) -> int:  # fmt: skip
    """The number of slots, once everything fits."""
    op = "chunk_bias"
    expect(op, "y", y, [torch.float32], ["P", "N"])
    expect(op, "chunks", chunks, [torch.int32], ["C", 3])
    expect(op, "bias", bias, FLOATS, ["X", y.shape[1]])
    expect(op, "out", out, FLOATS, [len(y) if to is None else "P", y.shape[1]])
    for name, t in (("y", y), ("bias", bias), ("out", out)):
        expect_rows(op, name, t)
    expect_contiguous(op, "chunks", chunks)
    for name, t, length in (("row_of", row_of, len(chunks)), ("to", to, len(y))):
        if t is not None:
            expect(op, name, t, [torch.int32], [length])
            expect_contiguous(op, name, t)
    slots = len(bias) if n_slots is None else n_slots
    if row_of is None and slots > len(bias):
        raise LabError(f"{op}: {slots} slots but {len(bias)} biases; row_of says which chunk has which.")
    return slots
