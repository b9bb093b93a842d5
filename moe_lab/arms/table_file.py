"""An arm table's file: written whole, read with every cell checked, so that a damaged one is named and steers nothing.

JSON: `version`, `device`, `about` (what it was measured on) and `rows`, each a `Row`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from moe_lab.errors import LabError
from moe_lab.formats.layouts import LAYOUTS
from moe_lab.system.user_cache import read_json, write_json

VERSION = 1
SIZES = ("d_model", "d_expert", "experts", "top_k", "tokens")
MOST = 1 << 40
"""Of a size, and of milliseconds: beyond it a number is a mistake, and ratios of such overflow."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured situation: `formats` of gate (where there is one), up and down; `arms` fastest first, `ms` each,
    arms on experts in other layouts by the names of `arms.names`."""

    formats: tuple[str, ...]
    d_model: int
    d_expert: int
    experts: int
    top_k: int
    tokens: int
    arms: tuple[str, ...]
    ms: tuple[float, ...]


def save_rows(path: Path, device: str, rows: Sequence[Row], about: dict[str, str]) -> Path:
    """Write a table whole, in place of what was there; `about` says what it was measured on."""
    return write_json(path, {"version": VERSION, "device": device, "about": about, "rows": [asdict(r) for r in rows]})


def load_rows(path: Path) -> tuple[Row, ...]:
    """The rows of a table, none where there is no file. LabError naming the file and the cell that is wrong."""
    found = read_json(path)
    if found is None:
        return ()
    if not isinstance(found, dict) or found.get("version") != VERSION:
        seen = found.get("version") if isinstance(found, dict) else type(found).__name__
        raise LabError(
            f"{path} is an arm table of version {seen!r}; wanted {VERSION}. moe-lab bench --tune makes it anew."
        )
    rows = found.get("rows")
    if not isinstance(rows, list):
        raise _wrong(path, "rows", rows, "a list")
    return tuple(_row(path, f"rows[{at}]", row) for at, row in enumerate(rows))


def _row(path: Path, cell: str, given: Any) -> Row:
    names = [f.name for f in fields(Row)]
    if not isinstance(given, dict) or set(names) - set(given):
        missing = f"no {', '.join(n for n in names if n not in given)}" if isinstance(given, dict) else given
        raise _wrong(path, cell, missing, f"an object of {', '.join(names)}")
    sizes: dict[str, Any] = {name: given[name] for name in SIZES}
    for name in SIZES:
        if type(given[name]) is not int or not 1 <= given[name] <= MOST:
            raise _wrong(path, f"{cell}.{name}", given[name], "a whole number of at least 1")
    texts = {name: _texts(path, f"{cell}.{name}", given[name]) for name in ("formats", "arms")}
    for at, arm in enumerate(texts["arms"]):
        name, mark, layout = arm.partition("@")
        if not name or (mark and layout not in LAYOUTS):
            raise _wrong(path, f"{cell}.arms[{at}]", arm, f"ARM or ARM@LAYOUT of {', '.join(LAYOUTS)}")
    if len(texts["formats"]) not in (2, 3):  # experts without a gate have two
        raise _wrong(path, f"{cell}.formats", given["formats"], "those of gate, up and down")
    ms = _times(path, f"{cell}.ms", given["ms"], len(texts["arms"]))
    return Row(texts["formats"], **sizes, arms=texts["arms"], ms=ms)


def _texts(path: Path, cell: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(text, str) for text in given):
        raise _wrong(path, cell, given, "a list of one text or more")
    if len(set(given)) < len(given) and cell.endswith("arms"):
        raise _wrong(path, cell, given, "each arm once")
    return tuple(given)


def _times(path: Path, cell: str, given: Any, wanted: int) -> tuple[float, ...]:
    if not isinstance(given, list) or len(given) != wanted:
        raise _wrong(path, cell, given, f"{wanted} times, one an arm")
    for at, time in enumerate(given):
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time <= MOST:
            raise _wrong(path, f"{cell}[{at}]", time, "milliseconds above 0")
    return tuple(given)


def _wrong(path: Path, cell: str, seen: Any, wanted: str) -> LabError:
    text = str(seen) if len(str(seen)) <= 80 else f"{str(seen)[:77]}..."
    return LabError(f"{path} is no arm table: {cell} is {text}; wanted {wanted}. moe-lab bench --tune makes it anew.")
