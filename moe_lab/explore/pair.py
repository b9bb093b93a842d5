"""Two controls and one figure."""

from collections.abc import Callable, Sequence
from typing import Any

from moe_lab.errors import LabError
from moe_lab.explore.grid import GridExplorer
from moe_lab.plots.style import Axes, Figure


class PairExplorer(GridExplorer):
    """Two controls over `first` and `second`, and the figure of the chosen pair.

    `frame(a, b)` returns a Figure or Axes. `labels` name the controls, differently; `show(value)` turns the second's
    values into text. LabError as GridExplorer.
    """

    def __init__(
        self,
        first: Sequence[Any],
        second: Sequence[Any],
        frame: Callable[[Any, Any], Figure | Axes],
        *,
        labels: tuple[str, str],
        show: Callable[[Any], str] = str,
        start: tuple[int, int] = (0, 0),
    ) -> None:
        if labels[0] == labels[1]:
            raise LabError(f"PairExplorer: both controls are called {labels[0]!r}; name them differently.")
        values = dict(zip(labels, (first, second), strict=True))
        super().__init__(values, frame, show={labels[1]: show}, start=start)
