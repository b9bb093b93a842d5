"""A replay's steps: where each layer's time went, from all resident to the wall, and what ran when.

Draws what `lab.replay` and `moe_lab.replay` give; measures nothing.
"""

from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.phases import statistic, typical_calls
from moe_lab.plots.style import OKABE_ITO, PHASES, Axes, describe, ink_on, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd

# column: (label, colour, hatch); route blue, fetch orange, compute green, as everywhere
PARTS = {
    "t_host_block_ms": ("blocked for picks", "#56B4E9", "xx"),
    "route_gpu_ms": ("route", "#0072B2", ""),
    "select_host_ms": ("group on host", "#0072B2", "..."),
    "plan_ms": ("ask the cache", "#F0E442", ""),
    "demand_wait_ms": ("wait for bytes", "#E69F00", "///"),
    "h2d_ms": ("copy", "#D55E00", ""),
    "routed_gpu_ms": ("experts", "#009E73", "..."),
    "shared_ms": ("shared expert", "#CC79A7", ""),
    "launch_ms": ("launch", "#4D4D4D", "++"),
    "other_ms": ("other", "#8C8C8C", "xx"),
}
_ON_GPU = ("t_host_block_ms", "select_host_ms", "plan_ms", "demand_wait_ms", "launch_ms", "other_ms")
NEEDED = (
    *("step", "layer", "arm", "backend", "wall_ms", "hits", "misses", "bytes_read"),
    *("t_host_block_ms", "route_gpu_ms", "select_host_ms", "plan_ms", "demand_wait_ms", "h2d_ms", "routed_gpu_ms"),
    *("shared_gpu_ms", "shared_hidden_ms", "launch_ms", "other_ms"),
)
WATERFALL = ("kind", "what", "ms_per_step", "steps")
_BARS = {
    "all resident": PHASES["compute"], "routing": PHASES["route"], "hidden I/O": "#F0E442", "late prefetch": "#D55E00",
    "demand stall": PHASES["fetch"], "other": PHASES["other"],
}  # fmt: skip


@remembers
def replay(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Stacked bars of a layer's call, one a (layer, arm), with the wall as a black tick. `df`: rows of `lab.replay`.

    A bar is the mean of the middle half of its layer's calls, by wall. On a CPU the parts are all of the call; on a GPU
    they are the host's, which add up to the wall, and the device's columns are left to the timeline.
    """
    need_columns(df, NEEDED, "replay")
    if bool(df["other_ms"].isna().all()):
        raise LabError("lab.plot.replay: level 0 records no parts; replay at level 1.")
    every = df.assign(shared_ms=df["shared_gpu_ms"] - df["shared_hidden_ms"])
    calls = typical_calls(every)
    gpu = bool((calls["backend"] == "cuda").any())
    shown = {name: look for name, look in PARTS.items() if name in _ON_GPU or not gpu}
    shown = {name: look for name, look in shown.items() if float(calls[name].max()) > 0.002 * calls["wall_ms"].max()}
    with style():
        axes = ax if ax is not None else new_axes(9.6, 1.7 + 0.36 * len(calls))[0]
        left = [0.0] * len(calls)
        for name, (label, colour, hatch) in shown.items():
            values = [float(v) for v in calls[name]]
            axes.barh(
                range(len(calls)), values, left=left, height=0.72, color=colour, hatch=hatch, edgecolor="white",
                linewidth=0.6, label=label,
            )  # fmt: skip
            left = [a + b for a, b in zip(left, values, strict=True)]
        for row, call in enumerate(calls.itertuples()):
            axes.plot([call.wall_ms] * 2, [row - 0.42, row + 0.42], color="black", linewidth=1.6)
        arms = calls["arm"].nunique() > 1
        axes.set_yticks(
            range(len(calls)), [f"layer {c.layer}{f' · {c.arm}' if arms else ''}" for c in calls.itertuples()]
        )
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_xlabel(f"ms of a call ({statistic(calls)}; black tick: wall clock)")
        describe(axes, *_replay_finding(every, shown), legend_columns=len(shown))
    return axes


def _replay_finding(calls: Any, shown: dict[str, Any]) -> tuple[str, str]:
    """Of all calls, not of the middle half drawn: a rare wait may lie in the others."""
    total = float(calls["wall_ms"].sum())
    share = {look[0]: float(calls[name].sum()) / total for name, look in shown.items()}
    first = max(share, key=lambda name: share[name])
    waited = float(calls["demand_wait_ms"].sum()) / total
    title = f"{share[first]:.0%} of all calls: {first}; waiting for bytes {waited:.1%}"
    return title, f"Shares of the wall: {', '.join(f'{name} {value:.1%}' for name, value in share.items())}."


@remembers
def waterfall(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """From a step with all experts at hand to the measured one, bar by bar, and the lines that bound it.

    `df`: rows of `moe_lab.replay.waterfall`.
    """
    need_columns(df, WATERFALL, "waterfall")
    bars: Any = df[df["kind"] == "part"]
    lines = dict(df.loc[df["kind"] == "line", ["what", "ms_per_step"]].to_numpy().tolist())
    with style():
        axes = ax if ax is not None else new_axes(8.8, 4.2)[0]
        top = 0.0
        for place, row in enumerate(bars.itertuples()):
            colour = _BARS.get(row.what, OKABE_ITO[0])
            axes.bar(place, row.ms_per_step, bottom=top, width=0.7, color=colour, edgecolor="white")
            inside = row.ms_per_step > 0.12 * sum(bars["ms_per_step"])
            axes.annotate(
                f"{row.ms_per_step:.3g}", (place, top + row.ms_per_step * (0.5 if inside else 1)), ha="center",
                xytext=(0, 0 if inside else 3), textcoords="offset points", va="center" if inside else "bottom",
                fontsize=8.5, color=ink_on(colour) if inside else "black", zorder=3,
                bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
            axes.plot([place - 0.35, place + 1.35], [top + row.ms_per_step] * 2, color="#555555", linewidth=0.7)
            top += row.ms_per_step
        axes.bar(len(bars), top, width=0.7, color="#555555")
        names = [*("+ " * (place > 0) + row.what for place, row in enumerate(bars.itertuples())), "wall"]
        split = ["\n".join(name.rsplit(" ", 1)) if len(name) > 11 else name for name in names]
        axes.set_xticks(range(len(names)), split)
        _bounds(axes, lines, len(names))
        axes.set_ylim(0, 1.12 * top)
        axes.set_ylabel("ms a step")
        axes.set_xlabel(f"where a mean step goes (n = {int(df['steps'].iloc[0])} steps)")
        axes.grid(axis="y")
        parts = {row.what: row.ms_per_step for row in bars.itertuples()}
        waits = parts["late prefetch"] + parts["demand stall"]
        detail = "; ".join(f"{name} {value:.3g} ms" for name, value in (*parts.items(), *lines.items()))
        describe(axes, f"Waiting for experts adds {waits:.3g} of {top:.3g} ms a step", f"{detail}.")
    return axes


def _bounds(axes: Axes, lines: dict[str, float], places: int) -> None:
    """Dashed lines right of the bars; labels are kept apart, however near the lines."""
    looks = dict(zip(lines, (":", (0, (3, 1, 1, 1)), "--", "-.", "-"), strict=False))
    for name, look in looks.items():
        axes.axhline(lines[name], color="black", linewidth=0.9, linestyle=look, label=f"{name} {lines[name]:.3g}")
    axes.set_xlim(-0.6, places - 0.4)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6, title="bounds, ms")
