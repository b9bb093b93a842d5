"""Notebook in, executed page out: parameters, execution, environment stamp, export."""

import html
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from moe_lab.errors import LabError, MissingExtra
from moe_lab.report.execute import CellError, Progress, execute
from moe_lab.report.parameters import with_parameters
from moe_lab.report.record import page_record
from moe_lab.system.environment import environment
from moe_lab.system.files import replace_file


@dataclass(frozen=True, slots=True, repr=False)
class Report:
    """A finished report. `path`: the HTML file; `notebook`: as executed; `seconds`: wall time from kernel start on."""

    path: Path
    notebook: Any
    seconds: float

    def text(self, tag: str) -> str:
        """What the cells tagged `tag` printed or returned, as plain text; "" when no cell has the tag."""
        parts = []
        for cell in self.notebook["cells"]:
            if tag not in cell["metadata"].get("tags", []):
                continue
            for output in cell.get("outputs", []):
                parts.append(output.get("text") or output.get("data", {}).get("text/plain", ""))
        return "\n".join(part.rstrip("\n") for part in parts if part)

    def __repr__(self) -> str:
        return f"Report({str(self.path)!r}, {len(self.notebook['cells'])} cells, {self.seconds:.1f} s)"

    def _repr_html_(self) -> str:
        link = f'<a href="{html.escape(quote(self.path.as_posix()))}">{html.escape(self.path.name)}</a>'
        return f"<p>Report {link}: {len(self.notebook['cells'])} cells in {self.seconds:.1f} s</p>"


def run(
    notebook: str | Path,
    out: str | Path | None = None,
    *,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    theme: Literal["light", "dark"] = "light",
    **params: Any,
) -> Report:
    """Execute `notebook` in this interpreter and write it as one offline HTML file.

    `out`: the HTML file (default: reports/<name>.html beside the notebook's folder). `params` replace values that the
    cell tagged `parameters` sets; other names are refused before anything runs. `progress(done, total, title, seconds)`
    is called after each cell (`show_progress` prints a line). `timeout_s`: the most one cell may take.

    Raises LabError for a missing file, a notebook that is not Python or not a notebook, or an unknown parameter;
    CellError when a cell fails: what was done until then is kept in `<out>.partial.html`. A finished page holds the
    notebook's cells, the parameters and the numbers it shows: `moe-lab reproduce PAGE` runs it again.
    """
    source = Path(notebook)
    target = Path(out) if out is not None else source.resolve().parent.parent / "reports" / f"{source.stem}.html"
    notebook_read = _read(source)
    made = with_parameters(notebook_read, params, str(source))
    notes = _fit_kernel(made, source)
    made["metadata"]["moe_lab"] = {"environment": environment(), "notes": notes}
    partial = target.with_suffix(".partial.html")
    _check_target(target)
    start = time.perf_counter()
    try:
        execute(made, source.resolve().parent, str(source), timeout_s=timeout_s, progress=progress)
    except CellError as error:
        made["metadata"]["moe_lab"]["notes"] = [*notes, f"Not finished: cell {error.cell} ({error.title}) {error.why}"]
        replace_file(partial, lambda part: part.write_text(to_html(made, source, theme), encoding="utf-8"))
        error.args = (f"{error.args[0]} What was done is in {partial}.",)
        raise
    seconds = time.perf_counter() - start
    made["metadata"]["moe_lab"]["record"] = page_record(source, notebook_read, params, made, target)
    replace_file(target, lambda part: part.write_text(to_html(made, source, theme), encoding="utf-8"))
    partial.unlink(missing_ok=True)  # an earlier run's
    return Report(path=target, notebook=made, seconds=seconds)


def _check_target(target: Path) -> None:
    """LabError before anything runs when no report can be written there."""
    if target.is_dir():
        raise LabError(f"cannot write the report to {target}: it is a folder. Name an HTML file in it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot make the folder {target.parent}: {error.strerror or error}.") from error


def to_html(notebook: Any, source: Path, theme: str = "light") -> str:
    """The notebook as one HTML page; `source` is its file, for the title and for pictures beside it."""
    from moe_lab.report.exporter import MoeHTMLExporter

    resources = {"metadata": {"name": source.stem, "path": str(source.resolve().parent)}}
    page, _ = MoeHTMLExporter(theme=theme).from_notebook_node(notebook, resources=resources)
    return page


def show_progress(done: int, total: int, title: str, seconds: float) -> None:
    """Print one line a cell: `[ 3/12]   1.4 s  Route 512 tokens`."""
    print(f"[{done:>{len(str(total))}}/{total}] {seconds:6.1f} s  {title}", flush=True)


def _read(source: Path) -> Any:
    try:
        import nbformat
    except ImportError as error:
        raise MissingExtra("nbformat", "report", "Reading a notebook") from error
    if not source.is_file():
        raise LabError(f"{source}: no such notebook file.")
    try:
        return nbformat.read(source, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and jsonschema's exceptions
        raise LabError(f"{source} is not a notebook that nbformat can read: {str(error).splitlines()[0]}") from error


def _fit_kernel(notebook: Any, source: Path) -> list[str]:
    """Names this interpreter's kernel in the notebook; a note for the report when the file named another."""
    spec = notebook["metadata"].get("kernelspec", {})
    if spec.get("language", "python") != "python":
        raise LabError(f"{source} is written for a {spec['language']} kernel; the lab runs Python notebooks.")
    asked = spec.get("name", "python3")
    notebook["metadata"]["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    if asked == "python3":
        return []
    return [f"The notebook asks for the kernel {asked!r}; it ran in the environment of this report instead."]
