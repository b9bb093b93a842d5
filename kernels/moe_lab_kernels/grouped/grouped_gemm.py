"""Grouped GEMM: expert rows times their expert's weights on the tensor cores, decoded as they are multiplied.

P pairs sorted by expert, S weight slots of [N, Kd]. A tile of the work list is at most `work.tokens` pairs of one slot;
a program multiplies it with `Tile.rows` weight rows. Two operations of one body:

    grouped_gate_up   h[p] = act(gate @ x[row_of[p]] (+ bias)) * (up @ x[row_of[p]] (+ bias)) (times the pair's weight)
    grouped_product   out[token * slots + slot of p] = W @ x[row_of[p]] (+ bias)

Rows are gathered as they are loaded and scattered as they are stored.

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

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.asked import SILU, Asked, BothBiases, gate_up_of, product_of
from moe_lab_kernels.grouped.body import (
    biased,
    either,
    hidden,
    owner,
    pairs_of,
    parted,
    place,
    sent,
    weight_rows,
)
from moe_lab_kernels.grouped.launching import Part, programs
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_call, values_ref
from moe_lab_kernels.grouped.staged import STAGED, staged_values, staged_words, why_not_staged
from moe_lab_kernels.grouped.steps import STEPS, block_values, scaled_values
from moe_lab_kernels.grouped.tiles import Tile, WorkList, for_few, tile_for
from moe_lab_kernels.launch.table import cut
from moe_lab_kernels.primitives import INTERPRET, offset64, round_to, to_f32
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.storage.scaled_layouts import LAYOUTS

PLAIN = ("", "", "none", 32, 1)  # code, scale, second, group, rows of a format without separate scales


@jit
def _weights(w, scale, second, step, j: tl.constexpr, Kd, like, FORMAT: tl.constexpr, CODE: tl.constexpr,
             SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr,
             EVEN: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Values [R, PART] in the dtype of `like`: part j of step `step`; zero past Kd. Pointers [R, 1] to rows."""
    lane = tl.arange(0, PART)[None, :]
    k = step * STEP + j * PART
    if FORMAT == "bf16" or FORMAT == "f16":
        stored = tl.load(w + k + lane) if EVEN else tl.load(w + k + lane, mask=k + lane < Kd, other=0)
        out = stored if stored.dtype == like else round_to(to_f32(stored), like)
    elif CODE == "":
        out = round_to(block_values(w, step, j, lane, FORMAT, NATIVE), like)
    else:
        v = scaled_values(w, scale, second, k, lane, Kd, CODE, SCALE, SECOND, GROUP, EVEN)
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


@jit
def _piece(piece, x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, w, w_scale, w_second, v,
           v_scale, v_second, out, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row,
           x_row, out_stride, w_slot, w_row, s_slot, s_row, g_slot, g_row, GATHER: tl.constexpr,
           SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr,
           NAMED: tl.constexpr, WEIGHED: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, FORMAT: tl.constexpr,
           CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
           STEP: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
           TOGETHER: tl.constexpr, STAGED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """One (tile of tokens, block of ROWS weight rows, or of ROWS rows of gate and as many of up)."""
    tile, slot, first, n, begin = place(tiles, n_tiles, N, piece, ROWS, TOGETHER)
    if (slot >= 0) & (slot < n_slots) & (n > 0):
        n_row = begin + tl.arange(0, ROWS)
        p, mine, row, exists = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
        known = exists[:, None]
        of_x = x + offset64(row[:, None], x_row)
        held, of_up = weight_rows(begin, N, ROWS, GATED)
        of_w = either(w, v, offset64(slot, w_slot) + offset64(held, w_row), of_up, GATED)
        of_scale = either(w_scale, v_scale, offset64(slot, s_slot) + offset64(held // SHARED, s_row), of_up, GATED)
        at_second = offset64(held, g_row) if SECOND == "bias" else 0 * offset64(held, 1)
        of_second = either(w_second, v_second, offset64(slot, g_slot) + at_second, of_up, GATED)
        acc = tl.zeros((2 * ROWS if GATED else ROWS, TOKENS), tl.float64 if INTERPRET else tl.float32)
        like: tl.constexpr = x.dtype.element_ty
        if STAGED:
            # Carried from turn to turn, weights are an operand that the compiler puts into shared memory: threads
            # decode in the layout of the words, and a product need not wait until its registers are free again.
            last = tl.cdiv(Kd, STEP) - 1
            raw = staged_words(of_w, of_scale, 0, Kd, FORMAT, EVEN)
            coming = staged_words(of_w, of_scale, tl.minimum(STAGED - 1, last), Kd, FORMAT, EVEN)
            a = staged_values(raw, 0, like, FORMAT, EVEN, NATIVE)
            for step in range(0, last + 1):
                raw = coming  # words of STAGED steps are on their way
                coming = staged_words(of_w, of_scale, tl.minimum(step + STAGED, last), Kd, FORMAT, EVEN)
                if STAGED == 1:
                    raw = coming
                for j in tl.static_range(STEP // PART):
                    k = step * STEP + j * PART + tl.arange(0, PART)[None, :]
                    b = tl.trans(tl.load(of_x + k, mask=known if EVEN else known & (k < Kd), other=0))
                    acc = _add_product(acc, a[j], b)
                a = staged_values(raw, tl.minimum(step + 1, last), like, FORMAT, EVEN, NATIVE)
        else:
            for step in range(0, tl.cdiv(Kd, STEP)):
                for j in tl.static_range(STEP // PART):
                    k = step * STEP + j * PART + tl.arange(0, PART)[None, :]
                    if EVEN:
                        b = tl.trans(tl.load(of_x + k, mask=known, other=0))
                    else:
                        b = tl.trans(tl.load(of_x + k, mask=known & (k < Kd), other=0))
                    a = _weights(of_w, of_scale, of_second, step, j, Kd, like, FORMAT, CODE, SCALE, SECOND, GROUP,
                                 STEP, PART, EVEN, NATIVE)  # fmt: skip
                    acc = _add_product(acc, a, b)
        stored: tl.constexpr = out.dtype.element_ty
        if not INTERPRET:
            # Asked for again, so that none of it lives through the loop (biases and 128 pairs spilled 32 bytes).
            tile, slot, first, n, begin = place(tiles, n_tiles, N, piece, ROWS, TOGETHER)
            n_row = begin + tl.arange(0, ROWS)
            p, mine, row, exists = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
        of_bias = owner(whose, whose_step, tile, slot, NAMED)
        sums = acc.to(tl.float32)
        if GATED:
            sums, sums2 = parted(sums, ROWS)
            if BIASED:
                sums = biased(sums, bias, of_bias, bias_row, n_row, N)
                sums2 = biased(sums2, bias2, of_bias, bias_row, n_row, N)
            result = hidden(sums, sums2, pair_weight, p, mine, limit, alpha, stored, LIMIT, GELU, WEIGHED, INNER, CUBE)
        else:
            if BIASED:
                sums = biased(sums, bias, of_bias, bias_row, n_row, N)
            result = round_to(sums, stored)
        to = sent(p, mine, out_row, out_slot, slots, SCATTER)
        here = out + offset64(to, out_stride)[:, None] + n_row[None, :]
        tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


# N, Kd and the strides of rows and slots decide how wide loads and stores are (N by way of the stores' mask); nothing
# else is worth a compilation of its own.
@jit(do_not_specialize=["n_pieces", "n_tiles", "n_slots", "n_x", "n_pairs", "limit", "alpha", "slots", "whose_step",
                        "bias_row", "s_slot", "s_row", "g_slot", "g_row"])  # fmt: skip
def _grouped(x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, w, w_scale, w_second, v, v_scale,
             v_second, out, n_pieces, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step,
             bias_row, x_row, out_stride, w_slot, w_row, s_slot, s_row, g_slot, g_row, GATHER: tl.constexpr,
             SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
             BIASED: tl.constexpr, NAMED: tl.constexpr, WEIGHED: tl.constexpr, INNER: tl.constexpr,
             CUBE: tl.constexpr, FORMAT: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr, SECOND: tl.constexpr,
             GROUP: tl.constexpr, SHARED: tl.constexpr, STEP: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr,
             ROWS: tl.constexpr, TOKENS: tl.constexpr, TOGETHER: tl.constexpr, STAGED: tl.constexpr,
             RESIDENT: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """Program = a piece, or (RESIDENT) every so-many-th."""
    if RESIDENT:
        for piece in range(tl.program_id(0), n_pieces, tl.num_programs(0)):
            _piece(piece, x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, w, w_scale, w_second,
                   v, v_scale, v_second, out, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step,
                   bias_row, x_row, out_stride, w_slot, w_row, s_slot, s_row, g_slot, g_row, GATHER, SCATTER, GATED,
                   GELU, LIMIT, BIASED, NAMED, WEIGHED, INNER, CUBE, FORMAT, CODE, SCALE, SECOND, GROUP, SHARED, STEP,
                   PART, EVEN, ROWS, TOKENS, TOGETHER, STAGED, NATIVE)  # fmt: skip
    else:
        _piece(tl.program_id(0), x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, w, w_scale,
               w_second, v, v_scale, v_second, out, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots,
               whose_step, bias_row, x_row, out_stride, w_slot, w_row, s_slot, s_row, g_slot, g_row, GATHER, SCATTER,
               GATED, GELU, LIMIT, BIASED, NAMED, WEIGHED, INNER, CUBE, FORMAT, CODE, SCALE, SECOND, GROUP, SHARED,
               STEP, PART, EVEN, ROWS, TOKENS, TOGETHER, STAGED, NATIVE)  # fmt: skip


def grouped_gate_up(x: Tensor, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                    out: Tensor, *, how: Gate = SILU, biases: BothBiases | None = None,
                    tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Write h [P, N] = act(gate row) * up row for every pair of the work list (Triton).

    x [R, Kd] bf16 or fp16, any row stride; row_of[p]: the row that pair p uses (None: row p); gate and up of one
    format, shape and strides; out [P, N] bf16, fp16 or fp32. `how`: activation, clamp, the pairs' weights. `biases`: of
    gate and up, alike, added to the fp32 sums; X = S, or `work.expert` says which tile has which row. Returns `out`.
    LabError for shapes, strides, devices or formats that disagree.
    """
    return _launch(gate_up_of("grouped_gate_up", x, row_of, gate, up, work, out, how, biases), tile)


def grouped_product(x: Tensor, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                    to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                    tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Write W @ x[row_of[p]] (+ bias) for every pair p of the work list (Triton), rounded once to out's dtype.

    As `grouped_gate_up`. It goes to row p of out [P, N], or where `to` says: then out may have any number of rows, and
    the places are not checked.
    """
    return _launch(product_of("grouped_product", x, row_of, w, work, out, to, bias), tile)


def grouped_gate_up_ref(x: Tensor, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                        out: Tensor, *, how: Gate = SILU, biases: BothBiases | None = None,
                        tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The same in torch, products in float64 and rounded once to fp32."""
    return _ref(gate_up_of("grouped_gate_up", x, row_of, gate, up, work, out, how, biases))


def grouped_product_ref(x: Tensor, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                        to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                        tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The same in torch, the product in float64 and rounded once to fp32."""
    return _ref(product_of("grouped_product", x, row_of, w, work, out, to, bias))


def _checked(a: Asked[Tensor, Tensor]) -> str:
    """The kernels' LIMIT, once everything fits."""
    check_call(a.op, a.x, a.row_of, a.w, a.work, a.out, a.to)
    return a.checked()


def _ref(a: Asked[Tensor, Tensor]) -> Tensor:
    _checked(a)

    def multiply(part: Part, w: Weight) -> Tensor:
        return (part.rows(a.x).double() @ values_ref(w, part.slot, a.x.dtype).double().T).float()

    return a.write_ref(a.out, len(a.x), multiply)


def _launch(a: Asked[Tensor, Tensor], tile: Tile | None) -> Tensor:
    mode, w, gated = _checked(a), a.w, a.how is not None
    on = backend.serve(a.op, x=a.x, **a.named(), w=w.data, scales=w.scales, second=w.second, out=a.out)
    n, step, layout, tiles = w.data.shape[1], STEPS[w.format], LAYOUTS.get(w.format), a.work.tiles
    if not len(tiles) or not n:
        return a.out
    unstaged = why_not_staged(w, a.x.dtype)
    if tile is None:
        tile = tile_for(w.format, a.work.tokens, gated, on, unstaged is None)
        tile = cut("grouped", tile, a.out.device, w.format, a.work.tokens, gated=gated, n=n, kd=w.kd)
        if gated and a.out.is_cuda:
            tile = for_few(tile, len(tiles) * -(-n // tile.rows), backend.processors(a.out.device))
    if tile.staged and unstaged is not None:
        raise LabError(f"{a.op}: {w.format} weights are not decoded by whole words {unstaged}; leave Tile.staged out.")
    step = STAGED[w.format] if tile.staged else step
    matrices = [w.data if p is None else p for m in a.both for p in (m.data, m.scales, m.second)]
    strides = [s for p in (w.data, w.scales, w.second) for s in (*(() if p is None else p.stride()), 0, 0)[:2]]
    kind = PLAIN if layout is None else (layout.code, layout.scale, layout.second, layout.group, layout.rows)
    around, pieces = a.ends(mode), len(tiles) * -(-n // tile.rows)
    backend.launch(
        _grouped,
        (programs(pieces, tile, on, a.out.device),),
        *(a.x, *around.pointers, *matrices, a.out, pieces, n, w.kd, len(tiles), len(w.data), len(a.x), a.pairs),
        *(*around.scalars, a.x.stride(0), a.out.stride(0), *strides, *around.constants, w.format, *kind, *step),
        *(w.kd % step.values == 0, tile.rows, a.work.tokens, tile.group, tile.staged, tile.resident > 0),
        backend.has_dp4a(on),
        device=a.out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    return a.out
