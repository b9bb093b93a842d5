"""How the lab's figures look, and how they carry their alt text.

The palette is Okabe and Ito's: its nearest pair stays apart under simulated protanopia and deuteranopia, where
matplotlib's default palette falls to pairs nobody can tell apart. Colour is never the only channel: phases have
hatches, arms have markers and dashes. Knows nothing about what is drawn.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError, LabTypeError, MissingExtra
from moe_lab.plots.figure import bundle

try:
    import matplotlib as mpl
    from matplotlib import colors as mcolors
    from matplotlib import pyplot as plt
    from matplotlib import ticker as ticker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image  # matplotlib's own dependency
except ImportError as error:
    raise MissingExtra("matplotlib", "lab", "Drawing a figure") from error

if TYPE_CHECKING:
    import pandas as pd

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
PHASES = {"route": "#0072B2", "fetch": "#E69F00", "compute": "#009E73", "other": "#8C8C8C"}
HATCHES = {"route": "", "fetch": "///", "compute": "...", "other": "xx"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 1)))
DPI = 110

_RC: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "figure.dpi": DPI,
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.grid": False,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "svg.hashsalt": "moe-lab",
}


class LabFigure(Figure):
    """A figure that tells a notebook, and so the exported page, what it shows (`.alt`, one or two sentences) and from
    which data.
    """

    alt: str = ""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        data = {"image/png": png(self), "text/plain": self.alt, **bundle(self)}
        return data, {"image/png": {"alt": self.alt}}


@contextmanager
def style() -> Iterator[None]:
    """The lab's rcParams inside the block, the user's own again after it.

    Except "interactive": a notebook's backend starts with the first figure, so inside the block, and sets it then.
    Restoring it would keep every later figure of that notebook from being shown.
    """
    interactive = mpl.rcParams["interactive"]
    try:
        with mpl.rc_context(_RC):
            try:
                yield
            finally:
                interactive = mpl.rcParams["interactive"]
    finally:
        mpl.rcParams["interactive"] = interactive


def new_axes(width: float = 8.0, height: float = 3.6, columns: int = 1) -> list[Axes]:
    """`columns` Axes side by side in one new `LabFigure`; sizes in inches. Call inside `style()`."""
    figure = plt.figure(FigureClass=LabFigure, figsize=(width, height), layout="constrained")
    return list(figure.subplots(1, columns, squeeze=False)[0])


def describe(ax: Axes, title: str, detail: str = "", *, legend_columns: int = 0) -> None:
    """Set the title, and the figure's alt text to title and detail where the figure is the lab's own.

    `legend_columns` > 0 puts the legend between title and axes, where it covers no data.
    """
    if legend_columns:
        ax.legend(
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=legend_columns,
            borderaxespad=0.1,
            handlelength=2.6,
            fontsize=8.5,
        )
    ax.set_title(title, pad=26 if legend_columns else None)
    if isinstance(ax.figure, LabFigure):
        ax.figure.alt = f"{title}. {detail}".strip() if detail else f"{title}."


@contextmanager
def unmoved(figure: Figure) -> Iterator[None]:
    """Draw inside the block; afterwards the Axes stand where they stood.

    Constrained layout starts from where the last drawing left them, and ticks follow sizes: drawn a second time, nine
    of the lab's fifteen test figures came out a few pixels different.
    """
    before = [(axes, axes.get_position(original=True), axes.get_in_layout()) for axes in figure.axes]
    try:
        yield
    finally:
        for axes, position, in_layout in before:
            axes.set_position(position)
            axes.set_in_layout(in_layout)  # set_position takes it for a place chosen by hand, which layout leaves alone


def png(figure: Figure | Axes, dpi: int = DPI) -> bytes:
    """The figure, or the one that Axes are on, as PNG bytes: opaque ground, the same bytes for the same figure (no
    date, no program name).

    256 colours are kept: charts lose nothing visible and take a third of the bytes (a 6 x 32 heat map 91 -> 31 kB).
    """
    whole = figure.get_figure(root=True) if isinstance(figure, Axes) else figure
    if not isinstance(whole, Figure):
        raise LabTypeError(f"lab.plot.png draws a matplotlib Figure or Axes, got {type(figure).__name__}.")
    with BytesIO() as full, BytesIO() as small, style(), unmoved(whole):
        whole.savefig(full, format="png", dpi=dpi, bbox_inches="tight", facecolor="white")
        picture = Image.open(full).convert("RGB")
        picture.quantize(256, dither=Image.Dither.NONE).save(small, format="PNG", optimize=True)
        return small.getvalue()


def ink_on(colour: Any) -> str:
    """Black or white, whichever reads better on `colour` (relative luminance as WCAG defines it)."""
    channels = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in mcolors.to_rgb(colour)]
    luminance = 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


def arm_styles(names: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Colour, marker and dash for each arm, in order of first appearance."""
    return {
        name: {
            "color": OKABE_ITO[i % len(OKABE_ITO)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": DASHES[i % len(DASHES)],
        }
        for i, name in enumerate(dict.fromkeys(names))
    }


def need_columns(df: "pd.DataFrame", columns: Iterable[str], plot: str) -> None:
    """Raise LabError when `df` is empty or lacks a column that `lab.plot.<plot>` draws."""
    seen = getattr(df, "columns", None)
    if seen is None:
        raise LabError(f"lab.plot.{plot} draws a pandas DataFrame, got {type(df).__name__}.")
    missing = [name for name in columns if name not in seen]
    if missing:
        raise LabError(
            f"lab.plot.{plot} needs the column{'s' * (len(missing) > 1)} {', '.join(missing)}; "
            f"the frame has {', '.join(map(str, seen)) or 'no columns'}."
        )
    if len(df) == 0:
        raise LabError(f"lab.plot.{plot} got a frame without rows: nothing was measured.")


def si(value: float, unit: str = "") -> str:
    """1234567 -> '1.23 M' + unit: three digits, for labels in figures."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
