"""A run on disk: one Parquet file, a row a record, what it was measured on as JSON in its metadata.

One file cannot lose its other half. It appears whole under a name that nothing had before, or not at all.
"""

import errno
import json
import os
from pathlib import Path
from secrets import token_hex
from typing import Any

from moe_lab.errors import LabError, MissingExtra
from moe_lab.runs.checksum import checksum
from moe_lab.runs.columns import COLUMNS, LATER, NUMBERS, WHOLE, from_columns, to_columns
from moe_lab.runs.record import Record
from moe_lab.system.environment import environment

SCHEMA = 2
"""Version of the file's columns and metadata; a reader refuses a newer one."""
META_KEY = b"moe_lab_run"
CHECKSUM = "checksum"
"""Its name in the metadata. Files from before there was one load without it."""
SUFFIX = ".parquet"


def write(records: tuple[Record, ...], about: dict[str, Any], path: Path) -> Path:
    """Write a run to `path`, which must not exist. LabError naming it when it does or the disk refuses."""
    pa = _arrow()
    columns = _columns(records)
    meta = json.loads(json.dumps({"schema": SCHEMA, **about}))
    meta[CHECKSUM] = checksum(columns, meta)
    table = _table(pa, columns).replace_schema_metadata({META_KEY: json.dumps(meta).encode()})
    part = path.with_name(f".{path.name}.{token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("xb") as sink:
                pa.parquet.write_table(table, sink, compression="zstd")
                sink.flush()
                os.fsync(sink.fileno())
            _place(part, path)
        finally:
            part.unlink(missing_ok=True)
    except FileExistsError as error:
        raise LabError(f"{error.filename2 or error.filename} is there already; no run is overwritten.") from error
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}.") from error
    return path


def _place(part: Path, path: Path) -> None:
    """Give the whole file its name if, and only if, nothing has that name."""
    try:
        os.link(part, path)
    except OSError as error:
        # FAT and some network folders have no links: hold the name with an empty file, then put the whole one there.
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        path.open("xb").close()
        try:
            os.replace(part, path)
        except OSError:
            path.unlink()
            raise


def read(path: str | Path) -> tuple[tuple[Record, ...], dict[str, Any]]:
    """A run's records and what its metadata says.

    LabError naming the file for anything else, and for values that are not those of its checksum; for a newer schema
    it names both versions.
    """
    path, pa = Path(path), _arrow()
    if not path.is_file():
        seen = "is not a regular file" if path.exists() else "does not exist"
        raise LabError(f"{path} {seen}; wanted a run, as Run.save writes it.")
    try:
        file = pa.parquet.ParquetFile(path)
        metadata = (file.schema_arrow.metadata or {}).get(META_KEY)
        about = None if metadata is None else _about(metadata)
        _check_schema(path, about)
        wanted = [name for name in (*COLUMNS, "samples") if (about or {})["schema"] > 1 or name not in LATER]
        missing = [name for name in wanted if name not in file.schema_arrow.names]
        if missing:
            raise LabError(f"{path} is a damaged run: it lacks the columns {', '.join(missing)}.")
        columns = file.read(columns=wanted).to_pydict()
        _check_sum(path, columns, about or {})
        columns = {**dict.fromkeys(LATER, [""] * len(columns["samples"])), **columns}
    except LabError:
        raise
    # What damaged bytes make pyarrow raise is nearly anything.
    except (OSError, ValueError, TypeError, LookupError, MemoryError, OverflowError, pa.ArrowException) as e:
        raise LabError(f"{path} is not a readable run: {(str(e).splitlines() or [repr(e)])[0]}") from e
    try:
        return from_columns(columns), about or {}
    except LabError as e:
        raise LabError(f"{path}: {e}") from e


def _about(metadata: bytes) -> Any:
    try:
        return json.loads(metadata)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"its metadata is no JSON: {e}") from e


def _check_sum(path: Path, columns: dict[str, list[Any]], about: dict[str, Any]) -> None:
    noted = about.pop(CHECKSUM, None)
    if noted is not None and noted != checksum(columns, about):
        raise LabError(f"{path} is a damaged run: its records or metadata do not have the checksum that it notes.")


def _check_schema(path: Path, about: Any) -> None:
    if about is None:
        raise LabError(f"{path} is a Parquet file, but no run: it has no {META_KEY.decode()} metadata.")
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, int) or schema < 1:
        raise LabError(f"{path} is a damaged run: its schema version is {schema!r}; wanted 1 to {SCHEMA}.")
    if schema > SCHEMA:
        written = about.get("environment")
        by = written.get("moe_lab", "unknown") if isinstance(written, dict) else "unknown"
        raise LabError(
            f"{path} has schema version {schema} (written by moe_lab {by}); this moe_lab {environment()['moe_lab']} "
            f"reads versions up to {SCHEMA}. Upgrade moe-lab to read it."
        )


def _columns(records: tuple[Record, ...]) -> dict[str, list[Any]]:
    columns = to_columns(records)
    for name in (name for name in COLUMNS if name not in (*WHOLE, *NUMBERS)):
        columns[name] = [_encodable(text) for text in columns[name]]
    return columns


def _table(pa: Any, columns: dict[str, list[Any]]) -> Any:
    kinds = {
        **dict.fromkeys(COLUMNS, pa.string()),
        **dict.fromkeys(WHOLE, pa.int64()),
        **dict.fromkeys(NUMBERS, pa.float64()),
        "samples": pa.list_(pa.float64()),
    }
    return pa.table({name: pa.array(columns[name], kind, from_pandas=False) for name, kind in kinds.items()})


def _encodable(text: str) -> str:
    """The text of an exception may hold half characters (undecodable file names), which no UTF-8 file takes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _arrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise MissingExtra("pyarrow", "lab", "Saving and loading runs") from e
    return pyarrow
