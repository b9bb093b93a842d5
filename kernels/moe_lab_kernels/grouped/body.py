"""What the grouped kernels share around their loops: which rows a program takes, and the gated activation."""

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import round_to, to_f32


@jit
def place(tiles, n_tiles, N, ROWS: tl.constexpr, TOGETHER: tl.constexpr):
    """(slot, first pair, pairs, first weight row) of this program; TOGETHER tiles walk blocks of rows side by side."""
    blocks = tl.cdiv(N, ROWS)
    pid = tl.program_id(0)
    walk = pid // (TOGETHER * blocks)
    beside = tl.minimum(n_tiles - walk * TOGETHER, TOGETHER)
    at = pid % (TOGETHER * blocks)
    tile = tiles + 3 * (walk * TOGETHER + at % beside)
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), at // beside * ROWS


@jit
def gated(g, u, limit, dtype: tl.constexpr, LIMIT: tl.constexpr, GELU: tl.constexpr, INNER: tl.constexpr,
          CUBE: tl.constexpr):  # fmt: skip
    """act(g) * u, all three rounded to `dtype`, as fp32 sums come."""
    g, u = to_f32(round_to(g, dtype)), to_f32(round_to(u, dtype))
    if LIMIT:
        # written with comparisons so that a NaN passes through
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    z = INNER * (g + CUBE * (g * g * g)) if GELU else g
    return round_to(tl.div_rn(g, 1.0 + tl.exp(-z)) * u, dtype)
