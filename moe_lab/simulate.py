"""Replay a routing trace against a cache that holds no bytes: hits and misses of any policy at any capacity.

The bookkeeping is the live cache's own (`stream.slots` under the same policy objects), so on the same requests both
count the same, exactly. A request is what the engine asks for at once: the distinct experts of one layer for the tokens
of one step, cut into waves when they outnumber the slots. `belady` is the exact optimum (MIN): it evicts the key whose
next use is farthest, which only a recorded trace can tell.
"""

import heapq
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.errors import LabError, MissingExtra
from moe_lab.stream.policy import POLICIES, Key, Policy, policy_factory, policy_name
from moe_lab.stream.slots import SlotTable, distinct, split_slots, split_waves
from moe_lab.trace import NO_PICK, RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

BELADY = "belady"
COLUMNS = ("policy", "capacity_slots", "layer", "requests", "hits", "misses", "hit_rate", "bytes_read")
NEVER = 1 << 62


class Belady:
    """Evicts the key whose next use is farthest away. `requests`: all groups of keys to come, in order."""

    name = BELADY

    def __init__(self, requests: Sequence[Sequence[Key]]) -> None:
        self._uses: dict[Key, list[int]] = defaultdict(list)
        for time, group in enumerate(requests):
            for key in group:
                self._uses[key].append(time)
        for times in self._uses.values():
            times.reverse()  # the next use is the last element
        self._next: dict[Key, int] = {}
        self._farthest: list[tuple[int, Key]] = []  # heap; entries that `_next` contradicts are stale

    def on_hit(self, key: Key) -> None:
        times = self._uses[key]
        if not times:
            raise LabError(f"belady was built for another trace: it does not know this request of {key!r}.")
        times.pop()
        self._next[key] = times[-1] if times else NEVER
        heapq.heappush(self._farthest, (-self._next[key], key))
        if len(self._farthest) > 64 + 4 * len(self._next):  # mostly stale by now: a long trace must not fill the memory
            self._farthest = [(-when, resident) for resident, when in self._next.items()]
            heapq.heapify(self._farthest)

    def on_insert(self, key: Key) -> None:
        self.on_hit(key)

    def on_evict(self, key: Key) -> None:
        self._next.pop(key, None)

    def victim(self, candidates: Collection[Key]) -> Key:
        held: list[tuple[int, Key]] = []  # farthest ones that the present request uses
        while True:
            when, key = heapq.heappop(self._farthest)
            if self._next.get(key) != -when:
                continue
            if key in candidates:
                break
            held.append((when, key))
        for entry in held:
            heapq.heappush(self._farthest, entry)
        return key


def simulate(
    trace: RoutingTrace | np.ndarray,
    capacity: int | Sequence[int],
    policies: Sequence[str | Policy | Any] = ("lru", BELADY),
    *,
    per_layer: bool = False,
    step_tokens: int = 1,
    expert_bytes: int | Mapping[int, int] | None = None,
) -> "pd.DataFrame":
    """A row for each (capacity, policy, layer): columns `COLUMNS`.

    `trace`: RoutingTrace or ids [T, L, K] (negative ids and a trace's "no pick" are skipped). `capacity`: slots of the
    whole cache, as in ExpertCache(slots=...); `per_layer` splits them as there. `policies`: names, objects (copied),
    classes or factories, and "belady". `step_tokens` tokens are served together, as a batch is. requests = distinct
    experts asked for; hit_rate = hits / requests (the "unique hit rate"), NaN without requests; bytes_read = misses x
    `expert_bytes` (a number, or one a layer), NaN without it. Raises LabError for what cannot be simulated.
    """
    layers, requests = _requests(trace, step_tokens)
    _check_policies(policies)
    rows = []
    most = max(len({key for _, keys in requests for key in keys}), len(layers), 1)
    for slots in [capacity] if isinstance(capacity, Integral) else list(capacity):  # type: ignore[arg-type]
        if slots < 1:
            raise LabError(f"capacity={slots} slots: wanted at least 1.")
        # slots beyond every key that is ever asked for stay empty; their table need not exist
        used = min(int(slots), most * len(layers) if per_layer else most)
        shares = split_slots(used, layers, per_layer)
        groups = [(layer, wave) for layer, keys in requests for wave in split_waves(keys, len(shares[layer]))]
        for policy in policies:
            counts = _replay(groups, shares, policy)
            rows += [(policy_name(policy), int(slots), *_row(n, *counts[n], expert_bytes)) for n in layers]
    return _frame(rows)


def _check_policies(policies: Sequence[str | Policy | Any]) -> None:
    """LabError for an unknown name, an object that is no policy, or two policies that the rows could not tell apart."""
    known: dict[str, type] = {BELADY: Belady}
    for policy in policies:
        if isinstance(policy, str) and policy not in (*POLICIES, BELADY):
            names = ", ".join((*POLICIES, BELADY))
            raise LabError(f"unknown eviction policy {policy!r}; wanted {names} or an object of your own.")
        kind = Belady if policy == BELADY else type(policy_factory(policy)())
        if known.setdefault(policy_name(policy), kind) is not kind:
            raise LabError(f"two eviction policies are called {policy_name(policy)!r}; give yours a `name` of its own.")


def _replay(
    groups: Sequence[tuple[int, Sequence[Key]]], shares: Mapping[int, range], policy: str | Policy | Any
) -> dict[int, tuple[int, int]]:
    """(hits, misses) a layer, of one policy over all groups."""
    tables = {}
    for share in set(shares.values()):
        if isinstance(policy, str) and policy == BELADY:
            made = Belady([keys for layer, keys in groups if shares[layer] == share])
        else:
            made = policy_factory(policy)()
        tables[share] = SlotTable(share, made)
    table_of = {layer: tables[share] for layer, share in shares.items()}
    hits, misses = dict.fromkeys(shares, 0), dict.fromkeys(shares, 0)
    for layer, keys in groups:
        table = table_of[layer]
        missing = table.take(keys)
        assert missing is not None  # a wave fits, and nothing else is held
        misses[layer] += len(missing)
        hits[layer] += len(keys) - len(missing)
        for key in keys:
            table.put_back(key)
    return {layer: (hits[layer], misses[layer]) for layer in shares}


def _requests(
    trace: RoutingTrace | np.ndarray, step_tokens: int
) -> tuple[tuple[int, ...], list[tuple[int, list[Key]]]]:
    """The layers, and what they ask for in the engine's order: step by step, layer by layer, experts ascending."""
    if step_tokens < 1:
        raise LabError(f"step_tokens={step_tokens}: wanted at least 1.")
    ids, layers, experts = _ids_of(trace)
    if ids.size == 0:
        return layers, []
    key_of = {layer: [(layer, expert) for expert in range(experts)] for layer in layers}
    requests = []
    for start in range(0, len(ids), step_tokens):
        for layer, picks in zip(layers, ids[start : start + step_tokens].swapaxes(0, 1).tolist(), strict=True):
            keys = key_of[layer]
            requests.append((layer, [keys[e] for e in distinct(p for row in picks for p in row) if 0 <= e < experts]))
    return layers, requests


def _ids_of(trace: RoutingTrace | np.ndarray) -> tuple[np.ndarray, tuple[int, ...], int]:
    """ids [T, L, K], the layers' numbers, and E; ids outside 0..E-1 are nothing to fetch."""
    if isinstance(trace, RoutingTrace):
        # Picks from E on are skipped: zero-computation experts have no weights, and "no pick" is the largest number.
        return trace.ids, tuple(trace.layers), trace.num_experts
    ids = np.asarray(trace)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise LabError(f"a trace is a RoutingTrace or whole numbers [T, L, K], got {ids.dtype} of shape {ids.shape}.")
    if ids.shape[1] == 0:
        raise LabError(f"the trace has shape {ids.shape}: no layers.")
    skipped = ids == NO_PICK if ids.dtype == np.uint16 else ids < 0
    ids = np.where(skipped, -1, ids.astype(np.int64))
    return ids, tuple(range(ids.shape[1])), int(ids.max(initial=-1)) + 1


def _row(
    layer: int, hits: int, misses: int, expert_bytes: int | Mapping[int, int] | None
) -> tuple[int, int, int, int, float, float]:
    """The columns from "layer" on."""
    size = expert_bytes.get(layer) if isinstance(expert_bytes, Mapping) else expert_bytes
    requests = hits + misses
    rate = hits / requests if requests else float("nan")
    return layer, requests, hits, misses, rate, float("nan") if size is None else misses * size


def _frame(rows: list[tuple]) -> "pd.DataFrame":
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtra("pandas", "report", "simulate") from error
    return pd.DataFrame(rows, columns=list(COLUMNS))
