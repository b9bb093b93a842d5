"""What ran when: a lane a thread or queue, with arrows from a miss over its read to the computation that needed it."""

from typing import TYPE_CHECKING, Any

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import HATCHES, OKABE_ITO, PHASES, Axes, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd

NEEDED = ("span", "lane", "what", "begin_ms", "end_ms", "step", "layer", "expert", "lane_kind", "after")
_LOOKS = {
    "route": (PHASES["route"], HATCHES["route"]), "fetch": (PHASES["fetch"], HATCHES["fetch"]),
    "compute": (PHASES["compute"], HATCHES["compute"]), "shared": (OKABE_ITO[3], ""), "demand": (OKABE_ITO[4], ""),
    "prefetch": (OKABE_ITO[5], "\\\\\\"), "copy": (OKABE_ITO[6], ""),
}  # fmt: skip
_MOST_ARROWS = 60  # more would cover the bars they join


@remembers
def timeline(df: "pd.DataFrame", *, ax: Axes | None = None, arrows: bool = True) -> Axes:
    """Spans by lane over time, ms. `df`: rows of `moe_lab.replay.timeline`, best of one or two steps.

    Reads for a request and reads ahead of one differ in colour and hatch; an arrow runs from each span to the one that
    waited for it (the first 60).
    """
    need_columns(df, NEEDED, "timeline")
    lanes = _order(df)
    with style():
        axes = ax if ax is not None else new_axes(9.6, 1.5 + 0.36 * len(lanes))[0]
        at = {lane: place for place, lane in enumerate(lanes)}
        kinds = [row["lane_kind"] or row["what"] for row in df.to_dict("records")]
        for kind, (colour, hatch) in _LOOKS.items():
            rows: Any = df[[k == kind for k in kinds]]
            if len(rows):
                slim = 0.4 if kind == "shared" else 0.72
                axes.barh(
                    [at[lane] for lane in rows["lane"]], rows["end_ms"] - rows["begin_ms"], left=rows["begin_ms"],
                    height=slim, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, label=_label(kind),
                )  # fmt: skip
        if arrows:
            _arrows(axes, df, at)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.grid(axis="x")
        steps, layers = df["step"].nunique(), df["layer"].nunique()
        axes.set_xlabel(
            f"ms since the first call (n = {len(df)} spans, {steps} step{'s' * (steps > 1)}, {layers} layers)"
        )
        describe(axes, *_finding(df), legend_columns=6)
    return axes


def _order(df: Any) -> list[str]:
    """Host, readers, copies, then the device's lanes."""
    readers = sorted((lane for lane in set(df["lane"]) if lane.startswith("reader")), key=lambda name: int(name[7:]))
    known = ["host", *readers, "copy", "compute", "side"]
    return [lane for lane in known if lane in set(df["lane"])]


def _label(kind: str) -> str:
    named = {"demand": "read, asked for", "prefetch": "read ahead", "copy": "copy", "shared": "shared expert"}
    return named.get(kind, kind)


def _arrows(axes: Axes, df: Any, at: dict[str, int]) -> None:
    rows = {row["span"]: row for row in df.to_dict("records")}
    joined = [(rows[row["after"]], row) for row in rows.values() if row["after"] in rows]
    for cause, effect in joined[:_MOST_ARROWS]:
        start = cause["begin_ms"] if effect["what"] == "read" else cause["end_ms"]
        axes.annotate(
            "", (effect["begin_ms"], at[effect["lane"]]), xytext=(start, at[cause["lane"]]),
            arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 0.7, "alpha": 0.7},
        )  # fmt: skip


def _finding(df: Any) -> tuple[str, str]:
    length = df["end_ms"] - df["begin_ms"]
    reads, asked = df["what"] == "read", df["lane_kind"] == "demand"
    whole = float(df["end_ms"].max() - df["begin_ms"].min())
    busy = {lane: float(length[df["lane"] == lane].sum()) for lane in _order(df)}
    title = f"{int(reads.sum())} reads in {whole:.3g} ms, {int((reads & ~asked).sum())} of them ahead of the request"
    return title, f"Busy ms by lane: {', '.join(f'{lane} {ms:.3g}' for lane, ms in busy.items())}."
