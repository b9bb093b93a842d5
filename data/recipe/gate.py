"""The gate a trained model must pass before it is shipped, from the experts its held-out tokens chose.

Conditions: every expert of every layer gets at least 0.5 % of the assignments; an LRU cache of a quarter of the
experts hits at least 1.5 times as often as on the same tokens in shuffled order; Belady's optimum hits at least 0.15
more than LRU; the last layer's router, asked one layer early, names at least 0.6 of its experts; the shipped formats
cost at most 0.02 nats. A request is one (token, expert) of one layer, tokens in text order; each layer has its own
slots.
"""

from collections import OrderedDict
from typing import Any

import numpy as np

LIMITS = {
    "min_share": 0.005,
    "lru_over_shuffled": 1.5,
    "belady_minus_lru": 0.15,
    "recall_last_pair": 0.6,
    "loss_increase": 0.02,
}


def lru_hits(requests: list[int], slots: int) -> int:
    """Hits of a least-recently-used cache."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for expert in requests:
        if expert in held:
            hits += 1
            held.move_to_end(expert)
            continue
        if len(held) == slots:
            held.popitem(last=False)
        held[expert] = None
    return hits


def belady_hits(requests: list[int], slots: int) -> int:
    """Hits of the optimal cache that must take in what it misses: evict what is asked for furthest in the future."""
    never = len(requests)
    following, seen = [never] * len(requests), {}
    for at in range(len(requests) - 1, -1, -1):
        following[at] = seen.get(requests[at], never)
        seen[requests[at]] = at
    held: dict[int, int] = {}
    hits = 0
    for at, expert in enumerate(requests):
        if expert in held:
            hits += 1
        elif len(held) == slots:
            del held[max(held, key=held.__getitem__)]
        held[expert] = following[at]
    return hits


def expert_shares(ids: np.ndarray, experts: int) -> np.ndarray:
    """ids [L, T, K] -> float64 [L, E], each row sums to 1."""
    counts = np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in ids])
    return counts / counts.sum(1, keepdims=True)


def cache_rates(ids: np.ndarray, slots: int, seed: int = 0) -> dict[str, list[float]]:
    """Hit rates by layer: `lru`, `lru_shuffled` (the same tokens in random order), `belady`. ids [L, T, K]."""
    order = np.random.default_rng(seed).permutation(ids.shape[1])
    rates: dict[str, list[float]] = {"lru": [], "lru_shuffled": [], "belady": []}
    for layer in ids:
        requests, shuffled = layer.reshape(-1).tolist(), layer[order].reshape(-1).tolist()
        rates["lru"].append(lru_hits(requests, slots) / len(requests))
        rates["lru_shuffled"].append(lru_hits(shuffled, slots) / len(requests))
        rates["belady"].append(belady_hits(requests, slots) / len(requests))
    return rates


def overlap(ids: np.ndarray) -> list[float]:
    """Part of a token's experts that the token before it had chosen too, by layer."""
    same = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1)
    return same.mean((1, 2)).tolist()


def judge(
    ids: np.ndarray, cache_tokens: np.ndarray, experts: int, recall: float, loss_increase: float
) -> dict[str, Any]:
    """Every quantity of the gate with its limit and verdict. `cache_tokens`: numbers of the tokens the caches see."""
    share = expert_shares(ids, experts)
    rates = cache_rates(ids[:, cache_tokens], experts // 4)
    mean = {name: float(np.mean(values)) for name, values in rates.items()}
    top_quarter = np.sort(share, axis=1)[:, -experts // 4 :].sum(1)
    seen = {
        "min_share": float(share.min()),
        "lru_over_shuffled": mean["lru"] / mean["lru_shuffled"],
        "belady_minus_lru": mean["belady"] - mean["lru"],
        "recall_last_pair": recall,
        "loss_increase": loss_increase,
    }
    passed = {
        name: value <= LIMITS[name] if name == "loss_increase" else value >= LIMITS[name]
        for name, value in seen.items()
    }
    by_layer = {
        "min_share": share.min(1).tolist(),
        "max_share": share.max(1).tolist(),
        "top_quarter_share": top_quarter.tolist(),
        "overlap": overlap(ids),
        **rates,
    }
    return {
        "tokens": int(ids.shape[1]),
        "cache_tokens": int(cache_tokens.size),
        "passed": passed,
        "all_passed": all(passed.values()),
        "seen": seen,
        "limits": LIMITS,
        "by_layer": by_layer,
    }


def table(verdict: dict[str, Any]) -> str:
    """The verdict as text: one line a layer, one line a condition."""
    layers = verdict["by_layer"]
    lines = ["layer  " + "  ".join(f"{name:>17}" for name in layers)]
    for layer in range(len(layers["lru"])):
        lines.append(f"{layer:>5}  " + "  ".join(f"{values[layer]:>17.4f}" for values in layers.values()))
    for name, value in verdict["seen"].items():
        sign = "<=" if name == "loss_increase" else ">="
        lines.append(
            f"{'ok  ' if verdict['passed'][name] else 'FAIL'} {name:<18} {value:8.4f}  wanted {sign} {LIMITS[name]}"
        )
    return "\n".join(lines)
