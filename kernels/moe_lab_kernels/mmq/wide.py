"""The int8 product for experts with many rows: weights opened once (`mmq.opened`), then a plain product of bytes.

The bits are those of `mmq.steps`: dots are integers, and the fp32 steps come in the same order. What is different is
what a program does: nothing is taken apart in its loop, and its loads are copies to shared memory that run ahead.

Exact forms use the instruction of a warp (mma.sync): sixteen rows of weights and eight of activations at a time, whose
sums may start from a constant. Started from the bits of 1.5 * 2^23 an integer sum below 2^22 reads as the float
M + I, so that fma(M + I, A, -M A) is I A rounded once: no conversion, two instructions for 32 values. (M A is exact: M
has two bits and A eleven.) The batch axis of `tl.dot` lays the warps along the weights' rows; without it the compiler
takes the instruction of four warps, whose sums start from zero or what they were.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false, reportPossiblyUnboundVariable=false

from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous
from moe_lab_kernels.grouped.body import biased, owner, pairs_of, sent
from moe_lab_kernels.grouped.launching import Biases, ends, named
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.launch.table import cut
from moe_lab_kernels.mmq import steps as ms
from moe_lab_kernels.mmq.opened import FORMS, Opened, open_weights, opened_bytes, room_for
from moe_lab_kernels.mmq.opened_planar import open_planar
from moe_lab_kernels.mmq.operands import MmqRows, Sides, sides
from moe_lab_kernels.mmq.places import places
from moe_lab_kernels.mmq.steps import M_BITS, M
from moe_lab_kernels.primitives import INTERPRET, fma, offset64, round_to

SCRATCH_BYTES = 1 << 30  # most of opened weights at a time; one weight where that is larger


class WideTile(NamedTuple):
    """How a program is cut: as `Tile`, with at most `tokens` rows of x. `turns`: groups of 32 values a step, where the
    row has a multiple of them.
    `by_warp`: the instruction of one warp, else that of four."""

    rows: int
    tokens: int
    warps: int
    stages: int
    turns: int = 1
    by_warp: bool = True
    group: int = 8
    registers: int | None = None


# Measured on an H200 (triton 3.6): docs/kernels.md has the tiles that lost. Two warps of 64 rows and 64 tokens won for
# the exact forms, whose barriers wait for few; "pair" and "halves" would spill there, and take four ("pair" 3 %
# slower), as "digits" takes one turn. Few rows of x wait for memory, which four warps and more stages ask for earlier.
TILES = {
    "one": WideTile(64, 64, 2, 3, 2),
    "digits": WideTile(64, 64, 2, 3),
    "halves": WideTile(64, 64, 4, 3),
    "pair": WideTile(64, 64, 4, 3),
    "fold": WideTile(64, 64, 4, 2, by_warp=False),
}
FEW_TILES = {16: WideTile(64, 16, 4, 4, 2), 32: WideTile(64, 32, 4, 3, 2)}  # exact forms
FOLDED_TILES = {"q3_k": WideTile(128, 128, 8, 3, by_warp=False)}  # other formats would spill
TILE_INTERPRETER = WideTile(256, 128, 4, 1)
IN_TURNS = ("one", "digits", "halves")


def wide_tile(format: str, folded: bool, tokens: int, on: str) -> WideTile:
    """How a program is cut; the interpreter pays for programs, so it takes tall ones."""
    step = FORMS[format, folded].step
    if on == "interpreter":
        return TILE_INTERPRETER
    if folded and step == "fold":
        return FOLDED_TILES.get(format, TILES[step])
    return FEW_TILES.get(tokens, TILES[step])


def scratch_bytes(w: Weight, work: WorkList, folded: bool) -> int:
    """Scratch that a product wants: every weight that the list can name, within the bound."""
    one = opened_bytes(w, folded)
    return max(one, min(SCRATCH_BYTES // one, len(work.tiles), len(w.data)) * one)


@jit
def _dot(codes, b, c, W: tl.constexpr, V: tl.constexpr):
    """c + codes @ b in int32; codes: int8 pointers to rows, b [W, TOKENS]. With V the batch of V warps."""
    k = tl.arange(0, W)
    a = tl.load(codes + (k[None, None, :] if V else k[None, :]))
    if INTERPRET:  # exact below 2^24, and quicker there
        out = c + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    else:
        out = tl.dot(a, b, c, out_dtype=tl.int32)
    return out


@jit
def _float(v):
    return v.to(tl.float32, bitcast=True)


@jit
def _rows(x, known, step, W: tl.constexpr, V: tl.constexpr):
    """[W, TOKENS] codes of the tile's rows."""
    b = tl.trans(tl.load(x + (step * W + tl.arange(0, W)[None, :]), mask=known, other=0))
    if V:
        b = tl.broadcast_to(b[None], [V, W, b.shape[1]])
    return b


@jit
def _thirty_twos(acc, codes, x, known, scale, dys, step, zero, N, LIST: tl.constexpr, STEP: tl.constexpr,
                 SPAN: tl.constexpr, KINDS: tl.constexpr, TURNS: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """TURNS groups of 32 values; a scale serves SPAN of them."""
    if SPAN > 1:  # else a scale a turn
        d = tl.load(scale + step * TURNS // SPAN * N)
    for j in tl.static_range(TURNS):
        g = step * TURNS + j
        b = _rows(x, known, g, 32, V)
        if STEP == "halves":
            of = codes + g * offset64(N, 64)
            d0, d1 = ms.two_of(scale + g * (2 * N))
            first, second = _float(_dot(of, b, zero, 32, V)), _float(_dot(of + N * 32, b, zero, 32, V))
            acc = fma(fma(first, d0, d0 * -M) + fma(second, d1, d1 * -M), tl.load(dys + g * LIST), acc)
        elif STEP == "digits":
            of = codes + g * offset64(N, 64)
            v = ms.of_digits(_dot(of, b, zero, 32, V), _dot(of + N * 32, b, zero, 32, V))
            acc = fma(v * d, tl.load(dys + g * LIST), acc)
        else:
            v = _float(_dot(codes + g * offset64(N, 32), b, zero, 32, V))
            if KINDS == 2:
                d, low = ms.two_of(scale + g * (2 * N))
                dy, total = ms.two_of(dys + g * (2 * LIST))
            else:
                dy = tl.load(dys + g * LIST)
                if SPAN == 1:
                    d = tl.load(scale + g * N)
            acc = fma(fma(v, d, d * -M), dy, acc)
            if KINDS == 2:
                acc = fma(low, total, acc)
    return acc


@jit
def _pair(acc, codes, x, known, scale, low, dys, sums, step, zero, N, LIST: tl.constexpr, TAIL: tl.constexpr,
          V: tl.constexpr):  # fmt: skip
    """q2_k, 128 values."""
    u, above = ms.two_of(scale + step // 2 * (2 * N))
    for j in tl.static_range(2):
        g = 2 * step + j
        b = _rows(x, known, g, 64, V)
        of = codes + g * offset64(N, 128)
        first = _float(_dot(of, b, zero, 64, V)) - M
        t = fma(first, above, fma(_float(_dot(of + N * 64, b, zero, 64, V)), u, u * -M))
        m0, m1, m2, m3 = ms.four_of(low + g * (4 * N))
        s0, s1, s2, s3 = ms.four_of(sums + g * (4 * LIST))
        if TAIL and j == 1:
            t = fma(m3, s3, fma(m2, s2, t))
        acc = fma(m1, s1, fma(m0, s0, fma(t, tl.load(dys + g * LIST), acc)))
        if not TAIL or j == 0:
            acc = fma(m3, s3, fma(m2, s2, acc))
    return acc


@jit
def _fold(acc, codes, x, known, scale, low, dys, sums, step, zero, N, LIST: tl.constexpr, PARTS: tl.constexpr,
          LOW: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """A block of 256 values against q8_k rows. low, sums: fp16 pointers [.., R, 1] and [TOKENS, 1]."""
    b = _rows(x, known, step, 256, V)
    of = codes + step * offset64(N, PARTS * 256)
    total = _dot(of, b, zero, 256, V)
    if PARTS == 2:
        total = (total << 8) + _dot(of + N * 256, b, zero, 256, V)
    part = total.to(tl.float32)
    if LOW:
        d, dmin = ms.two_of(scale + step * (2 * N))
        s = tl.trans(tl.load(sums + (step * (16 * LIST) + tl.arange(0, 16)[None, :])))
        k = step * N * 16 + tl.arange(0, 16)
        m = tl.load(low + (k[None, None, :] if V else k[None, :]))
        if V:
            s = tl.broadcast_to(s[None], [V, 16, s.shape[1]])
        if INTERPRET:
            m, s = m.to(tl.float32), s.to(tl.float32)
        part = part * d - tl.dot(m, s, input_precision="ieee") * dmin
    else:
        part = part * tl.load(scale + step * N)
    return fma(part, tl.load(dys + step * LIST), acc)


@jit
def _piece(x, dys, sums, row_of, out_row, out_slot, whose, bias, out, codes, scale, low, tile, past, slot, place, first,
           n, begin, N, n_steps, groups, lows, n_x, n_pairs, slots, whose_step, bias_row, x_row, out_stride, c_place,
           s_place, l_place, GATHER: tl.constexpr, SCATTER: tl.constexpr, BIASED: tl.constexpr, NAMED: tl.constexpr,
           STEP: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, KINDS: tl.constexpr, LOW: tl.constexpr,
           TAIL: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, LIST: tl.constexpr,
           V: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """TOKENS rows of a tile from row `past` on, of which n exist, with weight rows from `begin` on."""
    n_row = begin + tl.arange(0, ROWS)
    held = tl.minimum(n_row, N - 1)
    WIDTH: tl.constexpr = 256 if STEP == "fold" else 64 if STEP == "pair" else 32  # pyright: ignore[reportAssignmentType]
    if V:
        held = tl.reshape(held, [V, ROWS // V, 1])
        acc = tl.zeros((V, ROWS // V, TOKENS), tl.float32)
    else:
        held = held[:, None]
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
    zero = tl.full(acc.shape, 0 if STEP == "fold" else M_BITS, tl.int32)
    codes += offset64(place, c_place) + held * WIDTH
    scale += offset64(place, s_place) + held * KINDS
    low += offset64(place, l_place) + held * (16 if STEP == "fold" else 4)
    # a scale and a sum of 32 values come together; sums are otherwise four or sixteen
    dys += offset64(tile, groups * LIST * (KINDS if STEP == "one" else 1))
    sums += offset64(tile, lows * LIST)
    p, mine, row, exists = pairs_of(row_of, first, n, n_pairs, n_x, TOKENS, GATHER)
    of_x, known = x + offset64(row[:, None], x_row), exists[:, None]
    i = past + tl.arange(0, TOKENS)
    column = i[None, None, :] if V else i[None, :]
    dys += column * (KINDS if STEP == "one" else 1)
    sums += i[:, None] * 16 if STEP == "fold" else column * 4
    for step in tl.range(0, n_steps, num_stages=STAGES):
        if STEP == "pair":
            acc = _pair(acc, codes, of_x, known, scale, low, dys, sums, step, zero, N, LIST, TAIL, V)
        elif STEP == "fold":
            acc = _fold(acc, codes, of_x, known, scale, low, dys, sums, step, zero, N, LIST, PARTS, LOW, V)
        else:
            acc = _thirty_twos(acc, codes, of_x, known, scale, dys, step, zero, N, LIST, STEP, SPAN, KINDS, TURNS, V)
    acc = tl.reshape(acc, [ROWS, TOKENS])
    if BIASED:
        acc = biased(acc, bias, owner(whose, whose_step, tile, slot, NAMED), bias_row, n_row, N)
    here = out + offset64(sent(p, mine, out_row, out_slot, slots, SCATTER), out_stride)[:, None] + n_row[None, :]
    tl.store(here, tl.trans(round_to(acc, out.dtype.element_ty)), mask=mine[:, None] & (n_row < N)[None, :])


@jit(do_not_specialize=["n_steps", "n_tiles", "n_slots", "n_x", "n_pairs", "slots", "whose_step", "bias_row",
                        "first_place", "n_places", "groups", "lows"])  # fmt: skip
def _wide(x, dys, sums, row_of, out_row, out_slot, tiles, whose, bias, out, place_of, codes, scale, low, N, n_steps,
          groups, lows, n_tiles, n_slots, n_x, n_pairs, slots, whose_step, bias_row, first_place, n_places, x_row,
          out_stride, c_place, s_place, l_place, GATHER: tl.constexpr, SCATTER: tl.constexpr, BIASED: tl.constexpr,
          NAMED: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, KINDS: tl.constexpr,
          LOW: tl.constexpr, TAIL: tl.constexpr, TURNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
          LIST: tl.constexpr, TOGETHER: tl.constexpr, V: tl.constexpr, STAGES: tl.constexpr,
          NARROW: tl.constexpr):  # fmt: skip
    """Program = (piece of a tile of pairs, block of weight rows); TOGETHER pieces walk the blocks side by side."""
    tile, past, slot, first, n, begin = piece_of(tiles, n_tiles, N, ROWS, TOKENS, LIST, TOGETHER)
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    place = tl.load(place_of + slot) - first_place
    if (place < 0) | (place >= n_places):
        return
    if NARROW:  # noqa: SIM102 (a constant and a number on the device)
        if n <= TOKENS // 2:
            _piece(x, dys, sums, row_of, out_row, out_slot, whose, bias, out, codes, scale, low, tile, past, slot,
                   place, first, n, begin, N, n_steps, groups, lows, n_x, n_pairs, slots, whose_step, bias_row, x_row,
                   out_stride, c_place, s_place, l_place, GATHER, SCATTER, BIASED, NAMED, STEP, PARTS, SPAN, KINDS, LOW,
                   TAIL, TURNS, ROWS, TOKENS // 2, LIST, V, STAGES)  # fmt: skip
            return
    _piece(x, dys, sums, row_of, out_row, out_slot, whose, bias, out, codes, scale, low, tile, past, slot, place, first,
           n, begin, N, n_steps, groups, lows, n_x, n_pairs, slots, whose_step, bias_row, x_row, out_stride, c_place,
           s_place, l_place, GATHER, SCATTER, BIASED, NAMED, STEP, PARTS, SPAN, KINDS, LOW, TAIL, TURNS, ROWS,
           TOKENS, LIST, V, STAGES)  # fmt: skip


@jit
def piece_of(tiles, n_tiles, N, ROWS: tl.constexpr, TOKENS: tl.constexpr, LIST: tl.constexpr,
             TOGETHER: tl.constexpr):  # fmt: skip
    """(tile, rows of it before the program's, slot, first pair, pairs from there on, first weight row) of a program
    that takes TOKENS of a tile's LIST rows."""
    pieces = LIST // TOKENS
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    walk = pid // (TOGETHER * blocks)
    beside = tl.minimum(n_tiles * pieces - walk * TOGETHER, TOGETHER)
    at = pid % (TOGETHER * blocks)
    piece = walk * TOGETHER + at % beside
    tile, past = piece // pieces, piece % pieces * TOKENS
    slot, first, n = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    return tile, past, slot, first + past, n - past, at // beside * ROWS


def serves(w: Weight, folded: bool) -> bool:
    """Whether there is a way to open the format."""
    return (w.format, folded) in FORMS


def wide_product(rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor, to: Scatter | None,
                 biases: Biases, tile: WideTile | None, scratch: Tensor | None) -> None:  # fmt: skip
    """`mmq_product` by way of opened weights (Triton): as many at a time as `scratch` has room for. All but `scratch`
    is checked by then."""
    folded = rows.layout == "q8_k"
    if not serves(w, folded):
        raise LabError(f"mmq_product: there is no way to open {w.format} for {rows.layout} rows; leave the tile out.")
    given = named(row_of, work, to, biases, None)
    backend.serve("mmq_product", codes=rows.codes, **given, w=w.data, scratch=scratch, out=out)
    if not len(work.tiles) or not w.rows:
        return
    if scratch is None:
        scratch = torch.empty(scratch_bytes(w, work, folded), dtype=torch.uint8, device=out.device)
    expect("mmq_product", "scratch", scratch, [torch.uint8], ["bytes"])
    expect_contiguous("mmq_product", "scratch", scratch)
    least = opened_bytes(w, folded)
    if len(scratch) < least or scratch.data_ptr() % 16:
        raise LabError(f"mmq_product: scratch of {len(scratch)} bytes; wanted {least} at a multiple of 16, or more.")
    made = sides(rows, row_of, w, work, len(out) if to is None else len(to.row))
    room, at = room_for(scratch, w, folded), places(work, len(w.data))
    opened = open_planar if w.layout == "planar" else open_weights
    for first in range(0, len(at.slots), len(room.codes)):
        opened(w, folded, at, first, room)
        multiply(rows, row_of, w, work, out, to, biases, made, room, at.of_slot, first, tile)


def multiply(rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor, to: Scatter | None,
             biases: Biases, made: Sides, room: Opened, place_of: Tensor, first: int,
             tile: WideTile | None) -> None:  # fmt: skip
    """The product of the tiles whose weights lie open in `room`, places `first` and after."""
    on = backend.serve("mmq_product", codes=rows.codes, w=w.data, out=out)
    form, n = room.form, w.rows
    if tile is None:
        folded = rows.layout == "q8_k"
        kind, tile = f"{w.format}{'/q8_k' * folded}", wide_tile(w.format, folded, work.tokens, on)
        tile = cut("wide", tile, out.device, kind, work.tokens, gated=False, n=n, kd=w.kd)
    tokens = min(tile.tokens, work.tokens)
    low, warps = made.scale if made.low is None else made.low, tile.warps if tile.by_warp else 0
    plain = form.step in IN_TURNS and not biases  # two turns and a bias spill 8 bytes
    turns = tile.turns if plain and w.kd // 32 % tile.turns == 0 else 1
    step = {"pair": 128, "fold": 256}.get(form.step, 32 * turns)
    around = ends(row_of, work, to, biases, None, "none")
    of_row, row, slot, tiles, whose, _, bias, _ = around.pointers
    _, _, slots, whose_step, bias_row = around.scalars
    gather, scatter, _, _, _, with_biases, its_own, *_ = around.constants
    backend.launch(
        _wide,
        (len(work.tiles) * (work.tokens // tokens) * -(-n // tile.rows),),
        *(rows.codes, made.scale, low, of_row, row, slot, tiles, whose, bias, out, place_of),
        *(room.codes, room.scale, room.low, n, w.kd // step),
        *(made.scale.shape[1], low[0, :, 0].numel(), len(work.tiles), len(w.data), len(rows.codes)),
        *(len(out) if to is None else len(to.row), slots, whose_step, bias_row, first, len(room.codes)),
        *(rows.codes.stride(0), out.stride(0), room.codes.stride(0), room.scale.stride(0), room.low.stride(0)),
        *(gather, scatter, with_biases, its_own, form.step, form.parts, form.span // 32, form.kinds, form.low),
        *(made.tail, turns, tile.rows, tokens, work.tokens, tile.group, warps),
        *(tile.stages, tokens > 16),
        device=out.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
