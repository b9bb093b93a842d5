"""Which experts are picked together: a heat map of one layer's corrected lift."""

from typing import TYPE_CHECKING

import numpy as np

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd

_LIMIT = 3.0  # log2: a lift of 8 and of 1/8 end the scale
_MOST_LABELS = 40


@remembers
def coactivation(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """log2 lift of every pair. `df`: rows of `lab.analysis.coactivation` of one layer.

    Experts are ordered so that those picked together lie together (second moment's first axis); pairs never expected
    stay blank, pairs never seen are the darkest.
    """
    need_columns(df, ("layer", "expert_a", "expert_b", "together", "expected", "lift", "tokens"), "coactivation")
    layers = df["layer"].unique()
    if len(layers) != 1:
        raise LabError(
            f"lab.plot.coactivation draws one layer at a time, got layers {', '.join(map(str, layers))}: "
            "pass df[df.layer == n]."
        )
    lift = _square(df)
    order = _seriation(lift)
    with style():
        axes = ax if ax is not None else new_axes(6.6, 5.4)[0]
        axes.set_facecolor("#DDDDDD")
        drawn = np.clip(lift[np.ix_(order, order)], -_LIMIT, _LIMIT)
        image = axes.imshow(drawn, cmap="cividis", vmin=-_LIMIT, vmax=_LIMIT, interpolation="none")
        step = max(1, -(-len(order) // _MOST_LABELS))
        places = range(0, len(order), step)
        names = [str(order[i]) for i in places]
        axes.set_xticks(places, names, fontsize=6.5, rotation=90)
        axes.set_yticks(places, names, fontsize=6.5)
        axes.tick_params(length=0, pad=1)
        axes.spines[:].set_visible(False)
        bar = axes.figure.colorbar(image, ax=axes, fraction=0.046, label="picked together / expected")
        bar.set_ticks(range(-3, 4), labels=["≤1/8", "1/4", "1/2", "1", "2", "4", "≥8"])
        axes.set_xlabel(f"expert (n = {int(df['tokens'].iloc[0]):,} tokens)")
        axes.set_ylabel("expert")
        title, detail = _finding(df, layers[0])
        describe(axes, title, detail)
    return axes


def _square(df: "pd.DataFrame") -> np.ndarray:
    """log2 lift [E, E]; NaN on the diagonal and where nothing was expected, far below the scale where none was seen."""
    experts = int(df["expert_b"].max()) + 1
    lift = np.full((experts, experts), np.nan)
    with np.errstate(divide="ignore"):
        values = np.maximum(np.log2(df["lift"].to_numpy()), -2 * _LIMIT)
    a, b = df["expert_a"].to_numpy(), df["expert_b"].to_numpy()
    lift[a, b] = lift[b, a] = values
    return lift


def _seriation(lift: np.ndarray) -> np.ndarray:
    """Order of the experts along the leading eigenvector of the clipped lift."""
    near = np.clip(np.nan_to_num(lift), -_LIMIT, _LIMIT)
    vector = np.linalg.eigh(near).eigenvectors[:, -1]
    return np.argsort(vector * (1 if vector[np.abs(vector).argmax()] > 0 else -1), kind="stable")


def _finding(df: "pd.DataFrame", layer: "int | np.integer") -> tuple[str, str]:
    known = df[df["lift"].notna()]
    if not len(known):
        return f"Layer {layer}: no two experts are picked together", ""
    top, low = known.loc[known["lift"].idxmax()], known.loc[known["lift"].idxmin()]
    title = (
        f"Layer {layer}: experts {top.expert_a:.0f} and {top.expert_b:.0f} meet {top.lift:.1f}x as often as expected"
    )
    middle = float(((known["lift"] > 0.5) & (known["lift"] < 2)).mean())
    detail = (
        f"{top.together:,.0f} tokens pick both, {top.expected:,.0f} expected. Rarest: {low.expert_a:.0f} and "
        f"{low.expert_b:.0f} at {low.lift:.2f}. {middle:.0%} of {len(known)} pairs lie within a factor of two."
    )
    return title, detail
