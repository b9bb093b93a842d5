"""GEMV on floating activations: out[p] = W[slot of p] @ x[row_of[p]] (+ bias), weights of any format, x as it comes.

P pairs, S weight slots of [N, Kd], R rows of x (fp32, fp16, bf16, or e4m3 codes with a scale for each 128). Pairs come
in chunks of at most 8 that share a slot; a program takes a few weight rows and multiplies them with every row of its
chunk, so weights are read once a chunk. Two operations of one body:

    gemv_float         out[p] = W @ x (+ bias)
    gemv_float_gated   h[p] = act(gate @ x (+ bias)) * (up @ x (+ bias)) (times the pair's weight)

Reads N * row_bytes a chunk (twice that when gated) and Kd values a pair from the cache, writes N values a pair. fp32
sums in the order that `gemv_float.body` states: a row's bits depend on its own activations and weights alone, not on
the chunk, P, the tile or the machine; `ref` has the same. Gate, up and h are rounded to out's dtype where a
store would round them, so the gated form has the bits of two products and an activation (which meets its reference
within fp32's `exp`). Weights, and what of their scales has rows, lie in arenas or (all of them) in tables of addresses.

Knows nothing about experts, routing or residency. Pairs in no chunk keep what `out` held before; a chunk without rows,
or with a slot outside 0..S-1, writes nothing (tables made on a device are padded with such).
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any, Literal

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import gdc_launch_dependents, gdc_wait, jit, tl
from moe_lab_kernels.gemv_float.body import fetch_both, lane_sums
from moe_lab_kernels.gemv_float.operands import (
    Bias,
    Gate,
    Pairs,
    Rows,
    check_call,
    check_gated,
    each_chunk,
    exact_products,
)
from moe_lab_kernels.gemv_float.ref import matvec_ref
from moe_lab_kernels.gemv_float.steps import WALKS, finished
from moe_lab_kernels.gemv_float.tiles import FloatTile, tile_for
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.primitives import folded_row, offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, gated_value
from moe_lab_kernels.rows.hidden import hidden_rows_ref
from moe_lab_kernels.slots.pointer_table import Weights, is_pointers, operand, typed_base
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS

PLAIN = ("", "", "none", 32, 1)  # code, scale, second, group, rows of a format without separate scales
PLAIN_GATE = Gate()
MAX_GRID_Y = 65_535
Early = Literal["", "launch", "weights"]


@jit
def _strip(x, x_scale, row_of, out_row, pair_weight, w, scale, second, v, v_scale, v_second, bias, bias2, out, n0,
           first, n, N, units, n_x, n_pairs, limit, alpha, x_row, xs_row, w_row, s_row, g_row, out_stride,
           R: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, WEIGHED: tl.constexpr,
           SCATTER: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
           FORMAT: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
           SHARED: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, RUNS: tl.constexpr,
           PERIOD: tl.constexpr, EXACT: tl.constexpr, X_SCALED: tl.constexpr, EARLY: tl.constexpr,
           NATIVE: tl.constexpr):  # fmt: skip
    """B weight rows from n0 on, times up to R rows of one chunk. Axes: x row, weight row, lane. The first weights are
    asked for before anything that waits: for the kernel before (EARLY = "weights"), or for the number of a row of x."""
    n_row = n0 + tl.arange(0, B)[None, :, None]
    held = tl.minimum(n_row, N - 1)  # rows past N are read again and not stored
    w, v = w + offset64(held, w_row), v + offset64(held, w_row)
    u = tl.minimum(tl.arange(0, 32)[None, None, :], units - 1)
    ready = fetch_both(w, scale, second, v, v_scale, v_second, held, u, s_row, g_row, GATED, FORMAT, CODE, SECOND,
                       GROUP, SHARED, RUNS)  # fmt: skip
    if EARLY == "weights":
        gdc_wait()
        gdc_launch_dependents()
    p = first + tl.arange(0, R)[:, None, None]
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = tl.load(row_of + p, mask=mine, other=-1)
    known = (row >= 0) & (row < n_x)
    row = tl.where(known, row, 0)
    acc, acc2 = lane_sums(x + offset64(row, x_row), x_scale + offset64(row, xs_row), ready, w, scale, second, v,
                          v_scale, v_second, held, known, units, s_row, g_row, R, B, GATED, FORMAT, CODE, SCALE,
                          SECOND, GROUP, SHARED, BYTES, BLOCK, PER_BLOCK, RUNS, PERIOD, EXACT, X_SCALED,
                          NATIVE)  # fmt: skip
    acc = finished(acc, second, CODE, SECOND)
    of_lane, first_with_it = folded_row(B, 32)
    n_row = n0 + of_lane
    held = tl.minimum(n_row, N - 1)
    if BIAS:
        acc = acc + to_f32(tl.load(bias + held))
    stored: tl.constexpr = out.dtype.element_ty
    result = round_to(acc, stored)
    if GATED:
        acc2 = finished(acc2, v_second, CODE, SECOND)
        if BIAS:
            acc2 = acc2 + to_f32(tl.load(bias2 + held))
        g, u = to_f32(result), to_f32(round_to(acc2, stored))
        h = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
        if WEIGHED:
            h = h * tl.load(pair_weight + p, mask=mine, other=0)
        result = round_to(h, stored)
    to = p
    if SCATTER:
        to = tl.load(out_row + p, mask=mine, other=0)
    tl.store(out + offset64(to, out_stride) + n_row, result, mask=mine & (n_row < N) & first_with_it)


# Strides of rows and slots and addresses are specialised: they say how wide a load may be.
@jit(
    do_not_specialize=[
        "N",
        "units",
        "n_slots",
        "n_x",
        "n_pairs",
        "limit",
        "alpha",
        "s_slot",
        "s_row",
        "g_slot",
        "g_row",
        "xs_row",
        "bias_stride",
    ],
    do_not_specialize_on_alignment=["row_of", "out_row", "pair_weight", "chunks", "bias_of", "bias", "bias2", "out"],
)
def _gemv_float(x, x_scale, row_of, out_row, pair_weight, chunks, bias_of, w, w_scale, w_second, v, v_scale, v_second,
                bias, bias2, out, N, units, n_slots, n_x, n_pairs, limit, alpha, x_row, xs_row, w_slot, w_row, s_slot,
                s_row, g_slot, g_row, bias_stride, out_stride, GATED: tl.constexpr, BIAS: tl.constexpr,
                BIAS_OF: tl.constexpr, WEIGHED: tl.constexpr, SCATTER: tl.constexpr, INNER: tl.constexpr,
                CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr, CODE: tl.constexpr,
                SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
                BYTES: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, RUNS: tl.constexpr,
                PERIOD: tl.constexpr, EXACT: tl.constexpr, X_SCALED: tl.constexpr, TOGETHER: tl.constexpr,
                ROWS: tl.constexpr, SUMS: tl.constexpr, EARLY: tl.constexpr, TABLE: tl.constexpr, ELEMENT: tl.constexpr,
                SCALE_TYPE: tl.constexpr, BIAS_TYPE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (chunk, tile of rows); chunks on grid x because y and z stop at 65,535. TABLE: weights are addresses of
    their slots, and so is what of their scales has rows; ELEMENT, SCALE_TYPE, BIAS_TYPE: what lies there."""
    if EARLY == "launch":
        gdc_wait()
        gdc_launch_dependents()
    chunk, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    there = (slot >= 0) & (slot < n_slots)
    slot, n = tl.where(there, slot, 0), tl.where(there, n, 0)
    wide: tl.constexpr = 16 if BYTES == 0 else 1  # pyright: ignore[reportAssignmentType]
    w, v = typed_base(w, slot, w_slot, TABLE, ELEMENT, wide), typed_base(v, slot, w_slot, TABLE, ELEMENT, wide)
    w_scale = typed_base(w_scale, slot, s_slot, TABLE and SCALE != "", SCALE_TYPE, 1)
    v_scale = typed_base(v_scale, slot, s_slot, TABLE and SCALE != "", SCALE_TYPE, 1)
    w_second = typed_base(w_second, slot, g_slot, TABLE and SECOND == "bias", BIAS_TYPE, 1)
    v_second = typed_base(v_second, slot, g_slot, TABLE and SECOND == "bias", BIAS_TYPE, 1)
    if BIAS:
        whose = slot
        if BIAS_OF:
            whose = tl.load(bias_of + chunk)
        bias, bias2 = bias + offset64(whose, bias_stride), bias2 + offset64(whose, bias_stride)
    for done in range(0, n, TOGETHER):
        left = tl.minimum(n - done, TOGETHER)
        for size in tl.static_range(4):  # the smallest program of 1, 2, 4 or 8 rows that holds what is left
            if (1 << size) <= TOGETHER:  # noqa: SIM102 (decided when compiling, the inner test when running)
                if (left > (1 << size) // 2) & (left <= (1 << size)):
                    for n0 in range(tile * ROWS, tile * ROWS + ROWS, min(ROWS, max(1, SUMS >> size))):
                        _strip(x, x_scale, row_of, out_row, pair_weight, w, w_scale, w_second, v, v_scale, v_second,
                               bias, bias2, out, n0, first + done, left, N, units, n_x, n_pairs, limit, alpha, x_row,
                               xs_row, w_row, s_row, g_row, out_stride, 1 << size, min(ROWS, max(1, SUMS >> size)),
                               GATED, BIAS, WEIGHED, SCATTER, INNER, CUBE, GELU, LIMIT, FORMAT, CODE, SCALE, SECOND,
                               GROUP, SHARED, BYTES, BLOCK, PER_BLOCK, RUNS, PERIOD, EXACT, X_SCALED, EARLY,
                               NATIVE)  # fmt: skip


def gemv_float(rows: Rows, pairs: Pairs, w: Weight, out: Tensor, *, bias: Bias | None = None,
               tile: FloatTile | None = None, early: Early = "") -> Tensor:  # fmt: skip
    """Write W @ x (+ bias) for every pair of every chunk (Triton), rounded once to out's dtype (fp32, fp16, bf16).

    out [P, N], or any number of rows where `pairs.to` says which. `early` (from compute capability 9.0 on): start while
    the kernel before still runs, and wait for it at once ("launch") or, where it writes nothing but x, behind the first
    loads of weights ("weights"). Elsewhere it means nothing. Returns `out`. LabError when shapes, strides, devices or
    the format disagree.
    """
    check_call("gemv_float", rows, pairs, w, out, bias)
    return _launch("gemv_float", rows, pairs, (w, w), out, (bias, bias), Gate(), "none", tile, gated=False, early=early)


def gemv_float_gated(rows: Rows, pairs: Pairs, gate: Weight, up: Weight, out: Tensor, *, how: Gate = PLAIN_GATE,
                     gate_bias: Bias | None = None, up_bias: Bias | None = None, tile: FloatTile | None = None,
                     early: Early = "") -> Tensor:  # fmt: skip
    """Write the hidden row h [P, F] of every pair of every chunk (Triton); gate and up pass through out's dtype.

    gate and up of one format, shape and strides, biases likewise. As `gemv_float`.
    """
    mode = check_gated("gemv_float_gated", gate, up, (gate_bias, up_bias), how, len(pairs.row_of))
    check_call("gemv_float_gated", rows, pairs, gate, out, gate_bias)
    both = (gate_bias, up_bias)
    return _launch("gemv_float_gated", rows, pairs, (gate, up), out, both, how, mode, tile, gated=True, early=early)


def gemv_float_ref(rows: Rows, pairs: Pairs, w: Weight, out: Tensor, *, bias: Bias | None = None,
                   tile: FloatTile | None = None, early: Early = "") -> Tensor:  # fmt: skip
    """The same in torch, bit for bit; `tile` means nothing here. Slow: for tests."""
    check_call("gemv_float", rows, pairs, w, out, bias)
    for p, sums in _sums_ref(rows, pairs, w, bias):
        out[p if pairs.to is None else pairs.to[p].long()] = sums.to(out.dtype)
    return out


def gemv_float_gated_ref(rows: Rows, pairs: Pairs, gate: Weight, up: Weight, out: Tensor, *, how: Gate = PLAIN_GATE,
                         gate_bias: Bias | None = None, up_bias: Bias | None = None, tile: FloatTile | None = None,
                         early: Early = "") -> Tensor:  # fmt: skip
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    check_gated("gemv_float_gated", gate, up, (gate_bias, up_bias), how, len(pairs.row_of))
    check_call("gemv_float_gated", rows, pairs, gate, out, gate_bias)
    sums = zip(_sums_ref(rows, pairs, gate, gate_bias), _sums_ref(rows, pairs, up, up_bias), strict=True)
    for (p, g), (_, u) in sums:
        own = how if how.weight is None else how._replace(weight=how.weight[p])
        h = hidden_rows_ref(g.to(out.dtype), u.to(out.dtype), own)
        out[p if pairs.to is None else pairs.to[p].long()] = h
    return out


def _sums_ref(rows: Rows, pairs: Pairs, w: Weight, bias: Bias | None) -> list[tuple[Tensor, Tensor]]:
    """(pairs, their fp32 sums with the bias) of each chunk."""
    made = []
    for c, slot, p, index, known in each_chunk(pairs, len(w.data), len(rows.x)):
        sums = matvec_ref(rows, index, known, w, slot)
        if bias is not None:
            sums = sums + bias.values[slot if bias.row_of is None else int(bias.row_of[c])].float()
        made.append((p, sums))
    return made


def _element(t: Weights | None) -> Any:
    """The kernels' name for what lies at a table's addresses; None where there is no table."""
    return getattr(tl, str(t.dtype).removeprefix("torch.")) if t is not None and is_pointers(t) else None


def _launch(op: str, rows: Rows, pairs: Pairs, weights: tuple[Weight, Weight], out: Tensor,
            biases: tuple[Bias | None, Bias | None], how: Gate, mode: str, tile: FloatTile | None, *,
            gated: bool, early: str) -> Tensor:  # fmt: skip
    """Both operations of one body."""
    w, (bias, bias2), chunks = weights[0], biases, pairs.chunks
    of_bias = None if bias is None else bias.row_of
    matrices = [operand(m.data if t is None else t) for m in weights for t in (m.data, m.scales, m.second)]
    named = {
        "x": rows.x,
        "x's scales": rows.scale,
        "row_of": pairs.row_of,
        "chunks": chunks,
        "to": pairs.to,
        "out": out,
    }
    more = {"weight": how.weight, "bias.row_of": of_bias, **{f"part {i}": t for i, t in enumerate(matrices)}}
    more |= {name: None if b is None else b.values for name, b in (("bias", bias), ("second bias", bias2))}
    on = backend.serve(op, **named, **more)
    early = early if on == "cuda" and backend.has_early_start(out.device) else ""
    n, layout = w.data.shape[1], LAYOUTS.get(w.format)
    if tile is None:
        counts = len(chunks), len(pairs.row_of), pairs.max_rows
        tile = tile_for(w.format, n, *counts, gated=gated, on=on, device=out.device)
    tiles = -(-n // tile.rows)
    if tiles > MAX_GRID_Y:
        raise LabError(f"{op}: N={n} in tiles of {tile.rows} rows passes the grid's {MAX_GRID_Y}; take a taller tile.")
    strides = [s for t in (w.data, w.scales, w.second) for s in (*(() if t is None else t.stride()), 0, 0)[:2]]
    x = rows.x.view(torch.uint8) if rows.scale is not None else rows.x
    kind = PLAIN if layout is None else (layout.code, layout.scale, layout.second, layout.group, layout.rows)
    walk = WALKS[w.format]
    size = BLOCKS[w.format].bytes if w.format in BLOCKS else 0
    backend.launch(
        _gemv_float,
        (len(chunks), tiles),
        *(x, x if rows.scale is None else rows.scale, pairs.row_of, pairs.row_of if pairs.to is None else pairs.to),
        *(out if how.weight is None else how.weight, chunks, chunks if of_bias is None else of_bias),
        *matrices,
        *(out if b is None else b.values for b in (bias, bias2)),
        *(out, n, w.kd // walk.block * walk.per_block, len(w.data), len(x), len(pairs.row_of)),
        *(0.0 if how.limit is None else float(how.limit), float(how.alpha), x.stride(0)),
        *(0 if rows.scale is None else rows.scale.stride(0), *strides),
        *(0 if bias is None else bias.values.stride(0), out.stride(0)),
        *(gated, bias is not None, of_bias is not None, how.weight is not None, pairs.to is not None),
        *(GELU_INNER, GELU_CUBE, how.gelu, mode, w.format, *kind, size, *walk),
        *(exact_products(x, w.format), rows.scale is not None, min(pairs.max_rows, tile.shared)),
        *(tile.rows, tile.sums, early, is_pointers(w.data), *map(_element, (w.data, w.scales, w.second))),
        backend.has_dp4a(on),
        device=out.device,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        **backend.early_start(early != "", on),
    )
    return out
