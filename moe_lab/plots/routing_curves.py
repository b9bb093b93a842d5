"""Routing against what chance would give: reuse distances, unions of successive tokens, predictions one layer ahead.

Layers are drawn as one band, lowest to highest layer, around their median: a line a layer would be unreadable for a
model of sixty. Controls have their own colour, dash and label.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style, ticker

if TYPE_CHECKING:
    import pandas as pd

_MOST_LINES = 8  # pairs of layers with a line of their own


@remembers
def reuse(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Share of picks whose expert was picked at most d tokens ago. `df`: rows of `lab.analysis.reuse`."""
    need_columns(df, ("layer", "order", "distance_to", "picks", "share_within"), "reuse")
    finite = df[np.isfinite(df["distance_to"])]
    orders = list(dict.fromkeys(df["order"]))
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.8)[0]
        for order, look in arm_styles(orders).items():
            curves = finite[finite["order"] == order].pivot(index="distance_to", columns="layer", values="share_within")
            _band(axes, curves, look, {"text": "in text order"}.get(order, order))
        _log_axis(axes, finite["distance_to"])
        settled: Any = finite.groupby("distance_to")["share_within"].min()
        axes.set_xlim(right=1.1 * settled.index[min(int((settled < 0.995).sum()), len(settled) - 1)])
        layers = df["layer"].nunique()
        n = int(df.groupby(["layer", "order"])["picks"].sum().max())
        axes.set_xlabel(f"tokens since the layer last picked the expert (n = {n:,} picks a layer, {_layers(layers)})")
        axes.set_ylabel("share of picks")
        axes.set_ylim(0, 1.02)
        at = finite[finite["distance_to"] == 1].groupby("order")["share_within"].median()
        others = [order for order in orders if order != "text"]
        first = at.get("text", at.iloc[0])
        title = f"{first:.0%} of picks repeat an expert of the token before"
        if others and "text" in orders:
            title += f"; {at[others[0]]:.0%} with the tokens {others[0]}"
        detail = "; ".join(f"{order}: {share:.1%} within 1 token" for order, share in at.items())
        describe(axes, title, f"Cumulative reuse distance, median layer. {detail}.", legend_columns=len(orders))
    return axes


@remembers
def union(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Different experts among M successive tokens, against K M and independence. `df`: rows of `lab.analysis.union`.

    One layer: its 20th to 80th percentile of blocks as a band. Several: lowest to highest layer's mean.
    """
    columns = ("layer", "tokens", "distinct_mean", "distinct_p20", "distinct_p80", "most", "independent")
    need_columns(df, (*columns, "independent_in_domain", "blocks"), "union")
    drawn = {"distinct_mean": "measured", "independent_in_domain": "independent by domain"}
    drawn |= {"independent": "independent", "most": "most possible"}
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.8)[0]
        for (column, label), look in zip(drawn.items(), arm_styles(drawn).values(), strict=True):
            if df[column].notna().any():
                _band(axes, df.pivot(index="tokens", columns="layer", values=column), look, label)
        if df["layer"].nunique() == 1:
            one = df.sort_values("tokens")
            axes.fill_between(one["tokens"], one["distinct_p20"], one["distinct_p80"], alpha=0.2, linewidth=0)
        _log_axis(axes, df["tokens"])
        axes.set_ylim(bottom=0)
        spread = "band: p20 to p80 of blocks" if df["layer"].nunique() == 1 else _layers(df["layer"].nunique())
        few, many = df["blocks"].min(), df["blocks"].max()
        axes.set_xlabel(f"M successive tokens (n = {few:,} to {many:,} blocks; {spread})")
        axes.set_ylabel("different experts")
        at = df.iloc[(df["tokens"] - 8).abs().argsort()]["tokens"].iloc[0]
        here = df[df["tokens"] == at]
        found, chance, most = (here[c].median() for c in ("distinct_mean", "independent", "most"))
        title = f"{at} successive tokens need {found:.1f} experts: {most:.0f} at most, {chance:.1f} if independent"
        rows = [f"M={m}: {v:.1f}" for m, v in df.groupby("tokens")["distinct_mean"].median().items()]
        describe(axes, title, f"Mean union, median layer: {', '.join(rows)}.", legend_columns=4)
    return axes


@remembers
def next_layer(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Recall of the next layer's picks over k' predicted experts. `df`: rows of `lab.analysis.next_layer`.

    "next router" has a line a pair of layers up to eight pairs (a band beyond), each control a band over the pairs.
    """
    need_columns(df, ("layer", "next_layer", "predictor", "reads", "recall", "tokens"), "next_layer")
    named = df.assign(pair=[f"{a}→{b}" for a, b in zip(df["layer"], df["next_layer"], strict=True)])
    curves: Any = {
        name: rows.pivot(index="reads", columns="pair", values="recall")
        for name, rows in named.groupby("predictor", sort=False)
    }
    with style():
        axes = ax if ax is not None else new_axes(8.0, 4.0)[0]
        for (name, table), look in zip(curves.items(), arm_styles(curves).values(), strict=True):
            if name == "next router" and table.shape[1] <= _MOST_LINES:
                _lines(axes, table, look, name)
            else:
                _band(axes, table, look, name)
        axes.set_xticks(sorted(df["reads"].unique()))
        axes.set_ylim(0, 1.02)
        axes.margins(x=0.03)
        axes.grid(axis="y")
        axes.set_xlabel(f"k', experts predicted a token (n = {int(df['tokens'].max()):,} tokens; bands: layer pairs)")
        axes.set_ylabel("recall of true picks")
        title, detail = _prediction_finding(curves)
        describe(axes, title, detail, legend_columns=len(curves))
    return axes


def _prediction_finding(curves: "dict[str, pd.DataFrame]") -> tuple[str, str]:
    first = next(iter(curves))
    own = curves.get("next router", curves[first])
    k = own.index.min()
    at = own.loc[k].sort_values()
    title = f"At k' = {k} the next router finds {at.iloc[-1]:.0%} of {at.index[-1]}'s picks"
    title += f", {at.iloc[0]:.0%} of {at.index[0]}'s" if len(at) > 1 else ""
    detail = "; ".join(f"{name}: median recall {table.loc[k].median():.1%} at k'={k}" for name, table in curves.items())
    return title, f"{detail}. By pair: {', '.join(f'{pair} {v:.1%}' for pair, v in at.items())}."


def _lines(axes: Axes, table: "pd.DataFrame", look: Any, label: str) -> None:
    """A line a column, named at its right end; names of lines that meet share a place."""
    ends: dict[float, list[str]] = {}
    for number, column in enumerate(table):
        values = table[column]
        axes.plot(values.index, values, **{**look, "markersize": 4.5}, label=label if not number else None)
        near = next((y for y in ends if abs(y - values.iloc[-1]) < 0.05), float(values.iloc[-1]))
        ends.setdefault(near, []).append(str(column))
    for y, names in ends.items():
        axes.annotate(
            ", ".join(names), (table.index[-1], y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8,
            annotation_clip=False,
        )  # fmt: skip


def _band(axes: Axes, table: "pd.DataFrame", look: Any, label: str) -> None:
    """Median over the columns as a line, lowest to highest as a band."""
    table = table.sort_index()
    axes.plot(table.index, table.median(axis=1), **{**look, "markersize": 4.5}, label=label)
    if table.shape[1] > 1:
        axes.fill_between(
            table.index, table.min(axis=1), table.max(axis=1), color=look["color"], alpha=0.15, linewidth=0
        )


def _log_axis(axes: Axes, values: "pd.Series") -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.set_xlim(values.min() * 0.9, values.max() * 1.1)
    axes.grid(True)


def _layers(count: int) -> str:
    return f"band: {count} layers" if count > 1 else "one layer"
