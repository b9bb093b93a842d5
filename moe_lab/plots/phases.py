"""Where the time of an MoE layer went: route, fetch, compute and the rest, as stacked bars.

Draws `rec.timings` (one row for each layer call). A bar is the mean of the middle half of its layer's and arm's calls,
by wall time: its parts add up to its wall, as medians taken column by column do not, and a rare wait has its share in
it, where a single median call has all of it or none.
"""

from typing import TYPE_CHECKING, Any

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import HATCHES, PHASES, Axes, describe, ink_on, need_columns, new_axes, si, style

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("layer", "arm", "backend", "wall_ms", "hits", "misses", "bytes_read", *(f"{p}_ms" for p in PHASES))
_LABEL_SHARE = 0.06  # a number in a narrower segment would overlap its neighbours


def typical_calls(df: "pd.DataFrame") -> "pd.DataFrame":
    """One row a (layer, arm): the mean of the calls between the quartiles of the wall time (of all where there are
    fewer than four), n, the quartiles, and what the cache did in all n."""
    import pandas as pd

    rows = []
    for _, group in df.groupby(["layer", "arm"], sort=True):
        n, cut = len(group), len(group) // 4
        calls = group.sort_values("wall_ms", kind="stable").iloc[cut : n - cut]
        middle = calls.iloc[0].copy()
        times = [name for name in calls if name.endswith("_ms")]
        middle[times] = calls[times].mean()
        middle["n"] = n
        middle["wall_p25"], middle["wall_p75"] = group["wall_ms"].quantile([0.25, 0.75])
        for counted in ("hits", "misses", "bytes_read"):
            middle[counted] = group[counted].sum()
        rows.append(middle)
    return pd.DataFrame(rows).reset_index(drop=True)


def statistic(calls: "pd.DataFrame") -> str:
    """What the rows of `typical_calls` are, for an axis."""
    least, most = int(calls["n"].min()), int(calls["n"].max())
    n = f"n = {least}" if least == most else f"n = {least} to {most}"
    return f"mean of {'the middle half of ' * (most >= 4)}{n} calls"


@remembers
def phases(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Stacked horizontal bars of route / fetch / compute / other in ms, one bar a (layer, arm).

    `df`: columns layer, arm, backend, route_ms, fetch_ms, compute_ms, other_ms, wall_ms, hits, misses, bytes_read.
    The black tick is the wall time, so a gap between bar and tick would be time nobody accounts for; the thin line
    is the interquartile range when a bar stands for four calls or more.
    """
    need_columns(df, COLUMNS, "phases")
    calls = typical_calls(df)
    with style():
        axes = ax if ax is not None else new_axes(8.4, 1.5 + 0.34 * len(calls))[0]
        limit = float(max(calls["wall_ms"].max(), calls["wall_p75"].max())) or 1.0
        _bars(axes, calls, limit)
        _walls(axes, calls)
        _notes(axes, calls, limit)
        many_arms = calls["arm"].nunique() > 1
        labels = [f"layer {r.layer}" + (f" · {r.arm}" if many_arms else "") for r in calls.itertuples()]
        axes.set_yticks(range(len(calls)), labels)
        axes.invert_yaxis()
        axes.set_xlim(0, limit * 1.02)
        axes.grid(axis="x")
        axes.set_xlabel(f"time of a layer call, ms ({statistic(calls)}; black tick: wall clock)")
        title, detail = _finding(calls)
        describe(axes, title, detail, legend_columns=len(PHASES))
    return axes


def _bars(axes: Axes, calls: "pd.DataFrame", limit: float) -> None:
    left = [0.0] * len(calls)
    for phase, colour in PHASES.items():
        widths = [float(v) for v in calls[f"{phase}_ms"]]
        axes.barh(
            range(len(calls)), widths, left=left, height=0.72, color=colour, hatch=HATCHES[phase],
            edgecolor="white", linewidth=0.6, label=phase,
        )  # fmt: skip
        for row, (start, width) in enumerate(zip(left, widths, strict=True)):
            if width >= _LABEL_SHARE * limit:
                axes.text(
                    start + width / 2, row, f"{width:.3g}", ha="center", va="center", fontsize=8, color=ink_on(colour),
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
                )  # fmt: skip
        left = [a + b for a, b in zip(left, widths, strict=True)]


def _walls(axes: Axes, calls: "pd.DataFrame") -> None:
    for row, call in enumerate(calls.itertuples()):
        axes.plot([call.wall_ms] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.6)
        if call.n >= 4:
            axes.plot([call.wall_p25, call.wall_p75], [row + 0.3] * 2, color="black", linewidth=1.0)


def _notes(axes: Axes, calls: "pd.DataFrame", limit: float) -> None:
    """Right of the bars, what the cache did in all n calls; only where one was asked for anything."""
    for row, call in enumerate(calls.itertuples()):
        if asked := int(call.hits + call.misses):
            note = f"{int(call.hits)} of {asked} from the cache, {si(float(call.bytes_read), 'B')} read"
            axes.annotate(note, (limit * 1.03, row), va="center", fontsize=8, color="#333333", annotation_clip=False)


def _finding(calls: "pd.DataFrame") -> tuple[str, str]:
    sums: dict[str, Any] = {phase: float(calls[f"{phase}_ms"].sum()) for phase in PHASES}
    total = sum(sums.values()) or 1.0
    first = max(sums, key=lambda phase: sums[phase])
    arms = ", ".join(dict.fromkeys(calls["arm"]))
    backends = ", ".join(dict.fromkeys(calls["backend"]))
    title = f"{first.capitalize()} takes {sums[first] / total:.0%} of the time (arm {arms}; backend {backends})"
    shares = ", ".join(f"{phase} {value / total:.0%}" for phase, value in sums.items())
    asked = int(calls["hits"].sum() + calls["misses"].sum())
    cache = f" The cache served {int(calls['hits'].sum())} of {asked} expert requests." if asked else ""
    return title, f"Stacked bars for {len(calls)} layer calls, shares of the sum: {shares}.{cache}"
