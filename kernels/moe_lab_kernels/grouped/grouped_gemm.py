"""Grouped GEMM: expert rows times their expert's weights on the tensor cores, decoded as they are multiplied.

P pairs sorted by expert, S weight slots of [N, Kd]. A tile of the work list is at most `work.tokens` pairs of one slot;
a program multiplies it with `Tile.rows` weight rows. Two operations of one body:

    grouped_gate_up   h[p] = act(gate @ x[row_of[p]]) * (up @ x[row_of[p]])      rows gathered as they are loaded
    grouped_product   out[token * slots + slot of p] = W @ x[row_of[p]]          rows scattered as they are stored

Weights are the instruction's M side (64 rows or more) and tokens its N side, so one kind of tensor-core instruction
serves one row and hundreds, and a row's bits depend neither on the tile nor on what else is in the batch: each output
is one chain of fp32 sums along Kd (no split of Kd, no atomics). Operands have the dtype of x (bf16 or fp16): raw
weights are decoded as the decoding kernels do, fp32 and one rounding, in registers (`steps`) or, where a tile says so,
by whole words on their way to shared memory (`staged`). Gate, up and h
are rounded to the output's dtype where a store would round them, so fused and unfused have the same bits.

Reads each tile's weights once (N * row_bytes), 2 Kd bytes a pair for each block of weight rows (from the cache).
The references sum in float64 and round once: the sum's order makes the difference, see the tolerance table.
Knows nothing about routing, residency or weights of experts. Pairs in no tile keep what `out` held before.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Iterator

import torch

from moe_lab._types import Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.body import gated, place
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_call, check_gated, values_ref
from moe_lab_kernels.grouped.staged import STAGED, staged_values, staged_words, why_not_staged
from moe_lab_kernels.grouped.steps import STEPS, block_values, scaled_values
from moe_lab_kernels.grouped.tiles import Tile, WorkList, tile_for
from moe_lab_kernels.primitives import INTERPRET, offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, geglu_ref, swiglu_ref
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS

PLAIN = ("", "", "none", 32, 1)  # code, scale, second, group, rows of a format without separate scales


@jit
def _weights(w, scale, second, n_row, step, j: tl.constexpr, Kd, s_row, g_row, like, FORMAT: tl.constexpr,
             CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
             STEP: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Values [R, PART] in the dtype of `like`: part j of step `step`; zero past Kd. w: pointers [R, 1] to rows."""
    lane = tl.arange(0, PART)[None, :]
    k = step * STEP + j * PART
    if FORMAT == "bf16" or FORMAT == "f16":
        stored = tl.load(w + k + lane) if EVEN else tl.load(w + k + lane, mask=k + lane < Kd, other=0)
        out = stored if stored.dtype == like else round_to(to_f32(stored), like)
    elif CODE == "":
        out = round_to(block_values(w, step, j, lane, FORMAT, NATIVE), like)
    else:
        of_scale, of_second = scale + offset64(n_row // SHARED, s_row), second
        if SECOND == "bias":
            of_second = second + offset64(n_row, g_row)
        v = scaled_values(w, of_scale, of_second, k, lane, Kd, CODE, SCALE, SECOND, GROUP, EVEN)
        out = round_to(v if EVEN else tl.where(k + lane < Kd, v, 0), like)
    return out


@jit
def _add_product(acc, a, b):
    """acc + a @ b. The interpreter sums in float64, where no order shows after the rounding."""
    if INTERPRET:
        acc = tl.dot(to_f32(a).to(tl.float64), to_f32(b).to(tl.float64), acc, out_dtype=tl.float64)
    else:
        acc = tl.dot(a, b, acc)
    return acc


# N, Kd and the strides of rows and slots decide how wide loads and stores are (N by way of the stores' mask); nothing
# else is worth a compilation of its own.
@jit(do_not_specialize=["n_tiles", "n_slots", "n_x", "n_pairs", "limit", "s_slot", "s_row", "g_slot", "g_row"])
def _grouped(x, row_of, out, out_row, out_slot, tiles, w, w_scale, w_second, v, v_scale, v_second, N, Kd, n_tiles,
             n_slots, n_x, n_pairs, limit, x_row, out_stride, w_slot, w_row, s_slot, s_row, g_slot, g_row,
             FORMAT: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
             SHARED: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr,
             GELU: tl.constexpr, LIMIT: tl.constexpr, GATHER: tl.constexpr, SLOTS: tl.constexpr, INNER: tl.constexpr,
             CUBE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr,
             STAGED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (tile of tokens, block of weight rows)."""
    slot, first, n, begin = place(tiles, n_tiles, N, ROWS, TOGETHER)
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    n_row = begin + tl.arange(0, ROWS)
    p = first + tl.arange(0, TOKENS)
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = p
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known = (mine & (row >= 0) & (row < n_x))[:, None]
    of_x = x + offset64(tl.where(known, row[:, None], 0), x_row)
    held = tl.minimum(n_row, N - 1)[:, None]  # rows past N are read again and not stored
    of_w = w + offset64(slot, w_slot) + offset64(held, w_row)
    of_v = v + offset64(slot, w_slot) + offset64(held, w_row)
    w_scale, v_scale = w_scale + offset64(slot, s_slot), v_scale + offset64(slot, s_slot)
    w_second, v_second = w_second + offset64(slot, g_slot), v_second + offset64(slot, g_slot)
    acc = tl.zeros((ROWS, TOKENS), tl.float64 if INTERPRET else tl.float32)
    acc2 = acc
    like: tl.constexpr = x.dtype.element_ty
    if STAGED:
        # Carried from turn to turn, weights are an operand that the compiler puts into shared memory: threads decode in
        # the layout of the words, and a product need not wait until its registers are free again.
        last = tl.cdiv(Kd, STEP) - 1
        w_scale, v_scale = w_scale + offset64(held // SHARED, s_row), v_scale + offset64(held // SHARED, s_row)
        raw = staged_words(of_w, w_scale, 0, Kd, FORMAT, EVEN)
        a = staged_values(raw, 0, like, FORMAT, NATIVE)
        if GATED:
            raw2 = staged_words(of_v, v_scale, 0, Kd, FORMAT, EVEN)
            a2 = staged_values(raw2, 0, like, FORMAT, NATIVE)
        for step in range(0, last + 1):
            ahead = tl.minimum(step + 1, last)
            raw = staged_words(of_w, w_scale, ahead, Kd, FORMAT, EVEN)
            if GATED:
                raw2 = staged_words(of_v, v_scale, ahead, Kd, FORMAT, EVEN)
            for j in tl.static_range(STEP // PART):
                k = step * STEP + j * PART + tl.arange(0, PART)[None, :]
                b = tl.trans(tl.load(of_x + k, mask=known if EVEN else known & (k < Kd), other=0))
                acc = _add_product(acc, a[j], b)
                if GATED:
                    acc2 = _add_product(acc2, a2[j], b)
            a = staged_values(raw, ahead, like, FORMAT, NATIVE)
            if GATED:
                a2 = staged_values(raw2, ahead, like, FORMAT, NATIVE)
    else:
        for step in range(0, tl.cdiv(Kd, STEP)):
            for j in tl.static_range(STEP // PART):
                k = step * STEP + j * PART + tl.arange(0, PART)[None, :]
                if EVEN:
                    b = tl.trans(tl.load(of_x + k, mask=known, other=0))
                else:
                    b = tl.trans(tl.load(of_x + k, mask=known & (k < Kd), other=0))
                a = _weights(of_w, w_scale, w_second, held, step, j, Kd, s_row, g_row, like, FORMAT, CODE, SCALE,
                             SECOND, GROUP, SHARED, STEP, PART, EVEN, NATIVE)  # fmt: skip
                acc = _add_product(acc, a, b)
                if GATED:
                    a2 = _weights(of_v, v_scale, v_second, held, step, j, Kd, s_row, g_row, like, FORMAT, CODE, SCALE,
                                  SECOND, GROUP, SHARED, STEP, PART, EVEN, NATIVE)  # fmt: skip
                    acc2 = _add_product(acc2, a2, b)
    stored: tl.constexpr = out.dtype.element_ty
    if GATED:
        result = gated(acc.to(tl.float32), acc2.to(tl.float32), limit, stored, LIMIT, GELU, INNER, CUBE)
    else:
        result = round_to(acc.to(tl.float32), stored)
    to = p
    if SLOTS > 0:
        to = tl.load(out_row + p, mask=mine, other=0) * SLOTS + tl.load(out_slot + p, mask=mine, other=0)
    here = out + offset64(to, out_stride)[:, None] + n_row[None, :]
    tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


def grouped_gate_up(
    x: Tensor,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    out: Tensor,
    *,
    gelu: bool = False,
    limit: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Write h [P, N] = act(gate row) * up row for every pair of the work list (Triton).

    x [R, Kd] bf16 or fp16, any row stride; row_of[p]: the row that pair p uses (None: row p); gate and up of one
    format, shape and strides; out [P, N] bf16, fp16 or fp32. SiLU, or with `gelu` the tanh form of GELU; `limit` clamps
    first (`activation`). Returns `out`. LabError for shapes, strides, devices or formats that disagree.
    """
    check_gated(gate, up, limit)
    check_call("grouped_gate_up", x, row_of, gate, work, out, None)
    _launch("grouped_gate_up", x, row_of, gate, work, out, None, tile, up=up, gelu=gelu, limit=limit)
    return out


def grouped_product(
    x: Tensor,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Write W @ x[row_of[p]] for every pair p of the work list (Triton), rounded once to out's dtype.

    As `grouped_gate_up`. It goes to row p of out [P, N], or where `to` says: then out may have any number of rows, and
    the places are not checked.
    """
    check_call("grouped_product", x, row_of, w, work, out, to)
    _launch("grouped_product", x, row_of, w, work, out, to, tile)
    return out


def grouped_gate_up_ref(
    x: Tensor,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    out: Tensor,
    *,
    gelu: bool = False,
    limit: float | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The same in torch, products in float64 and rounded once to fp32."""
    check_gated(gate, up, limit)
    check_call("grouped_gate_up", x, row_of, gate, work, out, None)
    for pairs, rows, slot in _tiles_of(x, row_of, work, gate, len(out)):
        g, u = (_rows_ref(rows, w, slot).to(out.dtype) for w in (gate, up))
        out[pairs] = (geglu_ref if gelu else swiglu_ref)(g, u, limit=limit)
    return out


def grouped_product_ref(
    x: Tensor,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The same in torch, the product in float64 and rounded once to fp32."""
    check_call("grouped_product", x, row_of, w, work, out, to)
    for pairs, rows, slot in _tiles_of(x, row_of, work, w, len(out) if to is None else len(to.row)):
        at = pairs if to is None else (to.row[pairs] * to.slots + to.slot[pairs]).long()
        out[at] = _rows_ref(rows, w, slot).to(out.dtype)
    return out


def _tiles_of(x: Tensor, row_of: Tensor | None, work: WorkList, w: Weight, pairs: int) -> Iterator[tuple]:
    """(pairs, their rows of x, slot) of each tile; rows that do not exist are zero."""
    for slot, first, n in work.tiles.tolist():
        begin, end = max(first, 0), min(first + n, pairs)
        if 0 <= slot < len(w.data) and begin < end:
            p = torch.arange(begin, end, device=x.device)
            row = p if row_of is None else row_of[p].long()
            known = (row >= 0) & (row < len(x))
            yield p, x[torch.where(known, row, 0)].masked_fill(~known[:, None], 0), slot


def _rows_ref(rows: Tensor, w: Weight, slot: int) -> Tensor:
    return (rows.double() @ values_ref(w, slot, rows.dtype).double().T).float()


def _launch(op: str, x: Tensor, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor, to: Scatter | None,
            tile: Tile | None, *, up: Weight | None = None, gelu: bool = False,
            limit: float | None = None) -> None:  # fmt: skip
    """Both operations; `up` makes it the gated one."""
    row, slot, slots = to or (None, None, 0)
    on = backend.serve(
        op,
        x=x,
        row_of=row_of,
        row=row,
        slot=slot,
        w=w.data,
        scales=w.scales,
        second=w.second,
        tiles=work.tiles,
        out=out,
    )
    n, v, step, layout = w.data.shape[1], up or w, STEPS[w.format], LAYOUTS.get(w.format)
    if not len(work.tiles) or not n:
        return
    unstaged = why_not_staged(w, x.dtype)
    tile = tile or tile_for(w.format, work.tokens, up is not None, on, unstaged is None)
    if tile.staged and unstaged is not None:
        raise LabError(f"{op}: {w.format} weights are not decoded by whole words {unstaged}; leave Tile.staged out.")
    absent, matrices = w.data, [p for m in (w, v) for p in (m.data, m.scales, m.second)]
    strides = [s for p in (w.data, w.scales, w.second) for s in (*(() if p is None else p.stride()), 0, 0)[:2]]
    if tile.staged:
        step = STAGED[w.format]
    kind = PLAIN if layout is None else (layout.code, layout.scale, layout.second, layout.group, layout.rows)
    backend.launch(
        _grouped,
        (len(work.tiles) * -(-n // tile.rows),),
        *(x, *(work.tiles if i is None else i for i in (row_of,)), out),
        *(*(work.tiles if i is None else i for i in (row, slot)), work.tiles),
        *(absent if p is None else p for p in matrices),
        *(n, w.kd, len(work.tiles), len(w.data), len(x), len(out) if row is None else len(row)),
        *(0.0 if limit is None else limit, x.stride(0), out.stride(0), *strides),
        *(w.format, *kind, *step, w.kd % step.values == 0, up is not None, gelu, limit is not None),
        *(row_of is not None, slots, GELU_INNER, GELU_CUBE, tile.rows, work.tokens, tile.group, tile.staged),
        backend.has_dp4a(on),
        device=out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
