"""Tables for papers: a tidy frame as HTML in a notebook and as LaTeX.

Headers come from column names (time_ms -> time (ms)), a measured distribution becomes one column, median [p20, p80].
Knows nothing of what was measured; draws no conclusion.
"""

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.plots.latex import tabular
from moe_lab.plots.style import need_columns

if TYPE_CHECKING:
    import pandas as pd

# Longest suffix first: time_gb_per_s is no time in seconds.
_UNITS = {
    "_gb_per_s": "GB/s", "_tb_per_s": "TB/s", "_gib_per_s": "GiB/s", "_tflops": "TFLOP/s", "_tokens_per_s": "tokens/s",
    "_per_s": "1/s", "_bytes": "B", "_gib": "GiB", "_mib": "MiB", "_kib": "KiB", "_gb": "GB", "_mb": "MB", "_kb": "kB",
    "_bits": "bit", "_ms": "ms", "_us": "µs", "_ns": "ns", "_s": "s",
}  # fmt: skip
_QUANTILES = ("p20", "p50", "p80")
MOST_ROWS = 1000  # of a table on a page; a longer frame belongs into a file


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """A table ready to show. `headers` and `rows` are plain text; `numeric` says which columns are set flush right."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: tuple[bool, ...]
    caption: str = ""

    def to_latex(self, *, label: str = "") -> str:
        """A `table` environment (booktabs), every cell escaped. `label`: for \\ref."""
        return tabular(self.headers, self.rows, self.numeric, caption=self.caption, label=label)

    def _repr_html_(self) -> str:
        align = [' style="text-align:right"' if right else ' style="text-align:left"' for right in self.numeric]
        head = "".join(f'<th scope="col"{a}>{html.escape(h)}</th>' for h, a in zip(self.headers, align, strict=True))
        body = "".join(
            "<tr>" + "".join(f"<td{a}>{html.escape(c)}</td>" for c, a in zip(row, align, strict=True)) + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.headers, *self.rows, strict=True)]
        lines = [
            "  ".join(
                c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, self.numeric, strict=True)
            ).rstrip()
            for row in (self.headers, *self.rows)
        ]
        return "\n".join([*([self.caption] if self.caption else []), *lines])


def table(df: "pd.DataFrame", *, columns: Sequence[str] | None = None, caption: str = "", digits: int = 3) -> Table:
    """The frame as a Table, one row a row, in the frame's order.

    `columns`: which, and in which order; X_p20, X_p50, X_p80 (or p20, p50, p80 of a frame of runs) stand together in
    one column "X (unit), median [p20, p80]" at the place of the first; an `n` column says of how many. A frame of runs
    with one metric and unit names them in that header and drops both columns; where rows differ in them they stay. An
    index with a name, or of texts, comes first, as groupby leaves it; `columns` may name its levels. `digits`:
    significant ones; whole numbers stay whole. LabError: no rows, an unknown column, more than `MOST_ROWS` rows.
    """
    need_columns(df, (), "table")
    df = _with_index(df)
    need_columns(df, columns or (), "table")
    if len(df) > MOST_ROWS:
        raise LabError(f"lab.plot.table got {len(df):,} rows, more than {MOST_ROWS:,}: choose rows, or write a CSV.")
    if digits < 1:
        raise LabError(f"lab.plot.table: digits={digits}; wanted at least 1 significant digit.")
    names = [str(name) for name in (columns if columns is not None else df.columns)]
    frame: Any = df.set_axis([str(name) for name in df.columns], axis=1)
    headers, cells, numeric = [], [], []
    for header, parts in _layout(frame, names):
        values = [_values(frame[name]) for name in parts]
        headers.append(header)
        cells.append([_cell(row, digits) for row in zip(*values, strict=True)])
        numeric.append(all(_is_number(v) or v is None for column in values for v in column))
    return Table(tuple(headers), tuple(zip(*cells, strict=True)), tuple(numeric), caption)


def to_latex(
    df: "pd.DataFrame", *, caption: str = "", label: str = "", columns: Sequence[str] | None = None, digits: int = 3
) -> str:
    """`table(df, ...)` as LaTeX: needs \\usepackage{booktabs}."""
    return table(df, columns=columns, caption=caption, digits=digits).to_latex(label=label)


def header_of(name: str) -> str:
    """time_ms -> "time (ms)", time_ms_p50 -> "time (ms), median", top_k -> "top k": units stand apart."""
    found = re.fullmatch(r"(.+)_(p\d+|iqr|min|max|mean|sd)", name)
    base, statistic = (found[1], ", median" if found[2] == "p50" else f", {found[2]}") if found else (name, "")
    for suffix, unit in _UNITS.items():
        if base == suffix[1:] and "per" in suffix:
            return unit + statistic
        if base.endswith(suffix):
            return f"{base.removesuffix(suffix).replace('_', ' ')} ({unit}){statistic}"
    return base.replace("_", " ") + statistic


def _with_index(df: "pd.DataFrame") -> "pd.DataFrame":
    """The frame with its index in front, where that says something: numbers without a name only count rows."""
    wide: Any = df.copy(deep=False)
    for number in reversed(range(df.index.nlevels)):
        level: Any = df.index.get_level_values(number)
        name = "" if level.name is None else level.name
        if (name or level.dtype.kind not in "iuf") and name not in wide.columns:
            wide.insert(0, name, level)
    return wide


def _layout(frame: Any, names: list[str]) -> list[tuple[str, list[str]]]:
    """Header and source columns of each column shown."""
    groups = {name: _group(name, names) for name in names}
    metric = _one_metric(frame, names)
    shown: list[tuple[str, list[str]]] = []
    for name in names:
        group = groups[name]
        if group:
            header = _spread_header(group[1], metric)
            if (header, group) not in shown:
                shown.append((header, group))
        elif not (metric and name in ("metric", "unit")):
            shown.append((metric if metric and name == "p50" else header_of(name), [name]))
    return shown


def _values(column: Any) -> list[Any]:
    """A column's values; counts that pandas keeps as floats because one is missing are whole again."""
    values = [None if isinstance(v, float) and math.isnan(v) else v for v in column.tolist()]
    known = [v for v in values if v is not None]
    counts = len(known) < len(values) and all(isinstance(v, float) and v.is_integer() for v in known)
    return [int(v) if counts and v is not None else v for v in values]


def _group(name: str, names: list[str]) -> list[str]:
    """[X_p20, X_p50, X_p80] when `name` is one of them and all are there."""
    found = re.fullmatch(r"(.*_)?p(20|50|80)", name)
    trio = [f"{found[1] or ''}{q}" for q in _QUANTILES] if found else []
    return trio if trio and set(trio) <= set(names) else []


def _spread_header(p50: str, metric: str) -> str:
    what = header_of(p50.removesuffix("_p50")) if p50 != "p50" else metric
    return f"{what}, median [p20, p80]" if what else "median [p20, p80]"


def _one_metric(frame: Any, names: list[str]) -> str:
    """ "time (ms)" for a frame of runs whose rows all have that metric and unit, shown or not, else ""."""
    if "p50" not in names or not {"metric", "unit"} <= set(frame.columns):
        return ""
    pairs = {(str(m), str(u)) for m, u in zip(frame["metric"], frame["unit"], strict=True)}
    if len(pairs) != 1:
        return ""
    ((metric, unit),) = pairs
    return f"{metric} ({unit})"


def _cell(values: tuple[Any, ...], digits: int) -> str:
    if len(values) == 1:
        return text_of(values[0], digits)
    low, middle, high = values
    if not all(_is_number(v) and math.isfinite(v) for v in values):
        return text_of(middle, digits)  # nothing was measured: a dash
    decimals = _decimals(max(abs(middle), abs(high - low) if middle == 0 else 0), digits)
    return f"{_fixed(middle, decimals, digits)} [{_fixed(low, decimals, digits)}, {_fixed(high, decimals, digits)}]"


def text_of(value: Any, digits: int = 3) -> str:
    """One value as text: whole numbers in full with thousands apart, others to `digits` significant digits."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if value is None or (isinstance(value, float) and math.isnan(value)) or str(value) in ("<NA>", "NaT"):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return " ".join(str(value).split())
    return _fixed(value, _decimals(abs(value), digits), digits) if math.isfinite(value) else str(value)


def _decimals(size: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(size))) if size > 0 and math.isfinite(size) else digits - 1


def _fixed(value: float, decimals: int, digits: int) -> str:
    """With so many decimals; powers of ten where that would be a row of zeros."""
    if value and (decimals > digits + 3 or abs(value) >= 1e9):
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{decimals}f}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
