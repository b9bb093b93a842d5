"""Two controls and one figure: every combination drawn beforehand, as `Explorer` does it for one control."""

import html
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import ipywidgets
import traitlets

from moe_lab.errors import LabError
from moe_lab.explore.explorer import MOST_FRAMES, Explorer, quoted
from moe_lab.plots.style import Axes, Figure

# The frames stand in the order of the controls' product, so the place of one is its selects' indices read as digits.
_SCRIPT = (
    "const box=this.closest('.moe-explorer');let at=0;"
    "box.querySelectorAll('select').forEach(one=>at=at*one.options.length+one.selectedIndex);"
    "box.querySelectorAll('img').forEach((frame,i)=>frame.hidden=i!==at)"
)


class _Pair(ipywidgets.HBox):
    """Two dropdowns whose `value` is the place of their combination."""

    value = traitlets.Int()

    def __init__(self, labels: Sequence[str], names: Sequence[Sequence[str]], start: Sequence[int]) -> None:
        boxes = [
            ipywidgets.Dropdown(
                options=[(name, i) for i, name in enumerate(options)], value=at, description=label,
                style={"description_width": "initial"},
            )
            for label, options, at in zip(labels, names, start, strict=True)
        ]  # fmt: skip
        super().__init__(boxes)
        self.value = start[0] * len(names[1]) + start[1]
        for box in boxes:
            box.observe(self._moved, names="value")

    def _moved(self, _: Any) -> None:
        first, second = self.children
        self.value = first.value * len(second.options) + second.value


class PairExplorer(Explorer):
    """Two controls over `first` and `second`, and the figure of the chosen pair.

    `frame(a, b)` returns a Figure or Axes. `labels` name the controls, `show(value)` turns the second's values into
    text. LabError as Explorer, and for more than `MOST_FRAMES` combinations: a page would hold them all.
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
        self._labels, self._begin = labels, start
        self._names = ([str(a) for a in first], [show(b) for b in second])
        count = len(first) * len(second)
        if count > MOST_FRAMES:
            raise LabError(
                f"Explorer {'/'.join(labels)!r}: {len(first)} x {len(second)} = {count} frames, more than "
                f"{MOST_FRAMES}. Choose fewer of either."
            )
        for values, at, label in zip((first, second), start, labels, strict=True):
            if values and not 0 <= at < len(values):
                raise LabError(f"Explorer {label!r}: start={at}, but there are {len(values)} values.")
        place = start[0] * len(second) + start[1]
        super().__init__(
            list(product(first, second)),
            lambda pair: frame(*pair),
            label="/".join(labels),
            start=place,
            control="dropdown",
        )

    def _make_control(self) -> Any:
        return _Pair(self._labels, self._names, self._begin)

    def _name(self, index: int) -> str:
        a, b = divmod(index, len(self._names[1]))
        return f"{self._labels[0]} {self._names[0][a]}, {self._labels[1]} {self._names[1][b]}"

    def _frame_name(self, index: int) -> str:
        return self._name(index)

    def _control_html(self, chosen: list[int], start: int) -> str:
        return " ".join(
            f'<label>{html.escape(label)} <select autocomplete="off" oninput={quoted(_SCRIPT)}>'
            + "".join(
                f"<option{' selected' if i == at else ''}>{html.escape(name)}</option>" for i, name in enumerate(names)
            )
            + "</select></label>"
            for label, names, at in zip(self._labels, self._names, self._begin, strict=True)
        )
