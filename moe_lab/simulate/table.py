"""`lab.simulate`: hits and misses of policies at capacities, as tables."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np

from moe_lab.checks import wants_whole, wants_wholes
from moe_lab.errors import LabError, MissingExtra
from moe_lab.simulate.bounds import BELADY
from moe_lab.simulate.replay import AnyPolicy, check_policies, misses_of
from moe_lab.simulate.requests import Request, Trace, in_waves, requests_of
from moe_lab.stream.policy import policy_name
from moe_lab.stream.slots import split_slots

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("policy", "capacity_slots", "layer", "requests", "hits", "misses", "hit_rate", "bytes_read")
STEP_COLUMNS = ("policy", "capacity_slots", "step", "layer", "requests", "hits", "misses")


def simulate(
    trace: Trace,
    capacity: int | Sequence[int],
    policies: Sequence[AnyPolicy] = ("lru", BELADY),
    *,
    per_layer: bool = False,
    step_tokens: int = 1,
    expert_bytes: int | Mapping[int, int] | None = None,
) -> "pd.DataFrame":
    """A row for each (capacity, policy, layer): columns `COLUMNS`.

    `trace`: RoutingTrace or ids [T, L, K] (negative ids and a trace's "no pick" are skipped). `capacity`: slots of the
    whole cache, as in ExpertCache(slots=...); `per_layer` splits them as there. `policies`: names, objects (copied),
    classes or factories, and the bounds "belady", "belady_bypass" and "infinite". `step_tokens` tokens are served
    together, as a batch is. requests = distinct experts asked for; hit_rate = hits / requests (the "unique hit rate"),
    NaN without requests; bytes_read = misses x `expert_bytes` (a number, or one a layer), NaN without it. LabError for
    what cannot be simulated.
    """
    layers, requests = requests_of(trace, step_tokens)
    check_policies(policies)
    rows = []
    for slots in capacities(capacity):
        shares, waves = _split(layers, requests, slots, per_layer)
        asked = _by_layer(waves, [len(wave.keys) for wave in waves], layers)
        for policy in policies:
            misses = _by_layer(waves, misses_of(waves, shares, policy), layers)
            label = policy_name(policy)
            rows += [(label, slots, *_row(n, asked[n], misses[n], expert_bytes)) for n in layers]
    return frame(rows, COLUMNS)


def steps(
    trace: Trace, capacity: int, policy: AnyPolicy = "lru", *, per_layer: bool = False, step_tokens: int = 1
) -> "pd.DataFrame":
    """The same step by step: a row for each (step, layer), columns `STEP_COLUMNS`, as the engine's own record has it.

    A step is `step_tokens` tokens. LabError as `simulate`.
    """
    layers, requests = requests_of(trace, step_tokens)
    check_policies([policy])
    (slots,) = capacities(capacity)
    shares, waves = _split(layers, requests, slots, per_layer)
    misses = dict.fromkeys(((request.step, request.layer) for request in requests), 0)
    for wave, count in zip(waves, misses_of(waves, shares, policy), strict=True):
        misses[wave.step, wave.layer] += count
    label = policy_name(policy)
    rows = []
    for request in requests:
        asked, missed = len(request.keys), misses[request.step, request.layer]
        rows.append((label, slots, request.step, request.layer, asked, asked - missed, missed))
    return frame(rows, STEP_COLUMNS)


def capacities(given: int | Iterable[int]) -> list[int]:
    """One capacity or several as a list, each once. LabTypeError for what is no whole number, LabError for none at all
    and below 1.
    """
    if isinstance(given, Integral) or not isinstance(given, Iterable):
        return [wants_whole("capacity", given, 1)]
    listed = list(dict.fromkeys(wants_wholes("capacity", given, 1)))
    if not listed:
        raise LabError("capacity is empty; wanted at least one number of slots.")
    return listed


def _split(
    layers: Sequence[int], requests: list[Request], slots: int, per_layer: bool
) -> tuple[dict[int, range], list[Request]]:
    """The slots of each layer, and the requests cut into waves that fit them."""
    most = max(len({key for request in requests for key in request.keys}), len(layers), 1)
    # slots beyond every key that is ever asked for stay empty; their table need not exist
    shares = split_slots(min(slots, most * len(layers) if per_layer else most), layers, per_layer)
    return shares, in_waves(requests, shares)


def _by_layer(waves: Sequence[Request], counts: Sequence[int], layers: Sequence[int]) -> dict[int, int]:
    at = np.array([wave.layer for wave in waves], dtype=np.int64)
    number = np.array(counts, dtype=np.int64)
    return {layer: int(number[at == layer].sum()) for layer in layers}


def _row(
    layer: int, requests: int, misses: int, expert_bytes: int | Mapping[int, int] | None
) -> tuple[int, int, int, int, float, float]:
    """The columns from "layer" on."""
    size = expert_bytes.get(layer) if isinstance(expert_bytes, Mapping) else expert_bytes
    hits = requests - misses
    rate = hits / requests if requests else float("nan")
    return layer, requests, hits, misses, rate, float("nan") if size is None else misses * size


def frame(rows: Sequence[tuple], columns: Sequence[str]) -> "pd.DataFrame":
    """A DataFrame of `rows`. MissingExtra where pandas is absent."""
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("pandas", "report", "simulate") from error
    return pd.DataFrame(rows, columns=list(columns))
