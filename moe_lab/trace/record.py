"""A routing trace in memory: T tokens, L layers, K experts a token.

On disk (Parquet) there is a row for each (token, layer), token-major: token int64, layer int16, ids list<uint16>,
weights list<float16>, and where known token_id int32, domain string, margin float32 (K-th minus (K+1)-th choice score).
File metadata: model_hash, E, K, R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.card import card, spans
from moe_lab.checks import wants, wants_path, wants_whole
from moe_lab.errors import LabError, MissingExtra
from moe_lab.trace.values import (
    MOST_EXPERTS,
    NO_PICK,
    as_array,
    as_ids,
    as_layers,
    as_margin,
    as_token_ids,
    as_weights,
    asked_experts,
    token_span,
)

if TYPE_CHECKING:
    import pandas as pd

READERS = {".parquet": "parquet", ".pq": "parquet", ".csv": "tables", ".npz": "tables"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RoutingTrace:
    """Picks of T tokens in L layers. ids uint16 and weights float16 [T, L, K]; `layers` names the L layers.

    Optional: token_ids int32 [T], domains str [T], margin float32 [T, L]. E = num_experts, R = width. Weights that are
    not known (ids alone were recorded) are NaN, all of them. Arrays of wider dtypes are converted where nothing is lost
    (an id of -1 is NO_PICK). LabTypeError for other kinds, LabError for shapes that disagree, ids that are neither
    0..R-1 nor NO_PICK, weights that are not finite in float16, token ids beyond int32, layers twice or beyond int16.
    """

    ids: np.ndarray
    weights: np.ndarray
    layers: tuple[int, ...]
    num_experts: int
    width: int
    model_hash: str = ""
    token_ids: np.ndarray | None = None
    domains: np.ndarray | None = None
    margin: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._convert()
        if self.ids.ndim != 3 or self.ids.shape != self.weights.shape or self.ids.shape[1] != len(self.layers):
            raise LabError(
                f"a trace wants ids and weights [T, L, K] with L={len(self.layers)} layers, "
                f"got {self.ids.shape} and {self.weights.shape}."
            )
        if not 0 < self.num_experts <= self.width:
            raise LabError(f"a trace wants 0 < E <= R, got E={self.num_experts} and R={self.width}.")
        wants_whole("width (R of a trace)", self.width, 1, MOST_EXPERTS)
        for name, array, shape in (
            ("token_ids", self.token_ids, (self.tokens,)),
            ("domains", self.domains, (self.tokens,)),
            ("margin", self.margin, (self.tokens, len(self.layers))),
        ):
            if array is not None and array.shape != shape:
                raise LabError(f"trace {name} has shape {array.shape}; wanted {shape}.")
        self._check_values()

    def _convert(self) -> None:
        """Every field to what the file holds; each refuses what would change on the way."""
        wants("model_hash", self.model_hash, str, "text")
        kept: dict[str, Any] = {name: wants_whole(name, getattr(self, name)) for name in ("num_experts", "width")}
        kept |= {"layers": as_layers(self.layers), "ids": as_ids(self.ids, "ids"), "weights": as_weights(self.weights)}
        if self.token_ids is not None:
            kept["token_ids"] = as_token_ids(self.token_ids)
        if self.margin is not None:
            kept["margin"] = as_margin(self.margin)
        if self.domains is not None:
            as_array("domains", self.domains)
        for name, value in kept.items():
            object.__setattr__(self, name, value)

    def _check_values(self) -> None:
        outside = (self.ids >= self.width) & (self.ids != NO_PICK)
        if outside.any():
            at = np.unravel_index(int(outside.argmax()), outside.shape)
            raise LabError(
                f"the trace holds expert id {int(self.ids[at])} ({self._place(at)}); wanted 0..{self.width - 1} "
                f"(R={self.width})."
            )
        wrong = ~np.isfinite(self.weights)
        if wrong.any() and not np.isnan(self.weights).all():
            at = np.unravel_index(int(wrong.argmax()), wrong.shape)
            raise LabError(
                f"the trace holds weight {float(self.weights[at])} ({self._place(at)}, slot {at[2]}); wanted finite "
                f"ones, or NaN throughout where only ids are known."
            )

    def _place(self, at: tuple[Any, ...]) -> str:
        return f"token {at[0]}, layer {self.layers[at[1]]}"

    def __repr__(self) -> str:
        sizes = f"T={self.tokens}, L={len(self.layers)}, K={self.top_k}, E={self.num_experts}, R={self.width}"
        held = [name for name in ("token_ids", "domains", "margin") if getattr(self, name) is not None]
        held = ["weights", *held] if self.has_weights else held
        return f"RoutingTrace({sizes}, layers {spans(list(self.layers))}, with {', '.join(held) or 'ids alone'})"

    def _repr_html_(self) -> str:
        held = [name for name in ("token_ids", "domains", "margin") if getattr(self, name) is not None]
        facts = {
            "tokens, T": self.tokens,
            "layers": spans(list(self.layers)),
            "picks a token, K": self.top_k,
            "experts, E": self.num_experts,
            "router width, R": self.width,
            "with": ", ".join(["weights", *held] if self.has_weights else held) or "ids alone",
            "model": self.model_hash,
        }
        return card("RoutingTrace", facts)

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[2]

    @property
    def has_weights(self) -> bool:
        """Whether the weights are known (False: the file held ids alone)."""
        return not self.weights.size or not np.isnan(self.weights.flat[0])

    @classmethod
    def from_layers(
        cls,
        ids: Mapping[int, np.ndarray],
        weights: Mapping[int, np.ndarray],
        *,
        num_experts: int,
        width: int,
        **more: Any,
    ) -> "RoutingTrace":
        """Build from {layer: ids [T, K]} and {layer: weights [T, K]}; every layer must hold the same T and K. An id of
        -1 is a skipped slot.
        """
        wants("ids", ids, Mapping, "a mapping from layer number to ids [T, K]")
        wants("weights", weights, Mapping, "a mapping from layer number to weights [T, K]")
        layers = tuple(sorted(as_layers(tuple(ids))))
        if missing := [n for n in layers if n not in weights]:
            raise LabError(f"layer {missing[0]} has ids but no weights; wanted both for every layer.")
        picked = [as_ids(ids[n], f"ids of layer {n}") for n in layers]
        weighed = [as_weights(weights[n], f"weights of layer {n}") for n in layers]
        shapes = {n: a.shape for n, a in zip(layers, picked, strict=True)}
        if len(set(shapes.values())) != 1:
            raise LabError(f"a trace needs the same tokens and K in every layer, got {shapes}.")
        for n, a in zip(layers, weighed, strict=True):
            if a.shape != shapes[n]:
                raise LabError(f"layer {n} has ids {list(shapes[n])} but weights {list(a.shape)}.")
        return cls(
            ids=np.stack(picked, 1), weights=np.stack(weighed, 1), layers=layers, num_experts=num_experts, width=width,
            **more,
        )  # fmt: skip

    def layer(self, number: int) -> np.ndarray:
        """ids uint16 [T, K] of one layer. LabError for a layer that the trace lacks."""
        if wants_whole("layer", number) not in self.layers:
            raise LabError(f"the trace has no layer {number!r}; it has {', '.join(map(str, self.layers))}.")
        return self.ids[:, self.layers.index(number)]

    def part(self, start: int, stop: int) -> "RoutingTrace":
        """Tokens start..stop-1 as a trace (views of the same arrays). LabError outside 0..T."""
        start, stop = wants_whole("start", start), wants_whole("stop", stop)
        if not 0 <= start <= stop <= self.tokens:
            raise LabError(f"tokens {start}..{stop} asked of a trace of {self.tokens} tokens.")
        held = ("ids", "weights", "token_ids", "domains", "margin")
        cut = {name: a[start:stop] for name in held if (a := getattr(self, name)) is not None}
        return replace(self, **cut)

    @staticmethod
    def load(
        path: str | Path, *, num_experts: int | None = None, tokens: "tuple[int, int] | slice | None" = None
    ) -> "RoutingTrace":
        """Read a trace; the suffix says how.

        .parquet, .pq: the columns above. .csv: columns token, layer, ids and weights, the K values of a cell separated
        by spaces or semicolons, with or without brackets, or a column each (id0.., weight0..). .npz: idx [L, T, K] and
        optional weights [L, T, K], layers [L], token_ids [T], domain [T], margin [L, T], num_experts.

        `num_experts`: E, where the file does not say it (else the largest id + 1). `tokens`: (start, stop) reads these
        alone; a Parquet file is then read only where they stand. LabError naming the file when it is no trace.
        """
        file = wants_path("the trace's path", path)
        kind = READERS.get(file.suffix.lower())
        if kind is None:
            raise LabError(f"{path}: a trace is read from {', '.join(READERS)}; rename it or convert it.")
        span, experts = token_span(tokens), asked_experts(num_experts)
        if kind == "parquet":
            from moe_lab.trace.parquet import read_parquet

            return read_parquet(file, num_experts=experts, tokens=span)
        from moe_lab.trace.tables import read_table

        return read_table(file, num_experts=experts, tokens=span)

    def save(self, path: str | Path) -> Path:
        """Write Parquet (zstd) with metadata; returns the path. LabError for another suffix or a trace of no tokens."""
        from moe_lab.trace.writer import write_parquet

        return write_parquet(self, wants_path("the trace's path", path))

    def last_token(self) -> "pd.DataFrame":
        """Picks of the last token, a row a layer: layer, ids, weights (they decide the next prediction)."""
        pd = _pandas("RoutingTrace.last_token")
        if self.tokens == 0:
            raise LabError("the trace holds no token.")
        rows = [
            (n, self.ids[-1, i].tolist(), self.weights[-1, i].astype(float).tolist()) for i, n in enumerate(self.layers)
        ]
        return pd.DataFrame(rows, columns=["layer", "ids", "weights"])

    def load_table(self) -> "pd.DataFrame":
        """Assignments per (layer, expert), a row each: layer, expert, assignments, load_ratio (1 = the layer's
        mean).
        """
        pd = _pandas("RoutingTrace.load_table")
        rows = []
        for i, n in enumerate(self.layers):
            flat = self.ids[:, i].reshape(-1)
            counts = np.bincount(flat[flat < self.num_experts], minlength=self.num_experts)[: self.num_experts]
            mean = max(counts.mean(), 1e-12)
            rows += [(n, e, int(c), float(c / mean)) for e, c in enumerate(counts)]
        return pd.DataFrame(rows, columns=["layer", "expert", "assignments", "load_ratio"])


def join_traces(pieces: "Sequence[RoutingTrace]") -> RoutingTrace:
    """Successive pieces as one trace. LabError for no piece, or pieces of different layers, K or optional arrays."""
    if not pieces:
        raise LabError("there is no piece of a trace to join.")
    held = [
        name for name in ("ids", "weights", "token_ids", "domains", "margin") if getattr(pieces[0], name) is not None
    ]
    for piece in pieces:
        if piece.layers != pieces[0].layers or piece.top_k != pieces[0].top_k:
            raise LabError(
                f"pieces of a trace differ: layers {pieces[0].layers}, K={pieces[0].top_k} and layers {piece.layers}, "
                f"K={piece.top_k}."
            )
        if any(getattr(piece, name) is None for name in held):
            raise LabError(f"a piece of the trace lacks one of {', '.join(held)}, which the first has.")
    return replace(pieces[0], **{name: np.concatenate([getattr(p, name) for p in pieces]) for name in held})


def _pandas(need: str):
    try:
        import pandas
    except ImportError as e:
        raise MissingExtra("pandas", "lab", need) from e
    return pandas
