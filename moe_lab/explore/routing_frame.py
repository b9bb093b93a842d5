"""One frame of `lab.explore.routing`: a layer in a stretch of tokens, in three panels that share one figure.

Placed by hand: a page holds dozens of these, and matplotlib's constrained layout takes longer than drawing one.
"""

from typing import Any

import numpy as np

from moe_lab import analysis
from moe_lab.plots.figure import remember
from moe_lab.plots.style import OKABE_ITO, Axes, LabFigure, arm_styles, plt, style
from moe_lab.trace import RoutingTrace

_TITLE = {"fontsize": 9.5, "pad": 6}


def routing_frame(trace: RoutingTrace, layer: int, start: int, stop: int) -> LabFigure:
    """Picks token by token, load by expert, and union of successive tokens of one layer, tokens start..stop - 1."""
    part = analysis.tokens_of(trace, slice(start, stop))
    with style():
        figure: Any = plt.figure(FigureClass=LabFigure, figsize=(9.6, 5.4))
        said = (
            _raster(figure.add_axes((0.06, 0.60, 0.92, 0.33)), part, layer, start),
            _bars(figure.add_axes((0.06, 0.10, 0.48, 0.33)), part, layer),
            _union(figure.add_axes((0.62, 0.10, 0.36, 0.33)), part, layer),
        )
        figure.alt = f"{'; '.join(said)}."  # the explorer puts layer and tokens in front
    return figure


def _raster(axes: Axes, part: RoutingTrace, layer: int, first: int) -> str:
    """Experts by tokens, each pick shaded by its weight; how many stay from token to token is the finding."""
    hot = analysis.occupancy(part, layer)
    ids = np.minimum(part.layer(layer).astype(np.int64), part.num_experts)
    weight = np.zeros((part.tokens, part.num_experts + 1))
    np.put_along_axis(weight, ids, part.weights[:, part.layers.index(layer)].astype(np.float64), axis=1)
    shown = np.ma.array(weight[:, :-1], mask=~hot)
    box = (first - 0.5, first + part.tokens - 0.5, part.num_experts - 0.5, -0.5)
    axes.imshow(
        shown.T, aspect="auto", cmap="cividis_r", interpolation="none", vmin=0, vmax=max(shown.max(), 1e-9), extent=box
    )
    repeated = hot[1:] & hot[:-1]
    share = repeated.sum() / max(hot[1:].sum(), 1)
    title = f"{share:.0%} of picks repeat an expert of the token before"
    axes.set_title(f"Layer {layer}: {title}", **_TITLE)
    axes.set_xlabel(f"token (n = {part.tokens:,}); a mark is a pick, the darker the heavier", labelpad=2)
    axes.set_ylabel("expert")
    return title


def _bars(axes: Axes, part: RoutingTrace, layer: int) -> str:
    df: Any = analysis.load(part, layers=[layer])
    remember(axes, "load", df, {})
    ratio = df["load_ratio"].to_numpy()
    busiest = int(ratio.argmax())
    bars = axes.bar(df["expert"], ratio, color=OKABE_ITO[0], width=0.82)
    bars[busiest].set(facecolor=OKABE_ITO[4], edgecolor="white", hatch="///")
    axes.axhline(1.0, color="#333333", linewidth=1.0, linestyle="--")
    axes.set_xlim(-0.6, len(ratio) - 0.4)
    axes.grid(axis="y")
    title = f"expert {busiest} takes {ratio[busiest]:.1f}x the mean, {float((ratio == 0).mean()):.0%} idle"
    axes.set_title(title[0].upper() + title[1:], **_TITLE)
    axes.set_xlabel(f"expert (n = {int(df['assignments'].sum()):,} picks)", labelpad=2)
    axes.set_ylabel("load / mean")
    return title


def _union(axes: Axes, part: RoutingTrace, layer: int) -> str:
    df = analysis.union(part, layers=[layer])
    remember(axes, "union", df, {})
    drawn = {"distinct_mean": "measured", "independent": "independent", "most": "most"}
    for (column, label), look in zip(drawn.items(), arm_styles(drawn).values(), strict=True):
        axes.plot(df["tokens"], df[column], label=label, **{**look, "markersize": 3.5})
    axes.fill_between(df["tokens"], df["distinct_p20"], df["distinct_p80"], color=OKABE_ITO[0], alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(df["tokens"], [str(m) for m in df["tokens"]])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(True)
    axes.legend(loc="lower right", fontsize=8, handlelength=2.4)
    near = (df["tokens"] - 8).abs().to_numpy().argmin()
    m, mean = int(df["tokens"].to_numpy()[near]), float(df["distinct_mean"].to_numpy()[near])
    title = f"{m} successive tokens need {mean:.1f} experts"
    axes.set_title(title, **_TITLE)
    axes.set_xlabel("M successive tokens (band: p20 to p80)", labelpad=2)
    axes.set_ylabel("different experts")
    return title
