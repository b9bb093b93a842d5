"""`lab.plot.save`: a figure for a paper and all that is needed to draw it again.

STEM.pdf is the picture, STEM.csv the frame behind it (one a plot), STEM.json says how they belong together: "panels"
with plot, options, csv and columns of each, environment, version; the JSON that a report links to is one such panel.
The same figure gives the same bytes: no date, no random names.
"""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moe_lab.errors import LabError, LabTypeError
from moe_lab.plots.figure import Drawn, drawn, plain
from moe_lab.plots.style import Axes, Figure, LabFigure, mpl, style, unmoved
from moe_lab.system.environment import environment

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
# Type 42 keeps glyphs as fonts: text stays searchable, and journals refuse matplotlib's default, type 3.
_PDF: Any = {"pdf.fonttype": 42, "savefig.facecolor": "white"}
_NO_DATE: Any = {"CreationDate": None, "Producer": None, "Creator": None}


def save(
    figure: Figure | Axes, stem: str | os.PathLike[str], *, data: "pd.DataFrame | None" = None, overwrite: bool = False
) -> list[Path]:
    """Write STEM.pdf, STEM.csv and STEM.json; returns the paths. All or none: nothing is replaced unless `overwrite`.

    `figure`: what a `lab.plot` function returned, or the figure it is on (all its panels are saved; with several plots
    each has its STEM-<number>-<plot>.csv). `data`: the frame behind a figure you drew yourself.
    `lab.plot.<plot>(pd.read_csv(csv), **options)` with plot, options and csv of an entry of the JSON's "panels" draws
    that plot again. LabError: no data known, files that stand there already, a folder that cannot be written.
    """
    whole = figure.get_figure(root=True) if isinstance(figure, Axes) else figure
    if not isinstance(whole, Figure):
        raise LabTypeError(f"lab.plot.save saves a matplotlib Figure or Axes, got {type(figure).__name__}.")
    notes = drawn(whole) if data is None else [Drawn("", data, {})]
    if not notes:
        raise LabError("this figure carries no data: no lab.plot function drew it. Pass the frame behind it as data=.")
    base = _stem(stem)
    writers: dict[Path, Callable[[Path], object]] = {_with(base, ".pdf"): lambda path: _write_pdf(whole, path)}
    panels = []
    for path, note in zip(_csv_paths(base, notes), notes, strict=True):
        text = note.csv()
        writers[path] = lambda part, text=text: part.write_text(text, encoding="utf-8", newline="")
        panels.append(_panel(path, note, text))
    spec = {
        "schema": SCHEMA,
        "picture": _with(base, ".pdf").name,
        "alt": whole.alt if isinstance(whole, LabFigure) else "",
        "panels": panels,
        "environment": {**environment(), "matplotlib": mpl.__version__},
    }
    writers[_with(base, ".json")] = lambda path: path.write_text(
        json.dumps(spec, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8"
    )
    return _write_all(base.parent, writers, overwrite)


def _panel(path: Path, note: Drawn, text: str) -> dict[str, Any]:
    return {
        "plot": note.plot,
        "options": plain(note.options),
        "csv": path.name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "rows": len(note.df),
        "columns": {str(name): str(kind) for name, kind in note.df.dtypes.items()},
    }


def _stem(stem: str | os.PathLike[str]) -> Path:
    """The stem as a path; a ".pdf" someone wrote by habit is taken off, any other dot is part of the name."""
    base = Path(stem)
    base = base.with_suffix("") if base.suffix.lower() in (".pdf", ".csv", ".json") else base
    if not base.name or os.fspath(stem).endswith((os.sep, "/")):
        raise LabError(f"{os.fspath(stem)!r} names no file: pass a path without extension, such as 'figures/phases'.")
    return base


def _with(base: Path, suffix: str) -> Path:
    return base.with_name(base.name + suffix)


def _csv_paths(base: Path, notes: list[Drawn]) -> list[Path]:
    if len(notes) == 1:
        return [_with(base, ".csv")]
    return [_with(base, f"-{number}-{note.plot}.csv") for number, note in enumerate(notes, start=1)]


def _write_pdf(figure: Figure, path: Path) -> None:
    with style(), unmoved(figure), mpl.rc_context(_PDF):
        figure.savefig(path, format="pdf", metadata=_NO_DATE, bbox_inches="tight")


def _write_all(folder: Path, writers: dict[Path, Callable[[Path], object]], overwrite: bool) -> list[Path]:
    """Write every file aside, then put all in place, so that a full disk leaves what was there."""
    there = [path for path in writers if path.exists() and not (overwrite and path.is_file())]
    if there:
        raise LabError(f"{there[0]} stands there already: choose another stem, or pass overwrite=True.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".moe-lab-", dir=folder) as aside:
            for path, write in writers.items():
                write(Path(aside) / path.name)
            for path in writers:
                os.replace(Path(aside) / path.name, path)
    except OSError as error:
        raise LabError(f"cannot write the figure to {folder}: {error.strerror or error}.") from error
    return list(writers)
