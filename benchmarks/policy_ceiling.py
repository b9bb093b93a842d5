"""How much of the gap between LRU and the optimum anything could close on a trace: eviction by learnt scores.

    PYTHONPATH=.:kernels python benchmarks/policy_ceiling.py [--trace data/trace.parquet] [--slots 8]

The first half of every domain trains, the second half is served; each layer has `--slots` slots of its own, one token a
step. A score says how soon each expert is asked for again (target: exp(-tokens until then / 8)), by ridge regression;
the lowest resident score leaves. What a score may look at grows from row to row:
  one rate       the shipped policies' kind: one exponentially weighted request rate (half-lives 20, 69, 140 tokens)
  all rates      nine half-lives from 1 to 300 tokens and their square roots
  + followers    and which experts the layer's last three tokens picked
  + all layers   and the picks of this and the last token in every layer, which a cache split by layer never sees
  .., online     the same, learnt while the second half is served, from nothing
The last rows are the lab's own policies through its simulator, on the same second half; `fitted` has seen the first.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moe_lab.caching.study import study
from moe_lab.stream.policy import Fitted
from moe_lab.trace import RoutingTrace

HALF_LIVES = (1, 2, 4, 8, 16, 32, 69, 140, 300)
REACH = 8.0  # tokens: about how long an expert stays without being asked for
NEVER = 10**6
BLOCK, KNOWN_AFTER = 256, 64  # tokens; beyond 64 a next use counts e^-8


def one_hot(ids: np.ndarray, experts: int) -> np.ndarray:
    """[T, K] picks as [T, E] zeros and ones."""
    rows = np.zeros((len(ids), experts), np.float32)
    rows[np.arange(len(ids))[:, None], ids] = 1
    return rows


def rate(used: np.ndarray, half_life: float) -> np.ndarray:
    """Exponentially weighted share of the requests so far, [T, E]."""
    keep, now, found = 2 ** (-1 / half_life), np.zeros(used.shape[1]), np.empty_like(used)
    for t, row in enumerate(used):
        now = keep * now + (1 - keep) * row
        found[t] = now
    return found


def next_use(used: np.ndarray) -> np.ndarray:
    """Tokens until each expert is asked for again, [T, E]."""
    at, found = np.full(used.shape[1], NEVER), np.full(used.shape, NEVER)
    for t in range(len(used) - 1, -1, -1):
        found[t] = at - t
        at = np.where(used[t] > 0, t, at)
    return found


def last_use(used: np.ndarray) -> np.ndarray:
    """When each expert was asked for last, [T, E]."""
    at, found = np.full(used.shape[1], -1), np.empty(used.shape)
    for t, row in enumerate(used):
        at = np.where(row > 0, t, at)
        found[t] = at
    return found


def hit_rate(score: np.ndarray, ids: np.ndarray, slots: int) -> float:
    """Hits of a cache of `slots` from which, after each request, the lowest score leaves that the request spares."""
    resident: set[int] = set()
    hits = asked = 0
    for row, now in zip(ids.tolist(), score, strict=True):
        wanted = set(row)
        hits, asked = hits + len(wanted & resident), asked + len(wanted)
        over = len(resident | wanted) - slots
        leaving = sorted(resident - wanted, key=lambda e: now[e])[:over] if over > 0 else ()
        resident = (resident | wanted) - set(leaving)
    return hits / asked


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
    """Weights of the linear fit."""
    return np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)


def rates(used: np.ndarray) -> np.ndarray:
    """All rates and their roots, [T, E, 18]."""
    found = np.stack([rate(used, h) for h in HALF_LIVES], -1)
    return np.concatenate([found, np.sqrt(found)], -1)


def learnt(train: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray], more: str | None) -> np.ndarray:
    """Scores [T, E] of the test half; `more` names what is looked at beside the rates."""
    goal = np.exp(-next_use(train["used"]) / REACH)
    seen, served = rates(train["used"]), rates(test["used"])
    if more is not None:
        told = ridge(train[more], goal, 100.0)
        seen = np.concatenate([seen, (train[more] @ told)[..., None]], -1)
        served = np.concatenate([served, (test[more] @ told)[..., None]], -1)
    return served @ ridge(seen.reshape(-1, seen.shape[-1]), goal.reshape(-1), 1e-3)


def learnt_online(seen: Mapping[str, np.ndarray], more: str | None) -> np.ndarray:
    """Scores [T, E] of a regression that starts knowing nothing: each block of tokens is scored by what was learnt from
    the tokens whose next uses had been seen by then.
    """
    goal, base, scores = np.exp(-next_use(seen["used"]) / REACH), rates(seen["used"]), np.zeros(seen["used"].shape)
    told, first = (
        _Sums(0 if more is None else seen[more].shape[1], 100.0),
        _Sums(base.shape[-1] + (more is not None), 1e-3),
    )
    held = np.zeros((*goal.shape, base.shape[-1] + (more is not None)))
    for start in range(0, len(goal), BLOCK):
        now = slice(start, start + BLOCK)
        held[now, :, : base.shape[-1]] = base[now]
        if more is not None:
            held[now, :, -1] = seen[more][now] @ told.solved(goal.shape[1])
        scores[now] = (held[now] @ first.solved(1))[..., 0]
        known = slice(max(0, start - KNOWN_AFTER), max(0, start + BLOCK - KNOWN_AFTER))
        first.add(held[known].reshape(-1, held.shape[-1]), goal[known].reshape(-1, 1))
        if more is not None:
            told.add(seen[more][known], goal[known])
    return scores


class _Sums:
    """A ridge regression whose data come bit by bit."""

    def __init__(self, features: int, penalty: float) -> None:
        self._xx, self._xy = penalty * np.eye(features), None

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Learn from rows x [n, F] and y [n, G]."""
        self._xx += x.T @ x
        self._xy = x.T @ y + (0 if self._xy is None else self._xy)

    def solved(self, goals: int) -> np.ndarray:
        """Weights [F, G] so far; zeros before the first rows."""
        return np.zeros((len(self._xx), goals)) if self._xy is None else np.linalg.solve(self._xx, self._xy)


def looked_at(ids: np.ndarray, place: int, experts: int) -> dict[str, np.ndarray]:
    """What scores may look at for the layer at `place`, of picks [T, L, K]."""
    used, one = one_hot(ids[:, place], experts), np.ones((len(ids), 1), np.float32)
    every = np.concatenate([one_hot(ids[:, n], experts) for n in range(ids.shape[1])], 1)
    followers = np.concatenate([*(np.roll(used, lag, 0) for lag in range(3)), one], 1)
    return {
        "used": used,
        "+ followers": followers,
        "+ all layers": np.concatenate([every, np.roll(every, 1, 0), one], 1),
    }


def layer_rates(ids: tuple[np.ndarray, np.ndarray], place: int, experts: int, slots: int) -> dict[str, float]:
    """Hit rates on the test half of one layer, by row of the table."""
    train, test = (looked_at(half, place, experts) for half in ids)
    scores = {"lru": last_use(test["used"])}
    scores |= {f"one rate, half-life {h}": rate(test["used"], h) for h in (20, 69, 140)}
    for more in (None, "+ followers", "+ all layers"):
        scores[more or "all rates"] = learnt(train, test, more)
        scores[f"{more or 'all rates'}, online"] = learnt_online(test, more)
    scores["belady"] = -next_use(test["used"])
    return {name: hit_rate(score, ids[1][:, place], slots) for name, score in scores.items()}


def halves(trace: RoutingTrace) -> tuple[np.ndarray, np.ndarray]:
    """Picks of the first and of the second half of every domain."""
    named = np.zeros(trace.tokens) if trace.domains is None else np.asarray(trace.domains)
    parts = [np.flatnonzero(named == name) for name in dict.fromkeys(named.tolist())]
    first, second = (np.concatenate([p[s(len(p))] for p in parts]) for s in (_first, _second))
    ids = trace.ids.astype(np.int64)
    return ids[first], ids[second]


def _first(count: int) -> slice:
    return slice(0, count // 2)


def _second(count: int) -> slice:
    return slice(count // 2, count)


def shipped(trace: RoutingTrace, ids: tuple[np.ndarray, np.ndarray], slots: int) -> dict[str, float]:
    """Hit rates of policies that a cache can be given, all layers together."""
    made = []
    for half in ids:
        picks = {layer: half[:, n].astype(np.uint16) for n, layer in enumerate(trace.layers)}
        weights = {layer: np.full(each.shape, 1 / trace.top_k, np.float16) for layer, each in picks.items()}
        made.append(RoutingTrace.from_layers(picks, weights, num_experts=trace.num_experts, width=trace.width))
    policies = ["lru", "lfu_decay", "predicted", Fitted.of(made[0]), "belady"]
    table = study(made[1], slots * len(trace.layers), policies)
    return dict(zip(table["policy"], table["hit_rate"], strict=True))


def main() -> None:
    """Print hit rates and shares of the gap, means over the layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=Path(__file__).parents[1] / "data/trace.parquet")
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    trace = RoutingTrace.load(args.trace)
    ids = halves(trace)
    layers = [layer_rates(ids, n, trace.num_experts, args.slots) for n in range(len(trace.layers))]
    mean = {name: float(np.mean([layer[name] for layer in layers])) for name in layers[0]}
    for found in (mean, shipped(trace, ids, args.slots)):
        low, high = found["lru"], found["belady"]
        for name, value in found.items():
            print(f"{name:24} {value:.3f}  {(value - low) / (high - low):6.1%} of the gap", flush=True)


if __name__ == "__main__":
    main()
