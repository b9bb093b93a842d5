"""What the int8 grouped product is given: weights, activation rows, and their scales and sums laid out tile by tile.

R quantised rows are read through `row_of` as they lie; what belongs to a row and a group of values is not: a thread of
the tensor cores' layout holds columns of many rows, and one scale each would be as many loads in as many lines. So
`sides` puts the scales, and the sums that weights' minima meet, of a tile's TOKENS rows side by side: fp32
[tiles, groups, TOKENS], or [tiles, groups, TOKENS, 2] where a scale and a sum go together, and four sums of sixteen
values as [tiles, groups, TOKENS, 4]. Reads and writes about 4 * Kd / 16 bytes a pair for q2_k, an eighth of that
without sums.

Sums are kept as they multiply a weight's minimum (kquants 2.4): raw sums as they are; of d2s6, whose last two of eight
groups keep none, those groups' sums of codes, to be scaled with the dot of their 64 values; sums of codes (safe sums)
times the stored scale, which is exact in fp32; for q8_k the sums of codes themselves as fp16 [tiles, blocks, TOKENS,
16], exact up to 2048. Rows that a tile does not have are zero.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_rows
from moe_lab_kernels.grouped.operands import Scatter, Weight, check_list
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.primitives import offset64, to_f32
from moe_lab_kernels.rows.arithmetic import LAYOUTS
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar import restore_ref

# ggml's layout of activations for each weight format (its prefill arm)
MMQ_LAYOUTS = {
    "q2_k": "d2s6",
    **dict.fromkeys(("q4_k", "q5_k", "q4_0"), "ds4"),
    **dict.fromkeys(("q3_k", "q6_k", "q8_0", "mxfp4", "nvfp4"), "d4"),
}
# formats whose sub-block scales can be taken into integers over 256 values, against q8_k rows (ggml's CPU arithmetic)
FOLDED = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
HAS_MINIMA = ("q2_k", "q4_k", "q5_k")


class MmqRows(NamedTuple):
    """Quantised rows as `quantize_rows` gives them: codes int8 [R, Kp], scale [R, Kp / block] fp16, bf16 or fp32, total
    (None: no sums) fp16, bf16, fp32 or int16 [R, sums]; the layout's name."""

    codes: Tensor
    scale: Tensor
    total: Tensor | None
    layout: str

    def each(self, pick: Callable[[Tensor], Tensor]) -> "MmqRows":
        """The rows that `pick` takes out of each tensor."""
        total = None if self.total is None else pick(self.total)
        return MmqRows(pick(self.codes), pick(self.scale), total, self.layout)


class Sides(NamedTuple):
    """scale fp32 [tiles, groups, TOKENS]; low: see above, or None, of the same memory as scale where the two alternate;
    `tail`: whether low holds sums of codes in d2s6's last two groups of eight."""

    scale: Tensor
    low: Tensor | None
    tail: bool


def folded_layout(format: str) -> str:
    """The activation layout of the folded form: q8_k where there are sub-block scales, else the format's own."""
    return "q8_k" if format in FOLDED else layout_for(format)


def layout_for(format: str) -> str:
    """LabError for a format that the product has no arithmetic for."""
    if format not in MMQ_LAYOUTS:
        raise LabError(f"mmq multiplies no {format!r}; it multiplies {', '.join(MMQ_LAYOUTS)}.")
    return MMQ_LAYOUTS[format]


def in_fours(w: Weight) -> bool:
    """Whether four blocks of 32 values, none of which need lie on a whole word, together do."""
    strides = w.data.stride(0), w.data.stride(1), w.data.data_ptr()  # in bytes
    return BLOCKS[w.format].values == 32 and w.kd % 128 == 0 and all(s % 4 == 0 for s in strides)


def check_rows(op: str, rows: MmqRows, w: Weight) -> None:
    """Rows that the weight's format takes, with every sum it needs."""
    served = (layout_for(w.format), folded_layout(w.format))
    if rows.layout not in served:
        raise LabError(
            f"{op}: {w.format} takes rows of layout {' or '.join(dict.fromkeys(served))}, got {rows.layout}."
        )
    layout = LAYOUTS[rows.layout]
    expect(op, "codes", rows.codes, [torch.int8], ["R", -(-w.kd // layout.unit) * layout.unit])
    expect_rows(op, "codes", rows.codes, 16)
    r, kp = rows.codes.shape
    expect(op, "scale", rows.scale, FLOATS, [r, kp // layout.block])
    expect_rows(op, "scale", rows.scale)
    if w.format in HAS_MINIMA:
        if rows.total is None:
            raise LabError(f"{op}: {w.format} has minima, but the rows keep no sums.")
        kept = sums_kept(rows)
        dtypes = [torch.int16] if rows.layout == "q8_k" else [*FLOATS, torch.int16]
        if rows.total.dtype not in dtypes:
            raise LabError(f"{op}: {rows.layout} rows keep sums of {dtypes}, got {rows.total.dtype}.")
        expect(op, "total", rows.total, [rows.total.dtype], [r, kp // layout.sum_group // 8 * kept])
        expect_rows(op, "total", rows.total)


def sums_kept(rows: MmqRows) -> int:
    """Of every eight groups: 8, or 6 of d2s6's raw sums."""
    assert rows.total is not None
    layout = LAYOUTS[rows.layout]
    groups = rows.codes.shape[1] // layout.sum_group
    return layout.sums_kept if rows.total.shape[1] == groups // 8 * layout.sums_kept else 8


def check_product(op: str, rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, out: Tensor,
                  to: Scatter | None) -> None:  # fmt: skip
    """Everything that shapes, dtypes and strides can tell."""
    layout_for(w.format)
    block = BLOCKS[w.format]
    if w.layout not in ("raw", "planar"):
        raise LabError(f"{op}: weights lie in layout {w.layout!r}; it multiplies raw blocks and planes.")
    if w.kd < 1 or w.kd % block.values:
        raise LabError(f"{op}: {w.format} rows hold whole blocks of {block.values} values, got Kd={w.kd}.")
    if w.layout == "planar":
        expect(op, "w", w.data, [torch.uint8], ["S", 1, "bytes"])
    else:
        expect(op, "w", w.data, [torch.uint8], ["S", "N", w.kd // block.values * block.bytes])
        expect_rows(op, "w", w.data, block.alignment)
    check_rows(op, rows, w)
    check_list(op, row_of, work, w.rows, out, to)


def check_raw(op: str, w: Weight) -> None:
    """LabError for weights that must be opened to be multiplied."""
    if w.layout != "raw":
        raise LabError(f"{op}: weights in layout {w.layout!r} are multiplied by mmq_product in wide tiles alone.")


def raw_of(w: Weight, slot: int) -> Tensor:
    """A slot's raw blocks [N, row_bytes], in torch."""
    return w.data[slot] if w.layout == "raw" else restore_ref(w.data[slot, 0], w.format, w.rows, w.kd)


@jit
def _sides(codes, scale, total, row_of, tiles, out, low, groups, lows, n_x, n_pairs, codes_row, scale_row, total_row,
           GATHER: tl.constexpr, KIND: tl.constexpr, PER_SCALE: tl.constexpr, LOWS: tl.constexpr, FOUR: tl.constexpr,
           TURNS: tl.constexpr, AT_ONCE: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """Program = (tile, AT_ONCE scales and the LOWS sums that belong to them). FOUR sums of a row lie together; scales
    and sums come by TURNS, 2, or not, 1."""
    tile, part = tl.program_id(0), tl.program_id(1)
    first, n = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    p = tl.arange(0, TOKENS)
    mine = (p < n) & (first + p >= 0) & (first + p < n_pairs)
    row = first + p
    if GATHER:
        row = tl.load(row_of + first + p, mask=mine, other=-1)
    known = (mine & (row >= 0) & (row < n_x))[:, None]
    row = tl.where(known, row[:, None], 0)
    g = part * AT_ONCE + tl.arange(0, AT_ONCE)[None, :]
    value = to_f32(tl.load(scale + offset64(row, scale_row) + g, mask=known & (g < groups), other=0))
    here = (tl.trans(g) * TOKENS + p[None, :]) * TURNS
    tl.store(out + offset64(tile, groups * TOKENS * TURNS) + here, tl.trans(value), mask=tl.trans(g) < groups)
    if KIND != "none":
        m = part * LOWS + tl.arange(0, LOWS)[None, :]
        there = known & (m < lows)
        if KIND == "bsums":
            s = tl.load(total + offset64(row, total_row) + m, mask=there, other=0).to(tl.float16)
            at = offset64(tile, lows * TOKENS) + m // 16 * (16 * TOKENS) + p[:, None] * 16 + m % 16
            tl.store(low + at, s, mask=m < lows)
        else:
            at = m
            if KIND == "tail":
                at = m // 8 * 6 + m % 8
                there = there & (m % 8 < 6)
            s = to_f32(tl.load(total + offset64(row, total_row) + at, mask=there, other=0))
            if KIND == "codes":
                own = scale + offset64(row, scale_row) + m // PER_SCALE
                s = s * to_f32(tl.load(own, mask=there, other=0))
            if KIND == "tail":
                i = tl.arange(0, 16)[None, None, :]
                of = codes + offset64(row, codes_row)[:, :, None] + (m * 16)[:, :, None] + i
                last = known & (m < lows) & (m % 8 >= 6)
                c = tl.load(of, mask=tl.broadcast_to(last[:, :, None], of.shape), other=0).to(tl.int32)
                s += tl.sum(c, 2).to(tl.float32)
            m = tl.trans(m)
            at = ((m // FOUR * TOKENS + p[None, :]) * FOUR + m % FOUR) * TURNS
            to = low + offset64(tile, lows * TOKENS * TURNS) + at
            tl.store(to, tl.trans(s), mask=m < lows)


def sides(rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, pairs: int) -> Sides:
    """Scales and sums of every tile's rows (Triton). The shapes are those `check_product` has passed."""
    made, kind, per_scale = _empty(rows, w, work)
    if not len(work.tiles):
        return made
    total, low = (rows.scale if rows.total is None else rows.total), made.low
    groups, lows = made.scale.shape[1], 0 if low is None else low[0, :, 0].numel()
    at_once = {"q8_k": 2, "d2s6": 4}.get(rows.layout, 8)
    backend.launch(
        _sides,
        (len(work.tiles), -(-groups // at_once)),
        *(rows.codes, rows.scale, total, work.tiles if row_of is None else row_of, work.tiles, made.scale),
        *(made.scale if low is None else low, groups, lows, len(rows.codes), pairs),
        *(rows.codes.stride(0), rows.scale.stride(0), total.stride(0), row_of is not None, kind, per_scale),
        *(max(1, at_once * per_scale), 4 if rows.layout == "d2s6" else 1, made.scale.stride(-1), at_once, work.tokens),
        device=rows.codes.device,
        num_warps=4,
    )
    return made


def sides_ref(rows: MmqRows, row_of: Tensor | None, w: Weight, work: WorkList, pairs: int) -> Sides:
    """The same in torch, bit for bit."""
    made, kind, per_scale = _empty(rows, w, work)
    p = work.tiles[:, 1:2].long() + torch.arange(work.tokens, device=work.tiles.device)
    mine = (p < work.tiles[:, 1:2] + work.tiles[:, 2:3]) & (p >= 0) & (p < pairs)
    row = torch.where(mine, p, 0)
    row = row if row_of is None else row_of.long()[row]
    known = (mine & (row >= 0) & (row < len(rows.codes)))[..., None]
    row = torch.where(known[..., 0], row, 0)
    made.scale.copy_(torch.where(known, rows.scale.float()[row], 0).mT[:, : made.scale.shape[1]])
    if made.low is not None:
        assert rows.total is not None
        s = rows.total.float()
        if kind == "codes":
            s = s * rows.scale.float().repeat_interleave(per_scale, 1)
        elif kind == "tail":
            sums = rows.codes.unflatten(1, (-1, 16)).sum(-1, dtype=torch.int32).float().unflatten(1, (-1, 8))
            s = torch.cat([s.unflatten(1, (-1, 6)), sums[..., 6:]], -1).flatten(1)
        s = torch.where(known, s[row], 0)
        if kind == "bsums":
            made.low.copy_(s.unflatten(-1, (-1, 16)).transpose(1, 2)[:, : made.low.shape[1]])
        else:
            s = s.mT[:, : made.low[0, :, 0].numel()]
            made.low.copy_(s.unflatten(1, (-1, 4)).mT if made.low.ndim == 4 else s)
    return made


def _empty(rows: MmqRows, w: Weight, work: WorkList) -> tuple[Sides, str, int]:
    """Room for the sides, the kind of sums, and sums a scale."""
    layout, tiles, device = LAYOUTS[rows.layout], len(work.tiles), rows.codes.device
    turns = 2 if w.format in HAS_MINIMA and rows.layout == "ds4" else 1
    both = torch.empty(tiles, -(-w.kd // layout.block), work.tokens, turns, dtype=torch.float32, device=device)
    scale = both[..., 0]
    if w.format not in HAS_MINIMA:
        return Sides(scale, None, False), "none", 0
    assert rows.total is not None
    per_scale = layout.block // layout.sum_group
    if rows.layout == "q8_k":
        low = torch.empty(tiles, w.kd // 256, work.tokens, 16, dtype=torch.float16, device=device)
        return Sides(scale, low, False), "bsums", per_scale
    low = both[..., -1]
    if turns == 1:
        low = torch.empty(tiles, w.kd // 64, work.tokens, 4, dtype=torch.float32, device=device)
    tail = sums_kept(rows) < 8
    kind = "tail" if tail else "codes" if rows.total.dtype == torch.int16 else "raw"
    return Sides(scale, low, tail), kind, per_scale
