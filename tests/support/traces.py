"""Small routing traces: spelled out pick by pick, or drawn."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_lab.trace import RoutingTrace


def trace_of(picks: Sequence[Sequence[Sequence[int]]], num_experts: int, **more: Any) -> RoutingTrace:
    """From picks[token][layer] = ids, -1 for a skipped slot; slot k weighs 1 / (k + 2)."""
    signed = np.array(picks)
    ids = np.where(signed < 0, 65535, signed).astype(np.uint16)
    weights = np.broadcast_to(1 / (2 + np.arange(ids.shape[2])), ids.shape).astype(np.float16)
    about = {"layers": tuple(range(ids.shape[1])), "num_experts": num_experts, "width": num_experts, **more}
    return RoutingTrace(ids=ids, weights=weights, **about)


def random_trace(
    tokens: int = 300, layers: int = 3, experts: int = 8, top_k: int = 2, seed: int = 0, **more: Any
) -> RoutingTrace:
    """Different experts a token; expert e is liked e + 1 times as much as expert 0, and the choice sticks a little."""
    rng = np.random.default_rng(seed)
    liking = np.log1p(np.arange(experts)) + rng.gumbel(size=(tokens, layers, experts))
    liking[1:] += 0.5 * liking[:-1]
    return trace_of(np.argsort(-liking, axis=2)[:, :, :top_k], experts, **more)
