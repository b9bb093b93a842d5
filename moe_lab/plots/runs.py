"""Saved runs side by side: one row a measurement, one mark a run, so that a laptop's and a GPU's can be read together.

Draws the frame of `lab.runs`. It states what was measured and judges nothing: marks of different machines stand on one
axis, and whether one commit is slower than another is `moe-lab diff`'s to say.
"""

from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style, ticker

if TYPE_CHECKING:
    import pandas as pd

_SIZES = ("d_model", "d_expert", "experts", "top_k", "tokens")
_ROW = ("what", "workload", "model", *_SIZES, "state", "arm", "shared_arm", "format")
COLUMNS = ("run", *_ROW, "metric", "unit", "status", "backend", "device", "p20", "p50", "p80", "n", "floor")
MOST_ROWS = 60


@remembers
def runs(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Medians of several runs, one row a measurement, with lines from the 20th to the 80th percentile.

    `df`: `lab.runs(...)`, or part of it, of one metric and unit; 60 rows at most. A grey bar is the floor where it is
    known; what did not pass is named by its status. The axis is logarithmic where values lie further apart than 20x.
    """
    need_columns(df, COLUMNS, "runs")
    df = df.reset_index(drop=True)
    metric, unit = _one(df, "metric"), _one(df, "unit")
    rows = df.groupby(list(_ROW), sort=False, dropna=False).ngroup()
    if rows.nunique() > MOST_ROWS:
        raise LabError(f"lab.plot.runs draws {MOST_ROWS} rows at most, got {rows.nunique()}: pass a part of the frame.")
    legend = {run: _legend(n, run, group) for n, (run, group) in enumerate(df.groupby("run", sort=False))}
    with style():
        axes = ax if ax is not None else new_axes(8.6, 1.5 + rows.nunique() * (0.12 + 0.17 * len(legend)))[0]
        looks = arm_styles(legend)
        for number, (run, label) in enumerate(legend.items()):
            offset = 0.5 * ((number + 0.5) / len(legend) - 0.5)
            _marks(axes, df[df["run"] == run], rows, offset, label, looks[run])
        _scale(axes, df, metric, unit)
        first = df.assign(row=rows).drop_duplicates("row")
        axes.set_yticks(list(first["row"]), _row_labels(first))
        axes.set_ylim(rows.max() + 0.6, -0.6)
        title, detail = _finding(df, rows, unit)
        describe(axes, title, detail, legend_columns=1)
        axes.set_title(title, pad=10 + 14 * len(legend))
    return axes


def _one(df: "pd.DataFrame", column: str) -> str:
    values = list(df[column].unique())
    if len(values) != 1:
        raise LabError(
            f"lab.plot.runs draws one {column}, got {', '.join(map(str, values))}: pass a part of the frame."
        )
    return str(values[0])


def letter(number: int) -> str:
    """A, B, ..., Z, then 27, 28, ...: labels of runs are too long for a title."""
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _legend(number: int, run: Any, group: "pd.DataFrame") -> str:
    return " · ".join(
        [f"{letter(number)}: {run}", *(", ".join(dict.fromkeys(group[name])) for name in ("device", "backend"))]
    )


def _marks(axes: Axes, df: "pd.DataFrame", rows: "pd.Series", offset: float, label: str, look: Any) -> None:
    y = rows[df.index] + offset
    passed = (df["status"] == "PASSED").to_numpy()
    good, at = df[passed], y[passed]
    axes.hlines(at, good["p20"], good["p80"], color=look["color"], linewidth=2.2, alpha=0.55)
    axes.plot(good["p50"], at, linestyle="none", marker=look["marker"], color=look["color"], label=label)
    axes.plot(good["floor"], at, linestyle="none", marker="|", markersize=9, markeredgewidth=2.2, color="#8C8C8C")
    for status, where in zip(df["status"][~passed], y[~passed], strict=True):
        axes.annotate(
            status, (0.01, where), xycoords=("axes fraction", "data"), va="center", fontsize=8, color=look["color"]
        )


def _scale(axes: Axes, df: "pd.DataFrame", metric: str, unit: str) -> None:
    good = df[df["status"] == "PASSED"]
    values = [float(v) for name in ("p20", "p80", "floor") for v in good[name].dropna()]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_xscale("log")
        subs = (1, 2, 5) if max(values) < 500 * min(values) else (1,)
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs, numticks=12))
        axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axes.minorticks_off()
    else:
        axes.set_xlim(left=0)
    axes.grid(axis="x")
    counts = good["n"].dropna()
    least, most = (int(counts.min()), int(counts.max())) if len(counts) else (0, 0)
    n = "" if not most else f", n = {least}" + (f" to {most}" if most > least else "")
    floor = "; grey bar: floor" if good["floor"].notna().any() else ""
    axes.set_xlabel(f"{metric}, {unit} (median{n}; line: 20th to 80th percentile{floor})")


def _row_labels(first: "pd.DataFrame") -> list[str]:
    """What tells the rows apart; left out are what all share, except the arm, and sizes that the model implies."""
    by_model = first.groupby("model", dropna=False)
    implied = {n for n in _SIZES if by_model[n].nunique(dropna=False).max() == 1 and "" not in set(first["model"])}
    shown = [n for n in _ROW if n == "arm" or (n not in implied and first[n].nunique(dropna=False) > 1)]
    letters = dict(zip(_SIZES, "DFEKT", strict=True))
    return [
        " · ".join(f"{letters[n]}={row[n]}" if n in letters else str(row[n]) for n in shown if _said(row[n]))
        for _, row in first.iterrows()
    ]


def _said(value: Any) -> bool:
    import pandas as pd

    return not pd.isna(value) and value != ""


def _finding(df: "pd.DataFrame", rows: "pd.Series", unit: str) -> tuple[str, str]:
    good = df.assign(row=rows)[df["status"] == "PASSED"]
    table = good.pivot_table(index="row", columns="run", values="p50", aggfunc="median", sort=False)
    lost = len(df) - len(good)
    detail = f"{len(good)} medians of {df['run'].nunique()} runs in {rows.nunique()} rows"
    detail += f"; {lost} did not pass." if lost else "."
    both = table.dropna()
    letters = {run: letter(number) for number, run in enumerate(df["run"].unique())}
    if len(letters) == 1:
        best = good.loc[good["p50"].idxmin()] if len(good) else None
        return ("nothing passed" if best is None else f"{best['arm']} has the least: {best['p50']:.3g} {unit}"), detail
    if table.shape[1] < 2 or not len(both):
        return f"{', '.join(letters.values())} have no measurement in common", detail
    less = both.median().sort_values()
    low, high = less.index[0], less.index[-1]
    ratio = float((both[high] / both[low]).median())
    word = "more" if unit.endswith("/s") else "slower"
    return f"{letters[high]} is {ratio:.3g}x {word} than {letters[low]} (median of {len(both)} shared rows)", detail
