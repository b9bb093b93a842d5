"""What streamed steps cost: bounds as a ladder, purchases side by side, the model against what was measured."""

from typing import TYPE_CHECKING, Any

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import HATCHES, PHASES, Axes, describe, ink_on, need_columns, new_axes, si, style

if TYPE_CHECKING:
    import pandas as pd

BOUNDS = ("bound", "ms_per_step", "fetch_ms", "rest_ms", "misses_per_step", "bytes_per_step", "steps")
WHAT_IF = (
    *("change", "capacity_slots", "ms_per_step", "speedup", "fetch_ms", "rest_ms"),
    *("misses_per_step", "bytes_per_step", "steps", "assumes"),
)
CHECK = ("layer", "calls", "measured_ms", "predicted_ms", "error", "spread")


@remembers
def bounds(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """A mean step under each bound, best first: time without reads, time that stands still for reads, and what the
    next rung adds. `df`: rows of `lab.caching.bounds`.
    """
    need_columns(df, BOUNDS, "bounds")
    rows = df.sort_values("ms_per_step", kind="stable").to_dict("records")
    with style():
        axes = ax if ax is not None else new_axes(8.4, 1.5 + 0.36 * len(rows))[0]
        limit = max(row["ms_per_step"] for row in rows)
        before = 0.0
        for place, row in enumerate(rows):
            _bar(axes, place, row, limit)
            added = row["ms_per_step"] - before
            more = place and added > 1e-9 * row["ms_per_step"]  # not what a sum's rounding leaves
            note = f"{row['ms_per_step']:.3g} ms" + (f"  (+{added:.2g})" if more else "")
            note += f", {row['misses_per_step']:.3g} reads"
            _note(axes, place, row["ms_per_step"], note)
            if place:
                axes.plot([before, before], [place - 1, place], color="black", linewidth=0.9, linestyle=":")
            before = row["ms_per_step"]
        _finish(axes, [row["bound"] for row in rows], limit, rows[0]["steps"])
        title = _ladder_finding({row["bound"]: row["ms_per_step"] for row in rows})
        detail = "; ".join(f"{row['bound']} {row['ms_per_step']:.3g} ms" for row in rows)
        describe(axes, title, f"Modelled mean step: {detail}.", legend_columns=2)
    return axes


@remembers
def what_if(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """A mean step today and after each purchase, with the factor gained. `df`: rows of `lab.caching.what_if`."""
    need_columns(df, WHAT_IF, "what_if")
    rows = df.to_dict("records")
    with style():
        axes = ax if ax is not None else new_axes(8.4, 1.5 + 0.4 * len(rows))[0]
        limit = max(row["ms_per_step"] for row in rows)
        for place, row in enumerate(rows):
            _bar(axes, place, row, limit)
            note = f"{row['ms_per_step']:.3g} ms, x{row['speedup']:.2f}, {row['capacity_slots']:,} slots, "
            _note(axes, place, row["ms_per_step"], note + f"{si(row['bytes_per_step'], 'B')} read")
        axes.axvline(rows[0]["ms_per_step"], color="black", linewidth=0.8, linestyle="--")
        _finish(axes, [row["change"] for row in rows], limit, rows[0]["steps"])
        best = max(rows, key=lambda row: row["speedup"])
        title = f"{best['change']}: {best['speedup']:.2f} times as fast as today, by the model"
        detail = "; ".join(f"{row['change']} x{row['speedup']:.2f} ({row['assumes']})" for row in rows[1:])
        describe(axes, title, f"Today {rows[0]['ms_per_step']:.3g} ms a step. {detail}.", legend_columns=2)
    return axes


@remembers
def cost_check(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Measured against predicted milliseconds of a layer call, held-out calls. `df`: rows of `lab.caching.held_out`.

    A point on the diagonal was foretold exactly; whiskers are the median absolute residual of single calls.
    """
    need_columns(df, CHECK, "cost_check")
    layers: Any = df[df["layer"] != "all"]
    with style():
        axes = ax if ax is not None else new_axes(5.4, 4.4)[0]
        top = 1.12 * float(max(layers["measured_ms"].max(), layers["predicted_ms"].max()))
        axes.plot([0, top], [0, top], color="#8C8C8C", linewidth=0.9)
        axes.errorbar(
            layers["predicted_ms"], layers["measured_ms"], yerr=layers["spread"] * layers["measured_ms"],
            fmt="o", color=PHASES["route"], ecolor="#8C8C8C", capsize=2,
        )  # fmt: skip
        for row in layers.itertuples():
            axes.annotate(
                str(row.layer), (row.predicted_ms, row.measured_ms), xytext=(5, 4), textcoords="offset points"
            )
        axes.set(xlim=(0, top), ylim=(0, top))
        axes.grid(True)
        axes.set_xlabel(f"predicted from every other call, ms (n = {int(layers['calls'].min()):,} calls a layer)")
        axes.set_ylabel("measured in the calls between, ms")
        error = (
            df.loc[df["layer"] == "all", "error"] if (df["layer"] == "all").any() else layers["error"].abs().median()
        )
        whole = float(error.iloc[0]) if hasattr(error, "iloc") else float(error)
        detail = "; ".join(f"layer {row.layer} {row.error:+.1%}" for row in layers.itertuples())
        describe(axes, f"The model is {whole:+.1%} off on calls it has not seen", f"Error by layer: {detail}.")
    return axes


def _ladder_finding(times: dict[str, float]) -> str:
    """How far the policy stands above its two bounds; without a policy, the ends of the ladder."""
    hidden = next((name for name in times if name.endswith(", perfect prefetch")), None)
    own = hidden.removesuffix(", perfect prefetch") if hidden else None
    if hidden is None or own not in times or "belady" not in times:
        first, last = next(iter(times)), list(times)[-1]
        return f"From {times[first]:.3g} ms a step ({first}) to {times[last]:.3g} ({last})"
    title = f"{own} takes {times[own]:.3g} ms a step; the optimal policy {times['belady']:.3g}"
    return f"{title}, perfect prefetch {times[hidden]:.3g}"


def _bar(axes: Axes, place: int, row: dict[str, Any], limit: float) -> None:
    left = 0.0
    for part, phase, label in (
        ("rest_ms", "compute", "route, compute, other"),
        ("fetch_ms", "fetch", "waits for reads"),
    ):
        width = row[part]
        axes.barh(
            place, width, left=left, height=0.7, color=PHASES[phase], hatch=HATCHES[phase], edgecolor="white",
            linewidth=0.6, label=label if place == 0 else None,
        )  # fmt: skip
        if width >= 0.08 * limit:
            colour = PHASES[phase]
            axes.text(
                left + width / 2, place, f"{width:.3g}", ha="center", va="center", fontsize=8, color=ink_on(colour),
                bbox={"facecolor": colour, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
        left += width


def _note(axes: Axes, place: int, at: float, text: str) -> None:
    axes.annotate(
        text, (at, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color="#333333",
        annotation_clip=False, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
    )  # fmt: skip


def _finish(axes: Axes, names: list[str], limit: float, steps: int) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * limit)
    axes.grid(axis="x")
    axes.set_xlabel(f"modelled time of a step, ms (mean of n = {int(steps):,} steps)")
