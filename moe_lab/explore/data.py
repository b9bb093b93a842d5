"""The data behind an explorer's frames: one CSV a plot, a column in front that names the frame, and each frame's
options as JSON.
"""

import html
from collections.abc import Iterable
from typing import Any

from moe_lab.card import csv_link
from moe_lab.plots.figure import MOST_EMBEDDED, Drawn, plain


def frames_data(frames: Iterable[tuple[str, list[Drawn]]]) -> str:
    """A paragraph of links for (frame's name, what was drawn in it); "" when nothing remembers its data."""
    import pandas as pd

    by_plot: dict[str, list[Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for name, notes in frames:
        for note in notes:
            labelled = note.df.drop(columns="frame", errors="ignore")
            labelled.insert(0, "frame", name)
            by_plot.setdefault(note.plot, []).append(labelled)
            options.setdefault(note.plot, {})[name] = plain(note.options)
    links = [_link(plot, pd.concat(parts, ignore_index=True), options[plot]) for plot, parts in by_plot.items()]
    return f'<p class="moe-data">Data: {", ".join(links)}</p>' if links else ""


def _link(plot: str, df: Any, options: dict[str, Any]) -> str:
    text = df.to_csv(index=False, lineterminator="\n")
    about = f"{len(df)} rows: {', '.join(map(str, df.columns))}"
    if len(text.encode()) > MOST_EMBEDDED:
        return html.escape(f"{plot} has {about}; too large for a page")
    spec = {"plot": plot, "options": options, "rows": len(df), "columns": [str(name) for name in df.columns]}
    return csv_link(plot, text, about, spec)
