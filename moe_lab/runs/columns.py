"""Records as columns and back: the one flat layout that frames and files share.

A row a record, its case and its spread spread out. `samples` is a column of the file alone: a cell that holds a list is
no tidy frame.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from moe_lab.errors import LabError
from moe_lab.runs.record import CASE, SIZES, Case, Record, Spread, Status

SPREAD = ("n", "p20", "p50", "p80", "p95", "iqr")
COLUMNS = (
    "what", *CASE, "arm", "shared_arm", "format", "backend", "metric", "unit", "status", *SPREAD,
    "error", "error_measure", "predicted", "floor", "method", "reason", "layout", "tiles",
)  # fmt: skip
LATER = ("layout", "tiles")
"""What files of schema 1 do not say: empty there."""
WHOLE = (*SIZES, "n")
NUMBERS = ("p20", "p50", "p80", "p95", "iqr", "error", "predicted", "floor")


def to_columns(records: Iterable[Record]) -> dict[str, list[Any]]:
    """{column: a value a record} of COLUMNS and `samples`; None where a record holds nothing."""
    records = list(records)
    columns: dict[str, list[Any]] = {}
    for name in COLUMNS:
        if name in CASE:
            columns[name] = [getattr(r.case, name) for r in records]
        elif name in SPREAD:
            columns[name] = [None if r.spread is None else getattr(r.spread, name) for r in records]
        else:
            columns[name] = [getattr(r, name) for r in records]
    columns["status"] = [str(status) for status in columns["status"]]
    columns["samples"] = [None if r.spread is None else list(r.spread.samples) for r in records]
    return columns


def from_columns(columns: dict[str, Sequence[Any]]) -> tuple[Record, ...]:
    """The records again. LabError naming the first row that is none."""
    own = [name for name in COLUMNS if name not in (*CASE, *SPREAD, "status")]
    parts = [zip(*(columns[name] for name in names), strict=True) for names in (CASE, SPREAD, own)]
    rows = zip(*parts, columns["status"], columns["samples"], strict=True)
    records = []
    for number, (case, spread, rest, status, samples) in enumerate(rows):
        try:
            records.append(_record(case, spread, dict(zip(own, rest, strict=True)), status, samples))
        except LabError as e:
            raise LabError(f"record {number}: {e}") from e
    return tuple(records)


def _record(case: Any, spread: Any, rest: dict[str, Any], status: Any, samples: Any) -> Record:
    if status not in Status.__members__:
        raise LabError(f"its status is {status!r}; known: {', '.join(Status)}.")
    held = None
    if samples or any(value is not None for value in spread):
        held = Spread(samples=tuple(samples or ()), **dict(zip(SPREAD, spread, strict=True)))
    return Record(case=Case(**dict(zip(CASE, case, strict=True))), status=Status[status], spread=held, **rest)
