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
from moe_lab_kernels.grouped.asked import SILU, Asked, BothBiases, gate_up_of, product_of
from moe_lab_kernels.grouped.body import biased, hidden, owner, pairs_of, sent
from moe_lab_kernels.grouped.launching import Part
from moe_lab_kernels.grouped.operands import Scatter, Weight, alike
from moe_lab_kernels.grouped.tiles import TOKENS, Tile, WorkList
from moe_lab_kernels.launch.table import cut
from moe_lab_kernels.mmq.fold import fold_step
from moe_lab_kernels.mmq.operands import MmqRows, check_product, check_raw, in_fours, raw_of, sides
from moe_lab_kernels.mmq.ref import product_ref
from moe_lab_kernels.mmq.steps import STEPS, exact_step
from moe_lab_kernels.mmq.wide import WideTile, piece_of, scratch_bytes, serves, wide_product
from moe_lab_kernels.primitives import offset64, round_to
from moe_lab_kernels.rows.hidden import Gate, hidden_rows

# Measured on an H200 (triton 3.6): docs/kernels.md has the tiles that lost. With one stage, a row's words are loaded
# side by side (`codes.side_by_side`, `codes.blocks_at`) where a format has such loads. Programs of one warp then have
# no barriers: q3_k, 2 rows an expert, 188 us, in two warps 240, and 274 with the loads of operands; q8_0 194, 287, 271.
TILES = {16: Tile(32, 2, 2, 1), 32: Tile(64, 4, 2, 1), 64: Tile(64, 4, 2)}
# Uncapped, nvfp4 and gated q4_0 spill at 128 and 96 registers, as does gated q2_k in (64, 4, 2).
EXACT_TILES = {
    ("nvfp4", 16): Tile(32, 2, 2, 1, 168),
    **dict.fromkeys((("q3_k", 16), ("q8_0", 16)), Tile(16, 1, 1, 1)),
    **dict.fromkeys((("q4_0", 16), ("mxfp4", 16)), Tile(32, 2, 1, 1)),
    **{(f, 32): Tile(64, 4, 1, 1) for f in ("q3_k", "q8_0", "q4_0", "mxfp4")},
}
EXACT_GATED_TILES = {
    ("nvfp4", 16): Tile(32, 2, 2, 1, 168),
    ("q4_0", 16): Tile(32, 2, 2, 1, 128),
    ("q2_k", 64): Tile(128, 8, 2),
}
# Gate and up folded, from 32 tokens on, spill in 64 rows and four warps: 16 bytes (q3_k) to 384 (q4_k).
FOLDED_TILES = {**TILES, 16: Tile(64, 4, 2, 1)}
FOLDED_GATED_TILES = {**FOLDED_TILES, 32: Tile(64, 8, 2, 1), 64: Tile(64, 8, 2)}
TILE_INTERPRETER = Tile(256, 4, 1)
IN_FOURS = ("q8_0", "q4_0", "mxfp4")
MOST_TOKENS = 64  # of a tile's rows in a program
WIDE_TILES = 1.75  # tiles of 128 a weight from which weights are opened first
# Rows a tile from which they are, whatever the tiles, in the exact forms. 6 rows an expert, of raw blocks and with the
# opening: q6_k 532 and 525 us (nvfp4, 16 weights: 291 and 377); 56 rows: q3_k 401 and 372.
OPENED_FROM = {"q6_k": 16, "q3_k": 64, "mxfp4": 64}


def mmq_tile(format: str, folded: bool, tokens: int, on: str, gated: bool = False, fours: bool = True) -> Tile:
    """How a program is cut; the interpreter pays for programs, so it takes tall ones. The folded form's instruction is
    one of four warps. `fours`: whether small blocks come in fours (`operands.in_fours`)."""
    if on == "interpreter":
        return TILE_INTERPRETER
    tokens = min(tokens, MOST_TOKENS)
    if folded:
        return (FOLDED_GATED_TILES if gated else FOLDED_TILES)[tokens]
    if format in IN_FOURS and not fours:
        return TILES[tokens]
    return (EXACT_GATED_TILES if gated else EXACT_TILES).get((format, tokens), TILES[tokens])


def goes_wide(w: Weight, work: WorkList, folded: bool) -> bool:
    """Whether a product opens its weights first: planes, formats that are slow to take apart, and others where each
    meets `WIDE_TILES` full tiles or so, as far as the host knows."""
    slow = w.format == "mxfp4" and not in_fours(w)  # codes on odd bytes
    least = TOKENS[0] if slow else OPENED_FROM.get(w.format, 1 << 30)
    if w.layout != "raw" or (not folded and work.tokens >= least):
        return serves(w, folded)
    return work.tokens == 128 and len(work.tiles) >= WIDE_TILES * len(w.data) and serves(w, folded)


def scratch_for(work: WorkList, folded: bool, w: Weight) -> int:
    """Bytes of scratch that a product wants; 0 where it opens nothing."""
    return scratch_bytes(w, work, folded) if goes_wide(w, work, folded) else 0


@jit
def _piece(x, scale, low, row_of, out_row, out_slot, whose, pair_weight, bias, bias2, out, w, v, tile, past, slot,
           first, n, begin, N, steps, scales, lows, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row, x_row,
           out_stride, w_slot, w_row, GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr,
           GELU: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr, NAMED: tl.constexpr, WEIGHED: tl.constexpr,
           INNER: tl.constexpr, CUBE: tl.constexpr, FORMAT: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr,
           ROWS: tl.constexpr, TOKENS: tl.constexpr, LIST: tl.constexpr, V: tl.constexpr, TURNS: tl.constexpr,
           FOUR: tl.constexpr, SIDE: tl.constexpr, NATIVE: tl.constexpr, HALVED: tl.constexpr):  # fmt: skip
    """TOKENS rows of a tile from row `past` on, of which n exist, with weight rows from `begin` on. HALVED: two halves
    of them one after another in each step, as their sums of activations do not fit the registers together."""
    n_row = begin + tl.arange(0, ROWS)
    held = tl.minimum(n_row, N - 1)  # rows past N are read again and not stored
    W: tl.constexpr = TOKENS // 2 if HALVED else TOKENS
    p, mine, row, exists = pairs_of(row_of, first, n, n_pairs, n_x, W, GATHER)
    known = exists[:, None]
    of_x = x + offset64(row[:, None], x_row)
    i = tl.arange(0, W)
    if FOLD:
        held, acc, column = held[:, None], tl.zeros((ROWS, W), tl.float32), i[None, :]
    else:  # a batch of V warps: see `mmq.wide`
        held, acc = tl.reshape(held, [V, ROWS // V, 1]), tl.zeros((V, ROWS // V, W), tl.float32)
        column = i[None, None, :]
    of_w = w + offset64(slot, w_slot) + offset64(held, w_row)
    of_v = v + offset64(slot, w_slot) + offset64(held, w_row)
    of_scale = scale + offset64(tile, scales * LIST) + (past + column) * TURNS
    of_low = low + offset64(tile, lows * LIST) + (past * 16 + i[:, None] * 16 if FOLD else (past + column) * 4)
    acc2 = acc
    if HALVED:
        _, _, row2, exists2 = pairs_of(row_of, first + W, n - W, n_pairs, n_x, W, GATHER)
        of_x2, known2 = x + offset64(row2[:, None], x_row), exists2[:, None]
    for step in range(0, steps):
        if FOLD:
            acc = fold_step(acc, of_w, of_x, known, of_scale, of_low, step, FORMAT, LIST, NATIVE)
            if GATED:
                acc2 = fold_step(acc2, of_v, of_x, known, of_scale, of_low, step, FORMAT, LIST, NATIVE)
        else:
            acc = exact_step(acc, of_w, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, FOUR, SIDE, NATIVE)
            if GATED:
                acc2 = exact_step(acc2, of_v, of_x, known, of_scale, of_low, step, FORMAT, LIST, TAIL, FOUR, SIDE,
                                  NATIVE)  # fmt: skip
            if HALVED:
                acc2 = exact_step(acc2, of_w, of_x2, known2, of_scale + W * TURNS, of_low + W * 4, step, FORMAT, LIST,
                                  TAIL, FOUR, SIDE, NATIVE)  # fmt: skip
    if HALVED:
        acc = tl.reshape(tl.permute(tl.join(acc, acc2), (0, 1, 3, 2)), [V, ROWS // V, TOKENS])
        p, mine, _, _ = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
        acc2 = acc
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


# N and the strides of rows and slots decide how wide loads and stores are; nothing else is worth a compilation.
@jit(do_not_specialize=["steps", "n_tiles", "n_slots", "n_x", "n_pairs", "scales", "lows", "limit", "alpha", "slots",
                        "whose_step", "bias_row"])  # fmt: skip
def _mmq(x, scale, low, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, out, w, v, N, steps, scales,
         lows, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row, x_row, out_stride, w_slot,
         w_row, GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
         LIMIT: tl.constexpr, BIASED: tl.constexpr, NAMED: tl.constexpr, WEIGHED: tl.constexpr, INNER: tl.constexpr,
         CUBE: tl.constexpr, FORMAT: tl.constexpr, FOLD: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
         TOKENS: tl.constexpr, LIST: tl.constexpr, TOGETHER: tl.constexpr, V: tl.constexpr, TURNS: tl.constexpr,
         FOUR: tl.constexpr, SIDE: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = (piece of a tile of pairs, block of weight rows); TOGETHER pieces walk the blocks side by side."""
    tile, past, slot, first, n, begin = piece_of(tiles, n_tiles, N, ROWS, TOKENS, LIST, TOGETHER)
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    if NARROW:  # noqa: SIM102 (a constant and a number on the device)
        if n <= TOKENS // 2:
            _piece(x, scale, low, row_of, out_row, out_slot, whose, pair_weight, bias, bias2, out, w, v, tile, past,
                   slot, first, n, begin, N, steps, scales, lows, n_x, n_pairs, limit, alpha, slots, whose_step,
                   bias_row, x_row, out_stride, w_slot, w_row, GATHER, SCATTER, GATED, GELU, LIMIT, BIASED, NAMED,
                   WEIGHED, INNER, CUBE, FORMAT, FOLD, TAIL, ROWS, TOKENS // 2, LIST, V, TURNS, FOUR, SIDE, NATIVE,
                   False)  # fmt: skip
            return
    _piece(x, scale, low, row_of, out_row, out_slot, whose, pair_weight, bias, bias2, out, w, v, tile, past, slot,
           first, n, begin, N, steps, scales, lows, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row, x_row,
           out_stride, w_slot, w_row, GATHER, SCATTER, GATED, GELU, LIMIT, BIASED, NAMED, WEIGHED, INNER, CUBE,
           FORMAT, FOLD, TAIL, ROWS, TOKENS, LIST, V, TURNS, FOUR, SIDE, NATIVE,
           FORMAT == "q2_k" and TOKENS == 64 and not GATED and not FOLD)  # fmt: skip


def mmq_gate_up(rows: MmqRows, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                out: Tensor, *, how: Gate = SILU, biases: BothBiases | None = None,
                tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Write h [P, N] = act(gate row) * up row for every pair of the work list (Triton).

    rows: of the layout that the format takes (`mmq_operands.MMQ_LAYOUTS`), or q8_k for k-quants; row_of[p]: the row
    that pair p uses (None: row p); gate and up raw blocks of one format, shape and strides; out [P, N] bf16, fp16 or
    fp32, through whose dtype gate and up pass. `how`: activation, clamp, the pairs' weights. `biases`: of gate and up,
    alike, added to the fp32 sums; X = S, or `work.expert` says which tile has which row. Returns `out`. LabError for
    shapes, strides, devices, layouts or formats that disagree.
    """
    return _launch(gate_up_of("mmq_gate_up", rows, row_of, gate, up, work, out, how, biases), tile)


def mmq_product(rows: MmqRows, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                tile: Tile | WideTile | None = None, scratch: Tensor | None = None) -> Tensor:  # fmt: skip
    """Write W @ x[row_of[p]] (+ bias) for every pair p of the work list (Triton), rounded once to out's dtype.

    As `mmq_gate_up`. It goes to row p of out [P, N], or where `to` says: then out may have any number of rows, and the
    places are not checked. In wide tiles (`mmq.wide`; `goes_wide` by default, planes always) weights are opened first,
    in `scratch`: uint8, flat, `scratch_for` bytes or fewer, at least one opened weight (fresh memory by default).
    """
    asked = product_of("mmq_product", rows, row_of, w, work, out, to, bias)
    if isinstance(tile, WideTile) or (tile is None and goes_wide(w, work, rows.layout == "q8_k")):
        _checked(asked)
        wide_product(rows, row_of, w, work, out, to, asked.biases, tile, scratch)
        return out
    return _launch(asked, tile)


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
    """Whether one launch for gate and up is quicker than two. Of exact forms for nvfp4 alone, which is not timed: a
    thread holds what two launches hold one after another, so that half as many warps run (q2_k 255 registers for 96).
    Not where it spills, in every tile tried: folded q6_k, 2,768 bytes, and the pairs' weights on hidden rows, 8 to 16
    (q4_k)."""
    few = work.tokens <= 64 if folded else work.tokens == 16 and gate.format == "nvfp4"
    spills = (folded and gate.format == "q6_k") or how.weight is not None
    return few and not spills and alike(gate, up) is None and not goes_wide(gate, work, folded)


def mmq_gate_up_ref(rows: MmqRows, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                    out: Tensor, *, how: Gate = SILU, biases: BothBiases | None = None,
                    tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The same in torch; the products bit for bit."""
    return _ref(gate_up_of("mmq_gate_up", rows, row_of, gate, up, work, out, how, biases))


def mmq_product_ref(rows: MmqRows, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                    to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                    tile: Tile | WideTile | None = None, scratch: Tensor | None = None) -> Tensor:  # fmt: skip
    """The same in torch, bit for bit."""
    return _ref(product_of("mmq_product", rows, row_of, w, work, out, to, bias))


def _checked(a: Asked[MmqRows, Tensor]) -> str:
    """The kernels' LIMIT, once everything fits."""
    check_product(a.op, a.x, a.row_of, a.w, a.work, a.out, a.to)
    return a.checked()


def _ref(a: Asked[MmqRows, Tensor]) -> Tensor:
    _checked(a)

    def multiply(part: Part, w: Weight) -> Tensor:
        return product_ref(raw_of(w, part.slot), a.x.each(part.rows), w.format)

    return a.write_ref(a.out, len(a.x.codes), multiply)


def _launch(a: Asked[MmqRows, Tensor], tile: Tile | None) -> Tensor:
    mode, rows, work, out, (w, up) = _checked(a), a.x, a.work, a.out, a.both
    check_raw(a.op, w)
    of_x = {"codes": rows.codes, "scale": rows.scale, "total": rows.total}
    on = backend.serve(a.op, **of_x, **a.named(), w=w.data, up=up.data, out=out)
    n = w.data.shape[1]
    if not len(work.tiles) or not n:
        return out
    fold, gated, tokens = rows.layout == "q8_k", a.how is not None, min(work.tokens, MOST_TOKENS)
    four = in_fours(w) and in_fours(up)
    if tile is None:
        kind, tile = f"{w.format}{'/q8_k' * fold}", mmq_tile(w.format, fold, work.tokens, on, gated, four)
        tile = cut("mmq", tile, out.device, kind, tokens, gated=gated, n=n, kd=w.kd)
    made = sides(rows, a.row_of, w, work, a.pairs)
    low, turns = made.scale if made.low is None else made.low, made.scale.stride(-1)
    around = a.ends(mode)
    backend.launch(
        _mmq,
        (len(work.tiles) * (work.tokens // tokens) * -(-n // tile.rows),),
        *(rows.codes, made.scale, low, *around.pointers, out, w.data, up.data),
        *(n, w.kd // (256 if fold else 128 if four else STEPS[w.format])),
        *(made.scale.shape[1] * turns, low[0, :, 0].numel(), len(work.tiles), len(w.data), len(rows.codes), a.pairs),
        *(*around.scalars, rows.codes.stride(0), out.stride(0), *w.data.stride()[:2]),
        *(*around.constants, w.format, fold, made.tail, tile.rows, tokens, work.tokens, tile.group, tile.warps, turns),
        *(four, tile.stages == 1, tokens > 16, backend.has_dp4a(on)),
        device=out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    return out
