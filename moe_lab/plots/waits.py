"""Waits for experts and reads ahead of them: causes, latencies, and what became of each prefetch."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import OKABE_ITO, Axes, arm_styles, describe, need_columns, new_axes, style, ticker

if TYPE_CHECKING:
    import pandas as pd

STALLS = ("step", "layer", "expert", "cause", "wait_ms", "latency_ms")
SUMMARY = ("layer", "issued", "timely", "late", "useless", "harmful", "bytes_per_useful_byte", "recall")
_FATES = {
    "timely": (OKABE_ITO[2], ""), "late": (OKABE_ITO[1], "///"), "useless": ("#8C8C8C", "xx"),
    "harmful": (OKABE_ITO[4], "..."),
}  # fmt: skip


@remembers
def stalls(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Milliseconds waited by cause, longest first, with the number of experts. `df`: `Recording.stalls`."""
    need_columns(df, STALLS, "stalls")
    by_cause: Any = df.groupby("cause")["wait_ms"]
    sums = by_cause.sum().sort_values(ascending=False)
    counts, total = by_cause.size(), float(sums.sum())
    with style():
        axes = ax if ax is not None else new_axes(8.0, 1.4 + 0.36 * len(sums))[0]
        axes.barh(range(len(sums)), sums, height=0.7, color=OKABE_ITO[1], edgecolor="white")
        for place, (cause, ms) in enumerate(sums.items()):
            share = f"{ms / total:.0%}, " if total else ""
            axes.annotate(
                f"{ms:.3g} ms ({share}n = {counts[cause]})", (ms, place), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8.5, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(range(len(sums)), list(sums.index))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * float(sums.max()) or 1.0)
        axes.grid(axis="x")
        axes.set_xlabel(f"time waited in all, ms ({df['step'].nunique()} steps, n = {len(df)} experts)")
        first = sums.index[0]
        detail = "; ".join(f"{cause} {ms:.3g} ms in {counts[cause]}" for cause, ms in sums.items())
        share = f"{sums.iloc[0] / total:.0%} of the waiting" if total else "Nothing was waited for"
        describe(axes, f"{share}: {first}" if total else share, f"Waits by cause: {detail}.")
    return axes


@remembers
def wait_ecdf(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Share of the experts that were absent, by how long after the request they were in place; a line a layer where
    there are at most eight, and all together. `df`: `Recording.stalls`.
    """
    need_columns(df, STALLS, "wait_ecdf")
    known = df.dropna(subset=["latency_ms"])
    groups = {"all": known}
    if 1 < known["layer"].nunique() <= 8:
        groups |= {f"layer {n}": known[known["layer"] == n] for n in sorted(set(known["layer"]))}
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.8)[0]
        for name, look in arm_styles(groups).items():
            values = np.sort(groups[name]["latency_ms"].to_numpy())
            width = 2.2 if name == "all" else 1.1
            line = {"color": "black" if name == "all" else look["color"], "linestyle": look["linestyle"]}
            axes.step(values, np.arange(1, len(values) + 1) / max(len(values), 1), label=name, linewidth=width, **line)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        shown = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 5, 7)
        axes.xaxis.set_major_locator(ticker.LogLocator(10, subs=shown, numticks=16))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        axes.grid(True)
        axes.legend(fontsize=8, loc="lower right")
        low, middle, high, late = np.quantile(known["latency_ms"], (0.25, 0.5, 0.75, 0.99))
        axes.set_xlabel(f"from asked for to in place, ms (n = {len(known)}; quartiles {low:.3g} to {high:.3g})")
        axes.set_ylabel("experts that were absent")
        title = f"Half of the absent experts are there after {middle:.3g} ms, 99 % after {late:.3g} ms"
        describe(axes, title, f"Quartiles {low:.3g}, {middle:.3g} and {high:.3g} ms.")
    return axes


@remembers
def prefetch(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """What became of the experts that were read ahead, a bar a layer; behind it what a useful byte cost and how much of
    the picks the prediction named. `df`: rows of `moe_lab.replay.summary`.
    """
    need_columns(df, SUMMARY, "prefetch")
    with style():
        axes = ax if ax is not None else new_axes(8.4, 1.6 + 0.38 * len(df))[0]
        left = np.zeros(len(df))
        for fate, (colour, hatch) in _FATES.items():
            values = df[fate].to_numpy(float)
            axes.barh(
                range(len(df)), values, left=left, height=0.7, color=colour, hatch=hatch, edgecolor="white", label=fate
            )
            left += values
        for place, row in enumerate(df.itertuples()):
            cost, named = row.bytes_per_useful_byte, row.recall
            note = f"{cost:.2f} bytes a useful byte" if np.isfinite(cost) else "no byte of use"
            note += f", recall {named:.0%}" if np.isfinite(named) else ""
            axes.annotate(
                note, (left[place], place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5,
                annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(range(len(df)), [f"layer {n}" for n in df["layer"]])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.55 * float(left.max()) or 1.0)
        axes.grid(axis="x")
        axes.set_xlabel(f"experts read ahead of their request (n = {int(left.sum())})")
        used = float((df["timely"] + df["late"]).sum()) / max(float(left.sum()), 1.0)
        detail = "; ".join(
            f"layer {r.layer}: {r.timely} timely, {r.late} late, {r.useless} useless, {r.harmful} harmful"
            for r in df.itertuples()
        )
        describe(axes, f"{used:.0%} of what was read ahead was used", f"{detail}.", legend_columns=4)
    return axes
