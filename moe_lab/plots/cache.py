"""What caches keep: miss-ratio curves, stack distances, and policies between LRU and the optimum."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import OKABE_ITO, Axes, arm_styles, describe, need_columns, new_axes, style, ticker

if TYPE_CHECKING:
    import pandas as pd

CURVE = ("order", "policy", "capacity_slots", "capacity_share", "requests", "misses", "miss_ratio")
DISTANCE = ("order", "layer", "distance_from", "distance_to", "requests", "share", "share_within")
STUDY = ("order", "policy", "capacity_slots", "capacity_share", "requests", "hits", "hit_rate", "gap_closed")
_TEXT, _LRU, _BELADY = "text", "lru", "belady"


@remembers
def miss_ratio(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Share of requests that read their expert, by the share of experts that fit, a line an (order, policy).

    `df`: rows of `lab.caching.miss_ratio`. Grey: a cache that hits by its size alone (experts drawn evenly).
    """
    need_columns(df, CURVE, "miss_ratio")
    several = df["order"].nunique() > 1
    named = df.assign(line=[f"{p}, {o}" if several else p for p, o in zip(df["policy"], df["order"], strict=True)])
    with style():
        axes = ax if ax is not None else new_axes(8.0, 4.0)[0]
        for line, look in arm_styles(named["line"]).items():
            rows = named[named["line"] == line].sort_values("capacity_share")
            mark = look if len(rows) <= 16 else {**look, "marker": ""}
            axes.plot(100 * rows["capacity_share"], rows["miss_ratio"], label=line, **{**mark, "markersize": 4.5})
        axes.plot([0, 100], [1, 0], color="#8C8C8C", linewidth=0.9, label="evenly drawn experts")
        axes.set_xlim(0, 102)
        axes.set_ylim(0, 1.02)
        axes.grid(True)
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(decimals=0))
        axes.set_xlabel(f"experts that fit the cache (n = {int(df['requests'].max()):,} requests a line)")
        axes.set_ylabel("miss ratio")
        axes.legend(fontsize=8.5, loc="upper right", handlelength=3.2)  # curves fall: that corner is empty
        describe(axes, *_curve_finding(named))
    return axes


@remembers
def stack_distance(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Share of requests that an LRU of so many slots a layer hits. `df`: rows of `lab.caching.stack_distance`.

    The line of an order is the median layer, its band runs from the lowest to the highest one.
    """
    need_columns(df, DISTANCE, "stack_distance")
    finite = df[np.isfinite(df["distance_to"])]
    orders = list(dict.fromkeys(df["order"]))
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.8)[0]
        medians = {}
        for order, look in arm_styles(orders).items():
            table = finite[finite["order"] == order].pivot(index="distance_to", columns="layer", values="share_within")
            slots, middle = table.index + 1, table.median(axis=1)
            medians[order] = dict(zip(slots.astype(int), middle, strict=True))
            axes.plot(slots, middle, label=order, **{**look, "markersize": 4.5})
            axes.fill_between(slots, table.min(axis=1), table.max(axis=1), color=look["color"], alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.set_ylim(0, 1.02)
        axes.grid(True)
        layers, requests = df["layer"].nunique(), int(df.groupby(["order", "layer"])["requests"].sum().max())
        spread = f"band: {layers} layers" if layers > 1 else "one layer"
        axes.set_xlabel(f"slots of an LRU = stack distance + 1 (n = {requests:,} requests a layer; {spread})")
        axes.set_ylabel("share of requests that hit")
        first = orders[0]
        half = next((slots for slots, share in medians[first].items() if share >= 0.5), None)
        title = f"{half} slots hit half of the requests ({first})" if half else f"No LRU hits half of them ({first})"
        detail = "; ".join(
            f"{order}: {', '.join(f'{s} slots {share:.0%}' for s, share in points.items())}"
            for order, points in medians.items()
        )
        describe(axes, title, f"Hit share by LRU slots, median layer. {detail}.", legend_columns=len(orders))
    return axes


@remembers
def policies(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Hit rate of each policy at one capacity, worst first, with the controls below. `df`: rows of `lab.caching.study`.

    The lines are LRU and the optimum in text order; what a bar reaches of the way between is written behind it. With
    several capacities in the frame the smallest is drawn.
    """
    need_columns(df, STUDY, "policies")
    slots = int(df["capacity_slots"].min())
    here: Any = df[df["capacity_slots"] == slots]
    text = here[here["order"] == _TEXT].sort_values("hit_rate")
    rest = here[here["order"] != _TEXT].sort_values("hit_rate")
    with style():
        axes = ax if ax is not None else new_axes(8.0, 1.4 + 0.3 * len(here))[0]
        rows = [*text.to_dict("records"), *rest.to_dict("records")]
        for place, row in enumerate(rows):
            control = row["order"] != _TEXT
            axes.barh(
                place, row["hit_rate"], height=0.72, color="#8C8C8C" if control else _colour(row["policy"]),
                hatch="xx" if control else "", edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            closed = row["gap_closed"]
            note = f"{row['hit_rate']:.1%}"
            if not control and row["policy"] not in (_LRU, _BELADY) and closed == closed:
                note += f"  ({closed:+.0%} of the gap)"
            axes.annotate(
                note, (row["hit_rate"], place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            )  # fmt: skip
        for policy in (_LRU, _BELADY):
            for rate in text.loc[text["policy"] == policy, "hit_rate"]:
                axes.axvline(rate, color="black", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(rows)), [_row_name(row) for row in rows])
        axes.invert_yaxis()
        axes.set_xlim(0, min(1.0, max(row["hit_rate"] for row in rows) + 0.22))
        axes.xaxis.set_major_formatter(ticker.PercentFormatter(1, decimals=0))
        share = float(here["capacity_share"].iloc[0])
        axes.set_xlabel(f"hit rate at {slots} slots, {share:.0%} of the experts (n = {int(here['requests'].max()):,})")
        describe(axes, *_study_finding(text, rest))
    return axes


def _colour(policy: str) -> str:
    return {_LRU: OKABE_ITO[1], _BELADY: OKABE_ITO[2]}.get(policy, OKABE_ITO[0])


def _row_name(row: dict[str, Any]) -> str:
    return row["policy"] if row["order"] == _TEXT else f"{row['policy']}, {row['order']}"


def _curve_finding(named: Any) -> tuple[str, str]:
    """What a quarter of the experts gives."""
    at = named.iloc[(named["capacity_share"] - 0.25).abs().argsort()]["capacity_share"].iloc[0]
    near = named.assign(off=(named["capacity_share"] - at).abs()).sort_values("off", kind="stable")
    here = near.groupby("line", sort=False).first()["miss_ratio"].sort_values()
    worst = f", {here.index[-1]} {here.iloc[-1]:.0%}" if len(here) > 1 else ""
    title = f"With {at:.0%} of the experts {here.index[0]} misses {here.iloc[0]:.0%}{worst}"
    return title, f"Miss ratio there: {'; '.join(f'{line} {value:.1%}' for line, value in here.items())}."


def _study_finding(text: Any, rest: Any) -> tuple[str, str]:
    ours = text[~text["policy"].isin((_LRU, _BELADY))]
    rates = "; ".join(f"{_row_name(row)} {row['hit_rate']:.1%}" for row in [*_records(text), *_records(rest)])
    detail = f"Hit rates: {rates}."
    closing = ours.dropna(subset="gap_closed")
    if not len(closing):
        return f"Hit rates from {text['hit_rate'].min():.0%} to {text['hit_rate'].max():.0%}", detail
    best = closing.loc[closing["gap_closed"].idxmax()]
    return f"{best['policy']} closes {best['gap_closed']:.0%} of the gap between LRU and the optimum", detail


def _records(rows: Any) -> list[dict[str, Any]]:
    return rows.to_dict("records")
