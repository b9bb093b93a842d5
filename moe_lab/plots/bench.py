"""Arms side by side in one benchmark: median times with their spread, the floor, and other engines' recorded times.

Draws `lab.bench`, or saved runs of it (`lab.runs`), a laptop's beside a GPU's. A wrong result has no bar but its word,
so that nobody compares its speed.
"""

from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.runs import letter
from moe_lab.plots.style import OKABE_ITO, Axes, describe, need_columns, new_axes, si, style, ticker

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "model", "tokens", "state", "arm", "format", "status", "unit", "n", "p20", "p50", "p80", "floor", "predicted",
    "device",
)  # fmt: skip
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_HATCH = {"cold": "", "warm": "...", "": ""}
_MOST_BARS = 48


@remembers
def bench(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Horizontal bars of the median time on a log axis, one an (arm, case, state), grouped by case.

    `df`: a frame of `lab.bench` or of `lab.runs` (columns COLUMNS; several runs are told apart by letters that the alt
    text explains; `source` "recorded" marks other engines' rows). Whiskers run from the 20th to the 80th percentile;
    black ticks are the floors, diamonds the predictions; recorded rows are grey and hatched; a row that was not timed
    says its status. LabError for more than 48 rows: select some first.
    """
    need_columns(df, COLUMNS, "bench")
    if len(df) > _MOST_BARS:
        raise LabError(
            f"lab.plot.bench draws at most {_MOST_BARS} rows readably, got {len(df)}: select a model or T first."
        )
    rows = _ordered(df)
    with style():
        axes = ax if ax is not None else new_axes(8.6, 1.3 + 0.27 * len(rows))[0]
        timed = [r for r in rows if r["status"] == "PASSED"]
        if timed:
            axes.set_xscale("log")
            axes.set_xlim(*_limits(timed))
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
            axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,g}"))
            axes.minorticks_off()
        for place, row in enumerate(rows):
            _bar(axes, place, row)
        axes.set_yticks(range(len(rows)), [_label(r) for r in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        _separate(axes, rows)
        axes.grid(axis="x")
        n = sorted({int(r["n"]) for r in timed if r["n"] == r["n"]})
        spread = f"n = {n[0]}" + (f" to {n[-1]}" if len(n) > 1 else "") if n else "n = 0"
        axes.set_xlabel(
            f"time of a layer call, µs (median and p20 to p80 of {spread}; black tick: floor; diamond: predicted)"
        )
        describe(axes, *_finding(timed, rows))
    return axes


def _ordered(df: "pd.DataFrame") -> list[dict[str, Any]]:
    """Rows with times in microseconds, case by case in order of appearance, recorded ones last in theirs."""
    found = df.assign(**{name: "measured" for name in ("source",) if name not in df}).to_dict("records")
    cases = {case: i for i, case in enumerate(dict.fromkeys(_case(r) for r in found))}
    letters = _letters(found)
    arms = {arm: i for i, arm in enumerate(dict.fromkeys((r["arm"], r["state"]) for r in found))}
    for r in found:
        r["letter"] = letters.get(r.get("run"), "")
        factor = _SECONDS.get(r["unit"])
        if factor is None:
            raise LabError(f"lab.plot.bench draws times, got a row in {r['unit']!r}.")
        r |= {
            f"{name}_us": r[name] * factor * 1e6
            for name in ("p20", "p50", "p80", "floor", "predicted")
            if r[name] == r[name]
        }

    def place(r: dict[str, Any]) -> tuple:
        return cases[_case(r)], r["source"] == "recorded", arms[r["arm"], r["state"]] if letters else 0

    return sorted(found, key=place)


def _letters(rows: list[dict[str, Any]]) -> dict[Any, str]:
    """Run -> A, B, ...; empty for one run or none."""
    runs = list(dict.fromkeys(r["run"] for r in rows if r.get("run") == r.get("run") and "run" in r))
    return {run: letter(i) for i, run in enumerate(runs)} if len(runs) > 1 else {}


def _case(r: dict[str, Any]) -> tuple:
    return (r["model"], int(r["tokens"]), r["format"])


def _limits(timed: list[dict[str, Any]]) -> tuple[float, float]:
    values = [
        r[name]
        for r in timed
        for name in ("floor_us", "predicted_us", "p20_us", "p50_us", "p80_us")
        if r.get(name, 0) > 0
    ]
    return min(values) * 0.7, max(values) * 1.6


def _bar(axes: Axes, place: int, row: dict[str, Any]) -> None:
    if row["status"] != "PASSED":
        colour = OKABE_ITO[4] if row["status"] == "INCORRECT" else "#555555"
        axes.annotate(
            f" {row['status']}", (0.0, place), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            color=colour, fontweight="bold",
        )  # fmt: skip
        return
    theirs = row["source"] == "recorded"
    colour = "#BBBBBB" if theirs else OKABE_ITO[0] if row["state"] != "warm" else OKABE_ITO[5]
    hatch = "///" if theirs else _HATCH.get(row["state"], "")
    left = axes.get_xlim()[0]
    axes.barh(
        place, row["p50_us"] - left, left=left, height=0.7, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6
    )
    if "p20_us" in row and "p80_us" in row:
        axes.plot([row["p20_us"], row["p80_us"]], [place, place], color="black", linewidth=1.0)
    end = max(row["p50_us"], row.get("p80_us", 0.0), row.get("floor_us", 0.0))
    axes.annotate(f" {_digits(row['p50_us'])}", (end, place), va="center", fontsize=8)
    if row.get("predicted_us", 0.0) > 0:
        axes.plot(row["predicted_us"], place, marker="D", markersize=4.5, color="white", markeredgecolor="black")
    if row.get("floor_us", 0.0) > 0:
        axes.plot([row["floor_us"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.6)


def _digits(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:,.0f}"


def _label(r: dict[str, Any]) -> str:
    mark = " (recorded)" if r["source"] == "recorded" else ""
    state = f" · {r['state']}" if r["state"] and not mark else ""
    return f"{r['letter']}{' · ' * bool(r['letter'])}{r['arm']}{mark}{state}"


def _separate(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """The case at the right of its first row, a thin line above it."""
    for place, row in enumerate(rows):
        if place and _case(row) == _case(rows[place - 1]):
            continue
        if place:
            axes.axhline(place - 0.5, color="#BBBBBB", linewidth=0.7)
        model, tokens, format = _case(row)
        axes.annotate(
            f"{model}\n{format}, T = {tokens}", (1.01, place - 0.45), xycoords=("axes fraction", "data"), va="top",
            fontsize=8, color="#333333", annotation_clip=False,
        )  # fmt: skip


def _finding(timed: list[dict[str, Any]], rows: list[dict[str, Any]]) -> tuple[str, str]:
    """Fastest against slowest measured arm in the first case that has two, cold if there is such a state."""
    where = ", ".join(dict.fromkeys(r["device"] for r in rows if r["source"] == "measured"))
    several = dict.fromkeys(f"{r['letter']}: {r['run']} on {r['device']}" for r in rows if r["letter"])
    wrong = [f"{r['arm']} {r['status']}" for r in rows if r["status"] != "PASSED"]
    detail = f"Bars for {len(timed)} timed rows" + (
        f"; without a time: {', '.join(dict.fromkeys(wrong))}." if wrong else "."
    )
    if several:
        return _across(timed), f"{detail} {'; '.join(several)}."
    for first in timed:
        same = [
            r for r in timed if _case(r) == _case(first) and r["state"] == first["state"] and r["source"] == "measured"
        ]
        if len({r["arm"] for r in same}) > 1:
            ranked = sorted(same, key=lambda r: r["p50_us"])
            fast, slow = ranked[0], ranked[-1]
            gain = slow["p50_us"] / fast["p50_us"]
            title = f"{fast['arm']} is {gain:.1f}x faster than {slow['arm']} at T = {int(first['tokens'])} ({where})"
            facts = "; ".join(f"{r['arm']} {si(r['p50_us'], 'µs')}" for r in ranked)
            return title, f"{detail} {first['format']}, {first['state'] or 'streamed'}: {facts}."
    if timed:
        return f"{timed[0]['arm']} takes {timed[0]['p50_us']:.3g} µs at T = {int(timed[0]['tokens'])} ({where})", detail
    return f"Nothing was timed ({where})", detail


def _across(timed: list[dict[str, Any]]) -> str:
    """The first measurement that two runs share, in both."""
    for first in timed:
        key = (*_case(first), first["arm"], first["state"])
        same = {r["letter"]: r for r in timed if (*_case(r), r["arm"], r["state"]) == key and r["letter"]}
        if len(same) > 1:
            times = ", ".join(f"{name} {_digits(r['p50_us'])} µs ({r['device']})" for name, r in same.items())
            return f"{first['arm']} at T = {int(first['tokens'])}: {times}"
    return f"{', '.join(dict.fromkeys(r['letter'] for r in timed))} have no timed measurement in common"
