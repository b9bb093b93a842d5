"""`lab.explore`: one control and a figure, alive in a kernel and still alive in an exported page.

A widget needs a kernel and megabytes of script. So an Explorer also describes itself as plain HTML: every frame drawn
beforehand, a native range input or select, one line of script. JupyterLab takes the widget, our exporter the HTML.
"""

import html
import warnings
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any, Literal

from moe_lab.errors import LabError, MissingExtra
from moe_lab.explore.data import frames_data
from moe_lab.plots.figure import Drawn
from moe_lab.plots.figure import drawn as data_behind
from moe_lab.plots.style import Axes, Figure, LabFigure, plt, png

try:
    import ipywidgets
except ImportError as error:
    raise MissingExtra("ipywidgets", "lab", "An Explorer") from error

MOST_FRAMES = 64  # a 110 dpi frame takes 10 to 70 kB; more would make a report of megabytes for one slider
_SCRIPT = (
    "const box=this.closest('.moe-explorer'),at=this.selectedIndex??+this.value;"
    "box.querySelectorAll('img').forEach((frame,i)=>frame.hidden=i!==at);"
    "const now=box.querySelectorAll('img')[at].dataset.label;"
    "this.setAttribute('aria-valuetext',now);const out=box.querySelector('output');if(out)out.value=now"
)


class Explorer(ipywidgets.VBox):
    """A control over `values` and the figure of the chosen one.

    `frame(value)` returns a Figure or Axes; each is drawn once and kept. `label` names the control and goes into the
    alt text, with `unit` behind the value. `alt(value)` overrides the alt text that the lab's own figures carry.
    `control`: "slider" or "dropdown". `start`: index of the value shown first.
    LabError: no values, an unknown control, a frame that is no figure or has no alt text.
    """

    def __init__(
        self,
        values: Sequence[Any],
        frame: Callable[[Any], Figure | Axes],
        *,
        label: str,
        unit: str = "",
        alt: Callable[[Any], str] | None = None,
        control: Literal["slider", "dropdown"] = "slider",
        start: int = 0,
    ) -> None:
        self._values = list(values)
        if not self._values:
            raise LabError(f"Explorer {label!r} has no values to choose from.")
        if control not in ("slider", "dropdown"):
            raise LabError(f"Explorer {label!r}: control is {control!r}; it must be 'slider' or 'dropdown'.")
        if not 0 <= start < len(self._values):
            raise LabError(f"Explorer {label!r}: start={start}, but there are {len(self._values)} values.")
        self._frame, self._alt, self._label, self._unit, self._start = frame, alt, label, unit, start
        self._kind = control
        self._drawn: dict[int, tuple[bytes, str]] = {}
        self._data: dict[int, list[Drawn]] = {}
        self._picture = ipywidgets.HTML(layout=ipywidgets.Layout(min_height="240px"))
        self._control = self._make_control()
        self._control.observe(lambda change: self._show(change["new"]), names="value")
        self._show(start)
        super().__init__([self._control, self._picture])

    def drawn(self, index: int) -> tuple[bytes, str]:
        """PNG bytes and alt text of the frame for `values[index]`; drawn on first use."""
        if index not in self._drawn:
            self._drawn[index] = self._draw(index)
        return self._drawn[index]

    def to_html(self) -> str:
        """The explorer as a self-contained HTML fragment; no identifiers, so that equal inputs give equal bytes."""
        chosen = self._thinned()
        start = min(range(len(chosen)), key=lambda i: abs(chosen[i] - self._start))
        frames = "\n".join(
            f"<img {'' if i == start else 'hidden '}data-label={quoted(self._name(index))} "
            + f'alt={quoted(self.drawn(index)[1])} src="{_data_uri(self.drawn(index)[0])}">'
            for i, index in enumerate(chosen)
        )
        data = frames_data((self._frame_name(index), self._data[index]) for index in chosen)
        return f'<div class="moe-explorer">\n{self._control_html(chosen, start)}\n{frames}\n{data}</div>'

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        data["text/html"] = self.to_html()
        data["text/plain"] = self.drawn(self._start)[1]
        return bundle

    def _make_control(self) -> Any:
        options = [(self._name(i), i) for i in range(len(self._values))]
        shared = {
            "options": options,
            "value": self._start,
            "description": self._label,
            "style": {"description_width": "initial"},
        }
        if self._kind == "dropdown":
            return ipywidgets.Dropdown(**shared)
        return ipywidgets.SelectionSlider(continuous_update=False, layout=ipywidgets.Layout(width="480px"), **shared)

    def _show(self, index: int) -> None:
        picture, alt = self.drawn(index)
        self._picture.value = f'<img alt={quoted(alt)} src="{_data_uri(picture)}" style="max-width: 100%">'

    def _name(self, index: int) -> str:
        return f"{self._values[index]}{' ' + self._unit if self._unit else ''}"

    def _frame_name(self, index: int) -> str:
        """What a frame's alt text begins with."""
        return f"{self._label} {self._name(index)}"

    def _draw(self, index: int) -> tuple[bytes, str]:
        value = self._values[index]
        made = self._frame(value)
        figure = made.get_figure(root=True) if isinstance(made, Axes) else made
        if not isinstance(figure, Figure):
            raise LabError(f"Explorer {self._label!r}: frame({value!r}) returned {type(made).__name__}, not a figure.")
        alt = self._alt(value) if self._alt else figure.alt if isinstance(figure, LabFigure) else ""
        if not alt:
            raise LabError(f"Explorer {self._label!r}: the frame of {value!r} has no alt text; pass alt=.")
        picture, self._data[index] = png(figure), data_behind(figure)
        plt.close(figure)  # pyplot would keep every frame alive
        name = self._frame_name(index)
        return picture, alt if alt.lower().startswith(name.lower()) else f"{name}: {alt}"

    def _thinned(self) -> list[int]:
        count = len(self._values)
        if count <= MOST_FRAMES:
            return list(range(count))
        warnings.warn(
            f"Explorer {self._label!r}: a page holds {MOST_FRAMES} of the {count} frames, evenly spaced.", stacklevel=2
        )
        return [round(i * (count - 1) / (MOST_FRAMES - 1)) for i in range(MOST_FRAMES)]

    def _control_html(self, chosen: list[int], start: int) -> str:
        """The native control over the frames `chosen`; `start` is a place in that list."""
        return self._slider_html(chosen, start) if self._kind == "slider" else self._select_html(chosen, start)

    def _slider_html(self, chosen: list[int], start: int) -> str:
        name = html.escape(self._label)
        now = self._name(chosen[start])
        return (
            f'<label>{name} <input type="range" min="0" max="{len(chosen) - 1}" step="1" value="{start}" '
            f'autocomplete="off" aria-valuetext={quoted(now)} oninput="{_SCRIPT}"></label> '
            f"<output>{html.escape(now)}</output>"
        )

    def _select_html(self, chosen: list[int], start: int) -> str:
        options = "".join(
            f"<option{' selected' if i == start else ''}>{html.escape(self._name(index))}</option>"
            for i, index in enumerate(chosen)
        )
        name = html.escape(self._label)
        return f'<label>{name} <select autocomplete="off" oninput="{_SCRIPT}">{options}</select></label>'


def quoted(text: str) -> str:
    """An HTML attribute's value, in its quotes."""
    return f'"{html.escape(text, quote=True)}"'


def _data_uri(picture: bytes) -> str:
    return f"data:image/png;base64,{b64encode(picture).decode('ascii')}"
