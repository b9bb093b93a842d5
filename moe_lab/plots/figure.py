"""What a figure was drawn from: each plot function leaves its name, frame and options with the Axes it drew on.

So a figure can be saved with its data (`lab.plot.save`), and a report can offer the numbers behind each picture. The
note hangs on the Axes, not on the figure: four plots may share one figure, and the user may own it.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec
from weakref import WeakKeyDictionary

from moe_lab.card import FIGURE_MIME

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_EMBEDDED = 200_000  # bytes of CSV a figure; with 64 figures a page still stays near 10 MB

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """`df` went into `lab.plot.<plot>(df, **options)`."""

    plot: str
    df: "pd.DataFrame"
    options: dict[str, Any]

    def csv(self) -> str:
        """The frame as CSV without its index, floats with all their digits."""
        return self.df.to_csv(index=False, lineterminator="\n")


_DRAWN: "WeakKeyDictionary[Axes, list[Drawn]]" = WeakKeyDictionary()


def remembers(plot: "Callable[P, Axes]") -> "Callable[P, Axes]":
    """Decorator of a plot function `name(df, *, ax=None, ...) -> Axes`: the Axes it returns remember the call.

    The frame is copied, so changing it later changes nothing. A RoutingTrace is kept as its load table, which is what
    is drawn of it.
    """
    signature: Any = inspect.signature(plot)

    @wraps(plot)
    def drawing(*args: P.args, **kwargs: P.kwargs) -> "Axes":
        axes = plot(*args, **kwargs)
        df, *rest = signature.bind(*args, **kwargs).arguments.items()
        options = {name: value for name, value in rest if name != "ax"}
        remember(axes, plot.__name__, df[1], options)
        return axes

    return drawing


def remember(axes: "Axes", plot: str, df: Any, options: dict[str, Any]) -> None:
    """Note that `df` (a DataFrame, or something with a `load_table`) was drawn on `axes`."""
    frame = df.copy() if hasattr(df, "to_csv") else df.load_table()
    _DRAWN.setdefault(axes, []).append(Drawn(plot, frame, options))


def drawn(what: "Axes | Figure") -> list[Drawn]:
    """Everything drawn by the lab on these Axes, or on all Axes of this figure; empty when nothing was."""
    axes = what.axes if hasattr(what, "axes") and isinstance(what.axes, list) else [what]
    return [note for one in axes for note in _DRAWN.get(one, [])]  # type: ignore[arg-type, union-attr]


def bundle(figure: "Figure") -> dict[str, Any]:
    """The figure's data for a notebook's output: {FIGURE_MIME: {"panels": [...]}}, or {} for a figure without.

    A panel has plot, options, rows, columns and csv; csv is None beyond `MOST_EMBEDDED` bytes.
    """
    panels = []
    for note in drawn(figure):
        text = note.csv()
        panels.append(
            {
                "plot": note.plot,
                "options": plain(note.options),
                "rows": len(note.df),
                "columns": [str(name) for name in note.df.columns],
                "csv": text if len(text.encode()) <= MOST_EMBEDDED else None,
            }
        )
    return {FIGURE_MIME: {"panels": panels}} if panels else {}


def plain(value: Any) -> Any:
    """`value` as JSON holds it; whatever JSON has no word for becomes its repr."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
