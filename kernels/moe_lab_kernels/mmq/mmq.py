"""int8 grouped product on quantised blocks: expert rows times their expert's weights on the tensor cores.

P pairs sorted by expert, S weight slots of [N, Kd] raw blocks or planes, R rows of Kd values quantised to ggml's
prefill layouts. A tile of the work list is at most `work.tokens` pairs of one slot; a program multiplies it with
`Tile.rows` weight rows. Two operations of one body:

    mmq_gate_up   h[p] = act(gate @ x[row_of[p]] (+ bias)) * (up @ x[row_of[p]] (+ bias)) (times the pair's weight)
    mmq_product   out[token * slots + slot of p] = W @ x[row_of[p]] (+ bias)

Rows are gathered as they are loaded and scattered as they are stored. The arithmetic is ggml's, type by type
(`mmq.steps`), or its CPU's where the rows are q8_k. Integer dots are exact, and fp32 steps come in an order that the
format alone decides: a row's bits depend neither on the tile nor on what else is in the batch, and launcher,
interpreter and reference agree bit for bit. No split of Kd, no atomics, no padded groups.

Reads each tile's weights once (N * row_bytes) and, for each block of weight rows, Kd bytes of codes a pair and its
scales and sums (`mmq_operands.sides`, written by a launch before). Knows nothing about routing or residency. Pairs in
no tile keep what `out` held before.
"""
# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.body import biased, hidden, owner, pairs_of, sent
from moe_lab_kernels.grouped.launching import Biases, ends, named, of_part, parts, with_bias
from moe_lab_kernels.grouped.launching import places as places_of
from moe_lab_kernels.grouped.operands import Scatter, Weight, alike, check_alike, check_biases
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.launch.table import cut
from moe_lab_kernels.mmq.fold import fold_step
from moe_lab_kernels.mmq.operands import MmqRows, check_product, check_raw, in_fours, raw_of, sides
from moe_lab_kernels.mmq.ref import product_ref
from moe_lab_kernels.mmq.steps import STEPS, exact_step
from moe_lab_kernels.mmq.wide import WideTile, piece_of, scratch_bytes, serves, wide_product
from moe_lab_kernels.primitives import offset64, round_to
from moe_lab_kernels.rows.hidden import Gate, check_gate, hidden_rows, hidden_rows_ref

# Measured on an H200 (triton 3.6): docs/kernels.md has the tiles that lost. With up to 16 rows of x, programs of two
# warps are as quick as of four or up to 11 % quicker (q2_k).
TILES = {16: Tile(32, 2, 2, 1), 32: Tile(64, 4, 2, 1), 64: Tile(64, 4, 2)}
# Of tiles whose neighbours spill: q2_k in (64, 4, 2) 32 bytes; uncapped, nvfp4 and q4_0 at 128 and 96 registers; gate
# and up folded, from 32 tokens on, 64 rows in four warps, 16 bytes (q3_k) to 384 (q4_k).
EXACT_TILES = {
    ("nvfp4", 16): Tile(32, 2, 2, 1, 168),
    ("q4_0", 16): Tile(32, 2, 2, 1, 128),
    ("q2_k", 64): Tile(128, 8, 2),
}
FOLDED_TILES = {**TILES, 16: Tile(64, 4, 2, 1)}
FOLDED_GATED_TILES = {**FOLDED_TILES, 32: Tile(64, 8, 2, 1), 64: Tile(64, 8, 2)}
TILE_INTERPRETER = Tile(256, 4, 1)
MOST_TOKENS = 64  # of a tile's rows in a program
WIDE_TILES = 1.75  # tiles of 128 a weight from which weights are opened first
# Rows a tile from which they are, whatever the tiles, in the exact forms. 6 rows an expert, of raw blocks and with the
# opening: q6_k 532 and 525 us, mxfp4 569 and 359, q3_k 298 and 300 (nvfp4, 16 weights: 291 and 377); 56 rows: q3_k 401
# and 372.
OPENED_FROM = {"q6_k": 16, "mxfp4": 16, "q3_k": 64}
SILU = Gate()


def mmq_tile(format: str, folded: bool, tokens: int, on: str, gated: bool = False) -> Tile:
    """How a program is cut; the interpreter pays for programs, so it takes tall ones. The folded form's instruction is
    one of four warps."""
    if on == "interpreter":
        return TILE_INTERPRETER
    tokens = min(tokens, MOST_TOKENS)
    if folded:
        return (FOLDED_GATED_TILES if gated else FOLDED_TILES)[tokens]
    return EXACT_TILES.get((format, tokens), TILES[tokens])


def goes_wide(w: Weight, work: WorkList, folded: bool) -> bool:
    """Whether a product opens its weights first: planes, formats that are slow to take apart, and others where each
    meets `WIDE_TILES` full tiles or so, as far as the host knows."""
    if w.layout != "raw" or (not folded and work.tokens >= OPENED_FROM.get(w.format, 1 << 30)):
        return serves(w, folded)
    return work.tokens == 128 and len(work.tiles) >= WIDE_TILES * len(w.data) and serves(w, folded)


def scratch_for(work: WorkList, folded: bool, w: Weight) -> int:
    """Bytes of scratch that a product wants; 0 where it opens nothing."""
    return scratch_bytes(w, work, folded) if goes_wide(w, work, folded) else 0


# N and the strides of rows and slots decide how wide loads and stores are; nothing else is worth a compilation.
@jit(do_not_specialize=["steps", "n_tiles", "n_slots", "n_x", "n_pairs", "scales", "lows", "limit", "alpha", "slots",
                        "whose_step", "bias_row"])  # fmt: skip
def _mmq(x, scale, low, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, out, w, v, N, steps, scales,
         lows, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row, x_row, out_stride, w_slot,
         w_row, GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
         LIMIT: tl.constexpr, BIASED: tl.constexpr, NAMED: tl.constexpr, WEIGHED: tl.constexpr, INNER: tl.constexpr,
         CUBE: tl.constexpr, FORMAT: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
         TOKENS: tl.constexpr, LIST: tl.constexpr, TOGETHER: tl.constexpr, V: tl.constexpr, TURNS: tl.constexpr,
         FOUR: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (piece of a tile of pairs, block of weight rows); TOGETHER pieces walk the blocks side by side."""
    tile, past, slot, first, n, begin = piece_of(tiles, n_tiles, N, ROWS, TOKENS, LIST, TOGETHER)
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    n_row = begin + tl.arange(0, ROWS)
    p, mine, row, exists = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
    known = exists[:, None]
    of_x = x + offset64(row[:, None], x_row)
    held = tl.minimum(n_row, N - 1)  # rows past N are read again and not stored
    i = tl.arange(0, TOKENS)
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
            acc = exact_step(acc, of_w, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, FOUR, NATIVE)
            if GATED:
                acc2 = exact_step(acc2, of_v, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, FOUR, NATIVE)
    stored: tl.constexpr = out.dtype.element_ty
    sums, sums2 = tl.reshape(acc, [ROWS, TOKENS]), tl.reshape(acc2, [ROWS, TOKENS])
    if BIASED:
        of_bias = owner(whose, whose_step, tile, slot, NAMED)
        sums = biased(sums, bias, of_bias, bias_row, n_row, N)
        if GATED:
            sums2 = biased(sums2, bias2, of_bias, bias_row, n_row, N)
    if GATED:
        result = hidden(sums, sums2, pair_weight, p, mine, limit, alpha, stored, LIMIT, GELU, WEIGHED, INNER, CUBE)
    else:
        result = round_to(sums, stored)
    here = out + offset64(sent(p, mine, out_row, out_slot, slots, SCATTER), out_stride)[:, None] + n_row[None, :]
    tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


def mmq_gate_up(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    out: Tensor,
    *,
    how: Gate = SILU,
    biases: tuple[Float[Tensor, "X N"], Float[Tensor, "X N"]] | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Write h [P, N] = act(gate row) * up row for every pair of the work list (Triton).

    rows: of the layout that the format takes (`mmq_operands.MMQ_LAYOUTS`), or q8_k for k-quants; row_of[p]: the row
    that pair p uses (None: row p); gate and up raw blocks of one format, shape and strides; out [P, N] bf16, fp16 or
    fp32, through whose dtype gate and up pass. `how`: activation, clamp, the pairs' weights. `biases`: of gate and up,
    alike, added to the fp32 sums; X = S, or `work.expert` says which tile has which row. Returns `out`. LabError for
    shapes, strides, devices, layouts or formats that disagree.
    """
    mode = _check_gate_up(rows, row_of, gate, up, work, out, how, biases)
    check_raw("mmq_gate_up", gate)
    _launch("mmq_gate_up", rows, row_of, (gate, up), work, out, None, tile, biases or (), how, mode)
    return out


def mmq_product(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    bias: Float[Tensor, "X N"] | None = None,
    tile: Tile | WideTile | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Write W @ x[row_of[p]] (+ bias) for every pair p of the work list (Triton), rounded once to out's dtype.

    As `mmq_gate_up`. It goes to row p of out [P, N], or where `to` says: then out may have any number of rows, and the
    places are not checked. In wide tiles (`mmq.wide`; `goes_wide` by default, planes always) weights are opened first,
    in `scratch`: uint8, flat, `scratch_for` bytes or fewer, at least one opened weight (fresh memory by default).
    """
    biases = _check_product(rows, row_of, w, work, out, to, bias)
    if isinstance(tile, WideTile) or (tile is None and goes_wide(w, work, rows.layout == "q8_k")):
        wide_product(rows, row_of, w, work, out, to, biases, tile, scratch)
    else:
        check_raw("mmq_product", w)
        _launch("mmq_product", rows, row_of, (w, w), work, out, to, tile, biases, None, "none")
    return out


def mmq_hidden(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"],
    gate: Weight,
    up: Weight,
    work: WorkList,
    dtype: torch.dtype,
    *,
    how: Gate = SILU,
    biases: tuple[Float[Tensor, "X N"], Float[Tensor, "X N"]] | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """h [P, N] in `dtype`, in the quicker of two ways: `mmq_gate_up`, or two products and an activation (Triton). The
    same bits either way. Rows of pairs in no tile are undefined. `scratch`: as `mmq_product`."""
    room = torch.empty(len(row_of), gate.rows, dtype=dtype, device=row_of.device)
    if fuses(gate, up, work, rows.layout == "q8_k", how):
        return mmq_gate_up(rows, row_of, gate, up, work, room, how=how, biases=biases)
    of_gate, of_up = biases or (None, None)
    g = mmq_product(rows, row_of, gate, work, room, bias=of_gate, scratch=scratch)
    u = mmq_product(rows, row_of, up, work, torch.empty_like(room), bias=of_up, scratch=scratch)
    return hidden_rows(g, u, how)


def fuses(gate: Weight, up: Weight, work: WorkList, folded: bool, how: Gate) -> bool:
    """Whether one launch for gate and up is quicker than two; not where it spills, in every tile tried: folded q6_k,
    2,768 bytes, and the pairs' weights on hidden rows, 8 to 16 (q4_k)."""
    few = work.tokens <= (64 if folded else 16)
    spills = (folded and gate.format == "q6_k") or how.weight is not None
    return few and not spills and alike(gate, up) is None and not goes_wide(gate, work, folded)


def mmq_gate_up_ref(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    out: Tensor,
    *,
    how: Gate = SILU,
    biases: tuple[Float[Tensor, "X N"], Float[Tensor, "X N"]] | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The same in torch; the products bit for bit."""
    _check_gate_up(rows, row_of, gate, up, work, out, how, biases)
    for part in parts(row_of, len(rows.codes), work, len(gate.data), len(out)):
        picked = rows.each(part.rows)
        g, u = (
            with_bias(product_ref(raw_of(w, part.slot), picked, w.format), biases or (), i, part).to(out.dtype)
            for i, w in enumerate((gate, up))
        )
        out[part.pairs] = hidden_rows_ref(g, u, of_part(how, part))
    return out


def mmq_product_ref(
    rows: MmqRows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    bias: Float[Tensor, "X N"] | None = None,
    tile: Tile | WideTile | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """The same in torch, bit for bit."""
    biases = _check_product(rows, row_of, w, work, out, to, bias)
    for part in parts(row_of, len(rows.codes), work, len(w.data), len(out) if to is None else len(to.row)):
        sums = product_ref(raw_of(w, part.slot), rows.each(part.rows), w.format)
        out[places_of(part, to)] = with_bias(sums, biases, 0, part).to(out.dtype)
    return out


def _check_gate_up(rows: MmqRows, row_of: Tensor | None, gate: Weight, up: Weight, work: WorkList, out: Tensor,
                   how: Gate, biases: Biases | None) -> str:  # fmt: skip
    """The kernels' LIMIT, once everything fits."""
    check_alike("mmq_gate_up", gate, up)
    check_product("mmq_gate_up", rows, row_of, gate, work, out, None)
    check_biases("mmq_gate_up", biases or (), work, len(gate.data), gate.rows)
    return check_gate("mmq_gate_up", how, len(out))


def _check_product(rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor, to: Scatter | None,
                   bias: Tensor | None) -> Biases:  # fmt: skip
    biases = () if bias is None else (bias,)
    check_product("mmq_product", rows, row_of, w, work, out, to)
    check_biases("mmq_product", biases, work, len(w.data), w.rows)
    return biases


def _launch(op: str, rows: MmqRows, row_of: Tensor | None, weights: tuple[Weight, Weight], work: WorkList, out: Tensor,
            to: Scatter | None, tile: Tile | None, biases: Biases, how: Gate | None, mode: str) -> None:  # fmt: skip
    """Both operations; `how` makes it the gated one."""
    w, up = weights
    of_x = {"codes": rows.codes, "scale": rows.scale, "total": rows.total}
    on = backend.serve(op, **of_x, **named(row_of, work, to, biases, how), w=w.data, up=up.data, out=out)
    n, pairs = w.data.shape[1], len(out) if to is None else len(to.row)
    if not len(work.tiles) or not n:
        return
    fold, gated, tokens = rows.layout == "q8_k", how is not None, min(work.tokens, MOST_TOKENS)
    if tile is None:
        kind, tile = f"{w.format}{'/q8_k' * fold}", mmq_tile(w.format, fold, work.tokens, on, gated)
        tile = cut("mmq", tile, out.device, kind, tokens, gated=gated, n=n, kd=w.kd)
    made = sides(rows, row_of, w, work, pairs)
    low, turns = made.scale if made.low is None else made.low, made.scale.stride(-1)
    four, around = in_fours(w) and in_fours(up), ends(row_of, work, to, biases, how, mode)
    backend.launch(
        _mmq,
        (len(work.tiles) * (work.tokens // tokens) * -(-n // tile.rows),),
        *(rows.codes, made.scale, low, *around.pointers, out, w.data, up.data),
        *(n, w.kd // (256 if fold else 128 if four else STEPS[w.format])),
        *(made.scale.shape[1] * turns, low[0, :, 0].numel(), len(work.tiles), len(w.data), len(rows.codes), pairs),
        *(*around.scalars, rows.codes.stride(0), out.stride(0), *w.data.stride()[:2]),
        *(*around.constants, w.format, fold, made.tail, tile.rows, tokens, work.tokens, tile.group, tile.warps, turns),
        *(four, backend.has_dp4a(on)),
        device=out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
