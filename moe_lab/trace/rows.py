"""Rows (token, layer, picks) in any order -> the [T, L, K] grid of a trace, complete or refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.trace.record import RoutingTrace
from moe_lab.trace.values import as_ids, as_weights, experts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """N rows: token, layer int [N]; ids int and weights float [N, K]; token_id [N], domain [N], margin [N] or None."""

    token: np.ndarray
    layer: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    token_id: np.ndarray | None = None
    domain: np.ndarray | None = None
    margin: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.token)

    def take(self, which: "np.ndarray | slice") -> "Rows":
        """The rows at `which`: numbers, a mask or a slice."""
        held = {name: getattr(self, name) for name in self.__slots__}
        return replace(self, **{name: a[which] for name, a in held.items() if a is not None})


def join(parts: "list[Rows]") -> Rows:
    """Rows of several parts, one after another."""
    if len(parts) == 1:
        return parts[0]
    names = [name for name in Rows.__slots__ if getattr(parts[0], name) is not None]
    return Rows(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in names})


def within(rows: Rows, tokens: tuple[int, int], path: str | Path) -> Rows:
    """The rows of tokens start..stop-1. LabError where there are none."""
    kept = rows.take((rows.token >= tokens[0]) & (rows.token < tokens[1]))
    if not len(kept):
        held = f"{rows.token.min()}..{rows.token.max()}" if len(rows) else "none"
        stop = "the end" if tokens[1] >= 2**62 else tokens[1]
        raise LabError(f"{path} holds no token in {tokens[0]}..{stop} (it has {held}).")
    return kept


def to_trace(rows: Rows, path: str | Path, about: Mapping[str, Any], num_experts: int | None = None) -> RoutingTrace:
    """The trace that `rows` of file `path` spell. `about`: E, R, model_hash where the file says them; `num_experts`
    where it does not. LabError when a (token, layer) is missing or stands twice, or a token's rows name different token
    ids or domains.
    """
    if len(rows) == 0:
        raise LabError(f"{path} holds no rows.")
    layers = np.unique(rows.layer)
    if not _in_order(rows, layers):
        rows = rows.take(np.lexsort((rows.layer, rows.token)))
        if not _in_order(rows, layers):
            raise LabError(f"{path}: {_gap(rows, layers)}; a trace has each layer of each token once.")
    n = len(layers)
    ids = as_ids(rows.ids, str(path)).reshape(-1, n, rows.ids.shape[1])
    experts = experts_of(path, about.get("E"), num_experts, ids)
    try:
        return RoutingTrace(
            ids=ids,
            weights=as_weights(rows.weights).reshape(ids.shape),
            layers=tuple(int(v) for v in layers),
            num_experts=experts,
            width=max(about.get("R") or experts, experts),
            model_hash=about.get("model_hash") or "",
            token_ids=None if rows.token_id is None else _one_each(rows, "token_id", n),
            domains=None if rows.domain is None else _one_each(rows, "domain", n),
            margin=None if rows.margin is None else rows.margin.reshape(-1, n),
        )
    except LabError as e:
        first = f" Tokens counted from {rows.token[0]}." if rows.token[0] else ""
        raise LabError(f"{path}: {e}{first}") from e


def _one_each(rows: Rows, name: str, layers: int) -> np.ndarray:
    """A token's own value of a column, [T]. LabError where its rows disagree."""
    values = getattr(rows, name).reshape(-1, layers)
    differs = (values != values[:, :1]).any(axis=1)
    if differs.any():
        at = int(differs.argmax())
        found = ", ".join(repr(v) for v in dict.fromkeys(values[at].tolist()))
        raise LabError(
            f"the rows of token {rows.token[at * layers]} have {name} {found}; wanted one for all its layers."
        )
    return values[:, 0]


def _in_order(rows: Rows, layers: np.ndarray) -> bool:
    """Whether rows go token by token, each with all layers in ascending order."""
    n = len(layers)
    if len(rows) % n or not (rows.layer.reshape(-1, n) == layers).all():
        return False
    token = rows.token.reshape(-1, n)
    return bool((token == token[:, :1]).all() and (np.diff(token[:, 0]) > 0).all())


def _gap(rows: Rows, layers: np.ndarray) -> str:
    """What is wrong with sorted rows that fill no grid."""
    token, layer = rows.token, rows.layer
    twice = np.flatnonzero((np.diff(token) == 0) & (np.diff(layer) == 0))
    if len(twice):
        return f"token {token[twice[0]]} has layer {layer[twice[0]]} twice"
    numbers, counts = np.unique(token, return_counts=True)
    short = numbers[counts < len(layers)][0]
    absent = np.setdiff1d(layers, layer[token == short])[0]
    return f"token {short} lacks layer {absent}"
