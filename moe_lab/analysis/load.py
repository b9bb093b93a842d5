"""How evenly a router spreads its tokens, a layer at a time (a mean over layers hides a layer whose experts starve).

c_e: picks of expert e, p_e = c_e / sum c. max over mean = E max p; idle share = share of experts with c_e = 0; top
quarter = sum of the ceil(E/4) largest p; entropy H = -sum p log2 p bits, at most log2 E; 2^H "experts in use".

Skew: p of rank r (1 = busiest) is fitted by maximum likelihood as r^-s (Zipf) and as exp(-s r) (exponential). Both are
exponential families, so the likelihood is greatest where the model's mean of ln r (or r) is the measured one.
explained = 1 - KL(p, fit) / KL(p, even): 1 for a perfect fit, 0 for one no better than an even router.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.analysis.frames import frame
from moe_lab.analysis.picks import layers_of
from moe_lab.checks import wants_whole
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

MODELS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"zipf": np.log, "exponential": lambda rank: rank}
EVEN_DRAWS = 20
LARGEST_EXPONENT = 64.0  # beyond it the first rank takes all in float64


def counts(trace: RoutingTrace, layer: int) -> np.ndarray:
    """Picks of each expert, int64 [E], every slot counted (an expert picked twice by a token counts twice)."""
    flat = trace.layer(layer).reshape(-1)
    return np.bincount(flat[flat < trace.num_experts], minlength=trace.num_experts)


def load(trace: RoutingTrace, *, layers: Iterable[int] | None = None) -> "pd.DataFrame":
    """A row for each (layer, expert): layer, expert, rank (1 = busiest, ties by id), assignments, share, load_ratio.

    share: of the layer's picks, 0 where it has none. load_ratio = share x E. `lab.plot.load` draws it.
    """
    rows = []
    for number in layers_of(trace, layers, "load"):
        c = counts(trace, number)
        share = c / max(c.sum(), 1)
        rank = np.empty(len(c), dtype=int)
        rank[np.argsort(-c, kind="stable")] = np.arange(1, len(c) + 1)
        rows += [(number, e, int(rank[e]), int(c[e]), float(share[e]), float(share[e] * len(c))) for e in range(len(c))]
    return frame(rows, ("layer", "expert", "rank", "assignments", "share", "load_ratio"), "load")


def balance(trace: RoutingTrace, *, layers: Iterable[int] | None = None) -> "pd.DataFrame":
    """A row a layer: layer, tokens, assignments, max_over_mean, idle_share, top_quarter_share, entropy_bits,
    entropy_share (of log2 E), experts_in_use (2^H), zero_share.

    zero_share: share of all filled slots that went to zero-computation experts, which no other column counts. A layer
    without picks has NaN in the columns that divide by them. Formulas: see the module.
    """
    rows = []
    for number in layers_of(trace, layers, "balance"):
        c, ids = counts(trace, number), trace.layer(number)
        total, e = int(c.sum()), len(c)
        p = c / total if total else np.full(e, np.nan)
        entropy = entropy_bits(p)
        filled = ids < trace.width
        zero = float((filled & (ids >= e)).sum() / filled.sum()) if filled.any() else float("nan")
        top = float(np.sort(p)[::-1][: -(-e // 4)].sum())
        share = entropy / np.log2(e) if e > 1 else 1.0
        idle, busiest = float((c == 0).mean()), float(p.max() * e)
        rows.append((number, trace.tokens, total, busiest, idle, top, entropy, share, 2**entropy, zero))
    columns = ("layer", "tokens", "assignments", "max_over_mean", "idle_share", "top_quarter_share", "entropy_bits")
    return frame(rows, (*columns, "entropy_share", "experts_in_use", "zero_share"), "balance")


def skew(trace: RoutingTrace, *, layers: Iterable[int] | None = None, seed: int = 0) -> "pd.DataFrame":
    """A row for each (layer, model "zipf" or "exponential"): layer, model, exponent, explained, kl_bits, even_exponent,
    assignments.

    kl_bits = KL(p, fit) a pick. even_exponent: what the same fit finds in as many picks of a perfectly even router
    (mean of 20 seeded draws; ranks come from the counts they are fitted to, so chance alone gives some skew).
    An exponent is NaN for a layer without picks; explained is NaN where the measured load is exactly even.
    """
    wants_whole("seed", seed, 0)
    rows = []
    for number in layers_of(trace, layers, "skew"):
        c = np.sort(counts(trace, number))[::-1]
        rng = np.random.default_rng([seed, number])
        even = np.sort(rng.multinomial(c.sum(), np.full(len(c), 1 / len(c)), size=EVEN_DRAWS), axis=1)[:, ::-1]
        for name in MODELS:
            exponent, p = fit(c, name)
            kl, kl_even = _kl_bits(c, p), _kl_bits(c, np.full(len(c), 1 / len(c)))
            explained = 1 - kl / kl_even if kl_even else float("nan")
            chance = float(np.mean([fit(draw, name)[0] for draw in even]))
            rows.append((number, name, exponent, explained, kl, chance, int(c.sum())))
    columns = ("layer", "model", "exponent", "explained", "kl_bits", "even_exponent", "assignments")
    return frame(rows, columns, "skew")


def fit(ranked: np.ndarray, model: str) -> tuple[float, np.ndarray]:
    """(s, p [E]) of the model's maximum likelihood for counts by falling rank; NaN and an even p without counts."""
    statistic = MODELS[model](np.arange(1, len(ranked) + 1, dtype=np.float64))
    if not ranked.sum():
        return float("nan"), np.full(len(ranked), 1 / len(ranked))
    wanted = float(ranked @ statistic / ranked.sum())
    low, high = 0.0, LARGEST_EXPONENT
    for _ in range(80):  # the model's mean falls as s grows; 80 halvings end at float64's resolution
        middle = (low + high) / 2
        above = _family(statistic, middle) @ statistic > wanted
        low, high = (middle, high) if above else (low, middle)
    return low, _family(statistic, low)


def _family(statistic: np.ndarray, exponent: float) -> np.ndarray:
    weight = np.exp(-exponent * (statistic - statistic[0]))
    return weight / weight.sum()


def entropy_bits(p: np.ndarray) -> float:
    """-sum p log2 p with 0 log 0 = 0; NaN passes through."""
    return float(-(p * np.log2(np.where(p > 0, p, 1.0))).sum())


def _kl_bits(ranked: np.ndarray, fitted: np.ndarray) -> float:
    """KL(measured, fitted) in bits; 0 for no counts."""
    total = ranked.sum()
    if not total:
        return 0.0
    p = ranked / total
    here = p > 0
    return max(0.0, float((p[here] * np.log2(p[here] / np.maximum(fitted[here], 1e-300))).sum()))
