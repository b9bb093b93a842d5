"""How many different experts M successive tokens need: what batching shares and a prompt's chunk must fetch.

At most min(K M, E). Were tokens independent, expert e would be missing from all M with probability (1 - p_e)^M, so the
union would hold sum_e 1 - (1 - p_e)^M experts on average, exactly, however a token's own K picks depend on each other.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.analysis.frames import frame
from moe_lab.analysis.picks import layers_of, occupancy, popularity, wants_trace
from moe_lab.checks import wants_wholes
from moe_lab.errors import LabError
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLUMNS = (
    *("layer", "tokens", "distinct_mean", "distinct_p20", "distinct_p50", "distinct_p80"),
    *("most", "independent", "independent_in_domain", "blocks"),
)


def union(trace: RoutingTrace, sizes: Sequence[int] = SIZES, *, layers: Iterable[int] | None = None) -> "pd.DataFrame":
    """A row for each (layer, M): columns `COLUMNS`, all but tokens (M) and blocks counts of experts.

    Blocks of M successive tokens do not overlap; M beyond the trace is left out, LabError when none fits. independent:
    see the module; independent_in_domain: the same with each domain's own popularities, averaged by its tokens (NaN
    where the trace names no domains).
    """
    wants_trace("lab.analysis.union", trace)
    sizes = wants_wholes("sizes", sizes)
    if any(m < 1 for m in sizes):
        raise LabError(f"lab.analysis.union: sizes are {tuple(sizes)}; each must be at least 1 token.")
    chosen = layers_of(trace, layers, "union")
    fitting = [m for m in sizes if m <= trace.tokens]
    if not fitting:
        raise LabError(f"lab.analysis.union: no M of {tuple(sizes)} fits the trace's {trace.tokens} tokens.")
    rows = []
    for number in chosen:
        hot = occupancy(trace, number)
        per_domain = _by_domain(trace, hot)
        for m in fitting:
            found = distinct(hot, m)
            low, middle, high = np.quantile(found, (0.2, 0.5, 0.8))
            most = min(trace.top_k * m, trace.num_experts)
            own = sum(share * independent(p, m) for share, p in per_domain) if per_domain else float("nan")
            rows.append(
                (number, m, found.mean(), low, middle, high, most, independent(popularity(hot), m), own, len(found))
            )
    return frame(rows, COLUMNS, "union")


def distinct(hot: np.ndarray, m: int) -> np.ndarray:
    """Experts picked in each of the T // m blocks of m successive tokens, int [T // m], from occupancy [T, E]."""
    blocks = len(hot) // m
    return hot[: blocks * m].reshape(blocks, m, -1).any(axis=1).sum(axis=1)


def independent(p: np.ndarray, m: int) -> float:
    """sum_e 1 - (1 - p_e)^m: the mean union of m independent tokens that pick expert e with probability p_e."""
    return float((1 - (1 - p) ** m).sum())


def _by_domain(trace: RoutingTrace, hot: np.ndarray) -> list[tuple[float, np.ndarray]]:
    """(share of the tokens, popularity) of each domain."""
    if trace.domains is None:
        return []
    names = trace.domains.astype(str)
    return [(float((names == name).mean()), popularity(hot[names == name])) for name in np.unique(names)]
