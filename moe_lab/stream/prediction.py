"""Next-layer prediction: the next layer's router, applied to this layer's input, says which experts to read ahead.

T <= MOST_TOKENS tokens, k' picks each: one more router product and top-k', no wait of its own (the ids come back with
the plan's read-back). Hidden rows change little from layer to layer, so the guess is better than popularity; how good
it is differs by layer, and so may its width. It changes when bytes arrive, never which expert runs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.block import router_logits
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import route
from moe_lab.spec import MoESpec, RouterSpec
from moe_lab.system.devices import current_stream
from moe_lab.weights import RouterWeights

MOST_TOKENS = 8
LAST, UNKNOWN, HASHED, MANY, RESIDENT, NARROW = range(6)
REASONS: dict[int, str] = {
    LAST: "it is the last MoE layer",
    UNKNOWN: "the next layer is not known",
    HASHED: "the next layer routes by hash",
    MANY: f"more than T={MOST_TOKENS} tokens",
    RESIDENT: "its experts are not streamed",
    NARROW: "the next layer's width is 0",
}
"""Why a layer makes no prediction though one was asked for."""


class Widths(Mapping[int, int]):
    """k' by the number of the layer that is read ahead; 0 for layers it does not name. Hashable, as options are."""

    def __init__(self, widths: Mapping[int, int]) -> None:
        self._widths = {
            wants_whole("a layer in Options.prefetch", number, 0): wants_whole("a layer's prefetch width", k, 0)
            for number, k in widths.items()
        }

    def __getitem__(self, layer: int) -> int:
        return self._widths.get(layer, 0)

    def __iter__(self) -> Iterator[int]:
        return iter(self._widths)

    def __len__(self) -> int:
        return len(self._widths)

    def __hash__(self) -> int:
        return hash(frozenset(self._widths.items()))

    def __repr__(self) -> str:
        return repr(self._widths)


Prefetch = int | Sequence[int] | Mapping[int, int]


def as_prefetch(given: Any) -> int | Widths:
    """`Options.prefetch` as it is kept: a number, or widths by layer (a sequence counts layers from 0). LabError for
    negative widths, LabTypeError for what is none of the three."""
    if isinstance(given, Mapping):
        return given if isinstance(given, Widths) else Widths(given)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        return Widths(dict(enumerate(given)))
    if isinstance(given, bool) or not isinstance(given, int):
        raise LabTypeError(
            f"Options.prefetch is {given!r}; wanted a width k' >= 0, a sequence of widths or a mapping layer -> width."
        )
    return wants_whole("Options.prefetch", given, 0)


def check_widths(prefetch: int | Widths, layers: Collection[int]) -> None:
    """LabError where a width above 0 is for a layer that is none of the MoE `layers`: nothing would be read for it."""
    if not isinstance(prefetch, int) and (lost := [n for n, width in prefetch.items() if width and n not in layers]):
        raise LabError(
            f"Options.prefetch has a width for layer {lost[0]}, which is no MoE layer of the model; "
            f"it has {', '.join(map(str, layers))}."
        )


def width_of(prefetch: int | Widths, layer: int) -> int:
    """k' for reading ahead the experts of `layer`."""
    return prefetch if isinstance(prefetch, int) else prefetch[layer]


@dataclass(slots=True, eq=False)
class Successor:
    """The MoE layer after one: its number, and its router once asked for (`load`: spec and weights on the device)."""

    number: int
    load: Callable[[], tuple[MoESpec, RouterWeights]] | None
    _loaded: tuple[MoESpec, RouterWeights] | None = field(default=None, init=False)

    @classmethod
    def of(cls, layer: Any) -> "Successor":
        """A layer that is there already; `layer` is a MoELayer with a number."""
        return cls(wants_whole("the next layer's number", layer.number, 0), lambda: (layer.spec, layer.router_weights))

    @classmethod
    def none(cls) -> "Successor":
        """What follows the last layer."""
        return cls(-1, None)

    def router(self) -> tuple[MoESpec, RouterWeights]:
        """Spec and router weights, read at the first call."""
        if self._loaded is None:
            assert self.load is not None
            self._loaded = self.load()
        return self._loaded


def why_not(successor: Successor | None, prefetch: int | Widths, tokens: int, streamed: bool) -> int | None:
    """The reason (see REASONS) for which no prediction can be made; None when it can."""
    if not streamed:
        return RESIDENT
    if successor is None:
        return UNKNOWN
    if successor.load is None:
        return LAST
    if width_of(prefetch, successor.number) == 0:
        return NARROW
    if tokens > MOST_TOKENS:
        return MANY
    return HASHED if successor.router()[0].router.hash_routing else None


@cache
def ranking(spec: RouterSpec, width: int) -> RouterSpec:
    """The router's own order of experts, `width` of them (as many as it may pick from, at most); weights mean nothing
    here. Sparse mixing ranks the logits."""
    room = spec.width if spec.n_group == 1 else spec.topk_group * (spec.width // spec.n_group)
    mixed = spec.weights_from == "sparsemixer"
    return replace(
        spec, top_k=min(width, room), score="none" if mixed else spec.score, weights_from="score", normalize=False,
        scale=1.0, scale_on="weights", norm_eps=0.0,
    )  # fmt: skip


class Guess:
    """One call's prediction, queued on the current stream: the next layer's ids [T, k'], on their way to the host."""

    def __init__(self, x: Float[Tensor, "T D"], successor: Successor, width: int) -> None:
        spec, weights = successor.router()
        how = ranking(spec.router, width)
        bias = None if spec.router.weights_from == "sparsemixer" else weights.correction_bias
        ids = route(router_logits(x, weights, spec), how, correction_bias=bias).ids
        self._experts, self._copied = spec.num_experts, None
        self._ids: Int32[Tensor, "T k"] = ids
        if ids.is_cuda:
            self._ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(current_stream(ids.device))  # not of the current GPU, which may be another

    def read(self) -> list[int]:
        """Distinct experts, likeliest first: all tokens' first picks, then their second ones. Behind the plan's
        read-back there is nothing left to wait for. Zero-computation experts, which have no bytes, are left out."""
        if self._copied is not None:
            self._copied.synchronize()
        return [e for e in dict.fromkeys(self._ids.T.flatten().tolist()) if 0 <= e < self._experts]


__all__ = [
    "MOST_TOKENS", "REASONS", "Guess", "Prefetch", "Successor", "Widths", "as_prefetch", "ranking", "why_not",
    "width_of",
]  # fmt: skip
