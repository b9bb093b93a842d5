"""What a further row costs: c(M) = cost of M rows together / (M * cost of one row alone).

1 says that batching buys nothing, 1 / M that rows after the first are free. A layer's own c(M) falls more slowly than a
single product's, since M tokens need union(M) experts; a shape with one expert (E = K = 1) shows the product itself.
Transforms measured frames, measures nothing.
"""

from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

SAME = ("workload", "model", "arm", "format", "backend", "device", "state", "source")
COLUMNS = (*SAME, "rows", "time_us", "row_us", "c", "c_low", "c_high", "c_predicted", "c_floor", "n")
US = {"ms": 1e3, "us": 1.0, "s": 1e6}
NEEDED = ("arm", "tokens", "status", "unit", "p20", "p50", "p80", "predicted", "floor", "n")


def cost_curve(df: "pd.DataFrame") -> "pd.DataFrame":
    """A row for each (arm, format, model, state, device, M) of a frame of `lab.bench` or `lab.runs`; columns `COLUMNS`.

    time_us, row_us: the median call, and that over M. c: from medians; c_low, c_high: the call's 20th and 80th
    percentile over one row's median. c_predicted, c_floor: the same ratio of the record's predictions and floors (NaN
    where it has none). Groups without a PASSED record at M = 1 are left out; LabError when none is left, or a
    column is missing.
    """
    import pandas as pd

    _expect(df, NEEDED, "cost_curve", "lab.bench or lab.runs")
    passed: Any = df[(df["status"] == "PASSED") & df["tokens"].gt(0)]
    made: list[dict[str, Any]] = []
    same = [name for name in SAME if name in passed.columns]
    for key, group in passed.groupby(same, dropna=False, sort=False):
        one = group[group["tokens"] == 1]
        if len(one):
            head = dict(zip(same, key if isinstance(key, tuple) else (key,), strict=True))
            made += [{**head, **_point(row, one.iloc[0])} for _, row in group.sort_values("tokens").iterrows()]
    if not made:
        raise LabError("no arm was timed with one row: c(M) compares with it. Bench tokens=[1, ...] too.")
    return pd.DataFrame(made, columns=[name for name in COLUMNS if name in same or name not in SAME])


def _expect(df: "pd.DataFrame", columns: tuple[str, ...], what: str, source: str) -> None:
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise LabError(f"{what} wants a frame of {source}; this one lacks {', '.join(missing)}.")


def _point(row: Any, one: Any) -> dict[str, Any]:
    m, unit, base = int(row["tokens"]), US[row["unit"]], US[one["unit"]] * one["p50"]

    def ratio(value: Any, alone: Any) -> float:
        given = value is not None and alone is not None and alone > 0
        return float(value or 0) / (m * float(alone or 0)) if given else float("nan")

    low, middle, high = (row[p] * unit for p in ("p20", "p50", "p80"))
    return {
        "rows": m, "time_us": middle, "row_us": middle / m, "c": ratio(middle, base), "c_low": ratio(low, base),
        "c_high": ratio(high, base), "c_predicted": ratio(row["predicted"], one["predicted"]),
        "c_floor": ratio(row["floor"], one["floor"]), "n": row["n"],
    }  # fmt: skip


def crossover(df: "pd.DataFrame", arm: str, other: str) -> "pd.DataFrame":
    """From which M on `arm` stays at least as fast as `other`: columns model, format, state, device, rows (NaN: never
    within the M that both were measured at). `df`: a frame of `cost_curve`.
    """
    import pandas as pd

    _expect(df, ("arm", "rows", "time_us"), "crossover", "cost_curve")
    where = [name for name in ("workload", "model", "format", "state", "backend", "device") if name in df.columns]
    both: Any = df[df["arm"].isin([arm, other])]
    found = []
    for key, group in both.groupby(where, dropna=False, sort=False):
        times = group.pivot_table(index="rows", columns="arm", values="time_us").dropna().sort_index()
        if {arm, other} <= set(times.columns):
            behind = times.index[times[arm] > times[other]]
            ahead = times.index[times.index > behind[-1]] if len(behind) else times.index
            found.append({**dict(zip(where, key, strict=True)), "rows": ahead[0] if len(ahead) else float("nan")})
    if not found:
        raise LabError(f"{arm!r} and {other!r} were not measured on the same rows anywhere in this frame.")
    return pd.DataFrame(found)


__all__ = ["COLUMNS", "cost_curve", "crossover"]
