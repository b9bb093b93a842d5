"""An interval for the ratio of two medians, from the samples alone.

Percentile bootstrap (Efron 1979): both sides are drawn again with replacement, the ratio of their medians is taken,
and the interval holds the middle 95 % of such ratios. It says how far the samples at hand settle the ratio; what
changes between two sessions on one machine (clocks, temperature) is in no sample, so a verdict also wants a threshold.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

DRAWS = 2000
LEAST_SAMPLES = 5
"""Fewer have too few distinct resampled medians for a 95 % interval."""
_CHUNK = 1 << 20


def ratio_interval(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, *, seed: int = 0, share: float = 0.95
) -> tuple[float, float]:
    """Lower and upper end for median(b) / median(a). Samples are positive; the same samples give the same interval."""
    medians_a, medians_b = (_medians(np.sort(np.asarray(s, float)), seed, side) for side, s in enumerate((a, b)))
    tail = (1 - share) / 2
    low, high = np.quantile(medians_b / medians_a, (tail, 1 - tail)).tolist()
    return low, high


def _medians(ordered: np.ndarray, seed: int, side: int) -> np.ndarray:
    low, high = _median_ranks(len(ordered), seed, side)
    return (ordered[low] + ordered[high]) / 2


@lru_cache(maxsize=64)
def _median_ranks(n: int, seed: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of the two middle values in each of DRAWS resamples of n; which values stand there does not matter."""
    draw = np.random.default_rng((seed, side, n))
    rows = max(1, _CHUNK // n)
    middle = []
    for start in range(0, DRAWS, rows):
        ranks = draw.integers(0, n, (min(rows, DRAWS - start), n), dtype=np.int32)
        middle.append(np.partition(ranks, ((n - 1) // 2, n // 2), axis=1)[:, [(n - 1) // 2, n // 2]])
    low, high = np.concatenate(middle).T
    return low, high
