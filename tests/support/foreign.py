"""A notebook of somebody else: tables, formulas, widgets without a kernel, and HTML that would load things."""

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.support.notebooks import text

TABLE = (
    '<table class="dataframe"><thead><tr><th></th><th>a</th></tr></thead>'
    "<tbody><tr><th>0</th><td>1.5</td></tr></tbody></table>"
)
FAR = "https://example.org"
LOADS = """<script src="https://example.org/a.js"></script>
<img src="https://example.org/a.png" alt="far away">
<iframe src="https://example.org/"></iframe>
<link rel="stylesheet" href="https://example.org/a.css">
<script>
  window.ran = 'yes';
  fetch('https://example.org/data.json').catch(() => {});
  const far = new Image(); far.src = 'https://example.org/b.png';
</script>
<style>@import url('https://example.org/b.css'); body { background-image: url(https://example.org/c.png) }</style>"""


def foreign_notebook(path: Path, address: str = FAR) -> Path:
    """Write it with its outputs, as its author saved it; what it would load is at `address`."""
    loads = LOADS.replace(FAR, address)

    def shown(source: str, **data: Any) -> Any:
        bundle = {key.replace("__", "/"): value for key, value in data.items()}
        return new_code_cell(source, outputs=[new_output("display_data", data=bundle)])

    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "IntSlider(value=3)"}
    cells = [
        text("# Theirs\n\nInline $a_1$ and\n\n$$\\sum_k w_k$$"),
        text(f"Their own HTML:\n\n{loads}"),
        shown("df", text__html=TABLE, text__plain="   a\n0 1.5"),
        shown("Math()", text__latex="$\\displaystyle \\frac{a}{b}$", text__plain="<Math>"),
        shown("HTML()", text__html=loads, text__plain="<HTML>"),
        shown("Javascript()", application__javascript="window.js = 1", text__plain="<Javascript>"),
        new_code_cell("IntSlider()", outputs=[new_output("display_data", data=widget)]),
    ]
    kernel = {"name": "their-env", "display_name": "theirs", "language": "python"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path
