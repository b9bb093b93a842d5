"""What a further row costs, and what of a layer's work no batch can share."""

import math
from typing import TYPE_CHECKING, Any

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd


@remembers
def cost(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """c(M) over M, a line an (arm, format), against 1 / M (rows after the first free) and 1 (no gain).

    `df`: rows of `moe_lab.bench.cost.cost_curve`; c_low and c_high are drawn as a band.
    """
    need_columns(df, ("arm", "format", "rows", "c", "c_low", "c_high", "backend", "device", "n"), "cost")
    names = df["arm"] + " " + df["format"]
    with style():
        axes = ax if ax is not None else new_axes(6.4, 3.9)[0]
        for name, look in arm_styles(names).items():
            rows = df[names == name].sort_values("rows")
            axes.plot(rows["rows"], rows["c"], label=name, **look)
            axes.fill_between(rows["rows"], rows["c_low"], rows["c_high"], color=look["color"], alpha=0.15, linewidth=0)
        sizes = sorted(set(df["rows"]))
        axes.plot(
            sizes, [1 / m for m in sizes], color="#777777", linestyle=":", linewidth=1.2, label="1 / M: free rows"
        )
        axes.axhline(1, color="#777777", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(sizes, [str(m) for m in sizes])
        ticks = [2.0**-k for k in range(0, 1 + max(4, math.ceil(-math.log2(df["c"].min()))))]
        ticks = ticks[:: -(-len(ticks) // 6)]
        axes.set_yticks(ticks, [f"{t:.3g}" for t in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"rows together, M (medians, n = {int(df['n'].min())} or more; bands: 20th to 80th percentile)")
        axes.set_ylabel("c(M) = cost of M rows / (M x cost of one)")
        best: Any = df.sort_values(["rows", "c"]).groupby("rows").first().iloc[-1]
        most = max(sizes)
        title = f"{most} rows together cost {best['c']:.0%} of {most} rows alone in {best['arm']} {best['format']}"
        where = ", ".join(dict.fromkeys(df["device"] + ", backend " + df["backend"]))
        at = df[df["rows"] == most]
        detail = "; ".join(f"{r.arm} {r.format} c({most}) = {r.c:.3g}" for r in at.itertuples())
        axes.legend(fontsize=8.5, loc="lower left", handlelength=3.2)
        describe(axes, f"{title} ({where})", f"{detail}.")
    return axes


@remembers
def parts(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """A bar a T: shares of a layer call, steps that read no weights hatched. `df`: rows of `measure_parts`."""
    need_columns(df, ("tokens", "part", "reads", "share", "arm", "n", "backend", "device"), "parts")
    steps = list(dict.fromkeys(df.sort_values(["reads", "share"], ascending=[False, False])["part"]))
    with style():
        axes = ax if ax is not None else new_axes(7.4, 0.62 * df["tokens"].nunique() + 1.9)[0]
        sizes = sorted(set(df["tokens"]))
        left = dict.fromkeys(sizes, 0.0)
        for step, look in arm_styles(steps).items():
            of = df[df["part"] == step].set_index("tokens")
            plain = (of["reads"] == "weights").all()
            values = [float(of["share"].get(t, 0.0)) for t in sizes]
            axes.barh(
                range(len(sizes)), values, left=[left[t] for t in sizes], label=step, color=look["color"],
                hatch=None if plain else "///", edgecolor="white", linewidth=0.6,
            )  # fmt: skip
            left = {t: left[t] + v for t, v in zip(sizes, values, strict=True)}
        axes.set_yticks(range(len(sizes)), [f"T = {t}" for t in sizes])
        axes.invert_yaxis()
        axes.set_xlim(0, max(1.0, *left.values()))
        axes.set_xlabel(f"share of a layer call (medians, n = {int(df['n'].min())}); hatched: reads no weights")
        axes.legend(ncols=4, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.17 - 0.2 / len(sizes)))
        free = df[df["reads"] != "weights"].groupby("tokens")["share"].sum()
        arm = f"{', '.join(dict.fromkeys(df['arm']))}, {', '.join(dict.fromkeys(df['backend']))}"
        low, high = f"{free.min():.0%}", f"{free.max():.0%}"
        title = f"{low if low == high else f'{low} to {high}'} of a layer call reads no weights to share ({arm})"
        describe(axes, title, "; ".join(f"{share:.1%} at T = {t}" for t, share in free.items()) + ".")
    return axes
