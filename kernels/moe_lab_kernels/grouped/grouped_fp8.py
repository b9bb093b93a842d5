"""Grouped products of e4m3 rows with e4m3 weights in blocks of 128 x 128, on the fp8 tensor cores.

As `grouped_gemm`, with both sides 8 bits wide: rows have a scale for each 128 values (`rows.quantize_fp8`), weights one
for each 128 x 128 (format fp8_block). Each 128 values are one chain of the tensor core's fp32 sums from zero; its
result, times the product of the two scales, is added in fp32, 128 after 128, each step rounded once. A row's bits
depend neither on the tile nor on the batch.

    fp8_gate_up   h[p] = act(gate @ x) * (up @ x), in a float dtype, or quantised again where `h` is `Fp8Rows`: a
                  program holds 128 values of h, which is a scale's group
    fp8_product   out[token * slots + slot of p] = W @ x

Reads N * Kd bytes of weights a tile and Kd + Kd / 32 bytes a pair for each block of weight rows (from the cache). The
references take each chain in float64 and round it once. Knows nothing about routing, residency or weights of experts.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_rows
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
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_pairs, check_weight
from moe_lab_kernels.grouped.sides import FROM_TOKENS, sides
from moe_lab_kernels.grouped.tiles import FP8_APART_FROM, Tile, WorkList, fp8_tile_for
from moe_lab_kernels.launch.table import cut
from moe_lab_kernels.primitives import INTERPRET, fma, fma_ref, offset64, round_to, to_f32
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.rows.quantize_fp8 import fp8_codes, quantize_fp8_ref
from moe_lab_kernels.storage.minifloat import e4m3_to_f32, e4m3_values

GROUP = 128
_GROUP = tl.constexpr(GROUP)


def quantise_apart(tokens: int) -> bool:
    """Whether hidden rows of tiles of so many tokens are better quantised by a launch of their own: as measured."""
    return tokens >= FP8_APART_FROM


class Fp8Rows(NamedTuple):
    """Rows as `quantize_fp8` makes them: codes float8_e4m3fn [R, Kp], scale fp32 [R, Kp / 128]."""

    codes: Tensor
    scale: Tensor


@jit
def _chain(x, w, INTERPRETED: tl.constexpr):
    """fp32 [rows, tokens]: 128 values of each from zero. x: [tokens, 128], w: [rows, 128]."""
    if INTERPRETED:
        out = tl.dot(e4m3_to_f32(w).to(tl.float64), tl.trans(e4m3_to_f32(x).to(tl.float64)), out_dtype=tl.float64)
    else:
        out = tl.dot(w, tl.trans(x))
    return out.to(tl.float32)


@jit
def _piece(piece, x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, x_scale, w, w_scale, v,
           v_scale, out, out_scale, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step, bias_row,
           x_row, xs_row, out_stride, hs_row, w_slot, w_row, s_slot, s_row, GATHER: tl.constexpr,
           SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, BIASED: tl.constexpr,
           NAMED: tl.constexpr, WEIGHED: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, EVEN: tl.constexpr,
           BESIDE: tl.constexpr, QUANTISE: tl.constexpr, HOW: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
           TOKENS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """One (tile of tokens, block of ROWS weight rows, or of ROWS rows of gate and as many of up)."""
    tile, slot, first, n, begin = place(tiles, n_tiles, N, piece, ROWS, TOGETHER)
    if (slot >= 0) & (slot < n_slots) & (n > 0):
        p, mine, row, known = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
        of_x = x + offset64(row, x_row)[:, None]
        of_s, beside = x_scale + offset64(row, xs_row), x_scale + tl.minimum(tl.maximum(first, -TOKENS), n_pairs)
        n_row = begin + tl.arange(0, ROWS)
        at = offset64(slot, s_slot) + offset64(begin // _GROUP, s_row)
        w_scale, v_scale = w_scale + at, v_scale + at
        held, of_up = weight_rows(begin, N, ROWS, GATED)
        of_w = either(w, v, offset64(slot, w_slot) + offset64(held, w_row), of_up, GATED)
        acc = tl.zeros((2 * ROWS if GATED else ROWS, TOKENS), tl.float32)
        for step in range(0, tl.cdiv(Kd, _GROUP)):
            k = step * _GROUP + tl.arange(0, _GROUP)[None, :]
            if EVEN:
                b, a = tl.load(of_x + k, mask=known[:, None], other=0.0), tl.load(of_w + k)
            else:
                b = tl.load(of_x + k, mask=known[:, None] & (k < Kd), other=0.0)
                a = tl.load(of_w + k, mask=k < Kd, other=0.0)
            if BESIDE:
                s = tl.load(beside + tl.arange(0, TOKENS))[None, :]
                beside += xs_row
            else:
                s = tl.load(of_s + step, mask=known, other=0)[None, :]
            if GATED:
                scale = tl.where(of_up, tl.load(v_scale + step), tl.load(w_scale + step)) * s
            else:
                scale = tl.load(w_scale + step) * s
            acc = fma(_chain(b, a, INTERPRET), scale, acc)
        if GATED:
            acc, acc2 = parted(acc, ROWS)
        if BIASED:
            of_bias = owner(whose, whose_step, tile, slot, NAMED)
            acc = biased(acc, bias, of_bias, bias_row, n_row, N)
            if GATED:
                acc2 = biased(acc2, bias2, of_bias, bias_row, n_row, N)
        to = sent(p, mine, out_row, out_slot, slots, SCATTER)
        here = out + offset64(to, out_stride)[:, None] + n_row[None, :]
        if QUANTISE:
            h = to_f32(hidden(acc, acc2, pair_weight, p, mine, limit, alpha, HIDDEN, LIMIT, GELU, WEIGHED, INNER,
                              CUBE))  # fmt: skip
            h = tl.where((n_row < N)[:, None], h, 0.0)
            amax = tl.max(tl.where(h == h, tl.abs(h), 0.0), 0, keep_dims=True)
            code, d = fp8_codes(h, amax, 0.0, HOW, False)
            tl.store(here, tl.trans(code), mask=mine[:, None])  # to the group's end, where N is no multiple of it
            tl.store(out_scale + offset64(to, hs_row) + begin // _GROUP, tl.reshape(d, [TOKENS]), mask=mine)
        else:
            stored: tl.constexpr = out.dtype.element_ty
            if GATED:
                result = hidden(acc, acc2, pair_weight, p, mine, limit, alpha, stored, LIMIT, GELU, WEIGHED, INNER,
                                CUBE)  # fmt: skip
            else:
                result = round_to(acc, stored)
            tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


@jit(do_not_specialize=["n_pieces", "n_tiles", "n_slots", "n_x", "n_pairs", "limit", "alpha", "slots", "whose_step",
                        "bias_row", "xs_row", "hs_row", "s_slot", "s_row"])  # fmt: skip
def _grouped_fp8(x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, x_scale, w, w_scale, v,
                 v_scale, out, out_scale, n_pieces, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots,
                 whose_step, bias_row, x_row, xs_row, out_stride, hs_row, w_slot, w_row, s_slot, s_row,
                 GATHER: tl.constexpr, SCATTER: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr,
                 LIMIT: tl.constexpr, BIASED: tl.constexpr, NAMED: tl.constexpr, WEIGHED: tl.constexpr,
                 INNER: tl.constexpr, CUBE: tl.constexpr, EVEN: tl.constexpr, BESIDE: tl.constexpr,
                 QUANTISE: tl.constexpr, HOW: tl.constexpr, HIDDEN: tl.constexpr, ROWS: tl.constexpr,
                 TOKENS: tl.constexpr, TOGETHER: tl.constexpr, RESIDENT: tl.constexpr):  # fmt: skip
    """Program = a piece, or (RESIDENT) every so-many-th."""
    if RESIDENT:
        for piece in range(tl.program_id(0), n_pieces, tl.num_programs(0)):
            _piece(piece, x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, x_scale, w, w_scale,
                   v, v_scale, out, out_scale, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots, whose_step,
                   bias_row, x_row, xs_row, out_stride, hs_row, w_slot, w_row, s_slot, s_row, GATHER, SCATTER, GATED,
                   GELU, LIMIT, BIASED, NAMED, WEIGHED, INNER, CUBE, EVEN, BESIDE, QUANTISE, HOW, HIDDEN, ROWS,
                   TOKENS, TOGETHER)  # fmt: skip
    else:
        _piece(tl.program_id(0), x, row_of, out_row, out_slot, tiles, whose, pair_weight, bias, bias2, x_scale, w,
               w_scale, v, v_scale, out, out_scale, N, Kd, n_tiles, n_slots, n_x, n_pairs, limit, alpha, slots,
               whose_step, bias_row, x_row, xs_row, out_stride, hs_row, w_slot, w_row, s_slot, s_row, GATHER, SCATTER,
               GATED, GELU, LIMIT, BIASED, NAMED, WEIGHED, INNER, CUBE, EVEN, BESIDE, QUANTISE, HOW, HIDDEN, ROWS,
               TOKENS, TOGETHER)  # fmt: skip


def fp8_gate_up(x: Fp8Rows, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                h: Tensor | Fp8Rows, *, how: Gate = SILU, biases: BothBiases | None = None,
                stored: torch.dtype = torch.bfloat16, tile: Tile | None = None) -> Tensor | Fp8Rows:  # fmt: skip
    """Write act(gate row) * up row for every pair of the work list (Triton) and return `h`.

    `h`: floats [P, N], or `Fp8Rows` (codes [P, N up to a multiple of 128]): then gate, up and their product are rounded
    to `stored` (bf16 or fp16) first, so that fused and unfused have the same bits. `row_of`, `how`, `biases` as in
    `grouped_gate_up`. `tile.rows`: of each of the two matrices. LabError for shapes, strides, devices or formats that
    disagree.
    """
    _launch(gate_up_of("fp8_gate_up", x, row_of, gate, up, work, h, how, biases), tile, stored)
    return h


def fp8_product(x: Fp8Rows, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                tile: Tile | None = None) -> Tensor:  # fmt: skip
    """Write W @ x[row_of[p]] (+ bias) for every pair of the work list (Triton), rounded once to out's dtype, to row p
    of out or where `to` says (as `grouped_product`)."""
    _launch(product_of("fp8_product", x, row_of, w, work, out, to, bias), tile, torch.bfloat16)
    return out


def fp8_gate_up_ref(x: Fp8Rows, row_of: Int32[Tensor, " P"] | None, gate: Weight, up: Weight, work: WorkList,
                    h: Tensor | Fp8Rows, *, how: Gate = SILU, biases: BothBiases | None = None,
                    stored: torch.dtype = torch.bfloat16, tile: Tile | None = None) -> Tensor | Fp8Rows:  # fmt: skip
    """The same in torch."""
    asked = gate_up_of("fp8_gate_up", x, row_of, gate, up, work, h, how, biases)
    _checked(asked)
    if not isinstance(h, Fp8Rows):
        return asked.write_ref(h, len(x.codes), _multiply(asked))
    for part, value in asked.results_ref(len(x.codes), stored, _multiply(asked)):
        padded = torch.nn.functional.pad(value, (0, h.codes.shape[1] - value.shape[1]))
        h.codes[part.pairs], h.scale[part.pairs] = quantize_fp8_ref(padded)
    return h


def fp8_product_ref(x: Fp8Rows, row_of: Int32[Tensor, " P"] | None, w: Weight, work: WorkList, out: Tensor, *,
                    to: Scatter | None = None, bias: Float[Tensor, "X N"] | None = None,
                    tile: Tile | None = None) -> Tensor:  # fmt: skip
    """The same in torch."""
    asked = product_of("fp8_product", x, row_of, w, work, out, to, bias)
    _checked(asked)
    return asked.write_ref(out, len(x.codes), _multiply(asked))


def _multiply(a: Asked[Fp8Rows, Tensor | Fp8Rows]) -> Callable[[Part, Weight], Tensor]:
    """fp32 sums [n, N] of a part's rows: 128 after 128 values."""
    values = e4m3_values(a.x.codes.view(torch.uint8))[:, : a.w.kd]

    def multiply(part: Part, w: Weight) -> Tensor:
        rows, scale = part.rows(values), part.rows(a.x.scale)
        assert w.scales is not None
        codes, steps = e4m3_values(w.data[part.slot]), w.scales[part.slot].float()
        steps = steps.repeat_interleave(GROUP, 0)[: w.data.shape[1]]
        acc = torch.zeros(len(rows), len(codes), device=rows.device)
        for i in range(-(-w.kd // GROUP)):
            span = slice(i * GROUP, (i + 1) * GROUP)
            chain = (rows[:, span].double() @ codes[:, span].double().T).float()
            acc = fma_ref(chain, steps[:, i] * scale[:, i, None], acc)
        return acc

    return multiply


def _checked(a: Asked[Fp8Rows, Tensor | Fp8Rows]) -> str:
    """The kernels' LIMIT, once everything fits: all that shapes, dtypes and strides can tell."""
    op, x, w, out = a.op, a.x, a.w, a.out
    if w.format != "fp8_block":
        raise LabError(f"{op} multiplies fp8_block weights, got {w.format}; grouped_product multiplies others.")
    check_weight(op, w)
    groups, n = -(-w.kd // GROUP), w.data.shape[1]
    expect(op, "codes", x.codes, [torch.float8_e4m3fn], ["R", groups * GROUP])
    expect(op, "scale", x.scale, [torch.float32], [len(x.codes), groups])
    check_pairs(op, a.row_of, a.work, a.pairs, a.to)
    if isinstance(out, Fp8Rows):
        expect(op, "h.codes", out.codes, [torch.float8_e4m3fn], ["P", -(-n // GROUP) * GROUP])
        expect(op, "h.scale", out.scale, [torch.float32], [len(out.codes), -(-n // GROUP)])
    else:
        expect(op, "out", out, FLOATS, ["P", n])
    for name, t in (("codes", x.codes), ("scale", x.scale), *zip(("out", "out scale"), _parts(out), strict=False)):
        expect_rows(op, name, t)
    return a.checked()


def _parts(out: Tensor | Fp8Rows) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, Fp8Rows) else (out,)


def _launch(a: Asked[Fp8Rows, Tensor | Fp8Rows], tile: Tile | None, stored: torch.dtype) -> None:
    mode, x, w, gated, tiles = _checked(a), a.x, a.w, a.how is not None, a.work.tiles
    made, made_scale = (*_parts(a.out), x.scale)[:2]
    assert w.scales is not None
    on = backend.serve(a.op, x=x.codes, **a.named(), w=w.data, scales=w.scales, out=made)
    n, quantise = w.data.shape[1], isinstance(a.out, Fp8Rows)
    if not len(tiles) or not n:
        return
    if tile is None:
        kernel, built_in = f"grouped_fp8{'_hidden' * quantise}", fp8_tile_for(a.work.tokens, gated, quantise, on)
        tile = cut(kernel, built_in, made.device, w.format, a.work.tokens, gated=gated, n=n, kd=w.kd)
        if made.is_cuda and len(tiles) * -(-n // tile.rows) < backend.processors(made.device):
            tile = built_in  # tables are of long lists: qwen3-30b-a3b at T = 1 took 31.6 us by its table, 30.5 so
    if tile.rows > GROUP or (quantise and tile.rows != GROUP):
        raise LabError(f"{a.op}: a tile of {tile.rows} weight rows; a scale serves {GROUP}.")
    bits = torch.uint8 if on == "interpreter" else torch.float8_e4m3fn  # the interpreter knows no e4m3
    matrices = [t for m in a.both for t in (m.data.view(bits), m.scales)]
    around, pieces = a.ends(mode), len(tiles) * -(-n // tile.rows)
    beside = a.work.tokens >= FROM_TOKENS
    scale = sides(x.scale, a.row_of, a.pairs) if beside else x.scale
    backend.launch(
        _grouped_fp8,
        (programs(pieces, tile, on, made.device),),
        *(x.codes.view(bits), *around.pointers, scale, *matrices),
        *(made.view(torch.uint8 if quantise else made.dtype), made_scale, pieces, n, w.kd, len(tiles), len(w.data)),
        *(len(x.codes), a.pairs, *around.scalars, x.codes.stride(0), scale.stride(0), made.stride(0)),
        *(made_scale.stride(0), *w.data.stride()[:2], *w.scales.stride()[:2], *around.constants),
        *(w.kd % GROUP == 0, beside, quantise, LAYOUTS["fp8"].way),
        tl.float16 if stored == torch.float16 else tl.bfloat16,
        *(tile.rows, a.work.tokens, tile.group, tile.resident > 0),
        device=made.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
