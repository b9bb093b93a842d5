"""A run: records, and everything about where and how they came about that a later reader will ask for."""

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.runs.columns import COLUMNS, NUMBERS, WHOLE, to_columns
from moe_lab.runs.pairs import first_of_each
from moe_lab.runs.record import Record, Status
from moe_lab.runs.store import SUFFIX, read, write
from moe_lab.system.environment import driver, environment

if TYPE_CHECKING:
    import pandas as pd

RUN_COLUMNS = ("run", "date", "seed", "run_backend")
"""What a frame of several runs says besides COLUMNS and the environments; `run_backend` is the environment's."""
_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,59}")


def expect_folder(save: str | Path) -> None:
    """LabError for a file's name where a folder is wanted."""
    if Path(save).suffix == SUFFIX and not Path(save).is_dir():
        raise LabError(f"save to {str(save)!r}: wanted a folder; a run names its own file in it.")


def measured() -> dict[str, str]:
    """What this process runs on: `system.environment.environment()`, driver, and the commit apart from its dirt.

    dirty: "yes" when files differ from the commit, "no", or "unknown" where there is no repository (a wheel).
    """
    known = environment()
    commit = known["commit"]
    dirty = "unknown" if commit == "none" else "yes" if commit.endswith("+") else "no"
    return {**known, "driver": driver(), "commit": commit.removesuffix("+"), "dirty": dirty}


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Records of one session at a machine. `what` names the run in a file name ("bench"), `workload` says it in words.

    `options`: what was asked for, anything JSON holds. `environment`: name -> text, measured now when None; device and
    backend must be in it. `date`: ISO 8601, UTC, now when None. `label`: what plots call the run; without one, the
    file's stem.
    LabError or LabTypeError for anything that a file could not hold.
    """

    what: str
    records: Sequence[Record] = field(repr=False)
    _: KW_ONLY
    workload: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    seed: int | None = None
    environment: Mapping[str, str] = field(default=None, repr=False)  # type: ignore[assignment]
    date: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "records", _records(self.records))
        if not isinstance(self.what, str) or not _SLUG.fullmatch(self.what):
            raise LabError(
                f"a run's what is {self.what!r}; it names a file: small letters, digits, . _ - (60 at most)."
            )
        texts = isinstance(self.workload, str) and isinstance(self.label, str)
        if not texts or (self.seed is not None and not isinstance(self.seed, int)):
            raise LabTypeError(
                f"a run wants texts as workload and label and a whole seed, got {self.workload!r}, {self.label!r}, "
                f"{self.seed!r}."
            )
        put(self, "options", _options(self.options))
        put(self, "environment", measured() if self.environment is None else _environment(self.environment))
        put(self, "date", _date(self.date))
        put(self, "label", self.label or self._name())

    def _name(self) -> str:
        """Time, what, and eight digits of the content's hash: sorts by time, and no two runs share it."""
        columns = to_columns(self.records)
        del columns["samples"]  # their percentiles tell runs apart, in a tenth of the time
        text = json.dumps([self._about(), columns], sort_keys=True)
        digits = hashlib.sha256(text.encode()).hexdigest()[:8]
        return f"{datetime.fromisoformat(self.date):%Y%m%dT%H%M%SZ}-{self.what}-{digits}"

    def _about(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("what", "workload", "options", "seed", "date")}
        return {**kept, "environment": self.environment}

    def save(self, folder: str | Path = "runs") -> Path:
        """Write `<folder>/<UTC time>-<what>-<hash>.parquet` and return its path.

        LabError if it is there already, for a run without records, and for a file's name in the folder's place. A
        measurement that stands twice is kept and warned of: `diff` cannot pair it.
        """
        if not self.records:
            raise LabError(f"run {self.label} holds no records; there is nothing to save.")
        expect_folder(folder)
        if twice := [record for record, n in first_of_each(self.records) if n > 1]:
            warnings.warn(f"{len(twice)} of its measurements stand more than once, first {twice[0]}.", stacklevel=2)
        name = self._name()
        label = {} if self.label == name else {"label": self.label}
        return write(tuple(self.records), self._about() | label, Path(folder) / (name + SUFFIX))

    @classmethod
    def load(cls, path: str | Path) -> "Run":
        """A saved run. LabError naming the file for one that is damaged, no run, or of a newer schema version."""
        records, about = read(path)
        names = ("what", "workload", "options", "seed", "date", "environment")
        missing = [name for name in names if name not in about]
        if missing:
            raise LabError(f"{path} is a damaged run: its metadata lacks {', '.join(missing)}.")
        try:
            _environment(about["environment"])  # before None could stand for the machine that reads
            label = about.get("label") or Path(path).stem
            return cls(records=records, label=label, **{name: about[name] for name in names})
        except LabError as e:
            raise LabError(f"{path} is a damaged run: {e}") from e

    @property
    def frame(self) -> "pd.DataFrame":
        """A row a record (columns: moe_lab.runs.columns.COLUMNS). Samples stay in the records."""
        try:
            import pandas as pd
        except ImportError as e:
            raise MissingExtra("pandas", "lab", "A run's frame") from e
        columns = to_columns(self.records)
        whole = {name: pd.array(columns[name], dtype="Int64") for name in WHOLE}
        numbers = {name: np.array(columns[name], dtype=np.float64) for name in NUMBERS}
        return pd.DataFrame({name: {**columns, **numbers, **whole}[name] for name in COLUMNS})

    def _repr_html_(self) -> str:
        """Where it was measured, how the records ended, and the first eight of them."""
        env = self.environment
        counts = ", ".join(f"{n} {s}" for s in Status if (n := sum(r.status is s for r in self.records)))
        lines = [
            f"<b>Run {escape(self.label)}</b> · {escape(self.workload or self.what)} · {len(self.records)} records"
            + f" ({counts or 'none'})",
            " · ".join(escape(f"{n} {env[n]}") for n in ("device", "backend", "torch", "triton", "commit") if n in env),
        ]
        rows = "".join(_html_row(record) for record in self.records[:8])
        more = f"<p>{len(self.records) - 8} more in <code>.frame</code></p>" if len(self.records) > 8 else ""
        head = "".join(f"<th>{n}</th>" for n in ("what", "case", "arm", "format", "median", "n", "status"))
        return f"<div>{'<br>'.join(lines)}<table><tr>{head}</tr>{rows}</table>{more}</div>"


def _html_row(r: Record) -> str:
    median, n = ("", "") if r.spread is None else (f"{r.spread.p50:.4g} {r.unit}", str(r.spread.n))
    ended = (
        str(r.status) if not r.reason else f"{r.status}: {r.reason if len(r.reason) < 90 else r.reason[:87] + '...'}"
    )
    cells = (r.what, r.case.label, r.arm, r.format, median, n, ended)
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _records(records: Iterable[Record]) -> tuple[Record, ...]:
    kept = tuple(records)
    other = next((r for r in kept if not isinstance(r, Record)), None)
    if other is not None:
        raise LabTypeError(f"a run holds Records, got {type(other).__name__}.")
    return kept


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps(options))
    except (TypeError, ValueError, RecursionError) as e:
        raise LabTypeError(f"a run's options are kept as JSON: {e}. Give names and numbers instead of objects.") from e
    if not isinstance(plain, dict):
        raise LabTypeError(f"a run's options are a mapping by name, got {type(options).__name__}.")
    return plain


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(t, str) for pair in given.items() for t in pair):
        raise LabTypeError(f"a run's environment maps names to texts, got {given!r}.")
    missing = [name for name in ("device", "backend") if not given.get(name)]
    if missing:
        raise LabError(f"a run's environment lacks {' and '.join(missing)}; a number without them is not shown.")
    taken = sorted(({*given} - {"backend"}) & {*COLUMNS, *RUN_COLUMNS})
    if taken:
        raise LabError(f"a run's environment names {', '.join(taken)}, which records or runs say themselves.")
    return dict(given)


def _date(date: str) -> str:
    try:
        moment = datetime.fromisoformat(date) if date else datetime.now(UTC)
    except (TypeError, ValueError) as e:
        raise LabError(f"a run's date is {date!r}; wanted ISO 8601, as 2026-01-31T12:00:00Z.") from e
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
