"""int8 grouped product on raw quantised blocks: expert rows times their expert's weights on the tensor cores.

P pairs sorted by expert, S weight slots of [N, Kd] raw blocks, R rows of Kd values quantised to ggml's prefill
layouts. A tile of the work list is at most `work.tokens` pairs of one slot; a program multiplies it with `Tile.rows`
weight rows. Two operations of one body:

    mmq_gate_up   h[p] = act(gate @ x[row_of[p]]) * (up @ x[row_of[p]])      rows gathered as they are loaded
    mmq_product   out[token * slots + slot of p] = W @ x[row_of[p]]          rows scattered as they are stored

The arithmetic is ggml's, type by type (`mmq.steps`), or its CPU's where the rows are q8_k. Integer dots are exact, and
fp32 steps come in an order that the format alone decides: a row's bits depend neither on the tile nor on what else is
in the batch, and launcher, interpreter and reference agree bit for bit. No split of Kd, no atomics, no padded groups.

Reads each tile's weights once (N * row_bytes) and, for each block of weight rows, Kd bytes of codes a pair and its
scales and sums (`mmq_operands.sides`, written by a launch before). Knows nothing about routing or residency. Pairs in
no tile keep what `out` held before.
"""

from collections.abc import Iterator

import torch

from moe_lab._types import Int32, Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.operands import Scatter, Weight, alike, check_gated
from moe_lab_kernels.grouped.tiles import TOKENS, Tile, WorkList
from moe_lab_kernels.mmq.fold import fold_step
from moe_lab_kernels.mmq.operands import MmqRows, check_product, sides
from moe_lab_kernels.mmq.ref import product_ref
from moe_lab_kernels.mmq.steps import STEPS, exact_step
from moe_lab_kernels.mmq.wide import WideTile, scratch_bytes, serves, wide_product
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, geglu, geglu_ref, swiglu, swiglu_ref

# Measured on an H200 (triton 3.6), TOP/s of [2048, 7168] weights by four warps of 64 rows: q2_k and q3_k, 128 rows an
# expert in tiles of 64, 81 and 83. Two warps, 128 rows, three stages and caps on registers lost: docs/kernels.md.
TILES = {16: Tile(64, 4, 2, 1), 32: Tile(64, 4, 2, 1), 64: Tile(64, 4, 2)}
TILE_INTERPRETER = Tile(256, 4, 1)
MOST_TOKENS = 64  # of a tile's rows in a program
WIDE_TILES = 1.75  # tiles a weight from which weights are opened first


def mmq_tile(tokens: int, on: str) -> Tile:
    """How a program is cut; the interpreter pays for programs, so it takes tall ones."""
    return TILE_INTERPRETER if on == "interpreter" else TILES[min(tokens, MOST_TOKENS)]


def goes_wide(w: Weight, work: WorkList, folded: bool) -> bool:
    """Whether a product opens its weights first: where each meets `WIDE_TILES` full tiles or so, as far as the host
    knows."""
    many = len(work.tiles) >= WIDE_TILES * len(w.data)
    return many and work.tokens == TOKENS[-1] and serves(w, folded)


def scratch_for(work: WorkList, folded: bool, w: Weight) -> int:
    """Bytes of scratch that a product wants; 0 where it opens nothing."""
    return scratch_bytes(w, work, folded) if goes_wide(w, work, folded) else 0


# N and the strides of rows and slots decide how wide loads and stores are; nothing else is worth a compilation.
@jit(do_not_specialize=["steps", "n_tiles", "n_slots", "n_x", "n_pairs", "scales", "lows", "limit"])
def _mmq(x, scale, low, row_of, out, out_row, out_slot, tiles, w, v, N, steps, scales, lows, n_tiles, n_slots, n_x,
         n_pairs, limit, x_row, out_stride, w_slot, w_row, FORMAT: tl.constexpr, FOLD: tl.constexpr,
         TAIL: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, GATHER: tl.constexpr,
         SLOTS: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
         LIST: tl.constexpr, TOGETHER: tl.constexpr, V: tl.constexpr, TURNS: tl.constexpr,
         NATIVE: tl.constexpr):  # fmt: skip
    """Program = (piece of a tile of pairs, block of weight rows); TOGETHER pieces walk the blocks side by side."""
    blocks, pieces = tl.cdiv(N, ROWS), LIST // TOKENS
    pid = tl.program_id(0)
    walk = pid // (TOGETHER * blocks)
    beside = tl.minimum(n_tiles * pieces - walk * TOGETHER, TOGETHER)
    at = pid % (TOGETHER * blocks)
    piece = walk * TOGETHER + at % beside
    tile, past = piece // pieces, piece % pieces * TOKENS  # rows of the list's tile before the program's
    slot, first, n = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    first, n = first + past, n - past
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    n_row = at // beside * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, TOKENS)
    p = first + i
    mine = (i < n) & (p >= 0) & (p < n_pairs)
    row = p
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known = (mine & (row >= 0) & (row < n_x))[:, None]
    of_x = x + offset64(tl.where(known, row[:, None], 0), x_row)
    held = tl.minimum(n_row, N - 1)  # rows past N are read again and not stored
    if FOLD:
        held, acc, column = held[:, None], tl.zeros((ROWS, TOKENS), tl.float32), i[None, :]
    else:  # a batch of V warps: see `mmq.wide`
        held, acc = tl.reshape(held, [V, ROWS // V, 1]), tl.zeros((V, ROWS // V, TOKENS), tl.float32)
        column = i[None, None, :]
    of_w = w + offset64(slot, w_slot) + offset64(held, w_row)
    of_v = v + offset64(slot, w_slot) + offset64(held, w_row)
    of_scale = scale + offset64(tile, scales * LIST) + (past + column) * TURNS
    of_low = low + offset64(tile, lows * LIST) + (past * 16 + i[:, None] * 16 if FOLD else (past + column) * 4)
    acc2 = acc
    for step in range(0, steps):
        if FOLD:
            acc = fold_step(acc, of_w, of_x, known, of_scale, of_low, step, FORMAT, LIST, NATIVE)
            if GATED:
                acc2 = fold_step(acc2, of_v, of_x, known, of_scale, of_low, step, FORMAT, LIST, NATIVE)
        else:
            acc = exact_step(acc, of_w, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, NATIVE)
            if GATED:
                acc2 = exact_step(acc2, of_v, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, NATIVE)
    stored: tl.constexpr = out.dtype.element_ty
    result = round_to(tl.reshape(acc, [ROWS, TOKENS]), stored)
    if GATED:
        g, u = to_f32(result), to_f32(round_to(tl.reshape(acc2, [ROWS, TOKENS]), stored))
        if LIMIT:
            # written with comparisons so that a NaN passes through
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        z = INNER * (g + CUBE * (g * g * g)) if GELU else g
        result = round_to(tl.div_rn(g, 1.0 + tl.exp(-z)) * u, stored)
    to = p
    if SLOTS > 0:
        to = tl.load(out_row + p, mask=mine, other=0) * SLOTS + tl.load(out_slot + p, mask=mine, other=0)
    here = out + offset64(to, out_stride)[:, None] + n_row[None, :]
    tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


def mmq_gate_up(
    rows: MmqRows,
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

    rows: of the layout that the format takes (`mmq_operands.MMQ_LAYOUTS`), or q8_k for k-quants; row_of[p]: the row
    that pair p uses (None: row p); gate and up of one format, shape and strides; out [P, N] bf16, fp16 or fp32, through
    whose dtype gate and up pass. SiLU, or with `gelu` the tanh form of GELU; `limit` clamps first. Returns `out`.
    LabError for shapes, strides, devices, layouts or formats that disagree.
    """
    check_gated(gate, up, limit)
    check_product("mmq_gate_up", rows, row_of, gate, work, out, None)
    _launch("mmq_gate_up", rows, row_of, gate, work, out, None, tile, up=up, gelu=gelu, limit=limit)
    return out


def mmq_product(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | WideTile | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Write W @ x[row_of[p]] for every pair p of the work list (Triton), rounded once to out's dtype.

    As `mmq_gate_up`. It goes to row p of out [P, N], or where `to` says: then out may have any number of rows, and the
    places are not checked. In wide tiles (`mmq.wide`; `goes_wide` by default) weights are opened first, in `scratch`:
    uint8, flat, `scratch_for` bytes or fewer, at least one opened weight (fresh memory by default).
    """
    check_product("mmq_product", rows, row_of, w, work, out, to)
    if isinstance(tile, WideTile) or (tile is None and goes_wide(w, work, rows.layout == "q8_k")):
        wide_product(rows, row_of, w, work, out, to, tile, scratch)
    else:
        _launch("mmq_product", rows, row_of, w, work, out, to, tile)
    return out


def mmq_hidden(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"],
    gate: Weight,
    up: Weight,
    work: WorkList,
    dtype: torch.dtype,
    *,
    gelu: bool = False,
    limit: float | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """h [P, N] in `dtype`, in the quicker of two ways: `mmq_gate_up`, or two products and an activation (Triton). The
    same bits either way. Rows of pairs in no tile are undefined. `scratch`: as `mmq_product`."""
    room = torch.empty(len(row_of), gate.data.shape[1], dtype=dtype, device=row_of.device)
    if work.tokens <= (64 if rows.layout == "q8_k" else 16) and alike(gate, up) is None:
        return mmq_gate_up(rows, row_of, gate, up, work, room, gelu=gelu, limit=limit)
    g = mmq_product(rows, row_of, gate, work, room, scratch=scratch)
    u = mmq_product(rows, row_of, up, work, torch.empty_like(room), scratch=scratch)
    return (geglu if gelu else swiglu)(g, u, limit=limit)


def mmq_gate_up_ref(
    rows: MmqRows,
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
    """The same in torch; the products bit for bit."""
    check_gated(gate, up, limit)
    check_product("mmq_gate_up", rows, row_of, gate, work, out, None)
    for pairs, picked, slot in _tiles_of(rows, row_of, work, gate, len(out)):
        g, u = (product_ref(w.data[slot], picked, w.format).to(out.dtype) for w in (gate, up))
        out[pairs] = (geglu_ref if gelu else swiglu_ref)(g, u, limit=limit)
    return out


def mmq_product_ref(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | WideTile | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """The same in torch, bit for bit."""
    check_product("mmq_product", rows, row_of, w, work, out, to)
    for pairs, picked, slot in _tiles_of(rows, row_of, work, w, len(out) if to is None else len(to.row)):
        at = pairs if to is None else (to.row[pairs] * to.slots + to.slot[pairs]).long()
        out[at] = product_ref(w.data[slot], picked, w.format).to(out.dtype)
    return out


def _tiles_of(rows: MmqRows, row_of: Tensor | None, work: WorkList, w: Weight, pairs: int) -> Iterator[tuple]:
    """(pairs, their rows, slot) of each tile; rows that do not exist are zero."""
    for slot, first, n in work.tiles.tolist():
        begin, end = max(first, 0), min(first + n, pairs)
        if 0 <= slot < len(w.data) and begin < end:
            p = torch.arange(begin, end, device=rows.codes.device)
            row = p if row_of is None else row_of[p].long()
            known = (row >= 0) & (row < len(rows.codes))
            at, keep = torch.where(known, row, 0), ~known[:, None]
            yield p, rows.each(lambda t, at=at, keep=keep: t[at].masked_fill(keep, 0)), slot


def _launch(op: str, rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor, to: Scatter | None,
            tile: Tile | None, *, up: Weight | None = None, gelu: bool = False,
            limit: float | None = None) -> None:  # fmt: skip
    """Both operations; `up` makes it the gated one."""
    row, slot, slots = to or (None, None, 0)
    named = {"codes": rows.codes, "scale": rows.scale, "total": rows.total, "row_of": row_of, "row": row, "slot": slot}
    on = backend.serve(op, **named, w=w.data, up=up and up.data, tiles=work.tiles, out=out)
    n, pairs = w.data.shape[1], len(out) if row is None else len(row)
    if not len(work.tiles) or not n:
        return
    fold = rows.layout == "q8_k"
    tile = tile or mmq_tile(work.tokens, on)
    made, tokens = sides(rows, row_of, w, work, pairs), min(work.tokens, MOST_TOKENS)
    low, turns = made.scale if made.low is None else made.low, made.scale.stride(-1)
    backend.launch(
        _mmq,
        (len(work.tiles) * (work.tokens // tokens) * -(-n // tile.rows),),
        *(rows.codes, made.scale, low),
        *(work.tiles if row_of is None else row_of, out),
        *(*(work.tiles if i is None else i for i in (row, slot)), work.tiles, w.data, (up or w).data),
        *(n, w.kd // (256 if fold else STEPS[w.format]), made.scale.shape[1] * turns, low[0, :, 0].numel()),
        *(len(work.tiles), len(w.data), len(rows.codes), pairs, 0.0 if limit is None else limit),
        *(rows.codes.stride(0), out.stride(0), *w.data.stride()[:2]),
        *(w.format, fold, made.tail, up is not None, gelu, limit is not None, row_of is not None, slots),
        *(GELU_INNER, GELU_CUBE, tile.rows, tokens, work.tokens, tile.group, tile.warps, turns),
        backend.has_dp4a(on),
        device=out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
