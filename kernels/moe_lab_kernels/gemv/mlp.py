"""Gated experts of a decode step in two launches: y[p] = down @ (act(gate @ x[row of p]) * (up @ x[row of p])).

P pairs of R rows of x, in chunks of at most 8 that share a weight slot, as in `gemv`; gate and up [S, F, D], down
[S, D, F]. Reads the weights of the chunks' slots once; x, hidden rows and sums between stay in the cache.

The first launch quantises x and clears scratch. The second holds the programs of `gemv` for gate and up, then those for
down, in one grid, and no program waits for a kernel to end (`hand_over` has how, and why it does end):
    gate, up   a program stores its products in scratch. The last of a block of 32 hidden values waits for the others'
               products, activates and quantises them for every row of the chunk, and counts the block in at the chunk.
    down       a program waits until all hidden blocks of its chunk are there, then multiplies.
Every sum is added in the order of the launches one by one, so the bits are those of `quantize_lanes`, `gemv`,
`activation`, `quantize_lanes`, `gemv`.

Knows nothing about experts, routing or residency. A chunk without rows, or with a slot outside 0..S-1, writes nothing;
nor does a call without rows of x.
"""
# pyright: reportGeneralTypeIssues=false

from functools import partial
from typing import Any

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, signature
from moe_lab_kernels.gemv.forms import form_of, is_planar, values_of
from moe_lab_kernels.gemv.gemv import MAX_CHUNK_ROWS, check_weight, chunk_tile, gemv_ref
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
from moe_lab_kernels.gemv.lane_rows import code_bytes, lane_rows, quantize_lanes, quantize_lanes_ref
from moe_lab_kernels.gemv.mlp_call import Experts, check_call, limit_in, one_by_one, programs_of
from moe_lab_kernels.gemv.q8_rows import Empty, Words, fresh
from moe_lab_kernels.gemv.ref import lanes_of
from moe_lab_kernels.gemv.tiles import TILE_INTERPRETER, Tile, tiles_of_layer
from moe_lab_kernels.primitives import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER
from moe_lab_kernels.rows.hidden import SILU, Gate
from moe_lab_kernels.slots.pointer_table import as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.planar_layout import rows_in

POINTERS = ["codes", "scale", "total", "row_of", "out_row", "chunks", "gate", "up", "down", "handed", "y"]
SIZES = ["F", "D", "x_blocks", "h_blocks", "n_chunks", "n_slots", "n_x", "n_pairs", "limit", "alpha"]
STRIDES = ["codes_stride", "scale_stride", "gate_slot", "gate_row", "up_slot", "up_row", "down_slot", "down_row",
           "h_stride", "h_groups", "y_stride"]  # fmt: skip


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_mlp(codes, scale, total, row_of, out_row, chunks, gate, up, down, handed, y, F, D, x_blocks, h_blocks,
              n_chunks, n_slots, n_x, n_pairs, limit, alpha, codes_stride, scale_stride, gate_slot, gate_row, up_slot,
              up_row, down_slot, down_row, h_stride, h_groups, y_stride, FORMAT: tl.constexpr, LANES: tl.constexpr,
              PER_BLOCK: tl.constexpr, VALUES: tl.constexpr, NEXT: tl.constexpr, NEXT_LANES: tl.constexpr,
              NEXT_PER_BLOCK: tl.constexpr, NEXT_VALUES: tl.constexpr, STORE: tl.constexpr, INNER: tl.constexpr,
              CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, SHARED: tl.constexpr, R: tl.constexpr,
              ROWS: tl.constexpr, SUMS: tl.constexpr, DOWN_SHARED: tl.constexpr, DOWN_ROWS: tl.constexpr,
              DOWN_SUMS: tl.constexpr, WARPS: tl.constexpr, TABLE: tl.constexpr, NATIVE: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """Programs: (chunk, tile of F, gate or up), then (chunk, tile of D). TABLE: weights are the addresses of their
    slots."""
    # hidden values that are activated together
    BLOCK: tl.constexpr = max(ROWS, 32)  # pyright: ignore[reportAssignmentType]
    tiles, down_tiles = tl.cdiv(F, ROWS), tl.cdiv(D, DOWN_ROWS)
    is_down, chunk, tile, slot, first, n = work_of(chunks, n_chunks, n_slots, tiles, down_tiles)
    if n > 0:
        if is_down:
            w = slot_base(down, slot, down_slot, TABLE)
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            _, _, h, h_scale, h_total, h_sums = places(handed, n_chunks, n_pairs, F, h_stride, h_groups)
            await_hidden(handed + chunk, tl.cdiv(F, BLOCK))
            chunk_tile(h, h_scale, h_total, row_of, out_row, w, y, tile, first, n, D, h_blocks, n_pairs, n_pairs,
                       h_stride, h_groups, h_groups, down_row, y_stride, NEXT, NEXT_LANES, NEXT_PER_BLOCK,
                       NEXT_VALUES, 1, False, True, DOWN_SHARED, DOWN_ROWS, DOWN_SUMS, WARPS, NATIVE)  # fmt: skip
        else:
            w, row_stride = slot_base(gate, slot, gate_slot, TABLE), gate_row
            if tile % 2 == 1:
                w, row_stride = slot_base(up, slot, up_slot, TABLE), up_row
            to = product_of(handed, n_chunks, n_pairs, F, tile % 2)
            last = (tile % 2 == 1) & ((tile // 2 == tiles - 1) | ((tile // 2 + 1) * ROWS % BLOCK == 0))
            tile = tile // 2
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            chunk_tile(codes, scale, total, row_of, out_row, w, to, tile, first, n, F, x_blocks, n_x, n_pairs,
                       codes_stride, scale_stride, scale_stride, row_stride, F, FORMAT, LANES, PER_BLOCK, VALUES, 1,
                       True, False, SHARED, ROWS, SUMS, WARPS, NATIVE)  # fmt: skip
            if last:  # of those that make a block of hidden values
                # here and not above: over the product these would be registers too many
                gates, ups, h, h_scale, h_total, h_sums = places(handed, n_chunks, n_pairs, F, h_stride, h_groups)
                hide(gates, ups, h, h_scale, h_total, h_sums, handed + chunk, tile * ROWS // BLOCK, first, n, F,
                     n_pairs, limit, alpha, h_stride, h_groups, STORE, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK,
                     INNER, CUBE, GELU, LIMIT, R, BLOCK // 32, WARPS)  # fmt: skip
    else:
        wait_for_the_kernel_before(PDL)  # else this kernel could end first, and who waits for it alone be too early


_RIGHT: dict[tuple[Any, ...], tuple[int, int, int]] = {}
MOST_REMEMBERED = 1024


def gemv_mlp(x: Float[Tensor, "R D"], row_of: Int32[Tensor, " P"], w: Experts, chunks: Int32[Tensor, "C 3"],
             y: Float[Tensor, "Y D"], out_row: Int32[Tensor, " P"], *, how: Gate = SILU,
             store: torch.dtype = torch.bfloat16, max_rows: int = MAX_CHUNK_ROWS, layout: str = "raw",
             tile: Tile | None = None, down_tile: Tile | None = None, pdl: bool = True,
             empty: Empty = fresh) -> Tensor:  # fmt: skip
    """Write y[out_row[p]], the down row of every pair of every chunk (Triton).

    w: gate, up and down as `gemv` takes them in `layout`. row_of, chunks, max_rows: as in `gemv`. how: what is made of
    gate and up, without a weight. `store`: the dtype through which gate, up and h pass; down rows pass through y's.
    `pdl`: start while the kernel before still runs, where the GPU can. `empty` gives scratch (x.*, handed).
    Returns y. LabError when shapes, strides, devices or formats disagree.
    """
    op = "gemv_mlp"
    mode = limit_in(op, how)
    form, down_form = form_of(op, w.format, layout), form_of(op, w.down_format, layout)
    given = (x, row_of, *w.weights, chunks, form, down_form, y, out_row, store)
    asked = tuple(v if isinstance(v, str | torch.dtype) else signature(v) for v in given)
    if asked not in _RIGHT:  # a decode step asks the same again and again: the checks took 0.1 ms of the host's time
        if len(_RIGHT) >= MOST_REMEMBERED:
            _RIGHT.clear()
        _RIGHT[asked] = _check(op, x, row_of, w, chunks, y, out_row, store, layout)
    p, f, d = _RIGHT[asked]
    gate, up, down = map(operand, w.weights)
    on = backend.serve(op, x=x, row_of=row_of, gate=gate, up=up, down=down, chunks=chunks, y=y, out_row=out_row)
    pdl = pdl and backend.has_early_start(x.device)
    usual = (TILE_INTERPRETER, TILE_INTERPRETER)
    if on != "interpreter":
        usual = tiles_of_layer(form, down_form, max_rows, len(chunks), f, d)
    tile, down_tile = tile or usual[0], down_tile or usual[1]
    if tile.warps != down_tile.warps:
        raise LabError(f"{op}: one launch has one number of warps, got {tile} and {down_tile}.")
    # at least the weight rows that lie side by side on a warp
    rows, down_rows = (
        max(t.rows, 32 // lanes_of(form, kd).row) for t, form, kd in ((tile, form, d), (down_tile, down_form, f))
    )
    c = len(chunks)
    programs = programs_of(op, c, -(-f // rows), -(-d // down_rows))
    if not c or not len(x):
        return y
    device = x.device
    h_lanes, values, next_values = lanes_of(down_form, f), values_of(form), values_of(down_form)
    own = scratch(c, p, f, code_bytes(down_form, f, h_lanes))
    handed = empty("handed", (own.words,), torch.int32, device)
    room = lane_rows(op, x.shape, form, None, device, empty, "x")
    xq = quantize_lanes(x, w.format, layout=layout, out=room, clear=Words(handed, own.cleared), pdl=pdl)
    strides = [step for t in w.weights for step in as_tensor(t).stride()[:2]]
    backend.launch(
        _gemv_mlp,
        (programs,),
        *(*xq[:3], row_of, out_row, chunks, gate, up, down, handed, y),
        *(f, d, d // values, f // next_values, c, len(w.gate), len(x), p, how.limit or 0.0, how.alpha),
        *(xq.codes.stride(0), xq.scale.stride(0), *strides),
        *(own.row_bytes, own.groups, y.stride(0)),
        *(form, *xq.lanes, values, down_form, *h_lanes, next_values, stored(store)),
        *(
            GELU_INNER,
            GELU_CUBE,
            how.gelu,
            mode,
            min(max_rows, tile.shared),
            min(max_rows, HIDDEN_ROWS),
            rows,
            tile.sums,
        ),
        *(min(max_rows, down_tile.shared), down_rows, down_tile.sums),
        *(tile.warps, is_pointers(w.gate), backend.has_dp4a(on), pdl and on == "cuda"),
        device=device,
        num_warps=tile.warps,
        maxnreg=max(tile.registers or 255, down_tile.registers or 255) if on == "cuda" else None,
        **backend.early_start(pdl, on),
    )
    return y


def gemv_mlp_ref(x: Float[Tensor, "R D"], row_of: Int32[Tensor, " P"], w: Experts, chunks: Int32[Tensor, "C 3"],
                 y: Float[Tensor, "Y D"], out_row: Int32[Tensor, " P"], *, how: Gate = SILU,
                 store: torch.dtype = torch.bfloat16, max_rows: int = MAX_CHUNK_ROWS, layout: str = "raw",
                 tile: Tile | None = None, down_tile: Tile | None = None, pdl: bool = True,
                 empty: Empty = fresh) -> Tensor:  # fmt: skip
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    op = "gemv_mlp"
    _, f, _ = _check(op, x, row_of, w, chunks, y, out_row, store, layout)
    quantise, product = partial(quantize_lanes_ref, layout=layout), partial(gemv_ref, layout=layout)
    return one_by_one(op, quantise, product, x, row_of, w, chunks, y, out_row, f, how, store, max_rows)


def _check(op: str, x: Tensor, row_of: Tensor, w: Experts, chunks: Tensor, y: Tensor, out_row: Tensor,
           store: torch.dtype, layout: str) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything that shapes, dtypes and strides can tell holds."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    form, down_form, d = form_of(op, w.format, layout), form_of(op, w.down_format, layout), x.shape[1]
    f = rows_in(op, w.format, w.gate.shape[-1], d) if is_planar(form) else w.gate.shape[1]
    sides = (("gate", w.gate, form, f, d), ("up", w.up, form, f, d), ("down", w.down, down_form, d, f))
    for name, weight, own, n, kd in sides:
        check_weight(op, name, weight, own, n, kd)
    return check_call(op, x, row_of, w, chunks, y, out_row, f, store)
