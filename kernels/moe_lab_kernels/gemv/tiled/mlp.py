"""`mlp` on weights in tiles: y[p] = down @ (act(gate @ x[row of p]) * (up @ x[row of p])), in two launches.

As `mlp` has it (one grid of programs for gate and up, whose last ones of 32 hidden values activate and quantise them,
then programs for down that wait), with the products of `tiled`. The bits are those of `quantize_sums`, `gemv_tiled`,
`activation`, `quantize_sums`, `gemv_tiled` one by one.

P pairs of R rows of x, in chunks of at most 8 that share a weight slot; gate and up: tiles of [F, D], down: of [D, F].
A chunk without rows, or with a slot outside 0..S-1, writes nothing; nor does a call without rows of x.
"""
# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.gemv.hand_over import (
    HIDDEN_ROWS,
    await_hidden,
    hide,
    places,
    product_of,
    scratch,
    stored,
    work_of,
)
from moe_lab_kernels.gemv.mlp_call import Experts, check_call, limit_in, one_by_one, programs_of
from moe_lab_kernels.gemv.q8_rows import Empty, Words, fresh
from moe_lab_kernels.gemv.tiled.body import tile_chunk
from moe_lab_kernels.gemv.tiled.ref import parts_of
from moe_lab_kernels.gemv.tiled.sum_rows import quantize_sums, quantize_sums_ref, sum_rows
from moe_lab_kernels.gemv.tiled.tiled import MAX_CHUNK_ROWS, check_tiles, gemv_tiled_ref, step_bytes
from moe_lab_kernels.gemv.tiled.tiles import TileCut, cut_for
from moe_lab_kernels.primitives import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER
from moe_lab_kernels.rows.hidden import SILU, Gate
from moe_lab_kernels.slots.pointer_table import as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.row_tiles import ROWS, steps_of

POINTERS = ["codes", "scale", "sums", "total", "row_of", "out_row", "chunks", "gate", "up", "down", "handed", "y"]
SIZES = ["F", "D", "x_steps", "h_steps", "n_chunks", "n_slots", "n_x", "n_pairs", "limit", "alpha"]
STRIDES = ["codes_stride", "scale_stride", "gate_slot", "up_slot", "down_slot", "h_stride", "h_groups", "y_stride"]


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_tiled_mlp(codes, scale, sums, total, row_of, out_row, chunks, gate, up, down, handed, y, F, D, x_steps,
                    h_steps, n_chunks, n_slots, n_x, n_pairs, limit, alpha, codes_stride, scale_stride, gate_slot,
                    up_slot, down_slot, h_stride, h_groups, y_stride, FORMAT: tl.constexpr, STEP_BYTES: tl.constexpr,
                    P: tl.constexpr, NEXT: tl.constexpr, NEXT_BYTES: tl.constexpr, NEXT_P: tl.constexpr,
                    STORE: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr,
                    LIMIT: tl.constexpr, SHARED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, NEXT_B: tl.constexpr,
                    WARPS: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr,
                    PDL: tl.constexpr):  # fmt: skip
    """Programs: (chunk, B tiles of F, gate or up), then (chunk, NEXT_B tiles of D). TABLE: weights are the addresses of
    their slots."""
    # hidden values that are activated together
    BLOCK: tl.constexpr = max(16 * B, 32)  # pyright: ignore[reportAssignmentType]
    tiles, down_tiles = tl.cdiv(F, 16 * B), tl.cdiv(D, 16 * NEXT_B)
    is_down, chunk, tile, slot, first, n = work_of(chunks, n_chunks, n_slots, tiles, down_tiles)
    if n > 0:
        if is_down:
            w = slot_base(down, slot, down_slot, TABLE)
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            _, _, h, h_scale, h_total, h_sums = places(handed, n_chunks, n_pairs, F, h_stride, h_groups)
            await_hidden(handed + chunk, tl.cdiv(F, BLOCK))
            tile_chunk(h, h_scale, h_sums, h_total, row_of, out_row, w, y, tile, first, n, D, h_steps, F // 32,
                       n_pairs, n_pairs, h_stride, h_groups, y_stride, NEXT, NEXT_BYTES, NEXT_P, False, True, SHARED,
                       NEXT_B, NATIVE)  # fmt: skip
        else:
            w = slot_base(gate, slot, gate_slot, TABLE)
            if tile % 2 == 1:
                w = slot_base(up, slot, up_slot, TABLE)
            to = product_of(handed, n_chunks, n_pairs, F, tile % 2)
            last = (tile % 2 == 1) & ((tile // 2 == tiles - 1) | ((tile // 2 + 1) * 16 * B % BLOCK == 0))
            tile = tile // 2
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            tile_chunk(codes, scale, sums, total, row_of, out_row, w, to, tile, first, n, F, x_steps, D // 32, n_x,
                       n_pairs, codes_stride, scale_stride, F, FORMAT, STEP_BYTES, P, True, False, SHARED, B,
                       NATIVE)  # fmt: skip
            if last:  # of those that make a block of hidden values
                # here and not above: over the product these would be registers too many
                gates, ups, h, h_scale, h_total, h_sums = places(handed, n_chunks, n_pairs, F, h_stride, h_groups)
                hide(gates, ups, h, h_scale, h_total, h_sums, handed + chunk, tile * 16 * B // BLOCK, first, n, F,
                     n_pairs, limit, alpha, h_stride, h_groups, STORE, NEXT, 32, 0, 1, INNER, CUBE, GELU, LIMIT, R,
                     BLOCK // 32, WARPS)  # fmt: skip
    else:
        wait_for_the_kernel_before(PDL)  # else this kernel could end first, and who waits for it alone be too early


def gemv_tiled_mlp(x: Float[Tensor, "R D"], row_of: Int32[Tensor, " P"], w: Experts, chunks: Int32[Tensor, "C 3"],
                   y: Float[Tensor, "Y D"], out_row: Int32[Tensor, " P"], *, how: Gate = SILU,
                   store: torch.dtype = torch.bfloat16, max_rows: int = MAX_CHUNK_ROWS, cut: TileCut | None = None,
                   down_tiles: int | None = None, pdl: bool = True, empty: Empty = fresh) -> Tensor:  # fmt: skip
    """Write y[out_row[p]], the down row of every pair of every chunk (Triton).

    w: gate, up and down in tiles, or tables of their addresses. The others as in `gemv_mlp`; `cut`: of gate's and up's
    programs, of which down's differ in their `down_tiles`. Returns y. LabError when shapes, strides, devices or formats
    disagree.
    """
    op = "gemv_tiled_mlp"
    mode = limit_in(op, how)
    p, f, d = _check(op, x, row_of, w, chunks, y, out_row, store)
    gate, up, down = map(operand, w.weights)
    on = backend.serve(op, x=x, row_of=row_of, gate=gate, up=up, down=down, chunks=chunks, y=y, out_row=out_row)
    pdl = pdl and backend.has_early_start(x.device)
    parts, down_parts = parts_of(w.format, d), parts_of(w.down_format, f)
    cut = cut or cut_for(on, w.format, max_rows, parts, f)
    down_tiles = down_tiles or cut_for(on, w.down_format, max_rows, down_parts, d).tiles
    rows, c, device = ROWS * cut.tiles, len(chunks), x.device
    programs = programs_of(op, c, -(-f // rows), -(-d // (ROWS * down_tiles)))
    if not c or not len(x):
        return y
    own = scratch(c, p, f, f)
    handed = empty("handed", (own.words,), torch.int32, device)
    room = sum_rows(x.shape, device, empty, "x")
    xq = quantize_sums(x, out=room, clear=Words(handed, own.cleared), pdl=pdl)
    backend.launch(
        _gemv_tiled_mlp,
        (programs,),
        *(xq.codes, xq.scale, xq.sums, xq.total, row_of, out_row, chunks, gate, up, down, handed, y),
        *(f, d, steps_of(w.format, d), steps_of(w.down_format, f), c),
        *(len(w.gate), len(x), p, how.limit or 0.0, how.alpha, xq.codes.stride(0), xq.scale.stride(0)),
        *(as_tensor(t).stride(0) for t in w.weights),
        *(own.row_bytes, own.groups, y.stride(0)),
        *(w.format, step_bytes(w.format), parts, w.down_format, step_bytes(w.down_format), down_parts, stored(store)),
        *(GELU_INNER, GELU_CUBE, how.gelu, mode, min(max_rows, cut.shared), HIDDEN_ROWS, cut.tiles, down_tiles),
        *(cut.warps, is_pointers(w.gate), backend.has_dp4a(on), pdl and on == "cuda"),
        device=device,
        num_warps=cut.warps,
        maxnreg=cut.registers if on == "cuda" else None,
        **backend.early_start(pdl, on),
    )
    return y


def gemv_tiled_mlp_ref(x: Float[Tensor, "R D"], row_of: Int32[Tensor, " P"], w: Experts, chunks: Int32[Tensor, "C 3"],
                       y: Float[Tensor, "Y D"], out_row: Int32[Tensor, " P"], *, how: Gate = SILU,
                       store: torch.dtype = torch.bfloat16, max_rows: int = MAX_CHUNK_ROWS,
                       cut: TileCut | None = None, down_tiles: int | None = None, pdl: bool = True,
                       empty: Empty = fresh) -> Tensor:  # fmt: skip
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    op = "gemv_tiled_mlp"
    _, f, _ = _check(op, x, row_of, w, chunks, y, out_row, store)
    quantise = lambda rows, _: quantize_sums_ref(rows)  # noqa: E731
    return one_by_one(op, quantise, gemv_tiled_ref, x, row_of, w, chunks, y, out_row, f, how, store, max_rows)


def _check(op: str, x: Tensor, row_of: Tensor, w: Experts, chunks: Tensor, y: Tensor, out_row: Tensor,
           store: torch.dtype) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything that shapes, dtypes and strides can tell holds."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    d, f = x.shape[1], ROWS * w.gate.shape[1]
    check_tiles(op, "gate", w.gate, w.format, f, d)
    check_tiles(op, "up", w.up, w.format, f, d)
    check_tiles(op, "down", w.down, w.down_format, d, f)
    return check_call(op, x, row_of, w, chunks, y, out_row, f, store)
