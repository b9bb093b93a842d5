"""How soon an expert is picked again: distances in tokens, against the same picks in random order.

distance of a pick = tokens since this layer last picked the expert (1 = the token before); infinite for a first pick.
A cache that keeps the experts of the last d tokens serves the picks within distance d. Where tokens are independent the
distance of expert e is geometric, P(d) = p_e (1 - p_e)^(d-1); the shuffled control measures that with the trace's own
popularities.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.analysis.frames import frame
from moe_lab.analysis.picks import layers_of, occupancy, shuffled
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("layer", "order", "distance_from", "distance_to", "picks", "share", "share_within")
IN_TEXT, SHUFFLED, IN_DOMAIN = "text", "shuffled", "shuffled within domains"


def reuse(trace: RoutingTrace, *, layers: Iterable[int] | None = None, seed: int = 0) -> "pd.DataFrame":
    """A row for each (layer, order, bin): columns `COLUMNS`; distances in tokens, bins 1, 2, 3-4, 5-8, ..., infinite.

    order: "text" (as recorded), "shuffled" (all tokens, seeded), and where the trace names domains "shuffled within
    domains". share: of the layer's picks; share_within: their share up to distance_to (1 in the last bin, infinite).
    """
    chosen = layers_of(trace, layers, "reuse")
    orders = {IN_TEXT: trace, SHUFFLED: shuffled(trace, seed)}
    if trace.domains is not None:
        orders[IN_DOMAIN] = shuffled(trace, seed, within_domain=True)
    rows = []
    for number in chosen:
        for order, ordered in orders.items():
            found = distances(occupancy(ordered, number))
            rows += [(number, order, *row) for row in _bins(found, trace.tokens)]
    return frame(rows, COLUMNS, "reuse")


def distances(hot: np.ndarray) -> np.ndarray:
    """Distance of every pick of `hot` [T, E], float64 [picks], expert by expert; infinite for each first pick."""
    expert, token = np.nonzero(hot.T)
    gap = np.diff(token, prepend=0).astype(np.float64)
    first = np.diff(expert, prepend=-1) != 0
    return np.where(first, np.inf, gap)


def _bins(found: np.ndarray, tokens: int) -> list[tuple[float, float, int, float, float]]:
    """Bins (2^(n-1), 2^n] up to the longest distance that T tokens allow, then the infinite one."""
    most = int(np.ceil(np.log2(max(tokens - 1, 1))))
    edges = [0.0, *(2.0**n for n in range(most + 1))]
    rows, seen, total = [], 0, max(len(found), 1)
    for low, high in [*pairwise(edges), (edges[-1], np.inf)]:
        picks = int(((found > low) & (found <= high)).sum())
        seen += picks
        rows.append((np.inf if high == np.inf else low + 1, high, picks, picks / total, seen / total))
    return rows
