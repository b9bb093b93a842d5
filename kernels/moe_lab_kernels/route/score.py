"""Device code of the router's scores: float64 from fp32 logits, NaN-free, and sort keys that no rounding can blur.

Everything here is float64, so that results rounded once to fp32 agree between the compiled kernel, the interpreter and
torch (fp32 `exp` differs between them in up to 7 units in the last place). A NaN logit is handed over as -inf. Order is
decided on the bits of the float64 values, split into two int32 words, because one warp instruction reduces 32 of those.
"""

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import INTERPRET

LOWEST = tl.constexpr(-(2**31))  # below every value's key: padding and what was taken already
HIGHEST = tl.constexpr(2**31 - 1)
# Below this argument exp counts as 0: float64 subnormals come out differently on every device (and are 0 in fp32)
UNDERFLOW = tl.constexpr(-708.0)


@jit
def number(VALUE: tl.constexpr):
    """A float64 scalar; a plain Python number would be rounded to fp32 on its way into a kernel."""
    return tl.full((), VALUE, tl.float64)


@jit
def sort_key(v):
    """float64 -> two int32 words that sort, one after the other, as v does: -0 equals 0, NaN above +inf (as torch)."""
    bits = tl.where(v == 0.0, 0.0, v).to(tl.int64, bitcast=True)
    key = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    high, low = (key >> 32).to(tl.int32), key.to(tl.int32) ^ LOWEST
    return tl.where(v == v, high, HIGHEST), tl.where(v == v, low, HIGHEST)


@jit
def largest_f32(v):
    """The largest fp32 of each row of [C, ROWS, L] (no NaN among them): a reduction over integer keys is cheaper."""
    bits = v.to(tl.int32, bitcast=True)
    top = tl.max(tl.max(bits ^ ((bits >> 31) & 0x7FFFFFFF), 2), 0)
    return (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def first_largest(high, low, index, ROWS: tl.constexpr):
    """For each row of [C, ROWS, L]: the smallest `index` among those whose (high, low) is largest; int32 [ROWS]."""
    best = tl.max(tl.max(high, 2), 0)
    tied = high == tl.max(best, 0) if ROWS == 1 and not INTERPRET else high == best[None, :, None]
    first = tl.min(tl.min(tl.where(tied, index, HIGHEST), 2), 0)
    if ROWS == 1:
        # 20 of 52 mantissa bits decide nearly always; the rest is looked at only where they do not
        last = tl.max(tl.max(tl.where(tied, index, -1), 2), 0)
        if tl.max(last - first, 0) > 0:
            first = first_of_tied(tied, low, index)
    else:
        first = first_of_tied(tied, low, index)
    return first


@jit
def first_of_tied(tied, low, index):
    """The second half of `first_largest`: by the low word, then by index."""
    low = tl.where(tied, low, LOWEST)
    best = tl.max(tl.max(low, 2), 0)
    return tl.min(tl.min(tl.where(tied & (low == best[None, :, None]), index, HIGHEST), 2), 0)


@jit
def capped_logit(raw, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr):
    """raw / temperature, then cap * tanh(. / cap) where SOFTCAP is above 0."""
    z = raw
    if TEMPERATURE != 1.0:
        z = z / number(TEMPERATURE)
    if SOFTCAP > 0.0:
        cap = number(SOFTCAP)
        # tanh by expm1, itself by log: neither loses digits near 0, and both exist in the interpreter
        twice = -2.0 * tl.abs(z / cap)
        u = tl.exp(twice)
        less = tl.where(u == 1.0, twice, tl.where(u < 1e-17, -1.0, (u - 1.0) * (twice / tl.log(u))))
        tanh = -less / (2.0 + less)
        z = cap * tl.where(z < 0.0, -tanh, tanh)
    return z


@jit
def exp_or_0(x):
    """exp in float64 without subnormal results."""
    return tl.where(x < UNDERFLOW, 0.0, tl.exp(x))


@jit
def softmax_term(z, top):
    """exp(z - top); with top = +inf its logits share the mass, with top = -inf nothing has any."""
    infinite = tl.abs(top) == float("inf")
    e = exp_or_0(tl.where(infinite, 0.0, z - top))
    return tl.where(infinite, tl.where((z == top) & (top > 0.0), 1.0, 0.0), e)


@jit
def safe_divide(a, b):
    """a / b with 0/0 = 0."""
    zero = b == 0.0
    return tl.where(zero, 0.0, a / tl.where(zero, 1.0, b))


@jit
def sigmoid(z):
    """1 / (1 + exp(-z)), as torch writes it: where it saturates, the form decides which values tie."""
    return 1.0 / (1.0 + tl.exp(-z))


@jit
def score_of(z, top, total, SCORE: tl.constexpr):
    """The score of a logit; `top` and `total` are the row's largest logit and sum of terms (softmax only)."""
    if SCORE == "softmax":
        s = safe_divide(softmax_term(z, top), total)
    elif SCORE == "sigmoid":
        s = sigmoid(z)
    elif SCORE == "sqrt_softplus":
        e = exp_or_0(-tl.abs(z))
        u = 1.0 + e
        # what rounding u lost is at most 2^-53, so an fp32 reciprocal weighs it well enough
        log1p = tl.log(u) + (e - (u - 1.0)) * tl.div_rn(1.0, u.to(tl.float32)).to(tl.float64)
        s = tl.sqrt(tl.where(z > 0.0, z, 0.0) + log1p)
    else:
        s = z
    return s
