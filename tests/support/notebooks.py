"""Notebooks made by code, so that a test says what is in them."""

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def code(source: str, *tags: str) -> Any:
    """A code cell; `tags` as JupyterLab keeps them."""
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def text(source: str) -> Any:
    """A Markdown cell."""
    return new_markdown_cell(source)


def write(path: Path, *cells: Any, kernel: dict[str, str] | None = None) -> Path:
    """Write the cells as a notebook with stable cell ids; returns `path`."""
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02d}"
    nbformat.write(new_notebook(cells=list(cells), metadata={"kernelspec": kernel or KERNEL}), path)
    return path


LOADS = "frames.random_loads(layers=layers)"
HOSTILE = "Markdown('<script>x=1</script>\\n\\n<img src=x onerror=x> $a_1$')"
SETUP = "import sys\nsys.path.insert(0, root)\nimport moe_lab as lab\nfrom tests.support import frames"


def small_report(path: Path) -> Path:
    """A notebook with a formula, a table, a figure, an Explorer, untrusted Markdown and a claim."""
    root = str(Path(__file__).resolve().parents[2])
    return write(
        path,
        text("# A small report\n\nInline $p = \\operatorname{softmax}(Wx)$ and\n\n$$y = \\sum_{k=1}^{K} w_k E_k(x)$$"),
        code(f"layers = 4\nroot = {root!r}", "parameters"),
        code(SETUP),
        text("## A table"),
        code("df = frames.timings(layers=layers)\ndf[['layer', 'fetch_ms']]", "breakdown"),
        text("## A figure"),
        code("ax = lab.plot.phases(df)"),
        text("## An explorer"),
        code(f"lab.explore.load({LOADS})"),
        code("from IPython.display import Markdown, Math\n" + HOSTILE),
        code("Math(r'\\frac{a}{b}')"),
        text("## The claim"),
        code("assert len(df) == layers"),
    )
