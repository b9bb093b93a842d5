"""Routing traces: which experts each token took in each layer, as arrays and as Parquet.

Parquet has a row for each (token, layer), token-major: token int64, layer int16, ids list<uint16>, weights
list<float16>, and where known token_id int32, domain string, margin float32 (K-th minus (K+1)-th choice score).
File metadata: model_hash, E, K, R. A trace knows nothing about models or caches.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.errors import LabError, MissingExtra
from moe_lab.files import replace_file

if TYPE_CHECKING:
    import pandas as pd

META_KEY = b"moe_lab"
NO_PICK = np.uint16(65535)  # a skipped slot (-1) on disk


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RoutingTrace:
    """Picks of T tokens in L layers. ids uint16 and weights float16 [T, L, K]; `layers` names the L layers.

    Optional: token_ids int32 [T], domains str [T], margin float32 [T, L]. E = num_experts, R = width.
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
        seen = self.ids[self.ids != NO_PICK]
        if seen.size and int(seen.max()) >= self.width:
            raise LabError(f"the trace holds expert id {int(seen.max())}; wanted 0..{self.width - 1} (R={self.width}).")
        for name, array, shape in (
            ("token_ids", self.token_ids, (self.tokens,)),
            ("domains", self.domains, (self.tokens,)),
            ("margin", self.margin, (self.tokens, len(self.layers))),
        ):
            if array is not None and array.shape != shape:
                raise LabError(f"trace {name} has shape {array.shape}; wanted {shape}.")

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[2]

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
        """Build from {layer: ids [T, K]} and {layer: weights [T, K]}; every layer must hold the same T and K."""
        shapes = {n: a.shape for n, a in ids.items()}
        if len(set(shapes.values())) != 1:
            raise LabError(f"a trace needs the same tokens and K in every layer, got {shapes}.")
        layers = tuple(sorted(ids))
        picked = np.stack([np.where(ids[n] < 0, NO_PICK, ids[n]).astype(np.uint16) for n in layers], 1)
        weighed = np.stack([weights[n].astype(np.float16) for n in layers], 1)
        return cls(ids=picked, weights=weighed, layers=layers, num_experts=num_experts, width=width, **more)

    def layer(self, number: int) -> np.ndarray:
        """ids uint16 [T, K] of one layer."""
        if number not in self.layers:
            raise LabError(f"the trace has no layer {number}; it has {', '.join(map(str, self.layers))}.")
        return self.ids[:, self.layers.index(number)]

    @staticmethod
    def load(path: str | Path) -> "RoutingTrace":
        """Read a Parquet trace; LabError when the file is no trace."""
        return read_parquet(path)

    def save(self, path: str | Path) -> Path:
        """Write Parquet (zstd) with metadata; returns the path."""
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


def _pandas(need: str):
    try:
        import pandas
    except ImportError as e:
        raise MissingExtra("pandas", "lab", need) from e
    return pandas


def _arrow():
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra("pyarrow", "lab", "reading and writing Parquet traces") from e
    return pyarrow


def write_parquet(trace: RoutingTrace, path: Path) -> Path:
    """Write `trace` to `path`; a disk error becomes one LabError naming the file."""
    pa = _arrow()
    t, n, k = trace.ids.shape
    lists = lambda a, kind: pa.FixedSizeListArray.from_arrays(pa.array(a.reshape(-1), kind), k).cast(pa.list_(kind))  # noqa: E731
    columns = {
        "token": pa.array(np.repeat(np.arange(t, dtype=np.int64), n)),
        "layer": pa.array(np.tile(np.array(trace.layers, dtype=np.int16), t)),
        "ids": lists(trace.ids, pa.uint16()),
        "weights": lists(trace.weights, pa.float16()),
    }
    if trace.token_ids is not None:
        columns["token_id"] = pa.array(np.repeat(trace.token_ids.astype(np.int32), n))
    if trace.domains is not None:
        columns["domain"] = pa.array(np.repeat(trace.domains.astype(str), n), pa.string())
    if trace.margin is not None:
        columns["margin"] = pa.array(trace.margin.astype(np.float32).reshape(-1))
    about = {"model_hash": trace.model_hash, "E": trace.num_experts, "K": k, "R": trace.width, "layers": trace.layers}
    table = pa.table(columns).replace_schema_metadata({META_KEY: json.dumps(about).encode()})
    replace_file(path, lambda part: pa.parquet.write_table(table, part, compression="zstd", compression_level=12))
    return path


def read_parquet(path: str | Path) -> RoutingTrace:
    """Read a trace written by `write_parquet`, or any Parquet file with its columns."""
    pa = _arrow()
    try:
        table = pa.parquet.read_table(path)
    except (OSError, pa.ArrowInvalid) as e:
        raise LabError(f"{path} is not a readable Parquet trace: {str(e).splitlines()[0]}") from e
    missing = {"token", "layer", "ids", "weights"} - set(table.column_names)
    if missing:
        raise LabError(
            f"{path} lacks the trace columns {', '.join(sorted(missing))}; it has {', '.join(table.column_names)}."
        )
    about = json.loads((table.schema.metadata or {}).get(META_KEY, b"{}"))
    column = {name: table.column(name).combine_chunks() for name in table.column_names}
    ids, weights = (column[c].flatten().to_numpy(zero_copy_only=False) for c in ("ids", "weights"))
    token, layer = column["token"].to_numpy(), column["layer"].to_numpy()
    if len(token) == 0:
        raise LabError(f"{path} holds no rows.")
    layers = tuple(int(v) for v in np.unique(layer))
    t, n = len(token) // len(layers), len(layers)
    if t * n != len(token) or len(ids) % (t * n) or len(ids) != len(weights):
        raise LabError(f"{path}: {len(token)} rows and {len(ids)} picks do not fill a [T, L={n}, K] grid.")
    order = np.lexsort((layer, token))
    grid = lambda a: a.reshape(t * n, -1)[order].reshape(t, n, -1)  # noqa: E731
    per_row = lambda name: column[name].to_numpy(zero_copy_only=False)[order].reshape(t, n)  # noqa: E731
    experts = int(about.get("E", ids[ids != NO_PICK].max(initial=0) + 1))
    return RoutingTrace(
        ids=grid(ids), weights=grid(weights), layers=layers, num_experts=experts,
        width=int(about.get("R", experts)), model_hash=about.get("model_hash", ""),
        token_ids=per_row("token_id")[:, 0] if "token_id" in column else None,
        domains=per_row("domain")[:, 0] if "domain" in column else None,
        margin=per_row("margin") if "margin" in column else None,
    )  # fmt: skip
