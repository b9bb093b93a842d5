"""Traces out of Parquet: whole, a range of tokens, or piece by piece where the file is larger than memory."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.trace.record import RoutingTrace
from moe_lab.trace.rows import Rows, join, to_trace, within
from moe_lab.trace.values import as_ids, asked_experts, most_id, token_span
from moe_lab.trace.writer import META_KEY, arrow

NEEDED = ("token", "layer", "ids", "weights")
OPTIONAL = ("token_id", "domain", "margin")
SCAN_ROWS = 1 << 18


def read_parquet(
    path: str | Path, *, num_experts: int | None = None, tokens: tuple[int, int] | None = None
) -> RoutingTrace:
    """Read a Parquet trace, or of one the tokens start..stop-1, decoding only the row groups that hold some of them.

    Any Parquet file with the columns of a trace is read, in any order of rows. LabError naming the file otherwise.
    """
    file, tokens = _File(path), token_span(tokens)
    groups = list(range(file.parquet.num_row_groups))
    if tokens is None:
        return to_trace(file.rows(groups), path, file.about, asked_experts(num_experts))
    start, stop = tokens
    rows = file.rows([g for g in groups if file.may_hold(g, start, stop)])
    return to_trace(within(rows, (start, stop), path), path, file.about, asked_experts(num_experts))


def scan(path: str | Path, *, num_experts: int | None = None, rows: int = SCAN_ROWS) -> Iterator[RoutingTrace]:
    """A Parquet trace as successive traces of whole tokens, about `rows` rows each: bounded memory for any length.

    Where neither the file's metadata nor `num_experts` says E, the file is read twice, first for the largest id.
    LabError where rows do not stand in token order (then `RoutingTrace.load` it) or pieces hold different layers.
    """
    file, num_experts = _File(path), asked_experts(num_experts)
    if num_experts is None and "E" not in file.about:
        num_experts = max((most_id(as_ids(batch.ids, str(path))) for batch in file.batches(rows)), default=0) + 1
    layers: tuple[int, ...] | None = None
    held: Rows | None = None
    for batch in file.batches(rows):
        joined = batch if held is None else join([held, batch])
        if len(joined) and (np.diff(joined.token) < 0).any():
            raise LabError(f"{path}: its rows are not in token order, so it cannot be scanned. Load it as a whole.")
        # The last token may go on in the next batch.
        cut = int(np.searchsorted(joined.token, joined.token[-1])) if len(joined) else 0
        held = joined.take(slice(cut, None))
        if cut:
            piece = to_trace(joined.take(slice(0, cut)), path, file.about, num_experts)
            layers = _same_layers(path, layers, piece)
            yield piece
    if held is None:
        raise LabError(f"{path} holds no rows.")
    piece = to_trace(held, path, file.about, num_experts)
    _same_layers(path, layers, piece)
    yield piece


def read_last(path: str | Path, *, num_experts: int | None = None) -> RoutingTrace:
    """The last token of a Parquet trace, as a trace of one token; decodes the row groups that hold it."""
    file = _File(path)
    last = file.last_token()
    return read_parquet(path, num_experts=num_experts, tokens=(last, last + 1))


def _same_layers(path: str | Path, layers: tuple[int, ...] | None, piece: RoutingTrace) -> tuple[int, ...]:
    if layers is not None and piece.layers != layers:
        raise LabError(f"{path}: its first tokens have layers {layers}, later ones {piece.layers}.")
    return piece.layers


class _File:
    """An open Parquet file with the columns of a trace; what pyarrow says about a broken one becomes one LabError."""

    def __init__(self, path: str | Path) -> None:
        self.pa, self.path = arrow(), path
        if not Path(path).is_file():
            seen = "is not a regular file" if Path(path).exists() else "does not exist"
            raise LabError(f"{path} {seen}; wanted a Parquet trace.")
        with self._reading():
            self.parquet = self.pa.parquet.ParquetFile(path)
            schema = self.parquet.schema_arrow
        missing = [name for name in NEEDED if name not in schema.names]
        if missing:
            raise LabError(f"{path} lacks the trace columns {', '.join(missing)}; it has {', '.join(schema.names)}.")
        self.columns = [name for name in (*NEEDED, *OPTIONAL) if name in schema.names]
        self.about = _about(path, schema.metadata or {})

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What damaged bytes make pyarrow raise (nearly anything) becomes one LabError."""
        try:
            yield
        except LabError:
            raise
        except (OSError, ValueError, TypeError, LookupError, MemoryError, OverflowError, self.pa.ArrowException) as e:
            first = (str(e).splitlines() or [repr(e)])[0]
            raise LabError(f"{self.path} is not a readable Parquet trace: {first}") from e

    def _token_bounds(self, group: int) -> tuple[int, int] | None:
        """Smallest and largest token of a row group by its statistics, None where it has none."""
        with self._reading():
            meta = self.parquet.metadata.row_group(group)
            columns = [meta.column(i) for i in range(meta.num_columns)]
            known = next((c.statistics for c in columns if c.path_in_schema == "token"), None)
            return (int(known.min), int(known.max)) if known is not None and known.has_min_max else None

    def may_hold(self, group: int, start: int, stop: int) -> bool:
        """Whether a row group may hold a token in start..stop-1."""
        bounds = self._token_bounds(group)
        return bounds is None or (bounds[0] < stop and bounds[1] >= start)

    def last_token(self) -> int:
        """The largest token. LabError for a file of no rows."""
        groups = range(self.parquet.num_row_groups)
        largest = [bounds[1] if (bounds := self._token_bounds(g)) else self._largest(g) for g in groups]
        if not largest:
            raise LabError(f"{self.path} holds no rows.")
        return max(largest)

    def _largest(self, group: int) -> int:
        return int(self.rows([group]).token.max(initial=-1))

    def rows(self, groups: list[int]) -> Rows:
        """The rows of some row groups."""
        with self._reading():
            return self._rows(self.parquet.read_row_groups(groups, columns=self.columns))

    def batches(self, rows: int) -> Iterator[Rows]:
        """The file's rows, about `rows` at a time."""
        with self._reading():
            for batch in self.parquet.iter_batches(batch_size=rows, columns=self.columns):
                yield self._rows(self.pa.Table.from_batches([batch]))

    def _rows(self, table: Any) -> Rows:
        for name in self.columns:
            if table.column(name).null_count:
                raise LabError(f"{self.path}: column {name} has {table.column(name).null_count} empty cells.")
        known = {name: self._signed(table, name) for name in ("token", "layer", "token_id") if name in self.columns}
        if "margin" in self.columns:
            known["margin"] = self._numbers(table, "margin", np.floating)
        if "domain" in self.columns:
            known["domain"] = table.column("domain").cast(self.pa.string()).to_numpy()
        ids, weights = self._lists(table, "ids", np.integer), self._lists(table, "weights", np.floating)
        if ids.shape != weights.shape:
            raise LabError(f"{self.path}: K={ids.shape[1]} ids but {weights.shape[1]} weights a row.")
        return Rows(ids=ids, weights=weights, **known)

    def _check(self, name: str, values: np.ndarray, kind: type) -> np.ndarray:
        if not np.issubdtype(values.dtype, kind):
            wanted = "whole numbers" if kind is np.integer else "floating point"
            raise LabError(f"{self.path}: column {name} holds {values.dtype}; wanted {wanted}.")
        return values

    def _numbers(self, table: Any, name: str, kind: type) -> np.ndarray:
        return self._check(name, table.column(name).to_numpy(), kind)

    def _signed(self, table: Any, name: str) -> np.ndarray:
        """Whole numbers as int64, whose differences do not wrap around. LabError for those beyond it."""
        values = self._numbers(table, name, np.integer)
        if values.dtype.kind == "u" and values.size and int(values.max()) >= 2**63:
            raise LabError(f"{self.path}: column {name} holds {values.max()}; wanted 64-bit signed numbers.")
        return values.astype(np.int64, copy=False)

    def _lists(self, table: Any, name: str, kind: type) -> np.ndarray:
        """[N, K] of a column of lists, which must all be as long."""
        column, types = table.column(name), self.pa.types
        if not any(is_kind(column.type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
            raise LabError(f"{self.path}: column {name} is {column.type}; wanted lists.")
        flat = [chunk.flatten() for chunk in column.chunks]
        if any(part.null_count for part in flat):
            raise LabError(f"{self.path}: column {name} has lists with empty cells.")
        if not len(column):
            return np.zeros((0, 1), np.uint16 if kind is np.integer else np.float16)
        lengths = np.concatenate([chunk.value_lengths().to_numpy() for chunk in column.chunks])
        k = int(lengths[0])
        if k == 0 or (lengths != k).any():
            found = ", ".join(str(v) for v in np.unique(lengths)[:4])
            raise LabError(f"{self.path}: column {name} has lists of {found} values; wanted K in every row, K > 0.")
        values = np.concatenate([part.to_numpy(zero_copy_only=False) for part in flat])
        return self._check(name, values, kind).reshape(-1, k)


def _about(path: str | Path, metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """The file's metadata; {} where another program wrote it. LabError for one of ours that is damaged."""
    try:
        about = json.loads(metadata.get(META_KEY, b"{}"))
        numbers = {name: int(about[name]) for name in ("E", "K", "R") if name in about}
        return {**numbers, "model_hash": str(about.get("model_hash", ""))}
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise LabError(f"{path}: its trace metadata is damaged: {e}") from e
