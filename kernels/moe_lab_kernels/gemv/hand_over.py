"""How programs of one grid hand values to each other: what `mlp` and `tiled.mlp` share on the device, and its scratch.

Nobody waits for a kernel to end. A product of gate or up passes to the program that activates it by itself: its word of
scratch holds 0 until it is there, and then its fp32 bits inverted (all ones would be a NaN that no sum gives: a GPU's
are 0x7FFFFFFF). So only one program in eight pays for a release, that which makes 32 hidden values and counts them in
at their chunk; programs for down look at the count.

Looks are volatile: they find what is new. Behind a look at the count come plain loads, without an acquire, which would
empty the L1 cache under every program of the multiprocessor: it holds no older line of a hidden row, as nobody reads
one before its chunk is whole and no two rows share a line. (Where two chunks' scales shared one, sums were wrong.)

Programs that wait come behind those they wait for. A GPU starts programs in the order of their index, so when one
waits, the others have started, and they wait for nothing later: the kernel ends whatever else runs beside it.
"""
# pyright: reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import torch

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.q8_rows import keep, place_of
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import gated_value

GROUP = 32
HIDDEN_ROWS = 2  # of a chunk that are activated at once: one kernel for chunks of up to 2, 4 and 8
LINE = 128  # bytes of a cache line
_GROUP = tl.constexpr(GROUP)


class Scratch(NamedTuple):
    """int32 words that a call hands over in: C counts and products [2, P, F], which start as 0, then hidden rows in
    bytes of their own; each row's codes, scales, totals and sums start a cache line."""

    cleared: int  # words that start as 0
    words: int
    row_bytes: int  # from one hidden row's codes to the next one's
    groups: int  # likewise of its scales, totals and sums, in elements


def scratch(chunks: int, pairs: int, f: int, row_bytes: int) -> Scratch:
    """For P pairs of F hidden values in C chunks, whose codes take `row_bytes` a row."""
    line, groups = -(-row_bytes // LINE) * LINE, -(-(f // GROUP) // (LINE // 2)) * (LINE // 2)
    cleared = -(-chunks // GROUP) * GROUP + 2 * pairs * f
    return Scratch(cleared, cleared + pairs * (line + 8 * groups) // 4, line, groups)


def stored(dtype: torch.dtype) -> Any:
    """The dtype as device code names it."""
    return getattr(tl, {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}[dtype])


@jit
def work_of(chunks, n_chunks, n_slots, tiles, down_tiles):
    """Whether this program is down's; its chunk, tile and slot; the chunk's first pair and its number of pairs, 0 where
    the slot is none. Those of gate and up come first, two for each tile of each chunk, then down's."""
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
    return is_down, chunk, tile, slot, first, n


@jit
def product_of(handed, n_chunks, n_pairs, F, which):
    """Pointer to gate's products (`which` 0) or up's (1)."""
    return handed + (n_chunks + 31) // 32 * 32 + offset64(n_pairs * which, F)


@jit
def places(handed, n_chunks, n_pairs, F, row_bytes, groups):
    """Pointers to gate's products, up's, hidden codes, scales, totals and sums."""
    gates, ups = product_of(handed, n_chunks, n_pairs, F, 0), product_of(handed, n_chunks, n_pairs, F, 1)
    codes = (ups + offset64(n_pairs, F)).to(tl.pointer_type(tl.int8), bitcast=True)
    scale = (codes + offset64(n_pairs, row_bytes)).to(tl.pointer_type(tl.float16), bitcast=True)
    total = scale + offset64(n_pairs, groups)
    sums = (total + offset64(n_pairs, groups)).to(tl.pointer_type(tl.int32), bitcast=True)
    return gates, ups, codes, scale, total, sums


@jit
def hide(gates, ups, codes, scale, total, sums, ready, block, first, n, F, n_pairs, limit, alpha, row_bytes, row_groups,
         STORE: tl.constexpr, NEXT: tl.constexpr, NEXT_VALUES: tl.constexpr, NEXT_LANES: tl.constexpr,
         NEXT_PER_BLOCK: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr,
         LIMIT: tl.constexpr, R: tl.constexpr, G: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    """G groups of 32 hidden values of a chunk's n rows, from gate's and up's products as they come, quantised: codes in
    lane order, or, where NEXT_LANES is 0, in value order with their sums by 16. Products pass through STORE."""
    i = tl.arange(0, R * G)
    group, groups = block * G + i % G, F // _GROUP
    value = (group * _GROUP)[:, None] + tl.arange(0, _GROUP)[None, :]
    place = place_of(value, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK)
    for done in range(0, n, R):
        p = first + done + i // G
        mine = (p < first + n) & (p >= 0) & (p < n_pairs) & (group < groups)
        at = offset64(p, F)[:, None] + value
        g, u = tl.zeros((R * G, 32), tl.int32), tl.zeros((R * G, 32), tl.int32)
        missing = 1
        while missing > 0:
            g = tl.load(gates + at, mask=mine[:, None], other=-1, volatile=True)
            u = tl.load(ups + at, mask=mine[:, None], other=-1, volatile=True)
            missing = tl.sum(tl.sum(((g == 0) | (u == 0)).to(tl.int32), 1), 0)
        if WARPS > 1:
            # several warps may hold one value, of which only one has seen that it is there: now all of them do
            g = tl.load(gates + at, mask=mine[:, None], other=-1, volatile=True)
            u = tl.load(ups + at, mask=mine[:, None], other=-1, volatile=True)
        g, u = (~g).to(tl.float32, bitcast=True), (~u).to(tl.float32, bitcast=True)
        g, u = to_f32(round_to(g, STORE)), to_f32(round_to(u, STORE))
        made = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
        keep(to_f32(round_to(made, STORE)), codes, scale, total, sums, offset64(p, row_bytes)[:, None] + place,
             offset64(p, row_groups) + group, mine, NEXT, NEXT_VALUES, NEXT_LANES, NEXT_PER_BLOCK, R * G)  # fmt: skip
    tl.debug_barrier()
    tl.atomic_add(ready, 1, sem="release", scope="gpu")


@jit
def await_hidden(ready, blocks):
    """Until all blocks of a chunk's hidden values are there."""
    while tl.load(ready, volatile=True) < blocks:
        pass
    tl.debug_barrier()
