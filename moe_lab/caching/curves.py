"""Miss-ratio curves, and the stack distances behind the LRU's.

The LRU's whole curve comes from one pass (`distances`), every capacity of it exact; other policies are simulated at the
capacities asked for. miss ratio = experts read / distinct experts asked for, over all layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.caching.controls import TEXT
from moe_lab.caching.distances import stack_distances
from moe_lab.checks import wants_wholes
from moe_lab.errors import LabError
from moe_lab.simulate.bounds import BELADY
from moe_lab.simulate.replay import AnyPolicy, check_policies
from moe_lab.simulate.requests import Request, Trace, ids_of, requests_of
from moe_lab.simulate.table import frame, simulate
from moe_lab.stream.policy import policy_name
from moe_lab.stream.slots import split_slots

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("order", "policy", "capacity_slots", "capacity_share", "requests", "misses", "miss_ratio")
DISTANCE_COLUMNS = ("order", "layer", "distance_from", "distance_to", "requests", "share", "share_within")
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
LRU = "lru"


def miss_ratio(
    trace: Trace | Mapping[str, Trace],
    capacities: Iterable[int] | None = None,
    policies: Sequence[AnyPolicy] = (LRU, BELADY),
    *,
    per_layer: bool = False,
    step_tokens: int = 1,
) -> "pd.DataFrame":
    """A row for each (order, policy, capacity): columns `COLUMNS`.

    `trace`: one, or several by name as `lab.caching.controls` makes them. `capacities`: slots of the whole cache;
    without them eight from a sixteenth of all experts up, and for "lru" every capacity. `per_layer`, `step_tokens`: as
    in lab.simulate. capacity_share: slots / experts of all layers. LabError as lab.simulate.
    """
    check_policies(policies)
    rows = []
    for order, one in _named(trace).items():
        layers, requests = requests_of(one, step_tokens)
        experts = len(layers) * ids_of(one)[2]
        asked = sum(len(request.keys) for request in requests)
        least = len(layers) if per_layer else 1
        grid = _grid(experts, least) if capacities is None else wants_wholes("capacities", capacities, least)
        for policy in policies:
            if policy == LRU:
                sizes = list(range(least, experts + 1, least)) if capacities is None else grid
                misses = _lru_misses(layers, requests, sizes, per_layer, one, step_tokens)
            else:
                sizes = grid
                table = simulate(one, sizes, [policy], per_layer=per_layer, step_tokens=step_tokens)
                misses = table.groupby("capacity_slots").misses.sum().loc[sizes].tolist()
            for slots, missed in zip(sizes, misses, strict=True):
                ratio = missed / asked if asked else float("nan")
                rows.append((order, policy_name(policy), slots, slots / experts, asked, missed, ratio))
    return frame(rows, COLUMNS)


def stack_distance(
    trace: Trace | Mapping[str, Trace], *, per_layer: bool = True, step_tokens: int = 1
) -> "pd.DataFrame":
    """A row for each (order, layer, bin): columns `DISTANCE_COLUMNS`; bins 0, 1, 2-3, 4-7, ..., infinite.

    distance: other experts asked for since this one's last request, of the same layer (`per_layer`) or of all layers.
    share: of the layer's requests; share_within: their share up to distance_to, which is the hit rate of an LRU of
    distance_to + 1 slots.
    """
    rows = []
    for order, one in _named(trace).items():
        layers, requests = requests_of(one, step_tokens)
        if not requests:
            raise LabError("lab.caching.stack_distance: the trace holds no token.")
        edges = _edges(ids_of(one)[2] * (1 if per_layer else len(layers)))
        found = _distances(requests, per_layer)
        for layer in layers:
            mine = found[layer]
            seen = 0
            for low, high in [*edges, (np.inf, np.inf)]:
                count = int(((mine >= low) & (mine <= high)).sum())
                seen += count
                whole = max(len(mine), 1)
                rows.append((order, layer, low, high, count, count / whole, seen / whole))
    return frame(rows, DISTANCE_COLUMNS)


def _named(trace: Trace | Mapping[str, Trace]) -> Mapping[str, Trace]:
    if not isinstance(trace, Mapping):
        return {TEXT: trace}
    if not trace:
        raise LabError("no trace was given.")
    return trace


def _grid(experts: int, least: int) -> list[int]:
    """Eight capacities, multiples of `least` so that layers share evenly."""
    return sorted({max(1, round(share * experts / least)) * least for share in SHARES})


def _edges(longest: int) -> list[tuple[float, float]]:
    """(0, 0), (1, 1), (2, 3), (4, 7), ... up to the longest distance there can be."""
    powers = [2.0**n for n in range(max(longest - 1, 1).bit_length())]
    return [(0.0, 0.0), *((low, 2 * low - 1) for low in powers)]


def _distances(requests: Sequence[Request], per_layer: bool) -> dict[int, np.ndarray]:
    """Stack distances of each layer's requests, among the keys of the layer or of all layers."""
    number = np.array([request.layer for request in requests for _ in request.keys], dtype=np.int64)
    layers = sorted({request.layer for request in requests})
    if per_layer:
        return {n: stack_distances([request.keys for request in requests if request.layer == n]) for n in layers}
    found = stack_distances([request.keys for request in requests])
    return {n: found[number == n] for n in layers}


def _lru_misses(
    layers: Sequence[int], requests: Sequence[Request], sizes: Sequence[int], per_layer: bool, trace: Trace, tokens: int
) -> list[int]:
    """Experts an LRU of each size reads. Sizes too small for the widest request are simulated: waves have no stack."""
    distances = {layer: np.sort(found) for layer, found in _distances(requests, per_layer).items()}
    widest = {layer: max((len(r.keys) for r in requests if r.layer == layer), default=0) for layer in layers}
    misses = []
    for slots in sizes:
        shares = split_slots(slots, layers, per_layer)
        if any(len(shares[layer]) < widest[layer] for layer in layers):
            table = simulate(trace, slots, [LRU], per_layer=per_layer, step_tokens=tokens)
            misses.append(int(table.misses.sum()))
        else:
            found = (len(d) - np.searchsorted(d, len(shares[layer])) for layer, d in distances.items())
            misses.append(int(sum(found)))
    return misses
