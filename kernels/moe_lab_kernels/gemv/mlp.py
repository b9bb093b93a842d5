"""Gated experts of a decode step in two launches: y[p] = down @ (act(gate @ x[row of p]) * (up @ x[row of p])).

P pairs of R rows of x, in chunks of at most 8 that share a weight slot, as in `gemv`; gate and up [S, F, D], down
[S, D, F]. Reads the weights of the chunks' slots once; x, hidden rows and sums between stay in the cache.

The first launch quantises x and clears counters. The second holds the programs of `gemv` for gate and up, then those
for down, in one grid, and no program waits for a kernel to end:
    gate, up   a program stores its products in scratch and counts itself in at its block of 32 hidden values. The last
               of a block activates and quantises it for every row of the chunk, and counts the block in at the chunk.
    down       a program waits until all hidden blocks of its chunk are there, then multiplies.
Integers alone are counted; every sum is added in the order of the launches one by one, so the bits are those of
`quantize_lanes`, `gemv`, `activation`, `quantize_lanes`, `gemv`.

Programs that wait come last in the grid. A GPU starts programs in the order of their index, so when one waits, those
it waits for have started, and they wait for nothing: the kernel ends whatever else runs beside it.

Knows nothing about experts, routing or residency. A chunk without rows, or with a slot outside 0..S-1, writes nothing;
nor does a call without rows of x.
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any

import torch

from moe_lab._types import Float, Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows, signature
from moe_lab_kernels.gemv.body import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.gemv.decode_ref import lanes_of
from moe_lab_kernels.gemv.gemv import MAX_CHUNK_ROWS, chunk_tile, gemv_ref
from moe_lab_kernels.gemv.lane_rows import Empty, fresh, lane_rows, place_of, quantize_lanes, quantize_lanes_ref
from moe_lab_kernels.gemv.tiles import TILE_INTERPRETER, Tile, down_tile_for, tile_for
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, OAI_ALPHA, gated_value, limit_of
from moe_lab_kernels.rows.quantize_rows import q8_1_blocks
from moe_lab_kernels.slots.pointer_table import PointerTable, Weights, as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.blocks import BLOCKS, gemv_alignment, gemv_row_bytes

GROUP = 32
HIDDEN_ROWS = 2  # of a chunk that are activated at once: one kernel for chunks of up to 2, 4 and 8
_GROUP = tl.constexpr(GROUP)


@jit
def acquire(count, whole):
    """Read nothing from here on that is older than what the `whole` programs counted in had written. The condition is
    met: it keeps the compiler from dropping a look whose result nobody uses (then stale lines of the L1 cache gave
    wrong sums on an H200)."""
    while tl.atomic_add(count, 0, sem="acquire", scope="gpu") < whole:
        pass


@jit
def _hide(gates, ups, h, h_scale, h_total, block, first, n, F, n_pairs, limit, alpha, h_stride, NEXT: tl.constexpr,
          NEXT_VALUES: tl.constexpr, NEXT_LANES: tl.constexpr, NEXT_PER_BLOCK: tl.constexpr, INNER: tl.constexpr,
          CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, R: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """G groups of 32 hidden values of a chunk's n rows, from gate's and up's products, quantised."""
    i = tl.arange(0, R * G)
    group, groups = block * G + i % G, F // _GROUP
    value = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    place = place_of(value, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK)
    for done in range(0, n, R):
        p = first + done + i // G
        mine = (p < first + n) & (p >= 0) & (p < n_pairs) & (group < groups)
        at = offset64(p, F)[:, None] + value
        g = to_f32(tl.load(gates + at, mask=mine[:, None], other=0))
        u = to_f32(tl.load(ups + at, mask=mine[:, None], other=0))
        made = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
        code, d, total = q8_1_blocks(to_f32(round_to(made, gates.dtype.element_ty)))
        tl.store(h + (offset64(p, h_stride)[:, None] + place), code.to(tl.int8), mask=mine[:, None])
        of_block = offset64(p, groups) + group
        tl.store(h_scale + of_block, round_to(tl.reshape(d, [R * G]), tl.float16), mask=mine)
        tl.store(h_total + of_block, round_to(tl.reshape(total, [R * G]), tl.float16), mask=mine)


POINTERS = ["codes", "scale", "total", "row_of", "out_row", "chunks", "gate", "up", "down", "gates", "ups", "h",
            "h_scale", "h_total", "y", "counts"]  # fmt: skip
SIZES = ["F", "D", "x_blocks", "h_blocks", "n_chunks", "n_slots", "n_x", "n_pairs", "limit", "alpha"]
STRIDES = ["codes_stride", "scale_stride", "gate_slot", "gate_row", "up_slot", "up_row", "down_slot", "down_row",
           "h_stride", "y_stride"]  # fmt: skip


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_mlp(codes, scale, total, row_of, out_row, chunks, gate, up, down, gates, ups, h, h_scale, h_total, y,
              counts, F, D, x_blocks, h_blocks, n_chunks, n_slots, n_x, n_pairs, limit, alpha, codes_stride,
              scale_stride, gate_slot, gate_row, up_slot, up_row, down_slot, down_row, h_stride, y_stride,
              FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr, VALUES: tl.constexpr,
              NEXT: tl.constexpr, NEXT_LANES: tl.constexpr, NEXT_PER_BLOCK: tl.constexpr, NEXT_VALUES: tl.constexpr,
              INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
              SHARED: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, SUMS: tl.constexpr,
              DOWN_SHARED: tl.constexpr, DOWN_ROWS: tl.constexpr, DOWN_SUMS: tl.constexpr, TABLE: tl.constexpr,
              NATIVE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Programs: (chunk, tile of F, gate or up), then (chunk, tile of D). counts: hidden blocks of chunks, chunks [C].
    TABLE: weights are the addresses of their slots."""
    # hidden values that are activated together
    BLOCK: tl.constexpr = max(ROWS, 32)  # pyright: ignore[reportAssignmentType]
    blocks, tiles, down_tiles = tl.cdiv(F, BLOCK), tl.cdiv(F, ROWS), tl.cdiv(D, DOWN_ROWS)
    pid = tl.program_id(0)
    is_down = pid >= n_chunks * tiles * 2
    if is_down:
        pid -= n_chunks * tiles * 2
        chunk, tile = pid // down_tiles, pid % down_tiles
    else:
        chunk, tile = pid // (2 * tiles), pid % (2 * tiles)
    slot = tl.load(chunks + 3 * chunk)
    first, n = tl.load(chunks + 3 * chunk + 1), tl.load(chunks + 3 * chunk + 2)
    if (slot < 0) | (slot >= n_slots):
        n = 0
    ready = counts + n_chunks * blocks + chunk
    if n > 0:
        if is_down:
            w = slot_base(down, slot, down_slot, TABLE)
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            # a look that acquires empties the L1 cache under every program of the multiprocessor: only the last does
            while tl.load(ready, volatile=True) < blocks:
                pass
            acquire(ready, blocks)
            chunk_tile(h, h_scale, h_total, row_of, out_row, w, y, tile, first, n, D, h_blocks, n_pairs, n_pairs,
                       h_stride, F // _GROUP, F // _GROUP, down_row, y_stride, NEXT, NEXT_LANES, NEXT_PER_BLOCK,
                       NEXT_VALUES, 1, False, True, DOWN_SHARED, DOWN_ROWS, DOWN_SUMS, NATIVE)  # fmt: skip
        else:
            w, to, row_stride = slot_base(gate, slot, gate_slot, TABLE), gates, gate_row
            if tile % 2 == 1:
                w, to, row_stride = slot_base(up, slot, up_slot, TABLE), ups, up_row
            tile = tile // 2
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            chunk_tile(codes, scale, total, row_of, out_row, w, to, tile, first, n, F, x_blocks, n_x, n_pairs,
                       codes_stride, scale_stride, scale_stride, row_stride, F, FORMAT, LANES, PER_BLOCK, VALUES, 1,
                       True, False, SHARED, ROWS, SUMS, NATIVE)  # fmt: skip
            block = tile * ROWS // BLOCK
            # programs of a block: fewer in the last one of an F that fills none
            whole = 2 * tl.minimum(BLOCK // ROWS, tiles - block * (BLOCK // ROWS))
            count = counts + chunk * blocks + block
            tl.debug_barrier()
            if tl.atomic_add(count, 1, sem="release", scope="gpu") == whole - 1:
                acquire(count, whole)
                _hide(gates, ups, h, h_scale, h_total, block, first, n, F, n_pairs, limit, alpha, h_stride, NEXT,
                      NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK, INNER, CUBE, GELU, LIMIT, R, BLOCK // 32)  # fmt: skip
                tl.debug_barrier()
                tl.atomic_add(ready, 1, sem="release", scope="gpu")
    else:
        wait_for_the_kernel_before(PDL)  # else this kernel could end first, and who waits for it alone be too early


_RIGHT: dict[tuple[Any, ...], tuple[int, int, int]] = {}
MOST_REMEMBERED = 1024


def gemv_mlp(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S F row_bytes"] | PointerTable,
    up: UInt8[Tensor, "S F row_bytes"] | PointerTable,
    down: UInt8[Tensor, "S D down_bytes"] | PointerTable,
    chunks: Int32[Tensor, "C 3"],
    format: str,
    down_format: str,
    y: Float[Tensor, "Y D"],
    out_row: Int32[Tensor, " P"],
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    max_rows: int = MAX_CHUNK_ROWS,
    tile: Tile | None = None,
    down_tile: Tile | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """Write y[out_row[p]], the down row of every pair of every chunk (Triton).

    format: of gate and up; down_format: of down. row_of, chunks, max_rows: as in `gemv`. gelu, limit, limit_mode,
    alpha: as in `activation`. `store`: the dtype through which gate, up and h pass; down rows pass through y's.
    `pdl`: start while the kernel before still runs, where the GPU can. `empty` gives scratch (x.*, h.*, gate, up,
    counts). Returns y. LabError when shapes, strides, devices or formats disagree.
    """
    op = "gemv_mlp"
    mode = limit_of(op, limit, limit_mode, gelu=gelu)
    given = (x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    asked = tuple(v if isinstance(v, str | torch.dtype) else signature(v) for v in given)
    if asked not in _RIGHT:  # a decode step asks the same again and again: the checks took 0.1 ms of the host's time
        if len(_RIGHT) >= MOST_REMEMBERED:
            _RIGHT.clear()
        _RIGHT[asked] = _check(op, *given)
    p, f, d = _RIGHT[asked]
    named = {"x": x, "row_of": row_of, "gate": operand(gate), "up": operand(up), "down": operand(down)}
    on = backend.serve(op, **named, chunks=chunks, y=y, out_row=out_row)
    pdl = pdl and backend.has_early_start(x.device)
    tile = tile or (TILE_INTERPRETER if on == "interpreter" else tile_for(format, max_rows))
    down_tile = down_tile or (
        TILE_INTERPRETER if on == "interpreter" else down_tile_for(down_format, max_rows, len(chunks), d)
    )
    if tile.warps != down_tile.warps:
        raise LabError(f"{op}: one launch has one number of warps, got {tile} and {down_tile}.")
    # at least the weight rows that lie side by side on a warp
    rows, down_rows = (
        max(t.rows, 32 // lanes_of(fmt, kd).row) for t, fmt, kd in ((tile, format, d), (down_tile, down_format, f))
    )
    c = len(chunks)
    programs = c * (2 * -(-f // rows) - (-d // down_rows))
    if programs >= 1 << 31:
        raise LabError(f"{op}: C={c} chunks make {programs} programs, past the grid's 2^31 - 1; take them in parts.")
    if not c or not len(x):
        return y
    device = x.device
    counts = empty("counts", (c * (1 - (-f // max(rows, GROUP))),), torch.int32, device)
    room = lane_rows(op, x.shape, format, None, device, empty, "x")
    xq = quantize_lanes(x, format, out=room, clear=counts, pdl=pdl)
    gates, ups = (empty(name, (p, f), store, device) for name in ("gate", "up"))
    h = lane_rows(op, (p, f), down_format, None, device, empty, "h")
    b, nb = BLOCKS[format], BLOCKS[down_format]
    strides = [step for w in (gate, up, down) for step in as_tensor(w).stride()[:2]]
    backend.launch(
        _gemv_mlp,
        (programs,),
        *(*xq[:3], row_of, out_row, chunks, *map(operand, (gate, up, down)), gates, ups, *h[:3], y, counts),
        *(f, d, d // b.values, f // nb.values, c, len(gate), len(x), p, 0.0 if limit is None else limit, alpha),
        *(xq.codes.stride(0), xq.scale.stride(0), *strides),
        *(h.codes.stride(0), y.stride(0)),
        *(format, *xq.lanes, b.values, down_format, *h.lanes, nb.values),
        *(GELU_INNER, GELU_CUBE, gelu, mode, min(max_rows, tile.shared), min(max_rows, HIDDEN_ROWS), rows, tile.sums),
        *(min(max_rows, down_tile.shared), down_rows, down_tile.sums, is_pointers(gate)),
        *(backend.has_dp4a(on), pdl and on == "cuda"),
        device=device,
        num_warps=tile.warps,
        maxnreg=max(tile.registers or 255, down_tile.registers or 255) if on == "cuda" else None,
        **backend.early_start(pdl, on),
    )
    return y


def gemv_mlp_ref(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S F row_bytes"] | PointerTable,
    up: UInt8[Tensor, "S F row_bytes"] | PointerTable,
    down: UInt8[Tensor, "S D down_bytes"] | PointerTable,
    chunks: Int32[Tensor, "C 3"],
    format: str,
    down_format: str,
    y: Float[Tensor, "Y D"],
    out_row: Int32[Tensor, " P"],
    *,
    gelu: bool = False,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
    store: torch.dtype = torch.bfloat16,
    max_rows: int = MAX_CHUNK_ROWS,
    tile: Tile | None = None,
    down_tile: Tile | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    op = "gemv_mlp"
    limit_of(op, limit, limit_mode, gelu=gelu)
    p, f, _ = _check(op, x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    g = torch.zeros(p, f, dtype=store, device=x.device)
    u, own = g.clone(), torch.arange(p, dtype=torch.int32, device=x.device)
    gemv_ref(quantize_lanes_ref(x, format), row_of, gate, chunks, format, g, w2=up, out2=u, max_rows=max_rows)
    if gelu:
        h = activation.geglu_ref(g, u, limit=limit, limit_mode=limit_mode)
    else:
        h = activation.swiglu_ref(g, u, limit=limit, limit_mode=limit_mode, alpha=alpha)
    hidden = quantize_lanes_ref(h, down_format)
    return gemv_ref(hidden, own, down, chunks, down_format, y, out_row=out_row, max_rows=max_rows)


def _check(op: str, x: Tensor, row_of: Tensor, gate: Weights, up: Weights, down: Weights, chunks: Tensor, format: str,
           down_format: str, y: Tensor, out_row: Tensor, store: torch.dtype) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything that shapes, dtypes and strides can tell holds."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    expect(op, "row_of", row_of, [torch.int32], ["P"])
    expect(op, "out_row", out_row, [torch.int32], [len(row_of)])
    expect(op, "chunks", chunks, [torch.int32], ["C", 3])
    d = x.shape[1]
    expect(op, "gate", as_tensor(gate), [torch.uint8], ["S", "F", gemv_row_bytes(format, d)])
    f = gate.shape[1]
    expect(op, "up", as_tensor(up), [torch.uint8], gate.shape)
    expect(op, "down", as_tensor(down), [torch.uint8], [len(gate), d, gemv_row_bytes(down_format, f)])
    expect(op, "y", y, FLOATS, ["Y", d])
    if store not in FLOATS:
        raise LabError(f"{op}: store must be float32, float16 or bfloat16, got {store}.")
    if len({is_pointers(w) for w in (gate, up, down)}) > 1:
        raise LabError(f"{op}: gate, up and down are all tensors or all tables of addresses, got some of each.")
    for name, w, fmt in (("gate", gate, format), ("up", up, format), ("down", down, down_format)):
        expect_rows(op, name, as_tensor(w), gemv_alignment(fmt))
    for name, t in (("row_of", row_of), ("out_row", out_row), ("chunks", chunks)):
        expect_contiguous(op, name, t)
    expect_rows(op, "y", y)
    return len(row_of), f, d
