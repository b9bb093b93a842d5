"""A trace written piece by piece: memory for one row group, whatever the number of tokens.

The file appears under its name when it is whole. Until then it grows beside it and is removed when anything fails: an
error inside the `with` block, a full disk, pieces that do not fit together.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.checks import wants, wants_path, wants_whole
from moe_lab.errors import LabError, MissingExtra
from moe_lab.trace.record import RoutingTrace

META_KEY = b"moe_lab"
SUFFIXES = (".parquet", ".pq")
GROUP_ROWS = 1 << 19
"""Rows a row group: at K = 8 about 25 MB in memory; a scan decodes no more than this at once."""
LEVEL = 12
"""zstd: on the shipped trace 2 % smaller than level 3, for a fifth more time."""


class TraceWriter:
    """Writes a Parquet trace: `with TraceWriter(path) as w: w.append(trace)`, as often as there is something.

    The first piece says layers, K, E, R, model hash and which optional columns there are; LabError for a later piece
    that differs. Tokens are numbered on from piece to piece. `tokens` counts them. The file is put in place at the end
    of the block; LabError naming it when the disk refuses or no token was appended, and for a suffix that no reader
    takes for Parquet.
    """

    def __init__(self, path: str | Path, *, group_rows: int = GROUP_ROWS) -> None:
        self.path, self.tokens = wants_path("the trace's path", path), 0
        if self.path.exists() and not self.path.is_file():
            raise LabError(f"cannot write {self.path}: it is not a regular file.")
        if self.path.suffix.lower() not in SUFFIXES:
            raise LabError(f"{path}: traces are written as Parquet; give the file the suffix {' or '.join(SUFFIXES)}.")
        if wants_whole("group_rows", group_rows) < 1:
            raise LabError(f"group_rows={group_rows}: wanted 1 or more.")
        self._pa, self._group_rows = arrow(), group_rows
        self._part = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        self._like: RoutingTrace | None = None
        self._sink: Any = None
        self._writer: Any = None
        self._buffer: dict[str, np.ndarray] = {}
        self._held = 0
        self._open = True

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.close()

    def append(self, piece: RoutingTrace) -> None:
        """The next tokens."""
        wants("the piece", piece, RoutingTrace, "a RoutingTrace")
        if not self._open:
            raise LabError(f"{self.path}: the writer is closed.")
        try:
            if self._like is None:
                self._start(piece)
            self._check(piece)
            at = 0
            while at < piece.tokens:
                count = min(self._room - self._held, piece.tokens - at)
                for name, buffer in self._buffer.items():
                    buffer[self._held : self._held + count] = getattr(piece, name)[at : at + count]
                self._held, at = self._held + count, at + count
                if self._held == self._room:
                    self._flush()
        except OSError as e:
            self.abort()
            raise self._refusal(e) from e
        except BaseException:
            self.abort()
            raise

    def close(self) -> Path:
        """Write what is held and put the file in place; returns its path."""
        if self._like is None:
            self.abort()
            raise LabError(f"{self.path}: nothing was recorded, so there is no trace to write.")
        if not self.tokens + self._held:
            self.abort()
            raise LabError(f"{self.path}: no token was recorded, so there is no trace to write.")
        try:
            self._flush()
            self._writer.close()
            self._sink.close()
            os.replace(self._part, self.path)
        except OSError as e:
            raise self._refusal(e) from e
        finally:
            self.abort()
        return self.path

    def abort(self) -> None:
        """Stop and leave no file. Nothing happens to a file that is already in place."""
        self._open, self._buffer = False, {}
        for thing in (self._writer, self._sink):
            try:
                if thing is not None:
                    thing.close()
            except (OSError, self._pa.ArrowException):
                pass  # it was refused before; that error is on its way
        self._writer = self._sink = None
        self._part.unlink(missing_ok=True)

    def _refusal(self, e: OSError) -> LabError:
        return LabError(f"cannot write {self.path}: {os.strerror(e.errno) if e.errno else e}.")

    @property
    def _room(self) -> int:
        """Tokens a row group."""
        assert self._like is not None
        return max(1, self._group_rows // len(self._like.layers))

    def _start(self, piece: RoutingTrace) -> None:
        if not piece.layers or not piece.top_k:
            raise LabError(f"{self.path}: a trace of L={len(piece.layers)} layers and K={piece.top_k} has no picks.")
        self._like = piece.part(0, 0)
        for name, dtype in (
            ("ids", np.uint16), ("weights", np.float16), ("token_ids", np.int32), ("domains", object),
            ("margin", np.float32),
        ):  # fmt: skip
            if (array := getattr(piece, name)) is not None:
                self._buffer[name] = np.empty((self._room, *array.shape[1:]), dtype)
        parquet = self._pa.parquet
        self._sink = self._pa.OSFile(str(self._part), "wb")
        schema = self._table(0).schema
        self._writer = parquet.ParquetWriter(self._sink, schema, compression="zstd", compression_level=LEVEL)

    def _check(self, piece: RoutingTrace) -> None:
        assert self._like is not None
        for name in ("layers", "top_k", "num_experts", "width", "model_hash"):
            first, now = getattr(self._like, name), getattr(piece, name)
            if first != now:
                raise LabError(f"{self.path}: {name} was {first} in the first piece, now it is {now}.")
        for name in ("token_ids", "domains", "margin"):
            first, now = getattr(self._like, name), getattr(piece, name)
            if (first is None) != (now is None):
                raise LabError(
                    f"{self.path}: the first piece came {'without' if first is None else 'with'} {name}, this one "
                    f"{'without' if now is None else 'with'}."
                )

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(self._table(self._held), row_group_size=self._group_rows)
        self.tokens, self._held = self.tokens + self._held, 0

    def _table(self, count: int) -> Any:
        """The first `count` tokens of the buffer, a row a layer."""
        pa, like, held = self._pa, self._like, {name: a[:count] for name, a in self._buffer.items()}
        assert like is not None
        n, k = len(like.layers), like.top_k
        token = np.arange(self.tokens, self.tokens + count, dtype=np.int64)
        columns = {
            "token": pa.array(np.repeat(token, n)),
            "layer": pa.array(np.tile(np.array(like.layers, dtype=np.int16), count)),
            "ids": _lists(pa, held["ids"], pa.uint16(), k),
            "weights": _lists(pa, held["weights"], pa.float16(), k),
        }
        if "token_ids" in held:
            columns["token_id"] = pa.array(np.repeat(held["token_ids"], n))
        if "domains" in held:
            columns["domain"] = pa.array(np.repeat(held["domains"].astype(str), n), pa.string())
        if "margin" in held:
            columns["margin"] = pa.array(held["margin"].reshape(-1))
        about = {"model_hash": like.model_hash, "E": like.num_experts, "K": k, "R": like.width, "layers": like.layers}
        return pa.table(columns).replace_schema_metadata({META_KEY: json.dumps(about).encode()})


def _lists(pa: Any, values: np.ndarray, kind: Any, k: int) -> Any:
    """A column of lists of k values each."""
    offsets = pa.array(np.arange(0, values.size + 1, k, dtype=np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1), kind))


def arrow() -> Any:
    """pyarrow with its parquet module. MissingExtra where it is absent."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra("pyarrow", "lab", "reading and writing Parquet traces") from e
    return pyarrow


def write_parquet(trace: RoutingTrace, path: Path) -> Path:
    """Write `trace` to `path` in one step; a disk error becomes one LabError naming the file."""
    with TraceWriter(path) as writer:
        writer.append(trace)
    return path
