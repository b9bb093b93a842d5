"""Running notebooks: the shipped ones, and a small one whose outputs are known."""

from pathlib import Path

import pytest
from bs4 import BeautifulSoup

from moe_lab.report import Report, run
from tests.support.notebooks import code, small_report, text, write

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    return run(small_report(folder / "small.ipynb"), folder / "small.html", layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_shipped_notebook_runs_and_exports(path: Path, tmp_path: Path) -> None:
    """Its last cell asserts its claims, so a notebook that stopped being true fails here."""
    made = run(path, tmp_path / f"{path.stem}.html")
    page = BeautifulSoup(made.path.read_text(), "html.parser")
    assert made.path.stat().st_size < 10e6
    assert all(picture.get("alt") for picture in page.select("img"))
    assert "No description has been provided" not in page.text
    assert not page.select('[data-mime-type="application/vnd.jupyter.stderr"]'), "a cell wrote to stderr"


def test_parameter_reaches_the_cells(report: Report) -> None:
    assert report.text("breakdown").splitlines()[-1].split() == ["2", "2", "6.0"]
    assert "layers = 3" in BeautifulSoup(report.path.read_text(), "html.parser").text


def test_page_has_the_stamp_of_this_interpreter(report: Report) -> None:
    import torch

    page = BeautifulSoup(report.path.read_text(), "html.parser")
    stamp = {d.dt.text: d.dd.text for d in page.select(".moe-stamp dl div")}
    assert stamp["torch"] == torch.__version__
    assert {"backend", "device", "commit", "python", "triton"} <= set(stamp)
    assert not page.select(".moe-note")


def test_widget_state_is_kept_in_the_executed_notebook(report: Report) -> None:
    state = report.notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    assert any("SelectionSlider" in model["model_name"] for model in state.values())


def test_progress_is_one_call_a_code_cell_under_its_heading(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    book = write(tmp_path / "n.ipynb", code("1"), text("# Title"), code("2"), text("## Step"), code("3"))
    run(book, tmp_path / "n.html", progress=lambda done, total, title, _: seen.append((done, total, title)))
    assert seen == [(1, 3, "1"), (2, 3, "Title"), (3, 3, "Step")]


def test_report_lands_in_reports_beside_the_notebooks(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    made = run(write(tmp_path / "notebooks" / "n.ipynb", code("1")))
    assert made.path == tmp_path / "reports" / "n.html"


def test_cells_run_in_the_notebooks_folder(tmp_path: Path) -> None:
    book = write(tmp_path / "n.ipynb", code("import os\nprint(os.getcwd())", "where"))
    assert run(book, tmp_path / "n.html").text("where") == str(tmp_path)


def test_finished_run_removes_what_a_failed_one_left(tmp_path: Path) -> None:
    left = tmp_path / "n.partial.html"
    left.write_text("half")
    run(write(tmp_path / "n.ipynb", code("1")), tmp_path / "n.html")
    assert not left.exists()
