"""`mlp` on weights in tiles: y[p] = down @ (act(gate @ x[row of p]) * (up @ x[row of p])), in two launches.

As `mlp` has it (one grid of programs for gate and up, whose last ones of 32 hidden values activate and quantise them,
then programs for down that wait), with the products of `tiled`. The bits are those of `quantize_sums`, `gemv_tiled`,
`activation`, `quantize_sums`, `gemv_tiled` one by one.

P pairs of R rows of x, in chunks of at most 8 that share a weight slot; gate and up: tiles of [F, D], down: of [D, F].
A chunk without rows, or with a slot outside 0..S-1, writes nothing; nor does a call without rows of x.
"""
# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Float, Int32, Tensor, UInt8
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.gemv.body import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.gemv.hand_over import HIDDEN_ROWS, await_hidden, hide, places, product_of, scratch, stored
from moe_lab_kernels.gemv.mlp_call import check_call, one_by_one, programs_of
from moe_lab_kernels.gemv.q8_rows import Empty, Words, fresh
from moe_lab_kernels.gemv.sum_rows import quantize_sums, quantize_sums_ref, sum_rows
from moe_lab_kernels.gemv.tiled import MAX_CHUNK_ROWS, check_tiles, gemv_tiled_ref, step_bytes
from moe_lab_kernels.gemv.tiled_body import tile_chunk
from moe_lab_kernels.gemv.tiled_ref import parts_of
from moe_lab_kernels.gemv.tiles import TileCut, cut_for
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, OAI_ALPHA, limit_of
from moe_lab_kernels.slots.pointer_table import PointerTable, Weights, as_tensor, is_pointers, operand, slot_base
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
    pid = tl.program_id(0)
    is_down = pid >= n_chunks * tiles * 2
    if is_down:
        pid -= n_chunks * tiles * 2
        chunk, tile = pid // down_tiles, pid % down_tiles
    else:
        chunk, tile = pid // (2 * tiles), pid % (2 * tiles)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if (slot < 0) | (slot >= n_slots):
        n = 0
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


def gemv_tiled_mlp(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    up: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    down: UInt8[Tensor, "S tiles_d bytes_f"] | PointerTable,
    chunks: Int32[Tensor, "C 3"],
    format: str,
    down_format: str,
    y: Float[Tensor, "Y D"],
    out_row: Int32[Tensor, " P"],
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    max_rows: int = MAX_CHUNK_ROWS,
    cut: TileCut | None = None,
    down_tiles: int | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """Write y[out_row[p]], the down row of every pair of every chunk (Triton).

    Arguments as in `gemv_mlp`; `cut`: of gate's and up's programs, of which down's differ in their `down_tiles`.
    Returns y. LabError when shapes, strides, devices or formats disagree.
    """
    op = "gemv_tiled_mlp"
    mode = limit_of(op, limit, limit_mode, gelu=gelu)
    p, f, d = _check(op, x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    named = {"x": x, "row_of": row_of, "gate": operand(gate), "up": operand(up), "down": operand(down)}
    on = backend.serve(op, **named, chunks=chunks, y=y, out_row=out_row)
    pdl = pdl and backend.has_early_start(x.device)
    parts, down_parts = parts_of(format, d), parts_of(down_format, f)
    cut = cut or cut_for(on, format, max_rows, parts, f)
    down_tiles = down_tiles or cut_for(on, down_format, max_rows, down_parts, d).tiles
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
        *(xq.codes, xq.scale, xq.sums, xq.total, row_of, out_row, chunks, *map(operand, (gate, up, down)), handed, y),
        *(f, d, steps_of(format, d), steps_of(down_format, f), c),
        *(len(gate), len(x), p, 0.0 if limit is None else limit, alpha, xq.codes.stride(0), xq.scale.stride(0)),
        *(as_tensor(gate).stride(0), as_tensor(up).stride(0), as_tensor(down).stride(0)),
        *(own.row_bytes, own.groups, y.stride(0)),
        *(format, step_bytes(format), parts, down_format, step_bytes(down_format), down_parts, stored(store)),
        *(GELU_INNER, GELU_CUBE, gelu, mode, min(max_rows, cut.shared), HIDDEN_ROWS, cut.tiles, down_tiles),
        *(cut.warps, is_pointers(gate), backend.has_dp4a(on), pdl and on == "cuda"),
        device=device,
        num_warps=cut.warps,
        maxnreg=cut.registers if on == "cuda" else None,
        **backend.early_start(pdl, on),
    )
    return y


def gemv_tiled_mlp_ref(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    up: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    down: UInt8[Tensor, "S tiles_d bytes_f"] | PointerTable,
    chunks: Int32[Tensor, "C 3"],
    format: str,
    down_format: str,
    y: Float[Tensor, "Y D"],
    out_row: Int32[Tensor, " P"],
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    max_rows: int = MAX_CHUNK_ROWS,
    cut: TileCut | None = None,
    down_tiles: int | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    op = "gemv_tiled_mlp"
    _, f, _ = _check(op, x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    how = {"gelu": gelu, "limit": limit, "limit_mode": limit_mode, "alpha": alpha, "store": store, "max_rows": max_rows}
    weights, formats = (gate, up, down), (format, down_format)
    return one_by_one(
        op, lambda rows, _: quantize_sums_ref(rows), gemv_tiled_ref, x, row_of, weights, chunks, formats, y, out_row,
        f=f, **how,
    )  # fmt: skip


def _check(op: str, x: Tensor, row_of: Tensor, gate: Weights, up: Weights, down: Weights, chunks: Tensor, format: str,
           down_format: str, y: Tensor, out_row: Tensor, store: torch.dtype) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything that shapes, dtypes and strides can tell holds."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    d, f = x.shape[1], ROWS * gate.shape[1]
    sides = (("gate", gate, format, f, d), ("up", up, format, f, d), ("down", down, down_format, d, f))
    for name, w, own, n, kd in sides:
        check_tiles(op, name, w, own, n, kd)
    return check_call(op, x, row_of, (gate, up, down), chunks, y, out_row, f, store)
