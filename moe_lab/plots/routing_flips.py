"""Which tokens change experts when the router's precision changes: flip rate by router margin."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd


@remembers
def flips(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Share of flipped tokens in each bin of the margin. `df`: rows of `lab.analysis.flip_rate`.

    A point stands in the geometric middle of its bin (the first bin, from 0: half its end); over each bin its tokens.
    """
    need_columns(df, ("pair", "margin_from", "margin_to", "tokens", "flipped", "flip_rate"), "flips")
    pairs = list(dict.fromkeys(df["pair"]))
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.8)[0]
        for pair, look in arm_styles(pairs).items():
            rows = df[df["pair"] == pair]
            axes.plot(_middles(rows), rows["flip_rate"], label=pair, **{**look, "markersize": 5})
        bins = df.drop_duplicates("margin_from").sort_values("margin_from")
        for x, n in zip(_middles(bins), bins["tokens"], strict=True):
            axes.annotate(f"{n:,}", (x, 1.03), xycoords=("data", "axes fraction"), ha="center", fontsize=7.5)
        axes.annotate(
            "tokens", (0, 1.03), xycoords="axes fraction", xytext=(-6, 0), textcoords="offset points", ha="right",
            fontsize=7.5, annotation_clip=False,
        )  # fmt: skip
        axes.set_xscale("log")
        axes.set_ylim(0, 1.02)
        axes.grid(True)
        total = int(df[df["pair"] == pairs[0]]["tokens"].sum())
        axes.set_xlabel(f"margin: K-th minus (K+1)-th choice score (n = {total:,} tokens of all layers, each)")
        axes.set_ylabel("share of tokens flipped")
        title, detail = _finding(df, pairs)
        describe(axes, title, detail, legend_columns=min(len(pairs), 5))
        legend: Any = axes.get_legend()
        legend.set_bbox_to_anchor((0, 1.06))
        axes.set_title(title, pad=42)
    return axes


def _middles(rows: "pd.DataFrame") -> np.ndarray:
    low, high = rows["margin_from"].to_numpy(), rows["margin_to"].to_numpy()
    return np.where(low > 0, np.sqrt(low * high), high / 2)


def _finding(df: "pd.DataFrame", pairs: list[str]) -> tuple[str, str]:
    totals: Any = df.groupby("pair", sort=False)[["tokens", "flipped"]].sum()
    rates = totals["flipped"] / totals["tokens"]
    flipped = df[df["flipped"] > 0]
    share = f"{rates.max():.1%}" if len(pairs) == 1 else f"{rates.min():.1%} to {rates.max():.1%}"
    title = f"{share} of tokens change experts"
    title += f", none with a margin of {flipped['margin_to'].max():.0e} or more" if len(flipped) else ""
    return title, "; ".join(f"{pair}: {rate:.2%} flipped" for pair, rate in rates.items()) + "."
