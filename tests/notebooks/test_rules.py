"""Rules for what lies in notebooks/: clean files, short cells, one parameters cell, one title, a claim at the end."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from latex2mathml.converter import convert

from moe_lab.report.parameters import parameter_names
from tests.support.notebooks import code, text, write

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LONGEST_CELL, LONGEST_DEF = 20, 8


def broken_rules(path: Path) -> list[str]:
    """What is wrong with a notebook, in words; empty for a good one."""
    book = json.loads(path.read_text())
    nbformat.validate(nbformat.from_dict(book))
    cells = [{**c, "source": "".join(c["source"])} for c in book["cells"]]
    codes = [c for c in cells if c["cell_type"] == "code"]
    found = []
    if any(c["outputs"] or c["execution_count"] is not None for c in codes):
        found.append("outputs or execution counts are left in it")
    if book["metadata"].get("kernelspec", {}).get("name") != "python3":
        found.append("its kernelspec is not python3")
    if sum("parameters" in c["metadata"].get("tags", []) for c in codes) != 1:
        found.append("not exactly one parameters cell")
    titles = [
        line
        for c in cells
        if c["cell_type"] == "markdown"
        for line in c["source"].splitlines()
        if line.startswith("# ")
    ]
    if len(titles) != 1:
        found.append(f"{len(titles)} level-one headings")
    if not codes or "assert" not in codes[-1]["source"]:
        found.append("the last code cell asserts nothing")
    for number, cell in enumerate(codes, start=1):
        found += [f"code cell {number}: {what}" for what in _broken_in_cell(cell["source"])]
    return found


def _broken_in_cell(source: str) -> list[str]:
    found = []
    if (lines := len(source.splitlines())) > LONGEST_CELL:
        found.append(f"{lines} lines")
    for node in ast.walk(ast.parse(_without_magics(source))):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_DEF:
            found.append(f"def {node.name} is longer than {LONGEST_DEF} lines")
        if isinstance(node, ast.Attribute) and node.attr in ("IntSlider", "FloatSlider", "interact", "Dropdown"):
            found.append(f"a bare widget ({node.attr}) leaves nothing in the exported page; use lab.explore")
    return found


def _without_magics(source: str) -> str:
    return "\n".join("pass" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def formulas(path: Path) -> list[str]:
    """LaTeX between dollar signs in the Markdown cells."""
    cells = nbformat.read(path, as_version=4)["cells"]
    prose = "\n\n".join(c["source"] for c in cells if c["cell_type"] == "markdown")
    found = re.finditer(r"\$\$(.+?)\$\$|(?<![\\$])\$([^$\n]+)\$", prose, flags=re.S)
    return [match[1] or match[2] for match in found]


def test_the_tour_is_there() -> None:
    assert (ROOT / "notebooks" / "00_tour.ipynb") in NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_keeps_the_rules(path: Path) -> None:
    assert broken_rules(path) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_every_formula_converts(path: Path) -> None:
    for formula in formulas(path):
        assert "<mi>\\" not in convert(formula), f"{formula} has a macro that the exporter cannot draw"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_parameters_have_names(path: Path) -> None:
    assert parameter_names(nbformat.read(path, as_version=4), path.name)


def test_files_are_as_the_stripper_writes_them() -> None:
    check = subprocess.run(
        [sys.executable, "tools/strip_notebooks.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stderr


TITLE, SETTING, CLAIM = text("# T"), code("a = 1", "parameters"), code("assert a")
LONG_DEF = code("def f():\n" + "    x = 1\n" * 8 + "assert f")
BAD: dict[str, tuple[list[Any], str]] = {
    "no-parameters": ([TITLE, CLAIM], "not exactly one parameters cell"),
    "two-titles": ([text("# T\n\n# U"), SETTING, CLAIM], "2 level-one headings"),
    "no-claim": ([TITLE, SETTING, code("print(a)")], "asserts nothing"),
    "long-cell": ([TITLE, code("a = 1\n" * 21, "parameters"), CLAIM], "code cell 1: 21 lines"),
    "long-def": ([TITLE, SETTING, LONG_DEF], "def f is longer"),
    "bare-widget": ([TITLE, SETTING, code("w.IntSlider()\nassert a")], "bare widget"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_notebook_is_caught(case: str, tmp_path: Path) -> None:
    cells, says = BAD[case]
    found = broken_rules(write(tmp_path / "n.ipynb", *cells))
    assert len(found) == 1
    assert says in found[0]


def test_outputs_and_foreign_kernels_are_caught(tmp_path: Path) -> None:
    ran = code("assert 1")
    ran["execution_count"] = 3
    path = write(
        tmp_path / "n.ipynb",
        text("# T"),
        code("a = 1", "parameters"),
        ran,
        kernel={"name": "conda", "display_name": "c"},
    )
    assert len(broken_rules(path)) == 2


def test_stripper_removes_what_a_run_leaves(tmp_path: Path) -> None:
    ran = code("1", "parameters")
    ran["execution_count"], ran["outputs"] = 7, [nbformat.v4.new_output("stream", text="x")]
    path = write(tmp_path / "n.ipynb", text("# T\n\nline"), ran, kernel={"name": "other", "display_name": "o"})
    subprocess.run([sys.executable, ROOT / "tools" / "strip_notebooks.py", path], check=True, capture_output=True)
    book = json.loads(path.read_text())
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    assert book["cells"][1] == {
        "cell_type": "code", "execution_count": None, "id": "cell-01",
        "metadata": {"tags": ["parameters"]}, "outputs": [], "source": ["1"],
    }  # fmt: skip
    assert book["cells"][0]["source"] == ["# T\n", "\n", "line"]
