"""Traces out of CSV and npz, as other programs write them."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.system.npz import optional_array, read_npz
from moe_lab.trace.record import RoutingTrace
from moe_lab.trace.rows import Rows, to_trace, within
from moe_lab.trace.values import as_ids, as_weights, experts_of


def read_table(
    path: str | Path, *, num_experts: int | None = None, tokens: tuple[int, int] | None = None
) -> RoutingTrace:
    """Read a CSV or npz trace (see RoutingTrace.load). LabError naming the file, and for CSV the line."""
    reader = {".csv": read_csv, ".npz": read_arrays}[Path(path).suffix.lower()]
    return reader(path, num_experts, tokens)


def read_csv(path: str | Path, num_experts: int | None = None, tokens: tuple[int, int] | None = None) -> RoutingTrace:
    """Rows (token, layer) with ids and weights in one cell each or in columns id0.., weight0..; any order of rows.
    Optional columns: token_id, domain, margin. `tokens`: those numbered start..stop-1 alone.
    """
    if not Path(path).is_file():
        seen = "is not a regular file" if Path(path).exists() else "does not exist"
        raise LabError(f"{path} {seen}; wanted a CSV trace.")
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            header = [name.strip() for name in next(lines, [])]
            columns = _Columns(path, header)
            for cells in lines:
                if cells:
                    columns.add(lines.line_num, cells)
        rows = columns.rows() if tokens is None else within(columns.rows(), tokens, path)
        return to_trace(rows, path, {}, num_experts)
    except (OSError, UnicodeDecodeError, csv.Error, OverflowError, MemoryError) as e:
        raise LabError(f"{path} is not a readable CSV trace: {e}") from e


class _Columns:
    """Cells of a CSV file, gathered by column."""

    def __init__(self, path: str | Path, header: Sequence[str]) -> None:
        self.path, self.header = path, header
        self.where = {name: i for i, name in enumerate(header)}
        if len(self.where) < len(header):
            raise LabError(f"{path}: a column stands twice in {', '.join(header)}.")
        self.ids = self._group("ids", "id")
        self.weights = self._group("weights", "weight")
        missing = [name for name in ("token", "layer") if name not in self.where]
        missing += [name for name, found in (("ids", self.ids), ("weights", self.weights)) if not found]
        if missing:
            hint = _why_missing(header, missing)
            raise LabError(f"{path} lacks the trace columns {', '.join(missing)}; it has {', '.join(header)}.{hint}")
        self.optional = [name for name in ("token_id", "domain", "margin") if name in self.where]
        self.values: dict[str, list[Any]] = {n: [] for n in ("token", "layer", "ids", "weights", *self.optional)}
        self.k = 0

    def _group(self, together: str, apart: str) -> list[int]:
        """Where the K values stand: in one cell, or in columns numbered from 0."""
        if together in self.where:
            return [self.where[together]]
        found: list[int] = []
        while f"{apart}{len(found)}" in self.where:
            found.append(self.where[f"{apart}{len(found)}"])
        return found

    def add(self, line: int, cells: Sequence[str]) -> None:
        """One row."""
        if len(cells) != len(self.header):
            raise LabError(f"{self.path} line {line}: {len(cells)} cells under {len(self.header)} columns.")
        one: dict[str, Any] = {n: _number(self, line, n, cells[self.where[n]], int) for n in ("token", "layer")}
        one["ids"] = [_number(self, line, "ids", text, int) for text in _cells(cells, self.ids)]
        one["weights"] = [_number(self, line, "weights", text, float) for text in _cells(cells, self.weights)]
        self.k = self.k or len(one["ids"])
        if not self.k or len(one["ids"]) != self.k or len(one["weights"]) != self.k:
            raise LabError(
                f"{self.path} line {line}: {len(one['ids'])} ids and {len(one['weights'])} weights; "
                f"wanted {self.k or 'at least one'} of each."
            )
        for name in self.optional:
            text, kind = cells[self.where[name]], float if name == "margin" else int
            one[name] = text if name == "domain" else _number(self, line, name, text, kind)
        for name, value in one.items():
            self.values[name].append(value)

    def rows(self) -> Rows:
        """What was gathered, as arrays."""
        v = self.values
        shape = (len(v["token"]), self.k or 1)
        return Rows(
            token=np.array(v["token"], np.int64),
            layer=np.array(v["layer"], np.int64),
            ids=np.array(v["ids"], np.int64).reshape(shape),
            weights=np.array(v["weights"], np.float64).reshape(shape),
            token_id=np.array(v["token_id"], np.int64) if "token_id" in v else None,
            domain=np.array(v["domain"], object) if "domain" in v else None,
            margin=np.array(v["margin"], np.float32) if "margin" in v else None,
        )


def _why_missing(header: Sequence[str], missing: Sequence[str]) -> str:
    """A last sentence on a header that is nearly one."""
    if len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        return " Its cells are not separated by commas."
    if {name.lower() for name in header} & set(missing):
        return " Names are lower case."
    return ""


def _cells(cells: Sequence[str], where: list[int]) -> list[str]:
    if len(where) > 1:
        return [cells[i] for i in where]
    return cells[where[0]].strip().strip("[]").replace(";", " ").replace(",", " ").split()


def _number(columns: _Columns, line: int, name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise LabError(f"{columns.path} line {line}: {name} has {text[:40]!r}; wanted {wanted}.") from None


def read_arrays(
    path: str | Path, num_experts: int | None = None, tokens: tuple[int, int] | None = None
) -> RoutingTrace:
    """npz: idx [L, T, K] whole numbers and, where there are, weights [L, T, K], layers [L], token_ids [T], domain [T],
    margin [L, T], num_experts. `tokens`: start..stop-1 alone, counted from 0.
    """
    arrays = read_npz(path, "routing")
    idx = arrays.get("idx")
    if idx is None or idx.ndim != 3 or idx.dtype.kind not in "iu" or not idx.size:
        seen = "no idx" if idx is None else f"{idx.dtype} {idx.shape}"
        raise LabError(f"{path} must hold idx, whole numbers [L, T, K]; it has {seen} (arrays: {', '.join(arrays)}).")
    n, t, k = idx.shape
    if tokens is not None and tokens[0] >= min(tokens[1], t):
        raise LabError(f"{path} holds no token in {tokens[0]}..{tokens[1]} (it has 0..{t - 1}).")
    numbers = optional_array(arrays, path, "layers", (n,), "iu")
    numbers = np.arange(n) if numbers is None else numbers
    if len(np.unique(numbers)) < n:
        raise LabError(f"{path}: layers holds {numbers.tolist()}; wanted {n} different numbers.")
    order = np.argsort(numbers)
    ids = as_ids(idx, f"{path}: idx").transpose(1, 0, 2)[:, order]
    weights = optional_array(arrays, path, "weights", (n, t, k), "f")
    margin = optional_array(arrays, path, "margin", (n, t), "f")
    told = optional_array(arrays, path, "num_experts", (), "iu")
    experts = experts_of(path, None if told is None else int(told), num_experts, ids)
    known: dict[str, Any] = {
        "token_ids": optional_array(arrays, path, "token_ids", (t,), "iu"),
        "domains": optional_array(arrays, path, "domain", (t,), "U"),
        "margin": None if margin is None else margin.T[:, order],
    }
    try:
        whole = RoutingTrace(
            ids=ids,
            weights=np.full(ids.shape, np.nan, np.float16)
            if weights is None
            else as_weights(weights.transpose(1, 0, 2)[:, order]),
            layers=tuple(numbers[order].tolist()),
            num_experts=experts,
            width=experts,
            **known,
        )
    except LabError as e:
        raise LabError(f"{path}: {e}") from e
    return whole if tokens is None else whole.part(tokens[0], min(tokens[1], whole.tokens))
