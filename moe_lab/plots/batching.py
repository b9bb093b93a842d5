"""What handing a layer many tokens at once buys, arm by arm.

Batching saves two things that are shown apart: submissions (host work that a device profile never sees) and weight
reads shared between rows. Time alone would not say which of them paid.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, si, style, ticker

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("arm", "tokens", "time_ms_p50", "submissions", "weight_bytes", "backend", "device")
_PANELS = (
    ("time_ms_p50", 1e3, "time per token, µs (p50)"),
    ("submissions", 1.0, "submissions per token"),
    ("weight_bytes", 1e-3, "weight bytes read per token, kB"),
)


@remembers
def batching(df: "pd.DataFrame", *, ax: Axes | Sequence[Axes] | None = None) -> Axes:
    """Time, submissions and weight bytes per token over T, log-log, one line an arm.

    `df`: columns arm, tokens (T), time_ms_p50, submissions, weight_bytes (all of the whole call; NaN: unknown),
    backend, device; with time_ms_p20 and time_ms_p80 too, a band is drawn; with `n`, the repetitions are named.
    Without `ax`: a figure of three panels. One Axes: the time panel alone. Three Axes: all three.
    Returns the Axes of the time panel.
    """
    need_columns(df, COLUMNS, "batching")
    if (df["tokens"] < 1).any():
        raise LabError("lab.plot.batching divides by T; every row needs tokens >= 1.")
    with style():
        axes = _axes(ax)
        looks = arm_styles(df["arm"])
        for panel, (column, factor, label) in zip(axes, _PANELS, strict=False):
            _panel(panel, df, column, factor, looks)
            panel.set_ylabel(label)
            panel.set_xlabel(_x_label(df) if panel is axes[0] else "tokens in the call, T")
        _mark_crossover(axes[0], df)
        axes[0].legend(fontsize=8.5, loc="best", handlelength=3.2)
        title, detail = _finding(df)
        if len(axes) > 1:
            axes[0].figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
            describe(axes[0], title, detail)
            axes[0].set_title("")
        else:
            describe(axes[0], title, detail)
    return axes[0]


def _axes(ax: Any) -> list[Axes]:
    if ax is None:
        return new_axes(10.2, 3.5, columns=3)
    if isinstance(ax, Axes):
        return [ax]
    axes = list(ax)
    if len(axes) not in (1, 3):
        raise LabError(f"lab.plot.batching draws on one Axes or on three, got {len(axes)}.")
    return axes


def _x_label(df: "pd.DataFrame") -> str:
    return "tokens in the call, T" + (f" (n = {int(df['n'].min())} runs a point)" if "n" in df else "")


def _panel(axes: Axes, df: "pd.DataFrame", column: str, factor: float, looks: dict) -> None:
    for arm, look in looks.items():
        rows = df[df["arm"] == arm].sort_values("tokens")
        axes.plot(rows["tokens"], rows[column] * factor / rows["tokens"], label=arm, **look)
        if column == "time_ms_p50" and {"time_ms_p20", "time_ms_p80"} <= set(df.columns):
            low, high = (rows[f"time_ms_p{p}"] * factor / rows["tokens"] for p in (20, 80))
            axes.fill_between(rows["tokens"], low, high, color=look["color"], alpha=0.18, linewidth=0)
    ticks = sorted(set(df["tokens"]))
    ticks = ticks[:: -(-len(ticks) // 6)]
    axes.set_xscale("log", base=2)
    # An arm that reads nothing or submits nothing has no place on a log axis; the panel stays linear then.
    if (df[column].dropna() > 0).all():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=9))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(True)


def _mark_crossover(axes: Axes, df: "pd.DataFrame") -> None:
    """A line at the first T from which the arm that wins at the largest T stays ahead of the one that loses there."""
    times = df.pivot_table(index="tokens", columns="arm", values="time_ms_p50").dropna().sort_index()
    if times.shape[0] < 2 or times.shape[1] < 2:
        return
    winner, loser = times.iloc[-1].idxmin(), times.iloc[-1].idxmax()
    behind = times.index[times[winner] > times[loser]]
    if len(behind):
        first = times.index[times.index.get_loc(behind[-1]) + 1]
        axes.axvline(first, color="#555555", linewidth=1.0, linestyle=":")
        note = f" {winner} ahead\n from T = {first}"
        axes.annotate(note, (first, 0.98), xycoords=("data", "axes fraction"), fontsize=8, va="top")


def _finding(df: "pd.DataFrame") -> tuple[str, str]:
    """Slowest against fastest arm at the largest T that more than one arm was measured at."""
    where = f"{', '.join(dict.fromkeys(df['device']))}, backend {', '.join(dict.fromkeys(df['backend']))}"
    shared = [t for t, group in df.groupby("tokens") if group["arm"].nunique() > 1]
    if not shared:
        only = df.sort_values("tokens")
        gain = (only["time_ms_p50"] / only["tokens"]).iloc[0] / (only["time_ms_p50"] / only["tokens"]).iloc[-1]
        span = f"T = {only['tokens'].iloc[0]} to {only['tokens'].iloc[-1]}"
        return f"{only['arm'].iloc[0]}: time per token falls {gain:.1f}x from {span} ({where})", ""
    top = df[df["tokens"] == max(shared)].sort_values("time_ms_p50")
    fast, slow = top.iloc[0], top.iloc[-1]
    gain = slow["time_ms_p50"] / fast["time_ms_p50"]
    title = f"At T = {max(shared)}, {fast['arm']} is {gain:.1f}x faster than {slow['arm']} ({where})"
    facts = "; ".join(
        f"{r.arm} {r.time_ms_p50:.3g} ms, {int(r.submissions)} submissions, {_weights(float(r.weight_bytes))}"
        for r in top.itertuples()
    )
    return title, f"Lines over T = {df['tokens'].min()} to {df['tokens'].max()}. At T = {max(shared)}: {facts}."


def _weights(read: float) -> str:
    return "weight bytes unknown" if math.isnan(read) else f"{si(read, 'B')} of weights"
