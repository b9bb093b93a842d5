"""Grouped products of e4m3 rows with e4m3 weights in blocks of 128 x 128, on the fp8 tensor cores.

As `grouped_gemm`, with both sides 8 bits wide: rows have a scale for each 128 values (`rows.quantize_fp8`), weights one
for each 128 x 128 (format fp8_block). Each 128 values are one chain of the tensor core's fp32 sums from zero; its
result, times the product of the two scales, is added in fp32, 128 after 128. A row's bits depend neither on the tile
nor on the batch.

    fp8_gate_up   h[p] = act(gate @ x) * (up @ x), in a float dtype, or quantised again where `h` is `Fp8Rows`: a
                  program holds 128 values of h, which is a scale's group
    fp8_product   out[token * slots + slot of p] = W @ x

Reads N * Kd bytes of weights a tile and Kd + Kd / 32 bytes a pair for each block of weight rows (from the cache). The
references take each chain in float64 and round it once. Knows nothing about routing, residency or weights of experts.
"""
# pyright: reportGeneralTypeIssues=false

from collections.abc import Iterator
from typing import NamedTuple

import torch

from moe_lab._types import Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.grouped.body import gated, place
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_gated, check_weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.primitives import INTERPRET, offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, geglu_ref, swiglu_ref
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from moe_lab_kernels.rows.quantize_fp8 import fp8_codes, quantize_fp8_ref
from moe_lab_kernels.storage.minifloat import e4m3_to_f32, e4m3_values

GROUP = 128
_GROUP = tl.constexpr(GROUP)
MOST_TOKENS = 64  # two chains and two sums of 128 by 128 do not fit a program's registers
# (rows, warps, stages); 128 rows wherever h is quantised, whose groups they are
GATED_TILES = {16: Tile(128, 8, 4, 1), 32: Tile(128, 8, 4, 1), 64: Tile(128, 8, 3)}
PLAIN_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(128, 8, 4)}


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


@jit(do_not_specialize=["n_tiles", "n_slots", "n_x", "n_pairs", "limit", "xs_row", "hs_row", "s_slot", "s_row"])
def _grouped_fp8(x, x_scale, row_of, out, out_scale, out_row, out_slot, tiles, w, w_scale, v, v_scale, N, Kd, n_tiles,
                 n_slots, n_x, n_pairs, limit, x_row, xs_row, out_stride, hs_row, w_slot, w_row, s_slot, s_row,
                 EVEN: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
                 GATHER: tl.constexpr, SLOTS: tl.constexpr, QUANTISE: tl.constexpr, HOW: tl.constexpr,
                 HIDDEN: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, ROWS: tl.constexpr,
                 TOKENS: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Program = (tile of tokens, block of weight rows)."""
    slot, first, n, begin = place(tiles, n_tiles, N, ROWS, TOGETHER)
    if (slot < 0) | (slot >= n_slots) | (n <= 0):
        return
    n_row, p = begin + tl.arange(0, ROWS), first + tl.arange(0, TOKENS)
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = p
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known = mine & (row >= 0) & (row < n_x)
    row = tl.where(known, row, 0)
    of_x, of_s = x + offset64(row, x_row)[:, None], x_scale + offset64(row, xs_row)
    held = offset64(tl.minimum(n_row, N - 1), w_row)[:, None]  # rows past N are read again and not stored
    of_w, of_v = w + offset64(slot, w_slot) + held, v + offset64(slot, w_slot) + held
    at = offset64(slot, s_slot) + offset64(begin // _GROUP, s_row)
    w_scale, v_scale = w_scale + at, v_scale + at
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    acc2 = acc
    for step in range(0, tl.cdiv(Kd, _GROUP)):
        k = step * _GROUP + tl.arange(0, _GROUP)[None, :]
        if EVEN:
            b, a = tl.load(of_x + k, mask=known[:, None], other=0.0), tl.load(of_w + k)
        else:
            b = tl.load(of_x + k, mask=known[:, None] & (k < Kd), other=0.0)
            a = tl.load(of_w + k, mask=k < Kd, other=0.0)
        s = tl.load(of_s + step, mask=known, other=0)
        acc = acc + _chain(b, a, INTERPRET) * (tl.load(w_scale + step) * s)[None, :]
        if GATED:
            a2 = tl.load(of_v + k) if EVEN else tl.load(of_v + k, mask=k < Kd, other=0.0)
            acc2 = acc2 + _chain(b, a2, INTERPRET) * (tl.load(v_scale + step) * s)[None, :]
    to = p
    if SLOTS > 0:
        to = tl.load(out_row + p, mask=mine, other=0) * SLOTS + tl.load(out_slot + p, mask=mine, other=0)
    here = out + offset64(to, out_stride)[:, None] + n_row[None, :]
    if QUANTISE:
        h = to_f32(gated(acc, acc2, limit, HIDDEN, LIMIT, GELU, INNER, CUBE))
        h = tl.where((n_row < N)[:, None], h, 0.0)
        amax = tl.max(tl.where(h == h, tl.abs(h), 0.0), 0, keep_dims=True)
        code, d = fp8_codes(h, amax, 0.0, HOW, False)
        tl.store(here, tl.trans(code), mask=mine[:, None])  # to the group's end, where N is no multiple of it
        tl.store(out_scale + offset64(to, hs_row) + begin // _GROUP, tl.reshape(d, [TOKENS]), mask=mine)
    else:
        stored: tl.constexpr = out.dtype.element_ty
        result = gated(acc, acc2, limit, stored, LIMIT, GELU, INNER, CUBE) if GATED else round_to(acc, stored)
        tl.store(here, tl.trans(result), mask=mine[:, None] & (n_row < N)[None, :])


def fp8_gate_up(
    x: Fp8Rows,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    h: Tensor | Fp8Rows,
    *,
    gelu: bool = False,
    limit: float | None = None,
    hidden: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor | Fp8Rows:
    """Write act(gate row) * up row for every pair of the work list (Triton) and return `h`.

    `h`: floats [P, N], or `Fp8Rows` (codes [P, N up to a multiple of 128]): then gate, up and their product are rounded
    to `hidden` (bf16 or fp16) first, so that fused and unfused have the same bits. `row_of`, `gelu`, `limit` as in
    `grouped_gate_up`. LabError for shapes, strides, devices or formats that disagree.
    """
    check_gated(gate, up, limit)
    _check("fp8_gate_up", x, row_of, gate, work, h, None)
    _launch("fp8_gate_up", x, row_of, gate, work, h, None, tile, up=up, gelu=gelu, limit=limit, hidden=hidden)
    return h


def fp8_product(
    x: Fp8Rows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Write W @ x[row_of[p]] for every pair of the work list (Triton), rounded once to out's dtype, to row p of out or
    where `to` says (as `grouped_product`)."""
    _check("fp8_product", x, row_of, w, work, out, to)
    _launch("fp8_product", x, row_of, w, work, out, to, tile)
    return out


def fp8_gate_up_ref(
    x: Fp8Rows,
    row_of: Int32[Tensor, " P"] | None,
    gate: Weight,
    up: Weight,
    work: WorkList,
    h: Tensor | Fp8Rows,
    *,
    gelu: bool = False,
    limit: float | None = None,
    hidden: torch.dtype = torch.bfloat16,
    tile: Tile | None = None,
) -> Tensor | Fp8Rows:
    """The same in torch."""
    check_gated(gate, up, limit)
    _check("fp8_gate_up", x, row_of, gate, work, h, None)
    for pairs, rows, slot in _tiles_of(x, row_of, work, gate, _pairs(h, None)):
        dtype = hidden if isinstance(h, Fp8Rows) else h.dtype
        g, u = (_rows_ref(rows, w, slot).to(dtype) for w in (gate, up))
        value = (geglu_ref if gelu else swiglu_ref)(g, u, limit=limit)
        if isinstance(h, Fp8Rows):
            padded = torch.nn.functional.pad(value, (0, h.codes.shape[1] - value.shape[1]))
            h.codes[pairs], h.scale[pairs] = quantize_fp8_ref(padded)
        else:
            h[pairs] = value
    return h


def fp8_product_ref(
    x: Fp8Rows,
    row_of: Int32[Tensor, " P"] | None,
    w: Weight,
    work: WorkList,
    out: Tensor,
    *,
    to: Scatter | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """The same in torch."""
    _check("fp8_product", x, row_of, w, work, out, to)
    for pairs, rows, slot in _tiles_of(x, row_of, work, w, _pairs(out, to)):
        at = pairs if to is None else (to.row[pairs] * to.slots + to.slot[pairs]).long()
        out[at] = _rows_ref(rows, w, slot).to(out.dtype)
    return out


def _pairs(out: Tensor | Fp8Rows, to: Scatter | None) -> int:
    if to is not None:
        return len(to.row)
    return len(out.codes) if isinstance(out, Fp8Rows) else len(out)


def _tiles_of(x: Fp8Rows, row_of: Tensor | None, work: WorkList, w: Weight, pairs: int) -> Iterator[tuple]:
    """(pairs, (values, scales) of their rows, slot) of each tile; rows that do not exist are zero."""
    values = e4m3_values(x.codes.view(torch.uint8))[:, : w.kd]
    for slot, first, n in work.tiles.tolist():
        begin, end = max(first, 0), min(first + n, pairs)
        if 0 <= slot < len(w.data) and begin < end:
            p = torch.arange(begin, end, device=x.codes.device)
            row = p if row_of is None else row_of[p].long()
            known = (row >= 0) & (row < len(values))
            row = torch.where(known, row, 0)
            yield p, tuple(t[row].masked_fill(~known[:, None], 0) for t in (values, x.scale)), slot


def _rows_ref(rows: tuple[Tensor, Tensor], w: Weight, slot: int) -> Tensor:
    """fp32 [pairs, N]: 128 after 128 values."""
    values, scale = rows
    assert w.scales is not None
    codes, steps = e4m3_values(w.data[slot]), w.scales[slot].float().repeat_interleave(GROUP, 0)[: w.data.shape[1]]
    acc = torch.zeros(len(values), len(codes), device=values.device)
    for i in range(-(-w.kd // GROUP)):
        part = slice(i * GROUP, (i + 1) * GROUP)
        chain = (values[:, part].double() @ codes[:, part].double().T).float()
        acc = acc + chain * (steps[:, i] * scale[:, i, None])
    return acc


def _check(op: str, x: Fp8Rows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor | Fp8Rows,
           to: Scatter | None) -> None:  # fmt: skip
    """Everything that shapes, dtypes and strides can tell."""
    if w.format != "fp8_block":
        raise LabError(f"{op} multiplies fp8_block weights, got {w.format}; grouped_product multiplies others.")
    check_weight(op, w)
    groups, pairs, n = -(-w.kd // GROUP), _pairs(out, to), w.data.shape[1]
    expect(op, "codes", x.codes, [torch.float8_e4m3fn], ["R", groups * GROUP])
    expect(op, "scale", x.scale, [torch.float32], [len(x.codes), groups])
    for name, t, shape in (
        ("row_of", row_of, [pairs]),
        ("row", to and to.row, [pairs]),
        ("slot", to and to.slot, [pairs]),
        ("tiles", work.tiles, ["tiles", 3]),
    ):
        if t is not None:
            expect(op, name, t, [torch.int32], shape)
            expect_contiguous(op, name, t)
    if work.tokens not in GATED_TILES or (to is not None and to.slots < 1):
        known = ", ".join(map(str, GATED_TILES))
        raise LabError(f"{op}: tiles of {work.tokens} rows, {to and to.slots} slots; wanted {known}, and at least 1.")
    if isinstance(out, Fp8Rows):
        expect(op, "h.codes", out.codes, [torch.float8_e4m3fn], ["P", -(-n // GROUP) * GROUP])
        expect(op, "h.scale", out.scale, [torch.float32], [len(out.codes), -(-n // GROUP)])
    else:
        expect(op, "out", out, FLOATS, ["P", n])
    for name, t in (("codes", x.codes), ("scale", x.scale), *zip(("out", "out scale"), _parts(out), strict=False)):
        expect_rows(op, name, t)


def _parts(out: Tensor | Fp8Rows) -> tuple[Tensor, ...]:
    return tuple(out) if isinstance(out, Fp8Rows) else (out,)


def _launch(op: str, x: Fp8Rows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor | Fp8Rows,
            to: Scatter | None, tile: Tile | None, *, up: Weight | None = None, gelu: bool = False,
            limit: float | None = None, hidden: torch.dtype = torch.bfloat16) -> None:  # fmt: skip
    """Both operations; `up` makes it the gated one."""
    (row, slot, slots), v = to or (None, None, 0), up or w
    made, made_scale = (*_parts(out), x.scale)[:2]
    assert w.scales is not None
    assert v.scales is not None
    on = backend.serve(op, x=x.codes, row_of=row_of, row=row, slot=slot, w=w.data, scales=w.scales, tiles=work.tiles,
                       out=made)  # fmt: skip
    n = w.data.shape[1]
    if not len(work.tiles) or not n:
        return
    table = PLAIN_TILES if up is None else GATED_TILES
    tile = tile or (Tile(GROUP, 4, 1) if on == "interpreter" else table[work.tokens])
    quantise = isinstance(out, Fp8Rows)
    if tile.rows > GROUP or (quantise and tile.rows != GROUP):
        raise LabError(f"{op}: a tile of {tile.rows} weight rows; a scale serves {GROUP}.")
    bits = torch.uint8 if on == "interpreter" else torch.float8_e4m3fn  # the interpreter knows no e4m3
    store = torch.uint8 if quantise else made.dtype
    dtype = tl.float16 if hidden == torch.float16 else tl.bfloat16
    backend.launch(
        _grouped_fp8,
        (len(work.tiles) * -(-n // tile.rows),),
        *(x.codes.view(bits), x.scale, work.tiles if row_of is None else row_of, made.view(store), made_scale),
        *(*(work.tiles if i is None else i for i in (row, slot)), work.tiles),
        *(w.data.view(bits), w.scales, v.data.view(bits), v.scales),
        *(n, w.kd, len(work.tiles), len(w.data), len(x.codes), _pairs(out, to)),
        *(0.0 if limit is None else limit, x.codes.stride(0), x.scale.stride(0), made.stride(0), made_scale.stride(0)),
        *(*w.data.stride()[:2], *w.scales.stride()[:2], w.kd % GROUP == 0, up is not None, gelu, limit is not None),
        *(row_of is not None, slots, quantise, LAYOUTS["fp8"].way, dtype, GELU_INNER, GELU_CUBE),
        *(tile.rows, work.tokens, tile.group),
        device=made.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
