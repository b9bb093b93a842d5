"""What the grouped kernels share around their loops: the pieces a program takes, pairs, biases, hidden rows, places.

A piece is (tile of pairs, block of weight rows). A program takes one, or (persistent) every so-many-th of them.
"""

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.activation import gated_value


@jit
def place(tiles, n_tiles, N, piece, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """(tile, slot, first pair, pairs, first weight row) of a piece; TOGETHER tiles walk blocks of rows side by side."""
    blocks = tl.cdiv(N, ROWS)
    walk = piece // (TOGETHER * blocks)
    beside = tl.minimum(n_tiles - walk * TOGETHER, TOGETHER)
    at = piece % (TOGETHER * blocks)
    tile = walk * TOGETHER + at % beside
    entry = tiles + 3 * tile
    return tile, tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), at // beside * ROWS


@jit
def pairs_of(row_of, first, n, n_pairs, n_x, TOKENS: tl.constexpr, GATHER: tl.constexpr):
    """A tile's pairs [TOKENS]: their numbers, which are its own, their rows of x (0 for none), which rows exist."""
    p = first + tl.arange(0, TOKENS)
    mine = (p < first + n) & (p >= 0) & (p < n_pairs)
    row = p
    if GATHER:
        row = tl.load(row_of + p, mask=mine, other=-1)
    known = mine & (row >= 0) & (row < n_x)
    return p, mine, tl.where(known, row, 0), known


@jit
def weight_rows(begin, N, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Weight rows [ROWS, 1] from `begin` on, and whether they are up's. GATED: [2 ROWS, 1], eight rows of gate, eight
    of up, as one product: there a thread of the accumulators holds the two sums that belong together. Rows past N are
    read again and not stored."""
    i = tl.arange(0, 2 * ROWS if GATED else ROWS)[:, None]
    row = begin + (i // 16 * 8 + i % 8 if GATED else i)
    return tl.minimum(row, N - 1), i // 8 % 2 == 1


@jit
def either(w, v, at, of_up, GATED: tl.constexpr):
    """Pointers [rows, 1]: `at` elements into w, or (GATED) into v for rows of up."""
    out = w + at
    if GATED:
        out = tl.where(of_up, v + at, out)
    return out


@jit
def parted(sums, ROWS: tl.constexpr):
    """Gate's sums and up's [ROWS, pairs] of [2 ROWS, pairs]."""
    TOKENS: tl.constexpr = sums.shape[1]
    g, u = tl.split(tl.permute(tl.reshape(sums, [ROWS // 8, 2, 8, TOKENS]), (0, 2, 3, 1)))
    return tl.reshape(g, [ROWS, TOKENS]), tl.reshape(u, [ROWS, TOKENS])


@jit
def owner(whose, whose_step, tile, slot, NAMED: tl.constexpr):
    """The row of the biases that a tile has."""
    out = slot
    if NAMED:
        out = tl.load(whose + tile * whose_step)
    return out


@jit
def biased(sums, bias, row, bias_row, n_row, N):
    """fp32 sums [weight rows, pairs] and each weight row's bias."""
    return sums + to_f32(tl.load(bias + offset64(row, bias_row) + tl.minimum(n_row, N - 1)))[:, None]


@jit
def hidden(g, u, pair_weight, p, mine, limit, alpha, dtype: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr,
           WEIGHED: tl.constexpr, INNER: tl.constexpr, CUBE: tl.constexpr):  # fmt: skip
    """act(g) * u (times the pair's weight) in `dtype`, to which g and u, fp32 sums, are rounded first."""
    g, u = to_f32(round_to(g, dtype)), to_f32(round_to(u, dtype))
    h = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
    if WEIGHED:
        h = h * tl.load(pair_weight + p, mask=mine, other=0)[None, :]
    return round_to(h, dtype)


@jit
def sent(p, mine, out_row, out_slot, slots, SCATTER: tl.constexpr):
    """The row of the output that each pair writes."""
    to = p
    if SCATTER:
        to = tl.load(out_row + p, mask=mine, other=0) * slots + tl.load(out_slot + p, mask=mine, other=0)
    return to
