"""Grouped GEMV on quantised weights as they lie: out[p] = W[slot of p] @ x[row_of[p]], x as q8_1 rows.

P pairs, S weight slots of [N, Kd], R quantised activation rows. Pairs come in chunks of at most 8 that share a slot; a
program takes a tile of weight rows and multiplies it with every row of its chunk: a few at a time share the decoded
codes, the next find the tile in the cache. Reads N * row_bytes a chunk (plus Kd codes a pair, from the cache), writes
P * N. Formats: `blocks.GEMV_FORMATS`, as raw blocks or in planes; their arithmetic is in `raw` and `planar`.

A row's bits depend on its own codes and weights alone: not on how many rows the chunk holds, on P, on the tile or on
the machine. `gemv.body` says in which order it is added; `gemv_ref` adds likewise and so gives the same bits.

Knows nothing about experts, routing or residency: a slot is a slot. Pairs in no chunk keep what `out` held before; a
chunk without rows, or with a slot outside 0..S-1, writes nothing (tables made on a device are padded with such).
"""

# pyright: reportGeneralTypeIssues=false

from dataclasses import replace

import torch

from moe_lab._types import Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_rows
from moe_lab_kernels.gemv.body import lane_sums, stored_as
from moe_lab_kernels.gemv.forms import form_of, format_of, is_planar, values_of
from moe_lab_kernels.gemv.lane_rows import LaneRows, Rows, lane_index, to_plain
from moe_lab_kernels.gemv.pairs import MAX_CHUNK_ROWS, Pairs, by_chunks, check_out, check_pairs, grid_y
from moe_lab_kernels.gemv.ref import Lanes, lanes_of, matvec_ref
from moe_lab_kernels.gemv.tiles import TILE_INTERPRETER, Tile, tile_for
from moe_lab_kernels.primitives import by_warp, fold_rows, folded_row, offset64
from moe_lab_kernels.slots.pointer_table import PointerTable, Weights, as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.blocks import gemv_alignment, gemv_row_bytes
from moe_lab_kernels.storage.planar import restore_ref
from moe_lab_kernels.storage.planar_layout import ALIGNMENT, planes_of

TOTALS_NEEDED = ("q4_0",)


@jit
def _strip(codes, scale, total, row_of, out_row, w, out, n0, first, n, N, blocks, n_x, n_pairs, codes_stride,
           scale_stride, total_stride, w_row_stride, out_stride, FORMAT: tl.constexpr, LANES: tl.constexpr,
           PER_BLOCK: tl.constexpr, VALUES: tl.constexpr, ORDERED: tl.constexpr, GATHER: tl.constexpr,
           SCATTER: tl.constexpr, R: tl.constexpr, STRIP: tl.constexpr, WARPS: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """STRIP weight rows from n0 on, times up to R rows of one chunk. Axes of each tensor: x row, weight row, lane."""
    p = first + tl.arange(0, R)[:, None, None]
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = tl.where(mine, p, -1)
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known = (row >= 0) & (row < n_x)
    # 32 // LANES weight rows side by side; rows past N read row N - 1 again and are not stored
    each: tl.constexpr = 32 // LANES
    lane = tl.arange(0, 32)[None, None, :]
    n_row = n0 + tl.arange(0, STRIP // each)[None, :, None] * each + lane // LANES
    x, d8 = codes + offset64(row, codes_stride), scale + offset64(row, scale_stride)
    acc = lane_sums(w, w_row_stride, tl.minimum(n_row, N - 1), N, x, d8, total + offset64(row, total_stride), known,
                    blocks, R, STRIP // each, FORMAT, LANES, PER_BLOCK, VALUES, ORDERED, NATIVE)  # fmt: skip
    warps: tl.constexpr = min(WARPS, STRIP // each)  # pyright: ignore[reportAssignmentType]
    own: tl.constexpr = STRIP // each // warps  # pyright: ignore[reportAssignmentType]
    acc = by_warp(acc, R, STRIP // each, warps)
    sums = stored_as(fold_rows(acc, R * warps, own, LANES), out.dtype.element_ty)
    part = tl.arange(0, R * warps)[:, None, None]
    p = first + part // warps
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    to = p
    if SCATTER:
        to = tl.load(out_row + p, mask=mine, other=0)
    of_lane, first_with_it = folded_row(own, LANES)
    n_row = n0 + (of_lane * warps + part % warps) * each + lane // LANES
    tl.store(out + offset64(to, out_stride) + n_row, sums, mask=mine & (n_row < N) & first_with_it)


@jit
def chunk_tile(codes, scale, total, row_of, out_row, w, out, tile, first, n, N, blocks, n_x, n_pairs, codes_stride,
               scale_stride, total_stride, w_row_stride, out_stride, FORMAT: tl.constexpr, LANES: tl.constexpr,
               PER_BLOCK: tl.constexpr, VALUES: tl.constexpr, ORDERED: tl.constexpr, GATHER: tl.constexpr,
               SCATTER: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
               WARPS: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """ROWS weight rows of tile `tile`, times the n rows of one chunk. GATHER: pair p uses row row_of[p], else row p;
    SCATTER: it goes to row out_row[p], else row p."""
    for done in range(0, n, SHARED):
        left = tl.minimum(n - done, SHARED)
        for size in tl.static_range(3):  # the smallest program of 1, 2 or 4 rows that holds what is left
            if (1 << size) <= SHARED:  # noqa: SIM102 (likewise)
                if (left > (1 << size) // 2) & (left <= (1 << size)):
                    # a thread holds as many sums whatever LANES is: fewer lanes a row, more rows a warp
                    for n0 in range(tile * ROWS, tile * ROWS + ROWS, min(ROWS, 32 // LANES * (SUMS >> size))):
                        _strip(codes, scale, total, row_of, out_row, w, out, n0, first + done, left, N, blocks, n_x,
                               n_pairs, codes_stride, scale_stride, total_stride, w_row_stride, out_stride, FORMAT,
                               LANES, PER_BLOCK, VALUES, ORDERED, GATHER, SCATTER, 1 << size,
                               min(ROWS, 32 // LANES * (SUMS >> size)), WARPS, NATIVE)  # fmt: skip


POINTERS = ["codes", "scale", "total", "row_of", "out_row", "chunks", "w", "w2", "out", "out2"]
SIZES = ["N", "blocks", "n_slots", "n_x", "n_pairs"]
STRIDES = [
    f"{name}_stride" for name in ("codes", "scale", "total", "w_slot", "w_row", "w2_slot", "w2_row", "out", "out2")
]


# Not specialised on sizes, strides or addresses: no access is wider than its element, so that would only multiply
# compilations.
@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv(codes, scale, total, row_of, out_row, chunks, w, w2, out, out2, N, blocks, n_slots, n_x, n_pairs,
          codes_stride, scale_stride, total_stride, w_slot_stride, w_row_stride, w2_slot_stride, w2_row_stride,
          out_stride, out2_stride, FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
          VALUES: tl.constexpr, ORDERED: tl.constexpr, TWO: tl.constexpr, SCATTER: tl.constexpr,
          SHARED: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr, WARPS: tl.constexpr, TABLE: tl.constexpr,
          NATIVE: tl.constexpr):  # fmt: skip
    """Program = (chunk, tile of rows, weight); chunks on grid x because y and z stop at 65,535. TABLE: w and w2 hold
    the addresses of their slots."""
    chunk, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    there = (slot >= 0) & (slot < n_slots)
    slot, n = tl.where(there, slot, 0), tl.where(there, n, 0)
    base, to, row_stride, to_stride = slot_base(w, slot, w_slot_stride, TABLE), out, w_row_stride, out_stride
    if TWO:  # noqa: SIM102 (decided when compiling, the inner test when running)
        if tl.program_id(2) == 1:
            base, to = slot_base(w2, slot, w2_slot_stride, TABLE), out2
            row_stride, to_stride = w2_row_stride, out2_stride
    chunk_tile(codes, scale, total, row_of, out_row, base, to, tile, first, n, N, blocks, n_x, n_pairs, codes_stride,
               scale_stride, total_stride, row_stride, to_stride, FORMAT, LANES, PER_BLOCK, VALUES, ORDERED, True,
               SCATTER, SHARED, ROWS, SUMS, WARPS, NATIVE)  # fmt: skip


def gemv(rows: Rows, row_of: Int32[Tensor, " P"], w: UInt8[Tensor, "S rows bytes"] | PointerTable,
         chunks: Int32[Tensor, "C 3"], format: str, out: Tensor, *, w2: Weights | None = None,
         out2: Tensor | None = None, out_row: Int32[Tensor, " P"] | None = None, max_rows: int = MAX_CHUNK_ROWS,
         layout: str = "raw", tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Write out[p] [P, N] for every pair of every chunk, and with `w2`, w2's into `out2` in the same launch (Triton).

    rows: (codes int8 [R, Kd], scale and, which q4_0 alone reads, total fp16 [R, Kd / 32]); row_of[p]: the row that pair
    p uses; w: raw blocks [S, N, row_bytes], strided over slots and rows at will, or, where `layout` is "planar", planes
    [S, 1, bytes] (`storage.planar`), slots at multiples of 16 bytes; or (then w2 too) a table of their addresses;
    chunks: (slot, first pair, rows); out: fp32, fp16 or bf16, rounded once. `out_row`: pair p goes to row out_row[p]
    instead of row p, and out may have any number of rows (values are not checked).
    `max_rows` (1, 2, 4 or 8): the most rows a chunk is said to hold, so that decode runs a smaller program; larger
    chunks are computed all the same. Returns `out`. LabError when shapes, strides, devices or the format disagree.
    """
    pairs = Pairs(row_of, chunks, out_row, max_rows)
    form = _check(rows, pairs, w, format, layout, out, w2, out2)
    (codes, scale, total), strides = activation_rows(rows)
    tensors = {"codes": codes, "scale": scale, "total": total, "row_of": row_of, "w": operand(w), "chunks": chunks}
    more = {"out": out, "w2": None if w2 is None else operand(w2), "out2": out2, "out_row": out_row}
    on = backend.serve("gemv", **tensors, **more)
    n, kd = out.shape[1], width_of(rows)
    if tile is None:
        widest = min(TILE_INTERPRETER.rows, backend.next_power_of_2(n))
        tile = tile_for(form, max_rows) if on == "cuda" else replace(TILE_INTERPRETER, rows=widest)
    lanes, ordered = walk_of("gemv", rows, form, tile.lanes)
    height = max(tile.rows, 32 // lanes.row)
    tiles, two, scatter = grid_y("gemv", n, height), w2 is not None, out_row is not None
    second, to_second = (w, out) if w2 is None or out2 is None else (w2, out2)
    slot_steps = (*as_tensor(w).stride()[:2], *as_tensor(second).stride()[:2])
    backend.launch(
        _gemv,
        (len(chunks), tiles, 1 + two),
        *(codes, scale, total, row_of, row_of if out_row is None else out_row, chunks, operand(w), operand(second)),
        *(out, to_second),
        *(n, kd // values_of(form), len(w), len(codes), len(row_of)),
        *(*strides, *slot_steps, out.stride(0), to_second.stride(0)),
        *(form, *lanes, values_of(form), ordered, two, scatter),
        *(min(max_rows, tile.shared), height, tile.sums, tile.warps, is_pointers(w), backend.has_dp4a(on)),
        device=out.device,
        num_warps=tile.warps,
        maxnreg=tile.registers,
    )
    return out


def gemv_ref(rows: Rows, row_of: Int32[Tensor, " P"], w: UInt8[Tensor, "S rows bytes"] | PointerTable,
             chunks: Int32[Tensor, "C 3"], format: str, out: Tensor, *, w2: Weights | None = None,
             out2: Tensor | None = None, out_row: Int32[Tensor, " P"] | None = None, max_rows: int = MAX_CHUNK_ROWS,
             layout: str = "raw", tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The same in torch, bit for bit; of `tile` only the lanes mean something here. Slow: for tests."""
    pairs = Pairs(row_of, chunks, out_row, max_rows)
    form = _check(rows, pairs, w, format, layout, out, w2, out2)
    width, lanes = width_of(rows), rows.lanes if isinstance(rows, LaneRows) else tile.lanes if tile else None
    for slot, x, to in by_chunks(to_plain(rows), pairs, len(w)):
        for weight, target in ((w, out), (w2, out2)):
            if weight is not None and target is not None:
                raw = raw_of(weight[slot], form, target.shape[1], width)
                target[to] = matvec_ref(raw, x, form, lanes).to(target.dtype)
    return out


def raw_of(w: UInt8[Tensor, "rows bytes"], form: str, n: int, kd: int) -> UInt8[Tensor, "N row_bytes"]:
    """One weight of a form as raw blocks."""
    return restore_ref(w[0], format_of(form), n, kd) if is_planar(form) else w


def _check(rows: Rows, pairs: Pairs, w: Weights, format: str, layout: str, out: Tensor, w2: Weights | None,
           out2: Tensor | None) -> str:  # fmt: skip
    """The form, once everything that shapes, dtypes and strides can tell holds."""
    form = form_of("gemv", format, layout)
    check_rows("gemv", rows, format)
    check_pairs("gemv", pairs, w, w2, out2)
    n = out.shape[-1] if is_planar(form) else w.shape[1]
    for name, weight, to in (("w", w, out), ("w2", w2, out2)):
        if weight is not None and to is not None:
            check_weight("gemv", name, weight, form, n, width_of(rows))
            expect("gemv", name, as_tensor(weight), [torch.uint8], w.shape)
            check_out("gemv", name.replace("w", "out"), to, pairs, n)
    return form


def check_weight(op: str, name: str, w: Weights, form: str, n: int, kd: int) -> None:
    """LabError unless `w` holds [n, kd] weights of a form where its loads find them."""
    row_bytes = gemv_row_bytes(format_of(form), kd)
    if is_planar(form):
        expect(
            op, name, as_tensor(w), [torch.uint8], ["S", 1, planes_of(format_of(form), n * (kd // values_of(form)))[1]]
        )
        expect_rows(op, name, as_tensor(w), ALIGNMENT)
    else:
        expect(op, name, as_tensor(w), [torch.uint8], ["S", n, row_bytes])
        expect_rows(op, name, as_tensor(w), gemv_alignment(form))


def activation_rows(rows: Rows) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
    """codes, scale and total (where no format asks for totals, scale stands in for them), and their rows' strides."""
    codes, scale, total = rows[0], rows[1], rows[2] if len(rows) > 2 else rows[1]
    return (codes, scale, total), (codes.stride(0), scale.stride(0), total.stride(0))


def width_of(rows: Rows) -> int:
    """Kd of activation rows: in lane order the codes are padded."""
    return 32 * rows[1].shape[1] if isinstance(rows, LaneRows) else rows[0].shape[1]


def walk_of(op: str, rows: Rows, form: str, lanes: Lanes | None) -> tuple[Lanes, int]:
    """How weight rows are walked, and 1 where the activations lie in that order."""
    usual = lanes_of(form, width_of(rows))
    if is_planar(form) and lanes is not None and lanes.block != usual.block:
        raise LabError(f"{op}: {usual.block} lanes share a block of {form}, got {lanes}.")
    if not isinstance(rows, LaneRows):
        return lanes or usual, 0
    if rows.form != form or (lanes is not None and lanes != rows.lanes):
        raise LabError(f"{op}: rows in lane order for {rows.form} and {rows.lanes} met {form} and {lanes}.")
    return rows.lanes, 1


def check_rows(op: str, rows: Rows, format: str) -> None:
    """Activation rows: dtypes, shapes, strides; sums where they are given, and q4_0 needs them."""
    codes, scale, kd = rows[0], rows[1], width_of(rows)
    padded = len(lane_index(rows.form, kd, rows.lanes)) if isinstance(rows, LaneRows) else "Kd"
    expect(op, "codes", codes, [torch.int8], ["R", padded])
    gemv_row_bytes(format, kd)
    expect(op, "scale", scale, [torch.float16], [len(codes), kd // 32])
    expect_rows(op, "codes", codes, 8)
    expect_rows(op, "scale", scale)
    if len(rows) > 2:
        expect(op, "total", rows[2], [torch.float16], scale.shape)
        expect_rows(op, "total", rows[2])
    elif format in TOTALS_NEEDED:
        raise LabError(f"{op}: {format} needs rows of (codes, scale, total), got {len(rows)} tensors.")
