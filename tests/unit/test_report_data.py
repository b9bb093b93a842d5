"""Pages and their data: links under figures, foreign notebooks that stay offline, records that can be run again."""

import base64
import json
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbformat.v4 import new_code_cell, new_notebook, new_output

import moe_lab as lab
from moe_lab.card import FIGURE_MIME
from moe_lab.plots.figure import MOST_EMBEDDED
from moe_lab.report.record import page_json, read_record
from moe_lab.report.run import to_html
from tests.support import frames
from tests.support.foreign import foreign_notebook
from tests.support.notebooks import text


def page_of(*outputs: Any) -> BeautifulSoup:
    book = new_notebook(cells=[new_code_cell("show()", outputs=list(outputs))])
    return BeautifulSoup(to_html(book, Path("n.ipynb")), "html.parser")


def figure_output(figure: Any) -> Any:
    data, metadata = figure._repr_mimebundle_()
    data["image/png"] = base64.b64encode(data["image/png"]).decode()
    return new_output("display_data", data=data, metadata=metadata)


def read_csv(link: Any) -> pd.DataFrame:
    head, _, body = link["href"].partition(",")
    assert head == "data:text/csv;charset=utf-8;base64"
    return pd.read_csv(StringIO(base64.b64decode(body).decode()))


def read_json(link: Any) -> Any:
    head, _, body = link["href"].partition(",")
    assert head == "data:application/json;charset=utf-8;base64"
    return json.loads(base64.b64decode(body))


def test_figure_has_its_data_behind_a_link_that_says_what_it_is() -> None:
    df = frames.timings()
    link, spec = page_of(figure_output(lab.plot.phases(df).figure)).select(".moe-data a")
    assert link["download"] == link.text == "phases.csv"
    assert "3 rows: layer, arm" in link.parent.text
    pd.testing.assert_frame_equal(read_csv(link), df, check_dtype=False)
    assert spec["download"] == "phases.json"
    assert read_json(spec) == {"plot": "phases", "options": {}, "rows": 3, "columns": list(df.columns)}


def test_data_too_large_for_a_page_is_named_not_embedded() -> None:
    df = frames.timings().assign(note="x" * MOST_EMBEDDED)
    made = page_of(figure_output(lab.plot.phases(df).figure))
    assert not made.select(".moe-data a")
    assert "3 rows" in made.select_one(".moe-data").text
    assert "lab.plot.save" in made.select_one(".moe-data").text


def test_explorer_has_the_data_of_all_its_frames() -> None:
    explorer = lab.explore.load(frames.random_loads(layers=3))
    link, spec = page_of(new_output("display_data", data=explorer._repr_mimebundle_())).select(".moe-data a")
    df = read_csv(link)
    assert list(df["frame"].unique()) == ["layer 0", "layer 1", "layer 2"]
    assert len(df) == len(frames.random_loads(layers=3))
    assert (read_json(spec)["plot"], list(read_json(spec)["options"])) == ("load", ["layer 0", "layer 1", "layer 2"])


@pytest.mark.parametrize(
    "bundle",
    [{}, {"panels": "x"}, {"panels": [1]}, {"panels": [{"csv": 3}]}, [], "x",
     {"panels": [{"plot": '"><script>', "csv": "</a><script>", "columns": ["<script>"], "rows": "<script>"}]}],
    ids=["empty", "text", "number", "csv", "list", "word", "script"],
)  # fmt: skip
def test_a_strangers_bundle_is_escaped_or_ignored(bundle: Any) -> None:
    made = page_of(new_output("display_data", data={"image/png": "iVBORw0KGgo=", FIGURE_MIME: bundle}))
    assert not made.select("script")
    assert len(made.select("img")) == 1


def test_page_loads_nothing_by_policy() -> None:
    policy = page_of().select_one('meta[http-equiv="Content-Security-Policy"]')["content"]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert not any("http" in value or "*" in value or "'self'" in value for value in rules.values())


def test_foreign_notebook_exports_through_nbconvert(tmp_path: Path) -> None:
    book = foreign_notebook(tmp_path / "theirs.ipynb")
    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "moe_html", str(book)],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = BeautifulSoup((tmp_path / "theirs.html").read_text(), "html.parser")
    assert made.select_one("table.dataframe").get_text(" ").split() == ["a", "0", "1.5"]
    assert len(made.select("math")) == 3
    assert "IntSlider(value=3)" in made.text
    assert made.select_one('meta[http-equiv="Content-Security-Policy"]')
    assert "8 pictures, scripts or frames that the notebook names elsewhere are not loaded" in made.text
    assert not made.select("script[src*=require], script[src*=mathjax], script[type*=widget]")


def record_page(tmp_path: Path, record: Any) -> Path:
    book = new_notebook(cells=[text("# T")])
    book["metadata"]["moe_lab"] = {"environment": {}, "record": record}
    (tmp_path / "page.html").write_text(to_html(book, Path("n.ipynb")))
    return tmp_path / "page.html"


def test_record_survives_the_page_whatever_its_text(tmp_path: Path) -> None:
    record = {"schema": 1, "cells": [{"source": "x = '</script><!--&amp;\\u2028 \N{LINE SEPARATOR} \"é\\\\n'"}]}
    assert read_record(record_page(tmp_path, record)) == record
    assert "</script" not in page_json(record)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"schema": 99, "environment": {"moe_lab": "9.9"}}, r"version 99 \(moe_lab 9\.9\).*reads version 1"),
        ({"cells": []}, "damaged"),
        ([1], "damaged"),
        (None, "no report that can be run again: .* those of nbconvert do not"),
    ],
    ids=["newer", "no-schema", "list", "none"],
)
def test_a_page_that_is_no_report_is_refused(record: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=says):
        read_record(record_page(tmp_path, record))


@pytest.mark.parametrize("content", [b"<html>", b"\xff\xfe\x00", b""], ids=["html", "binary", "empty"])
def test_reproduce_of_another_page_is_exit_2(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from moe_lab.cli import main

    page = tmp_path / "other.html"
    page.write_bytes(content)
    assert main(["reproduce", str(page)]) == 2
    assert main(["reproduce", str(tmp_path / "none.html")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("cells", [1, [1], [{"type": "image", "source": "", "tags": [], "id": ""}]], ids=str)
def test_damaged_cells_are_refused_before_anything_runs(cells: Any, tmp_path: Path) -> None:
    from moe_lab.report import reproduce

    record = {"schema": 1, "cells": cells, "parameters": {}, "numbers": []}
    with pytest.raises(lab.LabError, match="record is damaged"):
        reproduce(record_page(tmp_path, json.loads(json.dumps(record))))
