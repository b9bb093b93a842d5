"""Grouped GEMV on weights in tiles: out[p] = W[slot of p] @ x[row_of[p]], x as q8_1 rows with their sums by 16.

What `gemv` does, of weights that were put into tiles of 16 rows when they were loaded (`storage.row_tiles`): a warp
fetches a tile with 16-byte loads and multiplies it on the tensor cores (`steps_k`, `steps_small`), 0.7 to 2.5
instructions a weight. Integer dots are exact, so values differ from `gemv`'s by the order of fp32 additions alone
(`ref`).

P pairs, S weight slots of [N, Kd], R quantised activation rows; chunks as in `gemv`. Reads N * row_bytes a chunk (plus
Kd codes a pair, from the cache), writes P * N. Pairs in no chunk keep what `out` held before; a chunk without rows, or
with a slot outside 0..S-1, writes nothing.
"""

# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_rows
from moe_lab_kernels.gemv.pairs import MAX_CHUNK_ROWS, Pairs, by_chunks, check_out, check_pairs, grid_y
from moe_lab_kernels.gemv.tiled.body import tile_chunk
from moe_lab_kernels.gemv.tiled.ref import matvec_ref, parts_of
from moe_lab_kernels.gemv.tiled.sum_rows import SumRows, check_sum_rows
from moe_lab_kernels.gemv.tiled.tiles import TileCut, cut_for
from moe_lab_kernels.slots.pointer_table import PointerTable, Weights, as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.row_tiles import ROWS, from_tiles, refusal, step_blocks, steps_of, tile_bytes

POINTERS = ["codes", "scale", "sums", "total", "row_of", "out_row", "chunks", "w", "w2", "out", "out2"]
SIZES = ["N", "steps", "subs", "n_slots", "n_x", "n_pairs"]
STRIDES = [f"{name}_stride" for name in ("codes", "scale", "w_slot", "w2_slot", "out", "out2")]


# not specialised on sizes, strides or addresses: that would only multiply compilations
@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_tiled(codes, scale, sums, total, row_of, out_row, chunks, w, w2, out, out2, N, steps, subs, n_slots, n_x,
                n_pairs, codes_stride, scale_stride, w_slot_stride, w2_slot_stride, out_stride, out2_stride,
                FORMAT: tl.constexpr, STEP_BYTES: tl.constexpr, P: tl.constexpr, TWO: tl.constexpr,
                SCATTER: tl.constexpr, SHARED: tl.constexpr, B: tl.constexpr, TABLE: tl.constexpr,
                NATIVE: tl.constexpr):  # fmt: skip
    """Program = (chunk, B tiles, weight). TABLE: w and w2 hold the addresses of their slots."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    there = (slot >= 0) & (slot < n_slots)
    slot, n = tl.where(there, slot, 0), tl.where(there, n, 0)
    base, to, to_stride = slot_base(w, slot, w_slot_stride, TABLE), out, out_stride
    if TWO:  # noqa: SIM102 (decided when compiling, the inner test when running)
        if tl.program_id(2) == 1:
            base, to, to_stride = slot_base(w2, slot, w2_slot_stride, TABLE), out2, out2_stride
    tile_chunk(codes, scale, sums, total, row_of, out_row, base, to, tile, first, n, N, steps, subs, n_x, n_pairs,
               codes_stride, scale_stride, to_stride, FORMAT, STEP_BYTES, P, True, SCATTER, SHARED, B,
               NATIVE)  # fmt: skip


def gemv_tiled(rows: SumRows, row_of: Int32[Tensor, " P"], w: UInt8[Tensor, "S tiles tile_bytes"] | PointerTable,
               chunks: Int32[Tensor, "C 3"], format: str, out: Tensor, *, w2: Weights | None = None,
               out2: Tensor | None = None, out_row: Int32[Tensor, " P"] | None = None, max_rows: int = MAX_CHUNK_ROWS,
               cut: TileCut | None = None) -> Tensor:  # fmt: skip
    """Write out[p] [P, N] for every pair of every chunk, and with `w2`, w2's into `out2` in the same launch (Triton).

    rows: as `sum_rows` makes them; w: tiles of [N, Kd] weights (`to_tiles`), or (then w2 too) a table of their
    addresses; the others as in `gemv`. Returns `out`. LabError when shapes, strides, devices or the format disagree.
    """
    pairs = Pairs(row_of, chunks, out_row, max_rows)
    n, kd = _check(rows, pairs, w, format, out, w2, out2)
    named = {"codes": rows.codes, "row_of": row_of, "w": operand(w), "chunks": chunks, "out": out, "out_row": out_row}
    on = backend.serve("gemv_tiled", **named, w2=None if w2 is None else operand(w2), out2=out2)
    cut = cut or cut_for(on, format, max_rows, parts_of(format, kd), n)
    tiles, two = grid_y("gemv_tiled", n, ROWS * cut.tiles), w2 is not None
    second, to_second = (w, out) if w2 is None or out2 is None else (w2, out2)
    backend.launch(
        _gemv_tiled,
        (len(chunks), tiles, 1 + two),
        *(rows.codes, rows.scale, rows.sums, rows.total, row_of, row_of if out_row is None else out_row, chunks),
        *(operand(w), operand(second), out, to_second, n, steps_of(format, kd), kd // 32, len(w), len(rows.codes)),
        *(len(row_of), rows.codes.stride(0), rows.scale.stride(0), as_tensor(w).stride(0), as_tensor(second).stride(0)),
        *(out.stride(0), to_second.stride(0), format, step_bytes(format), parts_of(format, kd), two),
        *(out_row is not None, min(max_rows, cut.shared), cut.tiles, is_pointers(w), backend.has_dp4a(on)),
        device=out.device,
        num_warps=cut.warps,
        maxnreg=cut.registers if on == "cuda" else None,
    )
    return out


def gemv_tiled_ref(rows: SumRows, row_of: Int32[Tensor, " P"], w: UInt8[Tensor, "S tiles tile_bytes"] | PointerTable,
                   chunks: Int32[Tensor, "C 3"], format: str, out: Tensor, *, w2: Weights | None = None,
                   out2: Tensor | None = None, out_row: Int32[Tensor, " P"] | None = None,
                   max_rows: int = MAX_CHUNK_ROWS, cut: TileCut | None = None) -> Tensor:  # fmt: skip
    """The same in torch, bit for bit; `cut` means nothing here. Slow: for tests."""
    pairs = Pairs(row_of, chunks, out_row, max_rows)
    _, kd = _check(rows, pairs, w, format, out, w2, out2)
    for slot, x, to in by_chunks(rows[:3], pairs, len(w)):
        for weight, target in ((w, out), (w2, out2)):
            if weight is not None and target is not None:
                raw = from_tiles(weight[slot][None], format, kd)[0]
                target[to] = matvec_ref(raw, x, format).to(target.dtype)
    return out


def step_bytes(format: str) -> int:
    """Bytes of a tile's step."""
    return ROWS * step_blocks(format) * BLOCKS[format].bytes


def check_tiles(op: str, name: str, w: Weights, format: str, n: int, kd: int) -> None:
    """LabError unless `w` holds tiles of [n, kd] weights, where 16-byte loads find them."""
    why = refusal(format, n, kd)
    if why is not None:
        raise LabError(f"{op}: {why}.")
    tensor = as_tensor(w)
    expect(op, name, tensor, [torch.uint8], ["S", n // ROWS, tile_bytes(format, kd)])
    if tensor.stride()[1:] != (tile_bytes(format, kd), 1):
        raise LabError(f"{op}: {name}'s tiles lie one behind the other, got strides {tensor.stride()}.")
    if not is_pointers(w):
        expect_rows(op, name, tensor, ROWS)


def _check(rows: SumRows, pairs: Pairs, w: Weights, format: str, out: Tensor, w2: Weights | None,
           out2: Tensor | None) -> tuple[int, int]:  # fmt: skip
    """N and Kd, once everything that shapes, dtypes and strides can tell holds."""
    op = "gemv_tiled"
    check_sum_rows(op, rows)
    check_pairs(op, pairs, w, w2, out2)
    n, kd = ROWS * w.shape[1], 32 * rows.scale.shape[1]
    for name, weight, to in (("w", w, out), ("w2", w2, out2)):
        if weight is not None and to is not None:
            check_tiles(op, name, weight, format, n, kd)
            check_out(op, name.replace("w", "out"), to, pairs, n)
    return n, kd
