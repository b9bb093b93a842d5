"""Several controls and one figure: every combination drawn beforehand, as `Explorer` does it for one control."""

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import ipywidgets
import numpy as np
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


class _Boxes(ipywidgets.HBox):
    """Dropdowns whose `value` is the place of their combination."""

    value = traitlets.Int()

    def __init__(self, labels: Sequence[str], names: Sequence[Sequence[str]], start: Sequence[int]) -> None:
        self._sizes = tuple(len(options) for options in names)
        boxes = [
            ipywidgets.Dropdown(
                options=[(name, i) for i, name in enumerate(options)], value=at, description=label,
                style={"description_width": "initial"},
            )
            for label, options, at in zip(labels, names, start, strict=True)
        ]  # fmt: skip
        super().__init__(boxes, layout=ipywidgets.Layout(flex_flow="row wrap"))
        self._moved(None)
        for box in boxes:
            box.observe(self._moved, names="value")

    def _moved(self, _: Any) -> None:
        self.value = place([box.value for box in self.children], self._sizes)


def place(indices: Sequence[int], sizes: Sequence[int]) -> int:
    """Where a combination stands in the product of its controls' values."""
    return int(np.ravel_multi_index(tuple(indices), tuple(sizes)))


class GridExplorer(Explorer):
    """A control for each entry of `values` (label -> its values), and the figure of the chosen combination.

    `frame(*chosen)` returns a Figure or Axes. `show` by label turns values into text. `start`: index of each control's
    first value. LabError as Explorer, and for more than `MOST_FRAMES` combinations: a page would hold them all.
    """

    def __init__(
        self,
        values: Mapping[str, Sequence[Any]],
        frame: Callable[..., Figure | Axes],
        *,
        show: Mapping[str, Callable[[Any], str]] | None = None,
        start: Sequence[int] | None = None,
    ) -> None:
        self._labels = tuple(values)
        self._begin = tuple(start) if start is not None else (0,) * len(values)
        named = {label: (show or {}).get(label, str) for label in values}
        self._names = tuple([named[label](one) for one in given] for label, given in values.items())
        self._sizes = tuple(len(names) for names in self._names)
        count = prod(self._sizes)
        if count > MOST_FRAMES:
            sizes = " x ".join(map(str, self._sizes))
            raise LabError(
                f"Explorer {'/'.join(self._labels)!r}: {sizes} = {count} frames, more than {MOST_FRAMES}. Choose "
                "fewer of either."
            )
        for size, at, label in zip(self._sizes, self._begin, self._labels, strict=True):
            if size and not 0 <= at < size:
                raise LabError(f"Explorer {label!r}: start={at}, but there are {size} values.")
        super().__init__(
            list(product(*values.values())),
            lambda chosen: frame(*chosen),
            label="/".join(self._labels),
            start=place(self._begin, self._sizes) if count else 0,
            control="dropdown",
        )

    def _make_control(self) -> Any:
        return _Boxes(self._labels, self._names, self._begin)

    def _name(self, index: int) -> str:
        chosen = np.unravel_index(index, self._sizes)
        return ", ".join(
            f"{label} {names[i]}" for label, names, i in zip(self._labels, self._names, chosen, strict=True)
        )

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
