"""How skewed each layer's load is: fitted exponents against what an even router's chance counts would give."""

from typing import TYPE_CHECKING

from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd


@remembers
def skew(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Zipf exponent of each layer and of an even router. `df`: rows of `lab.analysis.skew`.

    Beside each layer: how much of the skew the Zipf and the exponential law explain.
    """
    need_columns(df, ("layer", "model", "exponent", "explained", "even_exponent", "assignments"), "skew")
    wide = df.pivot(index="layer", columns="model", values="explained")
    zipf = df[df["model"] == "zipf"].sort_values("layer")
    with style():
        axes = ax if ax is not None else new_axes(8.0, 1.6 + 0.3 * len(zipf))[0]
        places = range(len(zipf))
        looks = arm_styles(("measured", "even router, same number of picks"))
        for (label, look), column in zip(looks.items(), ("exponent", "even_exponent"), strict=True):
            axes.plot(zipf[column], places, label=label, **{**look, "linestyle": "none", "markersize": 7})
        for place, layer in enumerate(zipf["layer"]):
            note = ", ".join(f"{name} {wide.loc[layer, name]:.0%}" for name in wide.columns)
            axes.annotate(
                f"explained: {note}", (1.0, place), xycoords=("axes fraction", "data"), xytext=(5, 0),
                textcoords="offset points", va="center", fontsize=8, annotation_clip=False,
            )  # fmt: skip
        axes.set_yticks(places, [f"layer {layer}" for layer in zipf["layer"]])
        axes.set_ylim(len(zipf) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.grid(axis="x")
        n = int(zipf["assignments"].max())
        axes.set_xlabel(f"Zipf exponent s, load ∝ rank^(-s) (maximum likelihood, n = {n:,} picks a layer)")
        low, high = zipf["exponent"].min(), zipf["exponent"].max()  # NaN, a layer without picks, is passed over
        span = f"{high:.2f}" if len(zipf) == 1 else f"{low:.2f} to {high:.2f}"
        better = "exponential" if wide["exponential"].median() > wide["zipf"].median() else "Zipf"
        weak = "Weak" if high < 0.5 else "Moderate" if high < 1 else "Strong"
        title = f"{weak} skew: exponents {span}; the {better} law fits better"
        if zipf["exponent"].isna().all():
            title = "No layer picks an expert with weights, so none has a skew"
        exponents = ", ".join(f"layer {r.layer} {r.exponent:.2f}" for r in zipf.itertuples())
        describe(axes, title, f"Zipf exponents: {exponents}.", legend_columns=2)
    return axes
