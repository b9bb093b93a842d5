"""What the questions of this package ask of a trace: who was picked by which token, and seeded controls.

Only the E experts with weights count; skipped slots and zero-computation experts are no picks. An expert that a token
names twice (a hash row may) is picked once.
"""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from moe_lab.checks import wants, wants_whole, wants_wholes
from moe_lab.errors import LabError
from moe_lab.trace import RoutingTrace


def wants_trace(question: str, trace: object) -> None:
    """LabTypeError for anything but a RoutingTrace; `question` names who asks."""
    wants(f"the trace of {question}", trace, RoutingTrace, "a RoutingTrace: lab.RoutingTrace.load(path) reads one")


def occupancy(trace: RoutingTrace, layer: int) -> np.ndarray:
    """bool [T, E]: whether the token picks the expert in this layer. LabError for a layer that the trace lacks."""
    wants_trace("lab.analysis.occupancy", trace)
    ids = trace.layer(layer).astype(np.int64)
    hot = np.zeros((trace.tokens, trace.num_experts + 1), dtype=bool)
    np.put_along_axis(hot, np.minimum(ids, trace.num_experts), True, axis=1)
    return hot[:, : trace.num_experts]


def popularity(hot: np.ndarray) -> np.ndarray:
    """p_e, float64 [E]: share of the tokens of `occupancy` that pick expert e. The shares sum to K."""
    return hot.mean(axis=0, dtype=np.float64)


def layers_of(trace: RoutingTrace, layers: Iterable[int] | None, question: str) -> tuple[int, ...]:
    """The layers asked for, all by default. LabError for a trace without tokens or a layer that it lacks."""
    wants_trace(f"lab.analysis.{question}", trace)
    if trace.tokens == 0:
        raise LabError(f"lab.analysis.{question}: the trace holds no token.")
    chosen = trace.layers if layers is None else tuple(wants_wholes("layers", layers))
    for number in chosen:
        trace.layer(number)
    return chosen


def tokens_of(trace: RoutingTrace, which: slice | np.ndarray) -> RoutingTrace:
    """The trace of some tokens: a slice, or whole numbers or bool [T] as numpy indexes.

    LabError where that is no token, or a number outside 0..T - 1.
    """
    wants_trace("lab.analysis.tokens_of", trace)
    try:
        order = np.arange(trace.tokens)[which]
    except IndexError as error:
        raise LabError(f"tokens of a trace of {trace.tokens}: {error}.") from error
    if order.ndim != 1 or not len(order):
        raise LabError(f"{which} names no tokens of a trace of {trace.tokens}.")
    return _reordered(trace, order)


def shuffled(trace: RoutingTrace, seed: int = 0, *, within_domain: bool = False) -> RoutingTrace:
    """The same tokens in seeded random order: every popularity is kept, every neighbourhood lost.

    `within_domain` permutes the tokens of each domain among their own places, which keeps what the change of subject
    alone explains. LabError when the trace names no domains.
    """
    wants_trace("lab.analysis.shuffled", trace)
    rng = np.random.default_rng(wants_whole("seed", seed, 0))
    if not within_domain:
        return _reordered(trace, rng.permutation(trace.tokens))
    if trace.domains is None:
        raise LabError("shuffled(within_domain=True) needs a trace that names its tokens' domains.")
    order = np.arange(trace.tokens)
    for name in np.unique(trace.domains.astype(str)):
        places = np.flatnonzero(trace.domains == name)
        order[places] = rng.permutation(places)
    return _reordered(trace, order)


def _reordered(trace: RoutingTrace, order: np.ndarray) -> RoutingTrace:
    optional = {name: getattr(trace, name) for name in ("token_ids", "domains", "margin")}
    kept = {name: None if values is None else values[order] for name, values in optional.items()}
    return replace(trace, ids=trace.ids[order], weights=trace.weights[order], **kept)
