"""`mlp` on weights in tiles: y[p] = down @ (act(gate @ x[row of p]) * (up @ x[row of p])), in two launches.

As `mlp` has it (one grid of programs for gate and up, whose last ones of 32 hidden values activate and quantise them,
then programs for down that wait), with the products of `tiled`. The bits are those of `quantize_sums`, `gemv_tiled`,
`activation`, `quantize_sums`, `gemv_tiled` one by one.

P pairs of R rows of x, in chunks of at most 8 that share a weight slot; gate and up: tiles of [F, D], down: of [D, F].
A chunk without rows, or with a slot outside 0..S-1, writes nothing; nor does a call without rows of x.
"""
# pyright: reportGeneralTypeIssues=false

import torch

from moe_lab._types import Float, Int32, Tensor, UInt8
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.gemv.body import let_the_next_kernel_start, wait_for_the_kernel_before
from moe_lab_kernels.gemv.lane_rows import Empty, fresh
from moe_lab_kernels.gemv.mlp import acquire
from moe_lab_kernels.gemv.sum_rows import quantize_sums, quantize_sums_ref, sum_rows, sums_by_16
from moe_lab_kernels.gemv.tiled import MAX_CHUNK_ROWS, check_tiles, gemv_tiled_ref, step_bytes
from moe_lab_kernels.gemv.tiled_body import tile_chunk
from moe_lab_kernels.gemv.tiled_ref import parts_of
from moe_lab_kernels.gemv.tiles import TileCut, cut_for
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER, OAI_ALPHA, gated_value, limit_of
from moe_lab_kernels.rows.quantize_rows import q8_1_blocks
from moe_lab_kernels.slots.pointer_table import PointerTable, as_tensor, is_pointers, operand, slot_base
from moe_lab_kernels.storage.row_tiles import ROWS, steps_of

GROUP = 32
HIDDEN_ROWS = 2  # of a chunk that are activated at once: one size, one kernel
_GROUP = tl.constexpr(GROUP)


@jit
def _hide(gates, ups, h, h_scale, h_total, h_sums, block, first, n, F, n_pairs, limit, alpha, INNER: tl.constexpr,
          CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, R: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """G groups of 32 hidden values of a chunk's n rows, from gate's and up's products, quantised."""
    i = tl.arange(0, R * G)
    group, groups = block * G + i % G, F // _GROUP
    value = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    for done in range(0, n, R):
        p = first + done + i // G
        mine = (p < first + n) & (p >= 0) & (p < n_pairs) & (group < groups)
        at = offset64(p, F)[:, None] + value
        g = to_f32(tl.load(gates + at, mask=mine[:, None], other=0))
        u = to_f32(tl.load(ups + at, mask=mine[:, None], other=0))
        made = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
        code, d, total = q8_1_blocks(to_f32(round_to(made, gates.dtype.element_ty)))
        code = code.to(tl.int32)
        tl.store(h + at, code.to(tl.int8), mask=mine[:, None])
        of_block = offset64(p, groups) + group
        tl.store(h_scale + of_block, round_to(tl.reshape(d, [R * G]), tl.float16), mask=mine)
        tl.store(h_total + of_block, round_to(tl.reshape(total, [R * G]), tl.float16), mask=mine)
        tl.store(h_sums + of_block, sums_by_16(code), mask=mine)


POINTERS = ["codes", "scale", "sums", "total", "row_of", "out_row", "chunks", "gate", "up", "down", "gates", "ups", "h",
            "h_scale", "h_total", "h_sums", "y", "counts"]  # fmt: skip
SIZES = ["F", "D", "x_steps", "h_steps", "n_chunks", "n_slots", "n_x", "n_pairs", "limit", "alpha"]
STRIDES = ["codes_stride", "scale_stride", "gate_slot", "up_slot", "down_slot", "y_stride"]


@jit(do_not_specialize=SIZES + STRIDES, do_not_specialize_on_alignment=POINTERS)
def _gemv_tiled_mlp(codes, scale, sums, total, row_of, out_row, chunks, gate, up, down, gates, ups, h, h_scale, h_total,
                    h_sums, y, counts, F, D, x_steps, h_steps, n_chunks, n_slots, n_x, n_pairs, limit, alpha,
                    codes_stride, scale_stride, gate_slot, up_slot, down_slot, y_stride, FORMAT: tl.constexpr,
                    STEP_BYTES: tl.constexpr, P: tl.constexpr, NEXT: tl.constexpr, NEXT_BYTES: tl.constexpr,
                    NEXT_P: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr,
                    LIMIT: tl.constexpr, SHARED: tl.constexpr, R: tl.constexpr, B: tl.constexpr, NEXT_B: tl.constexpr,
                    TABLE: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Programs: (chunk, B tiles of F, gate or up), then (chunk, NEXT_B tiles of D). counts: hidden blocks of chunks,
    chunks [C]. TABLE: weights are the addresses of their slots."""
    # hidden values that are activated together, and the programs that give them
    BLOCK: tl.constexpr = max(16 * B, 32)  # pyright: ignore[reportAssignmentType]
    blocks, tiles, down_tiles = tl.cdiv(F, BLOCK), tl.cdiv(F, 16 * B), tl.cdiv(D, 16 * NEXT_B)
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
            tile_chunk(h, h_scale, h_sums, h_total, row_of, out_row, w, y, tile, first, n, D, h_steps, F // _GROUP,
                       n_pairs, n_pairs, F, F // _GROUP, y_stride, NEXT, NEXT_BYTES, NEXT_P, False, True, SHARED,
                       NEXT_B, NATIVE)  # fmt: skip
        else:
            w, to = slot_base(gate, slot, gate_slot, TABLE), gates
            if tile % 2 == 1:
                w, to = slot_base(up, slot, up_slot, TABLE), ups
            tile = tile // 2
            wait_for_the_kernel_before(PDL)
            let_the_next_kernel_start(PDL)
            tile_chunk(codes, scale, sums, total, row_of, out_row, w, to, tile, first, n, F, x_steps, D // _GROUP, n_x,
                       n_pairs, codes_stride, scale_stride, F, FORMAT, STEP_BYTES, P, True, False, SHARED, B,
                       NATIVE)  # fmt: skip
            block = tile * 16 * B // BLOCK
            # programs of a block: fewer in the last one of an F that fills none
            whole = 2 * tl.minimum(BLOCK // (16 * B), tiles - block * (BLOCK // (16 * B)))
            count = counts + chunk * blocks + block
            tl.debug_barrier()
            if tl.atomic_add(count, 1, sem="release", scope="gpu") == whole - 1:
                acquire(count, whole)
                _hide(gates, ups, h, h_scale, h_total, h_sums, block, first, n, F, n_pairs, limit, alpha, INNER, CUBE,
                      GELU, LIMIT, R, BLOCK // 32)  # fmt: skip
                tl.debug_barrier()
                tl.atomic_add(ready, 1, sem="release", scope="gpu")
    else:
        wait_for_the_kernel_before(PDL)  # else this kernel could end first, and who waits for it alone be too early


def gemv_tiled_mlp(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    up: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    down: UInt8[Tensor, "S tiles_d bytes_f"] | PointerTable,
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
    cut: TileCut | None = None,
    down_tiles: int | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """Write y[out_row[p]], the down row of every pair of every chunk (Triton).

    Arguments as in `gemv_mlp`; `cut`: of gate's and up's programs, of which down's differ in their `down_tiles`.
    Returns y. LabError when shapes, strides, devices or formats disagree.
    """
    op = "gemv_tiled_mlp"
    mode = limit_of(op, limit, limit_mode, gelu=gelu)
    p, f, d = _check(op, x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    named = {"x": x, "row_of": row_of, "gate": operand(gate), "up": operand(up), "down": operand(down)}
    on = backend.serve(op, **named, chunks=chunks, y=y, out_row=out_row)
    pdl = pdl and backend.has_early_start(x.device)
    parts, down_parts = parts_of(format, d), parts_of(down_format, f)
    cut = cut or cut_for(on, format, max_rows, parts, f)
    down_tiles = down_tiles or cut_for(on, down_format, max_rows, down_parts, d).tiles
    rows, c, device = ROWS * cut.tiles, len(chunks), x.device
    programs = c * (2 * -(-f // rows) - (-d // (ROWS * down_tiles)))
    if programs >= 1 << 31:
        raise LabError(f"{op}: C={c} chunks make {programs} programs, past the grid's 2^31 - 1; take them in parts.")
    if not c or not len(x):
        return y
    counts = empty("counts", (c * (1 - (-f // max(rows, GROUP))),), torch.int32, device)
    xq = quantize_sums(x, out=sum_rows(x.shape, device, empty, "x"), clear=counts, pdl=pdl)
    gates, ups = (empty(name, (p, f), store, device) for name in ("gate", "up"))
    h = sum_rows((p, f), device, empty, "h")
    backend.launch(
        _gemv_tiled_mlp,
        (programs,),
        *(xq.codes, xq.scale, xq.sums, xq.total, row_of, out_row, chunks, *map(operand, (gate, up, down)), gates, ups),
        *(h.codes, h.scale, h.total, h.sums, y, counts, f, d, steps_of(format, d), steps_of(down_format, f), c),
        *(len(gate), len(x), p, 0.0 if limit is None else limit, alpha, xq.codes.stride(0), xq.scale.stride(0)),
        *(as_tensor(gate).stride(0), as_tensor(up).stride(0), as_tensor(down).stride(0), y.stride(0)),
        *(format, step_bytes(format), parts, down_format, step_bytes(down_format), down_parts),
        *(GELU_INNER, GELU_CUBE, gelu, mode, min(max_rows, cut.shared), HIDDEN_ROWS),
        *(cut.tiles, down_tiles, is_pointers(gate), backend.has_dp4a(on), pdl and on == "cuda"),
        device=device,
        num_warps=cut.warps,
        maxnreg=cut.registers if on == "cuda" else None,
        **backend.early_start(pdl, on),
    )
    return y


def gemv_tiled_mlp_ref(
    x: Float[Tensor, "R D"],
    row_of: Int32[Tensor, " P"],
    gate: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    up: UInt8[Tensor, "S tiles_f bytes_d"] | PointerTable,
    down: UInt8[Tensor, "S tiles_d bytes_f"] | PointerTable,
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
    cut: TileCut | None = None,
    down_tiles: int | None = None,
    pdl: bool = True,
    empty: Empty = fresh,
) -> Tensor:
    """The same in torch; like `activation`'s, it meets the kernel within fp32's `exp`, not bit for bit."""
    op = "gemv_tiled_mlp"
    limit_of(op, limit, limit_mode, gelu=gelu)
    p, f, _ = _check(op, x, row_of, gate, up, down, chunks, format, down_format, y, out_row, store)
    g = torch.zeros(p, f, dtype=store, device=x.device)
    u, own = g.clone(), torch.arange(p, dtype=torch.int32, device=x.device)
    gemv_tiled_ref(quantize_sums_ref(x), row_of, gate, chunks, format, g, w2=up, out2=u, max_rows=max_rows)
    if gelu:
        h = activation.geglu_ref(g, u, limit=limit, limit_mode=limit_mode)
    else:
        h = activation.swiglu_ref(g, u, limit=limit, limit_mode=limit_mode, alpha=alpha)
    return gemv_tiled_ref(quantize_sums_ref(h), own, down, chunks, down_format, y, out_row=out_row, max_rows=max_rows)


def _check(op: str, x: Tensor, row_of: Tensor, gate: Tensor | PointerTable, up: Tensor | PointerTable,
           down: Tensor | PointerTable, chunks: Tensor, format: str, down_format: str, y: Tensor, out_row: Tensor,
           store: torch.dtype) -> tuple[int, int, int]:  # fmt: skip
    """P, F, D, once everything that shapes, dtypes and strides can tell holds."""
    expect(op, "x", x, FLOATS, ["R", "D"])
    expect(op, "row_of", row_of, [torch.int32], ["P"])
    expect(op, "out_row", out_row, [torch.int32], [len(row_of)])
    expect(op, "chunks", chunks, [torch.int32], ["C", 3])
    d, f = x.shape[1], ROWS * gate.shape[1]
    if len({is_pointers(w) for w in (gate, up, down)}) > 1:
        raise LabError(f"{op}: gate, up and down are all tensors or all tables of addresses, got some of each.")
    for name, w, fmt, n, kd in (
        ("gate", gate, format, f, d),
        ("up", up, format, f, d),
        ("down", down, down_format, d, f),
    ):
        check_tiles(op, name, w, fmt, n, kd)
        if len(w) != len(gate):
            raise LabError(f"{op}: gate has {len(gate)} slots, {name} {len(w)}.")
    if f % GROUP:
        raise LabError(f"{op}: hidden rows are quantised in groups of {GROUP} values, got F={f}.")
    expect(op, "y", y, FLOATS, ["Y", d])
    if store not in FLOATS:
        raise LabError(f"{op}: store must be float32, float16 or bfloat16, got {store}.")
    for name, t in (("row_of", row_of), ("out_row", out_row), ("chunks", chunks)):
        expect_contiguous(op, name, t)
    expect_rows(op, "y", y)
    return len(row_of), f, d
