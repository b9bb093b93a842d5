"""A chunk of rows times tiles of 16 weight rows on the tensor cores, in an order of additions that is written out.

A row's steps (`storage.row_tiles`) go round P parts of the row in turn (`ref.parts_of`), which lie on a program's
warps, or in a warp's registers; a part's four lanes of a weight row add what their steps give in sequence. Then lanes
and parts are added, halves against halves. `ref` adds likewise, so bits depend on a row's own operands alone: on
no tile, no chunk, no number of warps, no launch.
"""
# pyright: reportGeneralTypeIssues=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.body import stored_as
from moe_lab_kernels.gemv.tiled.steps_k import q2_k, q3_k, q6_k, q45_k
from moe_lab_kernels.gemv.tiled.steps_small import q4_0, q8_0
from moe_lab_kernels.gemv.tiled.tensor_core import touch
from moe_lab_kernels.primitives import offset64


@jit
def step_parts(w, x, d8, sums, total, step, steps, subs, known, lane, zero, FORMAT: tl.constexpr,
               STEP_BYTES: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """fp32 of rows g and g + 8, [R, B, P, 32], from one step. w: pointers to tiles; x, d8, sums, total: to activation
    rows, of which `known` says which there are; steps past the last one give 0. subs: 32 values each, of a row."""
    there, at = known & (step < steps), tl.minimum(step, steps - 1)
    w += at * STEP_BYTES
    first, start = 4 * step, tl.minimum(4 * at, subs - 4)
    if FORMAT == "q8_0":
        out = q8_0(w, x, d8, start, first, there, lane, zero, NATIVE)
    elif FORMAT == "q4_0":
        out = q4_0(w, x, d8, total, start, first, there, lane, zero, NATIVE)
    else:
        x, d8, sums = x + at * 256, d8 + at * 8, sums + at * 8
        if FORMAT == "q2_k":
            out = q2_k(w, x, d8, sums, there, lane, zero, NATIVE)
        elif FORMAT == "q3_k":
            out = q3_k(w, x, d8, there, lane, zero, NATIVE)
        elif FORMAT == "q4_k":
            out = q45_k(w, x, d8, sums, there, lane, zero, False, NATIVE)
        elif FORMAT == "q5_k":
            out = q45_k(w, x, d8, sums, there, lane, zero, True, NATIVE)
        else:
            tl.static_assert(FORMAT == "q6_k")
            out = q6_k(w, x, d8, sums, there, lane, zero, NATIVE)
    return out


@jit
def _rows_times_tiles(codes, scale, sums, total, row_of, out_row, w, out, tile, first, n, N, steps, subs, n_x, n_pairs,
                      codes_stride, scale_stride, out_stride, FORMAT: tl.constexpr, STEP_BYTES: tl.constexpr,
                      P: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
                      NATIVE: tl.constexpr, ALONE: tl.constexpr):  # fmt: skip
    """Up to R rows of a chunk times B tiles from the B * tile-th on. ALONE: no chunk has more than one row; memory is
    waited for, and the next step asked for ahead (57.0 to 55.1 us for mixtral's layer at T = 1)."""
    lane = tl.arange(0, 32)[None, None, None, :]
    own = tl.arange(0, P)[None, None, :, None]
    # tiles past N's last one read it again and are not stored
    tiles = tile * B + tl.arange(0, B)[None, :, None, None] + 0 * lane
    w += offset64(tl.minimum(tiles, N // 16 - 1), steps * STEP_BYTES)
    p = first + tl.arange(0, R)[:, None, None, None]
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = tl.where(mine, p, -1)
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known, to = (row >= 0) & (row < n_x), p
    if SCATTER and R == 1:  # early, as its latency would show at the end of a program; more rows lack the registers
        to = tl.load(out_row + p, mask=mine, other=0)
    x, d8 = codes + offset64(row, codes_stride), scale + offset64(row, scale_stride)
    own_sums, own_total = sums + offset64(row, scale_stride), total + offset64(row, scale_stride)
    zero = tl.zeros((R, B, P, 32), tl.int32)
    low, high = tl.zeros((R, B, P, 32), tl.float32), tl.zeros((R, B, P, 32), tl.float32)
    for step in range(0, steps, P):
        if ALONE and NATIVE:
            touch(w + (tl.minimum(step + P + own, steps - 1) * STEP_BYTES + tl.minimum(128 * lane, STEP_BYTES - 1)))
        more_low, more_high = step_parts(w, x, d8, own_sums, own_total, step + own, steps, subs, known, lane, zero,
                                         FORMAT, STEP_BYTES, NATIVE)  # fmt: skip
        low += more_low
        high += more_high
    for i in tl.static_range(2):
        low += tl.gather(low, tl.broadcast_to(lane ^ (2 >> i), low.shape), 3)
        high += tl.gather(high, tl.broadcast_to(lane ^ (2 >> i), high.shape), 3)
    both = tl.join(low, high)
    for i in tl.static_range(2):
        if (P >> i) > 1:  # parts of the first half against those of the second
            first_half, second_half = tl.split(
                tl.permute(tl.reshape(both, [R, B, 2, P >> (i + 1), 32, 2]), (0, 1, 3, 4, 5, 2))
            )
            both = first_half + second_half
    low, high = tl.split(both)
    if SCATTER and R > 1:
        to = tl.load(out_row + p, mask=mine, other=0)
    n_row = tiles * 16 + lane // 4
    at, stored = out + offset64(to, out_stride) + n_row, mine & (tiles * 16 < N) & (lane % 4 == 0)
    tl.store(at, stored_as(low, out.dtype.element_ty), mask=stored)
    tl.store(at + 8, stored_as(high, out.dtype.element_ty), mask=stored)


@jit
def tile_chunk(codes, scale, sums, total, row_of, out_row, w, out, tile, first, n, N, steps, subs, n_x, n_pairs,
               codes_stride, scale_stride, out_stride, FORMAT: tl.constexpr, STEP_BYTES: tl.constexpr, P: tl.constexpr,
               GATHER: tl.constexpr, SCATTER: tl.constexpr, SHARED: tl.constexpr, B: tl.constexpr,
               NATIVE: tl.constexpr):  # fmt: skip
    """B tiles times the n rows of one chunk, up to SHARED (1, 2 or 4) of them at once. GATHER: pair p uses row
    row_of[p], else row p; SCATTER: it goes to row out_row[p], else row p."""
    for done in range(0, n, SHARED):
        left = tl.minimum(n - done, SHARED)
        for size in tl.static_range(3):  # the smallest program of 1, 2 or 4 rows that holds what is left
            if (1 << size) <= SHARED:  # noqa: SIM102 (decided when compiling, the inner test when running)
                if (left > (1 << size) // 2) & (left <= (1 << size)):
                    _rows_times_tiles(codes, scale, sums, total, row_of, out_row, w, out, tile, first + done, left, N,
                                      steps, subs, n_x, n_pairs, codes_stride, scale_stride, out_stride, FORMAT,
                                      STEP_BYTES, P, GATHER, SCATTER, 1 << size, B, NATIVE,
                                      SHARED == 1)  # fmt: skip
