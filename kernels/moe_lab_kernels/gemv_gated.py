"""Gate, up, gated activation and the next quantisation in one launch: h[p] = act(gate @ x) * (up @ x), as q8_1 rows.

P pairs, S weight slots of [F, D], R quantised activation rows; pairs in chunks of at most 8 that share a slot, as in
`gemv`. A program owns 32 consecutive rows of both weights, one block of the next quantisation, for every pair of its
chunk: reads 64 weight rows and a chunk's activations (from the cache), writes 36 bytes a pair; gate, up and h never
leave registers. They are rounded to the store dtype where the separate launches store them, and what follows starts
from the rounded values, so codes and scales have the bits of `gemv`, `activation`, `quantize_rows` one after another.

Knows nothing about experts or residency. Pairs in no chunk, and chunks that mean nothing, leave h as it was.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moe_lab._types import Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import activation, backend
from moe_lab_kernels.activation import GELU_CUBE, GELU_INNER, OAI_ALPHA, gated_value, limit_of
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.blocks import BLOCKS, gemv_alignment
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv import MAX_CHUNK_ROWS, activation_rows, check_operands, gemv_ref, walk_of, width_of
from moe_lab_kernels.gemv_body import fold_lanes, lane_sums, let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.lane_rows import LaneRows, Rows, lane_index, place_of, to_lanes
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.quantize_rows import q8_1_blocks, quantize_q8_1_ref
from moe_lab_kernels.tiles import GATED_FEW, GATED_MANY, MAX_SHARED, GatedTile

GROUP = 32
_GROUP = tl.constexpr(GROUP)
MOST_TILES = 65_535


class Hidden(NamedTuple):
    """Quantised hidden rows in value order: codes int8 [P, F], scale fp16 and total fp16 [P, F / 32]."""

    codes: Tensor
    scale: Tensor
    total: Tensor


@jit
def _hidden(codes, scale, total, row_of, out_row, gate, up, slot, h, h_scale, h_total, tile, first, n, F, blocks, n_x,
            n_pairs, limit, alpha, codes_stride, scale_stride, total_stride, gate_slot, gate_row, up_slot, up_row,
            h_stride, h_scale_stride, FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
            VALUES: tl.constexpr, ORDERED: tl.constexpr, NEXT: tl.constexpr, NEXT_VALUES: tl.constexpr,
            NEXT_LANES: tl.constexpr, NEXT_PER_BLOCK: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr,
            GELU: tl.constexpr, LIMIT: tl.constexpr, STORE: tl.constexpr, SCATTER: tl.constexpr, R: tl.constexpr,
            GROUPS: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """GROUPS blocks of hidden values of up to R rows of one chunk. Axes: x row; weight row; lane."""
    p = first + tl.arange(0, R)
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = tl.load(row_of + p, mask=mine, other=-1)[:, None, None]
    known = (row >= 0) & (row < n_x)
    # weight rows: 32 of gate, then the same 32 of up, group after group; past F the last row again, not stored
    each: tl.constexpr = 32 // LANES  # rows side by side
    i = tl.arange(0, 2 * GROUPS * _GROUP // each)[None, :, None] * each + tl.arange(0, 32)[None, None, :] // LANES
    f = tl.minimum((tile * GROUPS + i // (2 * _GROUP)) * _GROUP + i % _GROUP, F - 1)
    from_up = (i // _GROUP) % 2 == 1
    own = gate + offset64(slot, gate_slot)
    other = (up + offset64(slot, up_slot)).to(tl.int64) - own.to(tl.int64)
    w = own + tl.where(from_up, other + offset64(f, up_row), offset64(f, gate_row))
    x, d8 = codes + offset64(row, codes_stride), scale + offset64(row, scale_stride)
    s8 = total + offset64(row, total_stride)
    acc = lane_sums(w, x, d8, s8, known, blocks, R, 2 * GROUPS * _GROUP // each, FORMAT, LANES, PER_BLOCK, VALUES,
                    ORDERED, NATIVE)  # fmt: skip
    both = tl.reshape(fold_lanes(acc, R, 2 * GROUPS * _GROUP, LANES), [R * GROUPS, 2, _GROUP])
    g, u = tl.split(tl.permute(both, (0, 2, 1)))
    g, u = to_f32(round_to(g, STORE)), to_f32(round_to(u, STORE))
    v = to_f32(round_to(gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT), STORE))
    code, d, sums = q8_1_blocks(v)
    at = tl.arange(0, R * GROUPS)
    q = first + at // GROUPS
    group = tile * GROUPS + at % GROUPS
    there = (q < first + n) & (q >= 0) & (q < n_pairs) & (group * _GROUP < F)
    to = q
    if SCATTER:
        to = tl.load(out_row + q, mask=there, other=0)
    value = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    if NEXT != "plain":
        value = place_of(value, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK)
    where_codes = h + (offset64(to, h_stride)[:, None] + value)
    tl.store(where_codes, code.to(tl.int8), mask=there[:, None])
    of_block = offset64(to, h_scale_stride) + group
    tl.store(h_scale + of_block, round_to(tl.reshape(d, [R * GROUPS]), tl.float16), mask=there)
    tl.store(h_total + of_block, round_to(tl.reshape(sums, [R * GROUPS]), tl.float16), mask=there)


POINTERS = ["codes", "scale", "total", "row_of", "out_row", "chunks", "gate", "up", "h", "h_scale", "h_total"]
SIZES = ["F", "blocks", "n_slots", "n_x", "n_pairs", "limit", "alpha"]
STRIDES = ["codes_stride", "scale_stride", "total_stride", "gate_slot", "gate_row", "up_slot", "up_row", "h_stride",
           "h_scale_stride"]  # fmt: skip


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_gated(codes, scale, total, row_of, out_row, chunks, gate, up, h, h_scale, h_total, F, blocks, n_slots, n_x,
                n_pairs, limit, alpha, codes_stride, scale_stride, total_stride, gate_slot, gate_row, up_slot, up_row,
                h_stride, h_scale_stride, FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
                VALUES: tl.constexpr, ORDERED: tl.constexpr, NEXT: tl.constexpr, NEXT_VALUES: tl.constexpr,
                NEXT_LANES: tl.constexpr, NEXT_PER_BLOCK: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr,
                GELU: tl.constexpr, LIMIT: tl.constexpr, STORE: tl.constexpr, SCATTER: tl.constexpr,
                SHARED: tl.constexpr, GROUPS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program = (chunk, GROUPS groups of 32 hidden values)."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)
    chunk, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if (slot < 0) | (slot >= n_slots):
        n = 0
    for done in range(0, n, SHARED):
        left = tl.minimum(n - done, SHARED)
        for size in tl.static_range(3):  # the smallest program of 1, 2 or 4 rows that holds what is left
            if (1 << size) <= SHARED:  # noqa: SIM102 (decided when compiling, the inner test when running)
                if (left > (1 << size) // 2) & (left <= (1 << size)):
                    _hidden(codes, scale, total, row_of, out_row, gate, up, slot, h, h_scale, h_total, tile,
                            first + done, left, F, blocks, n_x, n_pairs, limit, alpha, codes_stride, scale_stride,
                            total_stride, gate_slot, gate_row, up_slot, up_row, h_stride, h_scale_stride, FORMAT,
                            LANES, PER_BLOCK, VALUES, ORDERED, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK, INNER,
                            CUBE, GELU, LIMIT, STORE, SCATTER, 1 << size, GROUPS, NATIVE)  # fmt: skip


STORES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def gemv_gated(
    rows: Rows,
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S F row_bytes"],
    up: UInt8[Tensor, "S F row_bytes"],
    chunks: Int32[Tensor, "C 3"],
    format: str,
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    out: Hidden | LaneRows | None = None,
    out_row: Int32[Tensor, " P"] | None = None,
    max_rows: int = MAX_CHUNK_ROWS,
    tile: GatedTile | None = None,
    pdl: bool = False,
) -> Hidden | LaneRows:
    """q8_1 rows of h [P, F] for every pair of every chunk (Triton); rows of pairs in no chunk stay as `out` had them.

    rows, row_of, chunks, out_row, max_rows: as in `gemv`. gelu, limit, limit_mode, alpha: as in `activation`. `store`:
    the dtype through which gate, up and h pass. `out`: LaneRows (`lane_rows.lane_rows`) get h in the order in which the
    down product reads it; value order otherwise. `pdl`: start while the kernel before still runs (needs compute
    capability 9.0). LabError when F is no multiple of 32, or shapes, strides, devices or the format disagree.
    """
    out, mode = _prepare(rows, row_of, gate, up, chunks, format, gelu, limit, limit_mode, store, out, out_row, max_rows)
    (codes, scale, total), strides = activation_rows(rows)
    named = {"codes": codes, "scale": scale, "row_of": row_of, "gate": gate, "up": up, "chunks": chunks}
    on = backend.serve("gemv_gated", **named, out_row=out_row, out_codes=out.codes)
    f, kd = gate.shape[1], width_of(rows)
    groups = f // GROUP
    if tile is None:
        tile = GATED_FEW if max_rows == 1 else GATED_MANY
        if on == "interpreter":
            tile = GatedTile(groups=min(8, backend.next_power_of_2(groups)))
    tiles = -(-groups // tile.groups)
    if tiles > MOST_TILES:
        raise LabError(f"gemv_gated: F={f} in groups of {GROUP * tile.groups} passes the grid's {MOST_TILES}.")
    scatter, next_walk = out_row is not None, ("plain", 32, 32, 1)
    if isinstance(out, LaneRows):
        next_walk = (out.format, BLOCKS[out.format].values, *out.lanes)
    lanes, ordered = walk_of("gemv_gated", rows, format, tile.lanes)
    backend.launch(
        _gemv_gated,
        (len(chunks), tiles),
        *(codes, scale, total, row_of, out_row if scatter else row_of, chunks, gate, up, *out[:3]),
        *(f, kd // BLOCKS[format].values, len(gate), len(codes), len(row_of)),
        *(0.0 if limit is None else float(limit), float(alpha), *strides),
        *(*gate.stride()[:2], *up.stride()[:2], out.codes.stride(0), out.scale.stride(0), format),
        *(
            *lanes,
            BLOCKS[format].values,
            ordered,
            *next_walk,
            GELU_INNER,
            GELU_CUBE,
            gelu,
            mode,
            STORES[store],
            scatter,
        ),
        *(min(max_rows, tile.shared, MAX_SHARED), tile.groups, backend.has_dp4a(on), pdl and on == "cuda"),
        device=codes.device,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        **backend.early_start(pdl, on),
    )
    return out


def gemv_gated_ref(
    rows: Rows,
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S F row_bytes"],
    up: UInt8[Tensor, "S F row_bytes"],
    chunks: Int32[Tensor, "C 3"],
    format: str,
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    out: Hidden | LaneRows | None = None,
    out_row: Int32[Tensor, " P"] | None = None,
    max_rows: int = MAX_CHUNK_ROWS,
    tile: GatedTile | None = None,
    pdl: bool = False,
) -> Hidden | LaneRows:
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    out, _ = _prepare(rows, row_of, gate, up, chunks, format, gelu, limit, limit_mode, store, out, out_row, max_rows)
    nan = torch.full((len(row_of), gate.shape[1]), float("nan"), dtype=store, device=out.codes.device)
    g, u = nan, nan.clone()
    gemv_ref(rows, row_of, gate, chunks, format, g, w2=up, out2=u, max_rows=max_rows)
    if gelu:
        h = activation.geglu_ref(g, u, limit=limit, limit_mode=limit_mode)
    else:
        h = activation.swiglu_ref(g, u, limit=limit, limit_mode=limit_mode, alpha=alpha)
    written = torch.zeros(len(row_of), dtype=torch.bool, device=h.device)
    for slot, first, n in chunks.tolist():
        if 0 <= slot < len(gate):
            written[max(first, 0) : max(first + n, 0)] = True
    to = torch.arange(len(row_of), device=h.device) if out_row is None else out_row.long()
    hidden = quantize_q8_1_ref(h)
    if isinstance(out, LaneRows):
        hidden = to_lanes(hidden, out.format, out.lanes)[:3]
    for made, kept in zip(hidden, out[:3], strict=True):
        kept[to[written]] = made[written]
    return out


def _prepare(rows: Rows, row_of: Tensor, gate: Tensor, up: Tensor, chunks: Tensor, format: str, gelu: bool,
             limit: float | None, limit_mode: str, store: torch.dtype, out: Hidden | LaneRows | None,
             out_row: Tensor | None, max_rows: int) -> tuple[Hidden | LaneRows, str]:  # fmt: skip
    """The output and the kernels' LIMIT, once everything that shapes, dtypes and strides can tell holds."""
    op = "gemv_gated"
    check_operands(op, rows, row_of, gate, chunks, format, out_row, max_rows, "gate")
    f = gate.shape[1]
    if f % GROUP or not f:
        raise LabError(f"{op}: F must be a positive multiple of {GROUP}, got gate of shape {list(gate.shape)}.")
    expect(op, "up", up, [torch.uint8], gate.shape)
    expect_rows(op, "up", up, gemv_alignment(format))
    if store not in FLOATS:
        raise LabError(f"{op}: store must be float32, float16 or bfloat16, got {store}.")
    mode = limit_of(op, limit, limit_mode, gelu=gelu)
    device, p = row_of.device, len(row_of)
    if out is None:
        halves = (torch.empty(p, f // GROUP, dtype=torch.float16, device=device) for _ in range(2))
        return Hidden(torch.empty(p, f, dtype=torch.int8, device=device), *halves), mode
    many = "P" if out_row is not None else p
    padded = len(lane_index(out.format, f, out.lanes)) if isinstance(out, LaneRows) else f
    expect(op, "out.codes", out.codes, [torch.int8], [many, padded])
    for name, t in (("out.scale", out.scale), ("out.total", out.total)):
        expect(op, name, t, [torch.float16], [len(out.codes), f // GROUP])
        expect_contiguous(op, name, t)
    expect_rows(op, "out.codes", out.codes)
    return out, mode
