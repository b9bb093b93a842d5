"""Traces that lack one thing the recorded one has: what is left of a policy's gain without it?

text                      as recorded
shuffled                  the same tokens in random order: popularities and a token's own picks stay, neighbours go
shuffled within domains   the same inside each domain, where the trace names them: what the change of subject explains
popularity                experts drawn anew by each layer's popularities: what is picked together goes as well
uniform                   experts drawn evenly: skew goes too, and hits are the cache's share of the experts
All are seeded. Weights of drawn traces are not known (NaN).
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from moe_lab.analysis.picks import occupancy, shuffled, wants_trace
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.trace import NO_PICK, RoutingTrace

TEXT, SHUFFLED, IN_DOMAIN = "text", "shuffled", "shuffled within domains"
POPULARITY, UNIFORM = "popularity", "uniform"


def controls(trace: RoutingTrace, seed: int = 0) -> dict[str, RoutingTrace]:
    """The trace and its controls by name (see the module), most like it first."""
    wants_trace("lab.caching.controls", trace)
    if trace.tokens == 0:
        raise LabError("lab.caching.controls: the trace holds no token.")
    found = {TEXT: trace}
    if trace.domains is not None:
        found[IN_DOMAIN] = shuffled(trace, seed, within_domain=True)
    return found | {
        SHUFFLED: shuffled(trace, seed),
        POPULARITY: by_popularity(trace, seed),
        UNIFORM: uniform(trace, seed),
    }


def uniform(trace: RoutingTrace, seed: int = 0) -> RoutingTrace:
    """As many different experts a token as recorded, each of the E equally likely."""
    return _drawn(trace, seed, lambda layer: np.zeros(trace.num_experts))


def by_popularity(trace: RoutingTrace, seed: int = 0) -> RoutingTrace:
    """As many different experts a token as recorded, drawn one after another by how often the layer picks each.

    Without replacement, so an expert that most tokens pick comes out a little less popular than recorded.
    """

    def odds(layer: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.log(occupancy(trace, layer).sum(axis=0))

    return _drawn(trace, seed, odds)


def previous_token(trace: RoutingTrace) -> RoutingTrace:
    """Each token's picks are those of the token before it; the first token has none. The naive forecast of a trace."""
    wants_trace("lab.caching.previous_token", trace)
    ids = np.full_like(trace.ids, NO_PICK)
    ids[1:] = trace.ids[:-1]
    return replace(trace, ids=ids, weights=np.full(ids.shape, np.nan, np.float16), margin=None)


def agreement(trace: RoutingTrace, forecast: RoutingTrace) -> float:
    """Share of the trace's picks (distinct, with weights) that the forecast names for the same token and layer."""
    if trace.ids.shape[:2] != forecast.ids.shape[:2] or trace.layers != forecast.layers:
        raise LabError(
            f"a forecast has the trace's tokens and layers; got {forecast.ids.shape[:2]} for {trace.ids.shape[:2]}."
        )
    pairs = [(occupancy(trace, n), occupancy(forecast, n)) for n in trace.layers]
    picks = sum(int(true.sum()) for true, _ in pairs)
    return sum(int((true & said).sum()) for true, said in pairs) / picks if picks else float("nan")


def _drawn(trace: RoutingTrace, seed: int, log_odds: Callable[[int], np.ndarray]) -> RoutingTrace:
    """Draws without replacement: the largest of log odds + Gumbel noise are exactly that."""
    wants_trace("lab.caching.controls", trace)
    rng = np.random.default_rng(wants_whole("seed", seed, 0))
    ids = np.full_like(trace.ids, NO_PICK)
    for place, layer in enumerate(trace.layers):
        picked = occupancy(trace, layer).sum(axis=1)
        noisy = log_odds(layer) + rng.gumbel(size=(trace.tokens, trace.num_experts))
        most = min(trace.top_k, trace.num_experts)
        order = np.argsort(-noisy, axis=1)[:, :most].astype(trace.ids.dtype)
        ids[:, place, :most] = np.where(np.arange(most) < picked[:, None], order, NO_PICK)
    return replace(trace, ids=ids, weights=np.full(ids.shape, np.nan, np.float16), margin=None)
