"""`moe-lab reproduce`: a page run again says the same, or what moved."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_lab.cli import main
from moe_lab.report import run
from moe_lab.report.record import read_record
from tests.support.notebooks import code, text, write


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report whose values come from a file beside its notebook, so that a test can move them."""
    folder = tmp_path_factory.mktemp("book") / "notebooks"
    folder.mkdir()
    (folder / "measured.json").write_text(json.dumps({"gemv": 2.0, "mine": 3.0, "time": 1.0}))
    book = write(
        folder / "n.ipynb",
        text("# A page"),
        code("scale = 1\nwanted = None", "parameters"),
        text("## The table"),
        code(
            "import json, pandas as pd\nread = json.load(open('measured.json'))\n"
            "pd.DataFrame({'arm': ['gemv', 'mine'], 'nmse': [read['gemv'] * scale, read['mine'] * scale],\n"
            "              'time_ms': read['time']})"
        ),
        text("## The claim"),
        code("assert read['gemv'] < 100, 'gemv is close'\nprint(f'{scale} scale')"),
    )
    return run(book, folder.parent / "reports" / "n.html", scale=10, wanted=("a", 1)).path


def measure(page: Path, **values: float) -> None:
    file = page.parent.parent / "notebooks" / "measured.json"
    file.write_text(json.dumps({"gemv": 2.0, "mine": 3.0, "time": 1.0, **values}))


def call(capsys: Any, page: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["reproduce", str(page), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_the_page_holds_what_it_needs_and_no_path(page: Path) -> None:
    record = read_record(page)
    assert record["parameters"] == {"scale": "10", "wanted": "('a', 1)"}
    assert record["folder"] == "../notebooks"
    assert record["notebook"] == "n.ipynb"
    assert str(page.parent.parent) not in page.read_text()
    assert [n["text"] for n in record["numbers"]] == ["20.0", "1.0", "30.0", "1.0", "10"]


def test_unchanged_page_holds_though_its_notebook_file_is_gone(page: Path, capsys: Any) -> None:
    """The cells come out of the page; the parameters too, or 2.0 would not be 20.0."""
    (page.parent.parent / "notebooks" / "n.ipynb").unlink(missing_ok=True)
    measure(page)
    code, answer = call(capsys, page)
    assert (code, answer["ok"], answer["rows"]) == (0, True, [])


def test_what_moved_is_named_with_where_it_stands(page: Path, capsys: Any) -> None:
    measure(page, mine=3.3, time=2.0)
    code, answer = call(capsys, page)
    value, *times = answer["rows"]
    assert (code, answer["ok"]) == (1, False)
    assert {k: value[k] for k in ("kind", "cell", "title", "column", "before", "after")} == {
        "kind": "value", "cell": 3, "title": "The table", "column": "nmse", "before": "30.0", "after": "33.0",
    }  # fmt: skip
    assert value["change"] == pytest.approx(0.1)
    assert [row["kind"] for row in times] == ["time", "time"]


def test_times_count_only_when_asked_and_the_threshold_is_an_option(page: Path, capsys: Any) -> None:
    measure(page, time=2.0, mine=3.3)
    assert call(capsys, page, "--threshold", "0.2")[0] == 0
    code, answer = call(capsys, page, "--threshold", "0.2", "--times")
    assert (code, {row["kind"] for row in answer["rows"]}) == (1, {"time"})


def test_a_claim_that_fails_now_is_an_answer(page: Path, capsys: Any) -> None:
    measure(page, gemv=1000.0)
    assert main(["reproduce", str(page)]) == 1
    out = capsys.readouterr().out
    assert "a claim fails now: cell 4 (The claim) raised AssertionError: gemv is close" in " ".join(out.split())


def test_a_page_that_cannot_run_is_exit_2(page: Path, capsys: Any) -> None:
    (page.parent.parent / "notebooks" / "measured.json").unlink()
    assert main(["reproduce", str(page)]) == 2
    assert "raised FileNotFoundError" in capsys.readouterr().err


def test_a_report_whose_claim_fails_says_no(tmp_path: Path, capsys: Any) -> None:
    """As `reproduce` does: 1 is an answer, 2 an accident."""
    book = write(tmp_path / "n.ipynb", text("# A page"), text("## The claim"), code("assert 2 < 1, 'less'"))
    command = ["report", "--notebook", str(book), "--out", str(tmp_path / "n.html"), "--json"]
    assert main(command) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["rows"][0]["claim"]) == (False, "raised AssertionError: less")
    assert not (tmp_path / "n.html").exists()
    write(book, code("1 / 0"))
    assert main(command) == 2
