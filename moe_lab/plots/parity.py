"""How far two arms' outputs lie apart, value by value, as a histogram (counted by `numerics.distance.error_bins`)."""

from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError
from moe_lab.numerics.distance import COLUMNS
from moe_lab.plots.figure import remembers
from moe_lab.plots.style import Axes, arm_styles, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd

_AXIS = {"relative": "|a − b| / rms(b)", "ulp": "distance in ULP of the output's dtype"}


@remembers
def parity(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Error histogram of one or more pairs of arms. `df`: rows of `error_bins`, one kind; counts on a log axis.

    One pair: bars. Several pairs: outlines, each with its own colour and dash. The share of equal values stands in the
    legend, since 0 has no place on a logarithmic axis.
    """
    need_columns(df, COLUMNS, "parity")
    kinds = list(dict.fromkeys(df["kind"]))
    if len(kinds) != 1 or kinds[0] not in _AXIS:
        raise LabError(
            f"lab.plot.parity draws one kind at a time ({', '.join(_AXIS)}), got {', '.join(map(str, kinds))}."
        )
    groups: Any = df.groupby(["arm_a", "arm_b"], sort=False)
    pairs = {f"{a} vs {b}": rows for (a, b), rows in groups}
    with style():
        axes = ax if ax is not None else new_axes(8.0, 3.4)[0]
        for (pair, rows), look in zip(pairs.items(), arm_styles(pairs).values(), strict=True):
            _outline(axes, pair, rows, look, filled=len(pairs) == 1)
        drawn = df[df["bin_right"] > 0]
        if len(drawn):
            axes.set_xscale("log", base=2 if kinds[0] == "ulp" else 10)
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.7)
        else:
            axes.text(0.5, 0.5, "every value is equal", ha="center", va="center", transform=axes.transAxes)
        values = groups["count"].sum()
        axes.set_xlabel(f"{_AXIS[kinds[0]]} (n = {int(values.max()):,} values)")
        axes.set_ylabel("values")
        axes.grid(True)
        describe(axes, *_finding(pairs, kinds[0]), legend_columns=min(len(pairs), 3))
    return axes


def _outline(axes: Axes, pair: str, rows: "pd.DataFrame", look: Any, *, filled: bool) -> None:
    equal = rows.loc[rows["bin_right"] == 0, "count"].sum() / rows["count"].sum()
    bins = rows[rows["bin_right"] > 0].sort_values("bin_left")
    label = f"{pair} ({equal:.1%} equal)"
    if not len(bins):
        axes.plot([], [], color=look["color"], linestyle=look["linestyle"], label=label)
        return
    # Closed integer bins [4, 7] are drawn to the start of the next, so that neighbours touch.
    right = bins["bin_right"] + (1.0 if (bins["kind"] == "ulp").all() else 0.0)
    edges = [*bins["bin_left"], right.iloc[-1]]
    fill = {"fill": True, "hatch": "//", "edgecolor": "white", "linewidth": 0.4} if filled else {"fill": False}
    colours = {"facecolor": look["color"]} if filled else {"edgecolor": look["color"], "linestyle": look["linestyle"]}
    axes.stairs(bins["count"], edges, label=label, **{"linewidth": 1.8, **fill, **colours})


def _finding(pairs: "dict[str, pd.DataFrame]", kind: str) -> tuple[str, str]:
    worst, name = max((float(rows.loc[rows["count"] > 0, "bin_right"].max()), pair) for pair, rows in pairs.items())
    if worst == 0:
        return f"{', '.join(pairs)}: bit-equal in every value", ""
    if kind == "ulp" and worst >= 2**30:  # sums that nearly cancel end on either side of zero: their count says nothing
        middle = max(_median(rows) for rows in pairs.values())
        title = f"{', '.join(pairs)}: half of the values lie within {middle:,.0f} ULP"
        return title, f"Histogram of distances; the last bins are values of opposite sign. {_shares(pairs)}."
    size = f"{worst:.0f} ULP" if kind == "ulp" else f"{_plain(worst)} of the rms"
    return f"{name}: no value is more than {size} apart", f"Histogram of distances. {_shares(pairs)}."


def _plain(value: float) -> str:
    """Two digits: 2.8, 0.12, 3.4e-05."""
    return f"{value:.2g}" if value >= 0.001 else f"{value:.1e}"


def _shares(pairs: "dict[str, pd.DataFrame]") -> str:
    shares = [float(r.loc[r["bin_right"] == 0, "count"].sum() / r["count"].sum()) for r in pairs.values()]
    return "; ".join(f"{pair}: {share:.1%} equal" for pair, share in zip(pairs, shares, strict=True))


def _median(rows: "pd.DataFrame") -> float:
    """The right end of the bin in which the middle value lies."""
    ordered = rows.sort_values("bin_right")
    return float(ordered.loc[ordered["count"].cumsum() >= ordered["count"].sum() / 2, "bin_right"].iloc[0])
