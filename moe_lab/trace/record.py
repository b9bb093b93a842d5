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

from moe_lab.errors import LabError, LabTypeError, MissingExtra

if TYPE_CHECKING:
    import pandas as pd

NO_PICK = np.uint16(65535)  # a skipped slot (-1) on disk
READERS = {".parquet": "parquet", ".pq": "parquet", ".csv": "tables", ".npz": "tables"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Picks of T tokens in L layers. ids uint16 and weights float16 [T, L, K]; `layers` names the L layers.

    Optional: token_ids int32 [T], domains str [T], margin float32 [T, L]. E = num_experts, R = width. Weights that are
    not known (ids alone were recorded) are NaN, all of them. LabError for shapes that disagree, ids that are neither
    0..R-1 nor NO_PICK, and weights that are not finite.
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
        if self.ids.ndim != 3 or self.ids.shape != self.weights.shape or self.ids.shape[1] != len(self.layers):
            raise LabError(
                f"a trace wants ids and weights [T, L, K] with L={len(self.layers)} layers, "
                f"got {self.ids.shape} and {self.weights.shape}."
            )
        if not 0 < self.num_experts <= self.width:
            raise LabError(f"a trace wants 0 < E <= R, got E={self.num_experts} and R={self.width}.")
        for name, array, shape in (
            ("token_ids", self.token_ids, (self.tokens,)),
            ("domains", self.domains, (self.tokens,)),
            ("margin", self.margin, (self.tokens, len(self.layers))),
        ):
            if array is not None and array.shape != shape:
                raise LabError(f"trace {name} has shape {array.shape}; wanted {shape}.")
        self._check_values()

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
        shapes = {n: a.shape for n, a in ids.items()}
        if len(set(shapes.values())) != 1:
            raise LabError(f"a trace needs the same tokens and K in every layer, got {shapes}.")
        layers = tuple(sorted(ids))
        picked = np.stack([as_ids(ids[n], f"layer {n}") for n in layers], 1)
        weighed = np.stack([as_weights(weights[n]) for n in layers], 1)
        return cls(ids=picked, weights=weighed, layers=layers, num_experts=num_experts, width=width, **more)

    def layer(self, number: int) -> np.ndarray:
        """ids uint16 [T, K] of one layer."""
        if number not in self.layers:
            raise LabError(f"the trace has no layer {number}; it has {', '.join(map(str, self.layers))}.")
        return self.ids[:, self.layers.index(number)]

    def part(self, start: int, stop: int) -> "RoutingTrace":
        """Tokens start..stop-1 as a trace (views of the same arrays). LabError outside 0..T."""
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
        kind = READERS.get(Path(path).suffix.lower())
        if kind is None:
            raise LabError(f"{path}: a trace is read from {', '.join(READERS)}; rename it or convert it.")
        span = token_span(tokens)
        if kind == "parquet":
            from moe_lab.trace.parquet import read_parquet

            return read_parquet(path, num_experts=num_experts, tokens=span)
        from moe_lab.trace.tables import read_table

        whole = read_table(path, num_experts=num_experts)
        return whole if span is None else whole.part(min(span[0], whole.tokens), min(span[1], whole.tokens))

    def save(self, path: str | Path) -> Path:
        """Write Parquet (zstd) with metadata; returns the path."""
        from moe_lab.trace.writer import write_parquet

        return write_parquet(self, Path(path))

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


def as_ids(ids: np.ndarray, where: str) -> np.ndarray:
    """Whole numbers as uint16, -1 as NO_PICK. LabError for what does not fit: nothing wraps around silently."""
    if ids.dtype.kind not in "iu":
        raise LabTypeError(f"{where}: expert ids are whole numbers, got {ids.dtype}.")
    if ids.dtype == np.uint16:
        return ids
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) > NO_PICK):
        raise LabError(
            f"{where}: expert ids run from {int(ids.min())} to {int(ids.max())}; wanted 0..{NO_PICK - 1}, or -1 for a "
            f"skipped slot."
        )
    return np.where(ids == -1, NO_PICK, ids).astype(np.uint16)


def most_id(ids: np.ndarray) -> int:
    """The largest id picked; 0 where every slot is skipped."""
    return int(ids[ids != NO_PICK].max(initial=0))


def experts_of(path: str | Path, told: int | None, asked: int | None, ids: np.ndarray) -> int:
    """E: what the file says, else what the caller does, else the largest id + 1. LabError where the two disagree."""
    if told and asked and told != asked:
        raise LabError(f"{path} says that there are {told} experts, but num_experts={asked} was asked.")
    return told or asked or most_id(ids) + 1


def as_weights(weights: np.ndarray) -> np.ndarray:
    """Weights as float16; what lies beyond it becomes an infinity, which a trace refuses."""
    with np.errstate(over="ignore"):
        return weights.astype(np.float16)


def token_span(tokens: "tuple[int, int] | slice | None") -> tuple[int, int] | None:
    """(start, stop) of a slice or pair of non-negative numbers. LabError for steps, negatives and reversed pairs."""
    if tokens is None:
        return None
    if isinstance(tokens, slice):
        if tokens.step not in (None, 1):
            raise LabError(f"tokens has step {tokens.step}; a trace is read in one piece.")
        start, stop = tokens.start or 0, 2**62 if tokens.stop is None else tokens.stop
    else:
        start, stop = tokens
    if not 0 <= start <= stop:
        raise LabError(f"tokens {start}..{stop}: wanted 0 <= start <= stop.")
    return int(start), int(stop)


def _pandas(need: str):
    try:
        import pandas
    except ImportError as e:
        raise MissingExtra("pandas", "lab", need) from e
    return pandas
