"""How evenly the router spreads its tokens: load of each expert over the mean of its layer.

The statistic is taken layer by layer and never averaged over layers first: a mean over layers hides a layer whose
experts starve.
"""

from typing import TYPE_CHECKING

import numpy as np

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import OKABE_ITO, Axes, describe, ink_on, mpl, need_columns, new_axes, style
from moe_lab.trace import RoutingTrace

if TYPE_CHECKING:
    import pandas as pd

_MOST_NUMBERED = 40  # experts a row; a number in a narrower cell cannot be read


@remembers
def load(df: "pd.DataFrame | RoutingTrace", *, ax: Axes | None = None) -> Axes:
    """Expert load over its layer's mean. `df`: columns layer, expert, assignments, or a RoutingTrace.

    Several layers: L x E heat map, busiest expert left, its id in the cell. One layer: bars by expert id.
    """
    if isinstance(df, RoutingTrace):
        df = df.load_table()
    need_columns(df, ("layer", "expert", "assignments"), "load")
    wide = df.pivot_table(index="layer", columns="expert", values="assignments", aggfunc="sum", fill_value=0)
    counts = wide.to_numpy(dtype=float)
    means = counts.mean(axis=1, keepdims=True)
    ratio = np.divide(counts, means, out=np.zeros_like(counts), where=means > 0)
    experts = wide.columns.to_numpy()
    with style():
        rows, columns = ratio.shape
        axes = ax if ax is not None else new_axes(8.4, 3.2 if rows == 1 else 1.5 + 0.34 * rows)[0]
        if rows == 1:
            _bars(axes, ratio[0], experts)
        else:
            _heat_map(axes, ratio, experts, list(wide.index))
        worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
        idle = float((counts == 0).mean())
        title = f"Layer {wide.index[worst[0]]}: expert {experts[worst[1]]} takes {ratio[worst]:.2f}x the mean load" + (
            f"; {idle:.0%} of experts idle" if idle else "; no expert idle"
        )
        n = f"n = {int(counts.sum(axis=1).max()):,} assignments a layer"
        axes.set_xlabel(f"expert ({n})" if rows == 1 else f"experts, busiest left; cell: expert id ({n})")
        peaks = ", ".join(f"layer {layer} {row.max():.2f}" for layer, row in zip(wide.index, ratio, strict=True))
        describe(axes, title, f"Load of {columns} experts over the mean of their layer. Busiest expert: {peaks}.")
    return axes


def _bars(axes: Axes, ratio: np.ndarray, experts: np.ndarray) -> None:
    busiest = ratio == ratio.max()
    bars = axes.bar(range(len(ratio)), ratio, color=OKABE_ITO[0], width=0.82)
    for bar, top in zip(bars, busiest, strict=True):
        if top:
            bar.set(facecolor=OKABE_ITO[4], edgecolor="white", hatch="///")
    axes.axhline(1.0, color="#333333", linewidth=1.0, linestyle="--")
    axes.annotate(
        "layer mean", (1.0, 1.0), xycoords=("axes fraction", "data"), xytext=(4, 0), textcoords="offset points",
        va="center", fontsize=8, annotation_clip=False,
    )  # fmt: skip
    step = max(1, len(ratio) // 32)
    axes.set_xticks(range(0, len(ratio), step), [str(e) for e in experts[::step]], fontsize=8)
    axes.set_xlim(-0.6, len(ratio) - 0.4)
    axes.set_ylabel("load / layer mean")
    axes.grid(axis="y")


def _heat_map(axes: Axes, ratio: np.ndarray, experts: np.ndarray, layers: list[int]) -> None:
    order = np.argsort(-ratio, axis=1, kind="stable")
    ranked = np.take_along_axis(ratio, order, axis=1)
    image = axes.imshow(
        ranked, aspect="auto", cmap="cividis", vmin=0, vmax=max(2.0, ranked.max()), interpolation="none"
    )
    axes.set_yticks(range(len(layers)), [f"layer {layer}" for layer in layers])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if ranked.shape[1] <= _MOST_NUMBERED:
        shades = np.asarray(mpl.colormaps["cividis"](image.norm(ranked)))
        for (row, column), expert in np.ndenumerate(experts[order]):
            ink = ink_on(shades[row, column][:3])
            axes.text(column, row, str(expert), ha="center", va="center", fontsize=7, color=ink)
    for row, values in enumerate(ranked):
        note = f"max {values[0]:.2f}, min {values[-1]:.2f}"
        axes.annotate(
            note, (1.0, row), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
            va="center", fontsize=8, annotation_clip=False,
        )  # fmt: skip
    axes.figure.colorbar(image, ax=axes, label="load / layer mean", pad=0.14, fraction=0.04)
