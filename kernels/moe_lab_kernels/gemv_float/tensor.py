"""Resident 4-bit integers times 1 to 16 rows of bf16 on the tensor cores: out[p] = W[slot of p] @ x[row_of[p]].

Operands as in `gemv_float`: P pairs in chunks of at most 16 that share a slot of [N, Kd] codes with scales and biases,
rows of x as they come. One weight read serves a chunk, and sixteen rows take hardly longer than one; where chunks have
one row or two, as experts' have in decode, `gemv_float` is quicker, whose sums are taken in another order. So a caller
takes one of the two for all numbers of rows: `lab.matmul`, whose matrix is one, takes this.

Reads N * row_bytes a chunk and Kd values a pair from the cache, writes N values a pair. fp32 sums in the order that
`tensor_body` states: a row's bits depend on its own activations and weights alone, not on the chunk, P, the tile or the
machine; `gemv_tensor_ref` has the same. Pairs in no chunk keep what `out` held before; a chunk without rows, or with a
slot outside 0..S-1, writes nothing.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false

from dataclasses import dataclass

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv_float.operands import Pairs, check_weight, each_chunk
from moe_lab_kernels.gemv_float.tensor_body import of_rows, parts_added, tensor_sums
from moe_lab_kernels.gemv_float.tensor_ref import parts_of, refusal, tensor_ref
from moe_lab_kernels.gemv_float.tensor_steps import STEP
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.primitives import offset64, round_to
from moe_lab_kernels.slots.pointer_table import is_pointers
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS

MAX_CHUNK_ROWS = 16
MAX_GRID_Y = 65_535


@dataclass(frozen=True, slots=True)
class TensorTile:
    """How a program is cut: `blocks` of 16 weight rows; `registers` is a thread's cap. No tile changes a bit."""

    blocks: int = 1
    registers: int = 128


# H200, triton 3.6: docs/kernels.md, "What a further row costs". A step has twice as many scales of groups of 32, which
# spill at fewer registers or with more rows.
EIGHT, SIXTEEN = {32: TensorTile(1, 168)}, {32: TensorTile(1, 255)}
EIGHT |= dict.fromkeys((64, 128), TensorTile(1, 128))
SIXTEEN |= dict.fromkeys((64, 128), TensorTile(2, 255))


# not specialised on sizes, strides or addresses: loads say themselves how wide they are
@jit(
    do_not_specialize=["N", "Kd", "n_slots", "n_x", "n_pairs", "x_row", "w_slot", "w_row", "s_slot", "s_row", "g_slot",
                       "g_row", "out_stride"],
    do_not_specialize_on_alignment=["x", "row_of", "chunks", "w", "scale", "second", "out"],
)  # fmt: skip
def _gemv_tensor(x, row_of, chunks, w, scale, second, out, N, Kd, n_slots, n_x, n_pairs, x_row, w_slot, w_row, s_slot,
                 s_row, g_slot, g_row, out_stride, GROUP: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
                 R: tl.constexpr, B: tl.constexpr, P: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (chunk, B tiles of 16 weight rows), P warps. Axes: eight rows of x, 16 weight rows, part, lane; of
    sums then weight row g or g + 8, row 2 q or 2 q + 1 of x."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(chunks + 3 * chunk)
    begin, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    there = (slot >= 0) & (slot < n_slots)
    slot, n = tl.where(there, slot, 0), tl.where(there, n, 0)
    w, scale, second = w + offset64(slot, w_slot), scale + offset64(slot, s_slot), second + offset64(slot, g_slot)
    lane, two = tl.arange(0, 32)[None, None, None, :], tl.arange(0, 2)
    of_tile = 16 * (B * tile + tl.arange(0, B))[None, :, None, None] + lane // 4
    # rows past N are read again and not stored
    low = of_rows(w, scale, second, tl.minimum(of_tile, N - 1), w_row, s_row, g_row, GROUP)
    high = of_rows(w, scale, second, tl.minimum(of_tile + 8, N - 1), w_row, s_row, g_row, GROUP)
    for done in range(0, n, 8 * R):
        first, left = begin + done, tl.minimum(n - done, 8 * R)
        p = first + 8 * tl.arange(0, R)[:, None, None, None] + lane // 4
        row = tl.load(row_of + p, mask=(p < first + left) & (p >= 0) & (p < n_pairs), other=0)
        row = tl.where((row >= 0) & (row < n_x), row, 0)  # columns of no row are not stored, or stored as zeros
        acc = tensor_sums(x + offset64(row, x_row) + lane % 4 * (GROUP // 4), low, high, Kd, scale.dtype.element_ty,
                          second.dtype.element_ty, GROUP, EVEN, WIDE, R, B, P, NATIVE)  # fmt: skip
        sums = parts_added(acc, R, B, P)
        g, q = (lane // 4)[:, :, :, :, None, None], (lane % 4)[:, :, :, :, None, None]
        n_row = 16 * (B * tile + tl.arange(0, B))[None, :, None, None, None, None] + g
        n_row = n_row + 8 * two[None, None, None, None, :, None]
        p = first + 8 * tl.arange(0, R)[:, None, None, None, None, None] + 2 * q + two[None, None, None, None, None, :]
        mine = (p < first + left) & (p >= 0) & (p < n_pairs)
        row = tl.load(row_of + p, mask=mine, other=-1)
        sums = tl.where((row >= 0) & (row < n_x), sums, 0)
        tl.store(out + offset64(p, out_stride) + n_row, round_to(sums, out.dtype.element_ty), mask=mine & (n_row < N))


def gemv_tensor(x: Tensor, pairs: Pairs, w: Weight, out: Tensor, *, tile: TensorTile | None = None) -> Tensor:
    """Write W @ x for every pair of every chunk (Triton), rounded once to out's dtype (fp32, fp16, bf16).

    x [R, Kd] bf16, any row stride; `pairs` as in `gemv_float`, of at most 16 rows a chunk, `to` left out; w: slots of
    int4_g32, int4_g64 or int4_g128 in an arena (`refusal` says what else is served: nothing); out [P, N]. Returns
    `out`. LabError when shapes, strides, devices or the format disagree.
    """
    _check(x, pairs, w, out)
    scale, second, layout = w.scales, w.second, LAYOUTS[w.format]
    assert scale is not None
    assert second is not None
    on = backend.serve("gemv_tensor", x=x, row_of=pairs.row_of, chunks=pairs.chunks, w=w.data, scales=scale,
                       second=second, out=out)  # fmt: skip
    n, parts = w.data.shape[1], parts_of(w.kd)
    if tile is None and on == "interpreter":  # which pays for operations, not for numbers
        tile = TensorTile(backend.next_power_of_2(max(1, -(-n // 16))))
    tile = tile or (EIGHT if pairs.max_rows <= 8 else SIXTEEN)[layout.group]
    tiles = -(-n // (16 * tile.blocks))
    if tiles > MAX_GRID_Y:
        raise LabError(f"gemv_tensor: N={n} makes {tiles} programs a chunk, past the grid's {MAX_GRID_Y}.")
    if x.data_ptr() % 16 or x.stride(0) % 8:
        x = x.clone(memory_format=torch.contiguous_format)  # loads are of 16 bytes
    strides = [s for t in (w.data, scale, second) for s in t.stride()[:2]]
    backend.launch(
        _gemv_tensor,
        (len(pairs.chunks), tiles),
        *(x, pairs.row_of, pairs.chunks, w.data, scale, second, out, n, w.kd, len(w.data), len(x), len(pairs.row_of)),
        *(x.stride(0), *strides, out.stride(0), layout.group, w.kd % (STEP * parts) == 0, _has_words(w, layout.group)),
        *(1 + (pairs.max_rows > 8), tile.blocks, parts, backend.has_dp4a(on)),
        device=out.device,
        num_warps=parts,
        maxnreg=tile.registers if on == "cuda" else None,
    )
    return out


def gemv_tensor_ref(x: Tensor, pairs: Pairs, w: Weight, out: Tensor, *, tile: TensorTile | None = None) -> Tensor:
    """The same in torch, bit for bit; `tile` means nothing here. Slow: for tests."""
    _check(x, pairs, w, out)
    for _, slot, p, index, known in each_chunk(pairs, len(w.data), len(x)):
        out[p] = tensor_ref(x, index, known, w, slot).to(out.dtype)
    return out


def _has_words(w: Weight, group: int) -> bool:
    """Whether a step's scales, and its biases, are 16 bits each and lie where one load takes them."""
    size, parts = 2 * STEP // group, [t for t in (w.scales, w.second) if t is not None]
    places = [t.data_ptr() for t in parts] + [s * t.element_size() for t in parts for s in t.stride()[:2]]
    return w.kd % STEP == 0 and all(t.element_size() == 2 for t in parts) and not any(at % size for at in places)


def _check(x: Tensor, pairs: Pairs, w: Weight, out: Tensor) -> None:
    """Everything that shapes, dtypes and strides can tell."""
    op = "gemv_tensor"
    why = refusal(w.format, w.kd)
    if why is not None:
        raise LabError(f"{op}: {why}.")
    if is_pointers(w.data):
        raise LabError(f"{op}: weights lie in an arena here, got a table of addresses; gemv_float takes one.")
    if pairs.to is not None:
        raise LabError(f"{op}: pair p writes row p; leave `to` out, or scatter with gemv_float.")
    if pairs.max_rows not in (1, 2, 4, 8, MAX_CHUNK_ROWS):
        raise LabError(f"{op}: max_rows={pairs.max_rows}; it must be 1, 2, 4, 8 or {MAX_CHUNK_ROWS}.")
    check_weight(op, w)
    expect(op, "x", x, [torch.bfloat16], ["R", w.kd])
    expect_rows(op, "x", x)
    if not len(x):
        raise LabError(f"{op}: x has no rows; pairs of rows that are not there read row 0.")
    expect(op, "row_of", pairs.row_of, [torch.int32], ["P"])
    expect(op, "chunks", pairs.chunks, [torch.int32], ["C", 3])
    for name, t in (("row_of", pairs.row_of), ("chunks", pairs.chunks)):
        expect_contiguous(op, name, t)
    expect(op, "out", out, FLOATS, [len(pairs.row_of), w.data.shape[1]])
    expect_rows(op, "out", out)
