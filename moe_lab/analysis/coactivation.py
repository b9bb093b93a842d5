"""Which experts a token picks together more often than their popularities explain.

Raw lift is P(i, j) / (P(i) P(j)). Its neutral value is not 1: a token picks K different experts, and taking one leaves
K - 1 places for the others. With equal popularities independence gives E (K - 1) / (K (E - 1)), 0.77 for E = 32, K = 4.
The corrected lift divides by what picking K without replacement gives at the measured popularities: among all ways of
drawing K of E with these inclusion probabilities the one of greatest entropy (conditional Poisson sampling), where a
set S has a probability proportional to prod w_e over S. With e_k the elementary symmetric sums of w,
    P(i) = w_i e_{K-1}(w without i) / e_K(w),    P(i, j) = w_i w_j e_{K-2}(w without i, j) / e_K(w).
The w are found by Newton's method on log w (the model: Chen, Dempster and Liu 1994).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import numpy as np

from moe_lab.analysis.frames import frame
from moe_lab.analysis.picks import layers_of, occupancy, wants_trace
from moe_lab.errors import LabError
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("layer", "expert_a", "expert_b", "together", "expected", "lift", "lift_raw", "tokens")
MARGINAL_ERROR = 1e-10  # of an inclusion probability: far below the 1 / T that counts can resolve
MOST_ROUNDS = 500
LONGEST_STEP = 2.0  # of log w: farther out the quadratic model of Newton's method is worthless


def coactivation(
    trace: RoutingTrace, *, layers: Iterable[int] | None = None, within: Literal["all", "domain"] = "all"
) -> "pd.DataFrame":
    """A row for each layer and pair expert_a < expert_b: columns `COLUMNS`.

    together: tokens that pick both; expected: tokens that would, picking without replacement; lift = together /
    expected (NaN where nothing is expected); lift_raw: see the module. `within="domain"` sums the expectation over the
    trace's domains, each with its own popularities: what is left is not explained by two experts serving one subject.
    Tokens that fill fewer or more than K different experts (skips, zero experts, duplicates) are drawn with their own
    number. LabError for K = 1 or, with "domain", a trace without domains.
    """
    wants_trace("lab.analysis.coactivation", trace)
    if trace.top_k < 2:
        raise LabError("lab.analysis.coactivation: a token picks K=1 expert, so no two are picked together.")
    if within not in ("all", "domain"):
        raise LabError(f"lab.analysis.coactivation: within is {within!r}; it must be 'all' or 'domain'.")
    if within == "domain" and trace.domains is None:
        raise LabError("lab.analysis.coactivation: within='domain' needs a trace that names its tokens' domains.")
    strata = np.zeros(trace.tokens, int) if within == "all" else np.unique(_names(trace), return_inverse=True)[1]
    rows = []
    a, b = np.triu_indices(trace.num_experts, k=1)
    for number in layers_of(trace, layers, "coactivation"):
        hot = occupancy(trace, number)
        together = _pairs(hot)[a, b]
        expected = np.sum([expected_pairs(hot[strata == s]) for s in np.unique(strata)], axis=0)[a, b]
        p = hot.mean(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lift, raw = together / expected, together / (p[a] * p[b] * len(hot))
        rows += zip(
            np.full(len(a), number), a, b, together.astype(int), expected, np.where(expected > 0, lift, np.nan), raw,
            np.full(len(a), len(hot)), strict=True,
        )  # fmt: skip
    return frame(rows, COLUMNS, "coactivation")


def _names(trace: RoutingTrace) -> np.ndarray:
    assert trace.domains is not None
    return trace.domains.astype(str)


def _pairs(hot: np.ndarray) -> np.ndarray:
    """Tokens that pick both, float64 [E, E]; fp64 holds these whole numbers exactly."""
    dense = hot.astype(np.float64)
    return dense.T @ dense


def expected_pairs(hot: np.ndarray) -> np.ndarray:
    """Tokens expected to pick both of each pair, float64 [E, E], zero diagonal. Tokens by their number of picks."""
    sizes = hot.sum(axis=1)
    expected = np.zeros((hot.shape[1], hot.shape[1]))
    for k in np.unique(sizes[sizes >= 2]):
        same = hot[sizes == k]
        expected += len(same) * joint(same.mean(axis=0), int(k))
    return expected


def joint(inclusion: np.ndarray, k: int) -> np.ndarray:
    """P(i, j) [E, E] of drawing k different experts with these inclusion probabilities (they sum to k)."""
    certain = inclusion >= 1 - 1e-12  # always drawn: their weight would be infinite, so they are set apart
    pairs = np.outer(certain, certain).astype(np.float64)
    free = np.flatnonzero(~certain & (inclusion > 0))
    left = k - int(certain.sum())
    if left >= 1 and len(free):
        inner = inclusion[free]
        pairs[np.ix_(certain, free)] = inner
        pairs[np.ix_(free, certain)] = inner[:, None]
        if left >= 2:
            pairs[np.ix_(free, free)] = _joint(inner, left)
    np.fill_diagonal(pairs, 0.0)
    return pairs


def _joint(inclusion: np.ndarray, k: int) -> np.ndarray:
    return _draw(_weights(inclusion, k), k)[1]


def _draw(w: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """P(i) [E] and P(i, j) [E, E], zero diagonal, of drawing k with these weights."""
    whole = _symmetric(w[None], k)[0, -1, k]
    alone = w * (1 - np.eye(len(w)))  # row i: the weights without i
    single = w * _leave_one_out(w[None], k - 1)[0] / whole
    both = np.outer(w, w) * _leave_one_out(alone, k - 2) / whole
    np.fill_diagonal(both, 0.0)
    return single, both


def _weights(inclusion: np.ndarray, k: int) -> np.ndarray:
    """Newton's method with halved steps on log w: the derivative of P(i) by log w_j is the covariance of picking i and
    j, and log e_K(w) - sum P log w is convex. (Plain iteration w = P / e_k-1 stalls when K is near E.)"""
    log_w = np.log(inclusion / (1 - inclusion))
    for _ in range(MOST_ROUNDS):
        single, both = _draw(np.exp(log_w), k)
        gap = inclusion - single
        if np.abs(gap).max() < MARGINAL_ERROR:
            return np.exp(log_w)
        covariance = both + np.diag(single) - np.outer(single, single)
        step = np.linalg.lstsq(covariance, gap, rcond=None)[0]
        step *= min(1.0, LONGEST_STEP / np.abs(step).max())
        log_w = _downhill(inclusion, log_w - log_w.mean(), step, k)
    many = f"K={k} of {len(inclusion)} experts"
    raise LabError(f"no drawing of {many} with these popularities was found in {MOST_ROUNDS} steps.")


def _downhill(inclusion: np.ndarray, log_w: np.ndarray, step: np.ndarray, k: int) -> np.ndarray:
    """The longest of step, step / 2, .. that lowers log e_K(w) - sum P log w."""

    def height(v: np.ndarray) -> float:
        return float(np.log(_symmetric(np.exp(v)[None], k)[0, -1, k]) - inclusion @ v)

    here = height(log_w)
    for halved in range(40):
        there = log_w + step / 2**halved
        if height(there) < here:
            return there
    return log_w + step  # at the rounding of `here`: the full step is Newton's last one


def _symmetric(w: np.ndarray, k: int) -> np.ndarray:
    """e_0..e_k of the first n weights of each row: [rows, E + 1, k + 1]. Sums of positives: nothing cancels."""
    sums = np.zeros((w.shape[0], w.shape[1] + 1, k + 1))
    sums[:, 0, 0] = 1.0
    for n in range(w.shape[1]):
        sums[:, n + 1] = sums[:, n]
        sums[:, n + 1, 1:] += w[:, n, None] * sums[:, n, :-1]
    return sums


def _leave_one_out(w: np.ndarray, k: int) -> np.ndarray:
    """e_k of each row's weights without the n-th: [rows, E], from sums of those before n and those after it."""
    before, after = _symmetric(w, k)[:, :-1], _symmetric(w[:, ::-1], k)[:, -2::-1]
    return np.einsum("rnk,rnk->rn", before, after[..., ::-1])
