"""Down product and weighted sum in one launch: out[t] = sum over k of weight[t, k] * (W[slot[t, k]] @ h[t K + k]).

T tokens, K slots a token, S weight slots of [D, F]. For few tokens whose experts are hardly shared: every token reads
its own K experts (K * D * row_bytes), and the K * D products between never leave registers. A program takes one token
and a tile of weight rows; a few of the token's slots lie side by side on its warps, the rest follow in a loop. Each
product is rounded to the store dtype where `gemv` stores it; the sum goes on as in `combine`: fp32, a product rounded,
then added, in rank order, the shared expert last, one rounding. So the bits are those of `gemv` and `combine`.

Knows nothing about experts or residency. A slot outside 0..S-1 counts as not picked.
"""
# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Float, Float32, Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.blocks import BLOCKS, gemv_alignment, gemv_row_bytes
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.combine import combine_ref
from moe_lab_kernels.decode_ref import matvec_ref
from moe_lab_kernels.gemv import activation_rows, check_rows, walk_of, width_of
from moe_lab_kernels.gemv_body import fold_lanes, lane_sums, let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.lane_rows import LaneRows, Rows, to_plain
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.tiles import COMBINE_FEW, CombineTile

MOST_TILES = 65_535


@jit
def _add_in_order(acc, v, ROWS: tl.constexpr, A: tl.constexpr):
    """acc [ROWS] plus v [ROWS, A], one column after another."""
    if A == 1:
        acc = acc + tl.reshape(v, [ROWS])
    elif A == 2:
        a, b = tl.split(v)
        acc = (acc + a) + b
    elif A == 4:
        even, odd = tl.split(tl.reshape(v, [ROWS, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        acc = (((acc + a) + b) + c) + d
    else:
        tl.static_assert(A == 8)
        even, odd = tl.split(tl.reshape(v, [ROWS, 4, 2]))
        ae, cg = tl.split(tl.reshape(even, [ROWS, 2, 2]))
        bf, dh = tl.split(tl.reshape(odd, [ROWS, 2, 2]))
        a, e = tl.split(ae)
        c, g = tl.split(cg)
        b, f = tl.split(bf)
        d, h = tl.split(dh)
        acc = (((((((acc + a) + b) + c) + d) + e) + f) + g) + h
    return acc


POINTERS = ["codes", "scale", "total", "w", "slots", "weights", "shared", "shared_gate", "out"]
SIZES = ["N", "blocks", "n_slots"]
STRIDES = [f"{n}_stride" for n in ("codes", "scale", "total", "w_slot", "w_row", "slots", "weights", "shared", "gate",
                                   "out")]  # fmt: skip


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_combine(codes, scale, total, w, slots, weights, shared, shared_gate, out, N, blocks, n_slots, codes_stride,
                  scale_stride, total_stride, w_slot_stride, w_row_stride, slots_stride, weights_stride, shared_stride,
                  gate_stride, out_stride, FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr,
                  VALUES: tl.constexpr, ORDERED: tl.constexpr, STORE: tl.constexpr,
                  K: tl.constexpr, TOGETHER: tl.constexpr, SHARED: tl.constexpr, GATED: tl.constexpr,
                  ROWS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program = (token, tile of rows). Axes: weight row; slot, along which warps lie; lane."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)
    t = tl.program_id(0)
    n_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # 32 // LANES rows side by side
    each: tl.constexpr = 32 // LANES
    lane_row = tl.arange(0, ROWS // each)[:, None, None] * each + tl.arange(0, 32)[None, None, :] // LANES
    from_row = offset64(tl.minimum(tl.program_id(1) * ROWS + lane_row, N - 1), w_row_stride)
    acc = tl.zeros((ROWS,), tl.float32)
    # not unrolled: the next slots' loads would be hoisted until registers spill
    for first in range(0, K, TOGETHER):
        k = first + tl.arange(0, TOGETHER)
        slot = tl.load(slots + offset64(t, slots_stride) + k)
        weight = tl.load(weights + offset64(t, weights_stride) + k)
        taken = (slot >= 0) & (slot < n_slots)
        from_slot = offset64(tl.where(taken, slot, 0), w_slot_stride)[None, :, None]
        row = (t * K + k)[None, :, None]
        x, d8 = codes + offset64(row, codes_stride), scale + offset64(row, scale_stride)
        s8, known = total + offset64(row, total_stride), taken[None, :, None]
        sums = lane_sums(w + (from_slot + from_row), x, d8, s8, known, blocks, ROWS // each, TOGETHER, FORMAT, LANES,
                         PER_BLOCK, VALUES, ORDERED, NATIVE)  # fmt: skip
        folded = tl.reshape(fold_lanes(sums, ROWS // each, TOGETHER * each, LANES), [ROWS // each, TOGETHER, each])
        y = to_f32(round_to(tl.reshape(tl.permute(folded, (0, 2, 1)), [ROWS, TOGETHER]), STORE))
        # adding +0 changes nothing: the sum starts at +0 and so is never -0
        acc = _add_in_order(acc, tl.where(taken[None, :], y * weight[None, :], 0.0), ROWS, TOGETHER)
    there = n_row < N
    if SHARED:
        extra = to_f32(tl.load(shared + offset64(t, shared_stride) + n_row, mask=there, other=0))
        if GATED:
            extra = extra * tl.load(shared_gate + offset64(t, gate_stride))
        acc = acc + extra
    tl.store(out + offset64(t, out_stride) + n_row, round_to(acc, out.dtype.element_ty), mask=there)


STORES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def gemv_combine(
    rows: Rows,
    w: UInt8[Tensor, "S D row_bytes"],
    slots: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    format: str,
    shared: Float[Tensor, "T D"] | None = None,
    shared_gate: Float32[Tensor, " T"] | None = None,
    *,
    store: torch.dtype = torch.bfloat16,
    out: Float[Tensor, "T D"] | None = None,
    tile: CombineTile | None = None,
    pdl: bool = False,
) -> Float[Tensor, "T D"]:
    """The weighted sum [T, D] in the store dtype, or in `out`'s (Triton).

    rows: (codes int8 [T K, F], scale fp16 [T K, F / 32], ..), row t K + k of slot k; slots[t, k]: the weight slot of
    pick k. shared, shared_gate: as in `combine`. `store`: the dtype through which each down row passes. `pdl`: as in
    `gemv_gated`. LabError when shapes, strides, devices or the format disagree.
    """
    out = _prepare(rows, w, slots, weights, format, shared, shared_gate, store, out)
    t, k = slots.shape
    (codes, scale, total), strides = activation_rows(rows)
    named = {"codes": codes, "scale": scale, "w": w, "slots": slots, "weights": weights, "out": out}
    on = backend.serve("gemv_combine", **named, shared=shared, shared_gate=shared_gate)
    n, f = w.shape[1], width_of(rows)
    if tile is None:
        tile = CombineTile(min(256, backend.next_power_of_2(n))) if on == "interpreter" else COMBINE_FEW
    (lanes, ordered), together = walk_of("gemv_combine", rows, format, tile.lanes), tile.slots(k)
    height = max(tile.rows, 32 // lanes.row)
    tiles = -(-n // height)
    if k % together or tiles > MOST_TILES:
        raise LabError(f"gemv_combine: D={n} and K={k} cannot be cut by {tile}.")
    extra, gate = (out if shared is None else shared), (weights if shared_gate is None else shared_gate)
    backend.launch(
        _gemv_combine,
        (t, tiles),
        *(codes, scale, total, w, slots, weights, extra, gate, out, n, f // BLOCKS[format].values, len(w)),
        *(*strides, *w.stride()[:2], slots.stride(0), weights.stride(0), extra.stride(0)),
        *(
            gate.stride(0),
            out.stride(0),
            format,
            *lanes,
            BLOCKS[format].values,
            ordered,
            STORES[store],
            k,
            together,
            shared is not None,
        ),
        *(shared_gate is not None, height, backend.has_dp4a(on), pdl and on == "cuda"),
        device=codes.device,
        num_warps=tile.warps or together,
        maxnreg=tile.registers,
        **backend.early_start(pdl, on),
    )
    return out


def gemv_combine_ref(
    rows: Rows,
    w: UInt8[Tensor, "S D row_bytes"],
    slots: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    format: str,
    shared: Float[Tensor, "T D"] | None = None,
    shared_gate: Float32[Tensor, " T"] | None = None,
    *,
    store: torch.dtype = torch.bfloat16,
    out: Float[Tensor, "T D"] | None = None,
    tile: CombineTile | None = None,
    pdl: bool = False,
) -> Float[Tensor, "T D"]:
    """The same in torch, bit for bit; of `tile` only the lanes mean something here. Slow: for tests."""
    out = _prepare(rows, w, slots, weights, format, shared, shared_gate, store, out)
    rows, lanes = to_plain(rows), rows.lanes if isinstance(rows, LaneRows) else tile.lanes if tile else None
    y = torch.zeros(*slots.shape, w.shape[1], dtype=store, device=w.device)
    ids = torch.where((slots >= 0) & (slots < len(w)), slots, -1)
    for slot in ids[ids >= 0].unique().tolist():
        t, k = (ids == slot).nonzero(as_tuple=True)
        at = t * slots.shape[1] + k
        y[t, k] = matvec_ref(w[slot], [r[at] for r in rows], format, lanes).to(store)
    return out.copy_(combine_ref(y, weights, shared, shared_gate, out_dtype=out.dtype, ids=ids))


def _prepare(rows: Rows, w: Tensor, slots: Tensor, weights: Tensor, format: str, shared: Tensor | None,
             shared_gate: Tensor | None, store: torch.dtype, out: Tensor | None) -> Tensor:  # fmt: skip
    """The output, once everything that shapes, dtypes and strides can tell holds."""
    op, codes = "gemv_combine", rows[0]
    expect(op, "slots", slots, [torch.int32], ["T", "K"])
    t, k = slots.shape
    expect(op, "weights", weights, [torch.float32], [t, k])
    check_rows(op, rows, format)
    if len(codes) != t * k:
        raise LabError(f"{op}: rows of {len(codes)} pairs, but slots has T={t} tokens of K={k}.")
    expect(op, "w", w, [torch.uint8], ["S", "D", gemv_row_bytes(format, width_of(rows))])
    if store not in FLOATS:
        raise LabError(f"{op}: store must be float32, float16 or bfloat16, got {store}.")
    if not k or not len(w):
        raise LabError(f"{op}: K={k} slots a token and S={len(w)} weight slots; wanted at least one of each.")
    if shared_gate is not None and shared is None:
        raise LabError(f"{op}: shared_gate was given without shared.")
    if out is None:
        out = torch.empty(t, w.shape[1], dtype=store, device=codes.device)
    expect(op, "out", out, FLOATS, [t, w.shape[1]])
    for name, v, dtypes, shape in (
        ("shared", shared, FLOATS, [t, w.shape[1]]),
        ("shared_gate", shared_gate, [torch.float32], [t]),
    ):
        if v is not None:
            expect(op, name, v, dtypes, shape)
    expect_rows(op, "w", w, gemv_alignment(format))
    for name, v in (("slots", slots), ("weights", weights), ("shared", shared), ("out", out)):
        if v is not None:
            expect_rows(op, name, v)
    if shared_gate is not None:
        expect_contiguous(op, "shared_gate", shared_gate)
    return out
