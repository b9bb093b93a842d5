"""Tokens for streaming runs: a recorded trace spread over more experts, and layer inputs that make routers pick it.

The shipped trace has 32 experts and 4 picks. Spread over E of them, an expert becomes E / 32 children, and which child
a token takes follows from its id: the words' own frequencies and the text's repetitions stay. Picks beyond 4 are the
first of another layer, among other children.

The input of (token, layer) is made of the router rows of its picks, and more weakly of the next layer's rows of what a
predictor would name: a share of the true picks among its first K, more among its next K, the rest decoys as popular
experts are. Routers and prediction then run for real, with the accuracy that was published for this model (seed system
S3: the first 6 hold 67.6 % of the picks, the first 12 81.8 %).
"""

import numpy as np
import torch

from benchmarks.streamed_file import Shape, routers
from moe_lab.trace import RoutingTrace

RECALL = (0.676, 0.818)
OWN, NEAR, FAR = 6.0, 3.0, 2.0  # strengths of a token's picks, of the predictor's first K and of its next K


def wide_trace(trace: RoutingTrace, shape: Shape, tokens: int, first: int = 0) -> RoutingTrace:
    """`tokens` tokens of `trace` from `first` on, in layers, experts and picks of `shape`."""
    part = slice(first, first + tokens)
    ids, words = trace.ids[part].astype(np.int64), np.asarray(trace.token_ids)[part].astype(np.int64)
    children = shape.experts // trace.num_experts
    child = (words * 2654435761 >> 7) % children
    other = (child + 1 + (words * 40503 >> 5) % max(1, children - 1)) % children
    layers = []
    for number in range(shape.layers):
        own = ids[:, number % ids.shape[1]] * children + child[:, None]
        more = ids[:, (number + 2) % ids.shape[1], : shape.top_k - trace.top_k] * children + other[:, None]
        layers.append(np.concatenate([own, more], 1))
    picks = np.stack(layers, 1)
    nothing = np.full(picks.shape, np.nan)
    return RoutingTrace(
        ids=picks, weights=nothing, layers=tuple(range(shape.layers)), num_experts=shape.experts, width=shape.experts,
        token_ids=words,
    )  # fmt: skip


def predicted(trace: RoutingTrace, recall: tuple[float, float] = RECALL, seed: int = 3) -> np.ndarray:
    """What a predictor names for each layer one layer ahead, [T, L, 2 K]: `recall` of the picks among the first K and
    among all.
    """
    rng, k = np.random.default_rng(seed), trace.top_k
    named = np.empty((trace.tokens, len(trace.layers), 2 * k), np.int64)
    for place in range(len(trace.layers)):
        counts = np.bincount(trace.ids[:, place].ravel(), minlength=trace.num_experts) + 0.5
        for t in range(trace.tokens):
            picks = trace.ids[t, place]
            lot = rng.random(k)
            near, far = picks[lot < recall[0]], picks[(lot >= recall[0]) & (lot < recall[1])]
            weights = counts.copy()
            weights[picks] = 0
            decoys = rng.choice(trace.num_experts, 2 * k - len(near) - len(far), False, weights / weights.sum())
            fill = k - len(near)
            named[t, place] = [*near, *decoys[:fill], *far, *decoys[fill:]]
    return named


def inputs(trace: RoutingTrace, named: np.ndarray, shape: Shape, device: str, seed: int = 4) -> list[torch.Tensor]:
    """Rows [T, D] for each layer, bf16: their router picks the trace's experts, the next layer's router what `named`
    says of the next layer.
    """
    weights = [router.to(device) for router in routers(shape)]
    g = torch.Generator().manual_seed(seed)
    rows = []
    for place, weight in enumerate(weights):
        own = torch.from_numpy(trace.ids[:, place].astype(np.int64)).to(device)
        strength = OWN + 0.5 * torch.rand(own.shape, generator=g).to(device)
        x = torch.einsum("tk,tkd->td", strength, weight[own])
        if place + 1 < len(weights):
            ahead = torch.from_numpy(named[:, place + 1]).to(device)
            steps = torch.tensor([NEAR] * trace.top_k + [FAR] * trace.top_k, device=device)
            x += torch.einsum("k,tkd->td", steps, weights[place + 1][ahead])
        rows.append(x.bfloat16())
    return rows
