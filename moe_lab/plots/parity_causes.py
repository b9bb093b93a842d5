"""Why two arms differ: the share of each numeric choice, and where along a row of weights the error arises."""

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_lab.errors import LabError
from moe_lab.plots.figure import remembers
from moe_lab.plots.style import OKABE_ITO, Axes, describe, need_columns, new_axes, style

if TYPE_CHECKING:
    import pandas as pd

_NEEDS = ("choice", "name", "differs", "first", "last", "share", "share_se")
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "++", "oo", "--", "||", "**")
_LEAST_LABEL = 0.08  # share of a bar below which its letter has no room
_MAP_NEEDS = ("part", "expert", "block", "first", "last", "nmse_a", "nmse_b", "nmse_ab")
_SIDES = {"nmse_a": "side a against float64", "nmse_b": "side b against float64", "nmse_ab": "side a against side b"}


@remembers
def attribution(df: "pd.DataFrame", *, ax: Axes | None = None) -> Axes:
    """Shares of the choices in the difference of two sides. `df`: rows of `ParityReport.attribution`.

    One attribution: a bar a choice that differs, its Shapley share in NMSE with its standard error; marks: switched
    first and switched last. With a column `case`: a stacked bar a case, its shares as parts of the whole.
    """
    need_columns(df, _NEEDS, "attribution")
    apart = df[df["differs"]]
    with style():
        cases = list(dict.fromkeys(df["case"])) if "case" in df else []
        count = len(cases) if cases else max(1, len(apart))
        axes = ax if ax is not None else new_axes(8.0, 1.6 + 0.36 * count)[0]
        said = _stacks(axes, apart, cases) if cases else _bars(axes, apart)
        axes.grid(axis="x")
        axes.invert_yaxis()
        describe(axes, *said, legend_columns=3)
        lines = -(-len(axes.get_legend_handles_labels()[0]) // 3)
        axes.set_title(said[0], pad=12 + 14 * max(1, lines))
    return axes


def _total(rows: "pd.DataFrame") -> float:
    """The whole difference; NaN where a share is."""
    return float(rows["share"].sum(skipna=False))


def _bars(axes: Axes, df: "pd.DataFrame") -> tuple[str, str]:
    total = _total(df)
    places = np.arange(len(df))
    axes.barh(places, df["share"], xerr=df["share_se"], color=OKABE_ITO[0], height=0.6, label="Shapley share")
    axes.plot(df["first"], places, ">", color=OKABE_ITO[4], label="switched first", linestyle="none")
    axes.plot(df["last"], places, "<", color=OKABE_ITO[2], label="switched last", linestyle="none")
    axes.set_yticks(places, [f"({c}) {name}" for c, name in zip(df["choice"], df["name"], strict=True)])
    axes.set_xlabel(f"NMSE of side b against side a (n = {len(df)} choices that differ)")
    if not len(df) or total == 0:
        return "No choice differs in effect: the sides have the same bits", ""
    if not np.isfinite(total):
        return "One side is not finite: nothing to share out", "NaN or infinity in an output."
    top = df.loc[df["share"].idxmax()]
    parts = "; ".join(f"({c}) {name} {v / total:.1%}" for c, name, v in df[["choice", "name", "share"]].to_numpy())
    title = f"({top.choice}) {top['name']} makes {top.share / total:.0%} of the difference"
    return title, f"NMSE {total:.2g} in all. Shares: {parts}."


def _stacks(axes: Axes, df: "pd.DataFrame", cases: list[Any]) -> tuple[str, str]:
    """Positive shares to the right, negative ones to the left; each case's parts add up to 1."""
    letters = dict.fromkeys(df["choice"])
    looks = {c: (OKABE_ITO[i % len(OKABE_ITO)], _HATCHES[i % len(_HATCHES)]) for i, c in enumerate(letters)}
    names = dict(zip(df["choice"], df["name"], strict=True))
    drawn, lines = set(), []
    for row, case in enumerate(cases):
        rows = df[df["case"] == case]
        total = _total(rows)
        if not np.isfinite(total) or total == 0:
            axes.text(0.01, row, "equal" if total == 0 else "not finite", va="center", fontsize=8)
            lines.append(f"{case}: {'equal' if total == 0 else 'not finite'}")
            continue
        ends = {True: 0.0, False: 0.0}
        for letter, share in zip(rows["choice"], rows["share"] / total, strict=True):
            colour, hatch = looks[letter]
            label = f"({letter}) {names[letter]}" if letter not in drawn else None
            style_of: Any = {"color": colour, "hatch": hatch, "edgecolor": "white", "height": 0.62, "label": label}
            axes.barh(row, share, left=ends[share >= 0], **style_of)
            drawn.add(letter)
            if abs(share) >= _LEAST_LABEL:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
                axes.text(ends[share >= 0] + share / 2, row, letter, ha="center", va="center", fontsize=8, bbox=box)
            ends[share >= 0] += share
        top = rows.loc[rows["share"].idxmax()]
        lines.append(f"{case}: ({top.choice}) {top['name']} {top.share / total:.0%} of NMSE {total:.2g}")
    axes.set_yticks(range(len(cases)), [str(c) for c in cases])
    axes.set_xlabel(f"share of the difference (n = {len(cases)} cases)")
    return _common(df), "; ".join(lines) + "."


def _common(df: "pd.DataFrame") -> str:
    """Which choice leads in how many cases."""
    whole: Any = df.groupby("case", sort=False)
    leaders = [rows.loc[rows["share"].idxmax()] for _, rows in whole if np.isfinite(_total(rows))]
    leaders = [row for row in leaders if row["share"] > 0]
    if not leaders:
        return "No case has a difference to share out"
    letters = [row["choice"] for row in leaders]
    top = max(dict.fromkeys(letters), key=letters.count)
    name = next(row["name"] for row in leaders if row["choice"] == top)
    return f"({top}) {name} leads in {letters.count(top)} of {len(df['case'].unique())} cases"


@remembers
def error_map(df: "pd.DataFrame", *, value: str = "nmse_b", ax: Axes | None = None) -> Axes:
    """Error by part, expert (rows) and block of a weight's row (columns). `df`: rows of `ParityReport.error_map`.

    `value`: "nmse_a", "nmse_b" or "nmse_ab". The colour is a block's error over the mean of its row, so that rows of
    loud and quiet experts compare.
    """
    need_columns(df, _MAP_NEEDS, "error_map")
    if value not in _SIDES:
        raise LabError(f"lab.plot.error_map draws {', '.join(_SIDES)}, got {value!r}.")
    wide = df.pivot_table(index=["part", "expert"], columns="block", values=value, sort=False)
    cells = wide.to_numpy()
    mean = np.nanmean(cells, 1, keepdims=True)
    ratio = np.divide(cells, mean, out=np.zeros_like(cells), where=mean > 0)
    parts = wide.index.get_level_values("part")
    with style():
        axes = ax if ax is not None else new_axes(8.0, min(6.0, 1.6 + 0.03 * len(wide)))[0]
        high = max(2.0, float(np.nanmax(ratio)))
        image = axes.imshow(ratio, aspect="auto", cmap="cividis", vmin=0, vmax=high, interpolation="none")
        starts = [i for i, p in enumerate(parts) if i == 0 or parts[i - 1] != p]
        middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(parts)], strict=True)]
        axes.set_yticks(middles, [f"{parts[s]}\n{list(parts).count(parts[s])} experts" for s in starts])
        for start in starts[1:]:
            axes.axhline(start - 0.5, color="white", linewidth=2)
        width = int(df["last"].iloc[0] - df["first"].iloc[0] + 1)
        step = max(1, cells.shape[1] // 16)
        axes.set_xticks(range(0, cells.shape[1], step), [str(b) for b in wide.columns[::step]])
        axes.set_xlabel(f"block of {width} values along a row (n = {cells.size:,} blocks)")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.figure.colorbar(image, ax=axes, label="error / mean of the row", fraction=0.04)
        describe(axes, *_map_finding(wide, ratio, value))
    return axes


def _map_finding(wide: "pd.DataFrame", ratio: np.ndarray, value: str) -> tuple[str, str]:
    parts, lines, widest = wide.index.get_level_values("part"), [], ("", 0.0, 1.0)
    for part in dict.fromkeys(parts):
        column = ratio[np.asarray(parts == part)].mean(0)
        low, high = float(column.min()), float(column.max())
        lines.append(
            f"{part}: {low:.2f} to {high:.2f} of the mean, least in block {int(wide.columns[column.argmin()])}"
        )
        if low and high / low > widest[1] / widest[2]:
            widest = (part, high, low)
    part, high, low = widest
    title = f"Blocks of {part} differ by {high / low:.1f}x in the error of {_SIDES[value]}" if part else "No block errs"
    return title, f"Error of {_SIDES[value]} by block, mean over experts. {'; '.join(lines)}."
