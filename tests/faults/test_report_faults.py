"""What goes wrong with a report: each ends soon, in one line that names the cell or the argument."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

import moe_lab as lab
from moe_lab.explore import Explorer
from moe_lab.numerics.distance import error_bins
from moe_lab.report import CellError, run
from tests.support.notebooks import code, text, write


def test_killed_kernel_ends_the_run_and_keeps_what_was_done(tmp_path: Path) -> None:
    book = write(
        tmp_path / "n.ipynb",
        text("# T"),
        code("print('before' + '-the-end')"),
        text("## Too much memory"),
        code("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"),
        code("print('never' + '-reached')"),
    )
    start = time.perf_counter()
    with pytest.raises(CellError, match=r"cell 2 \(Too much memory\) lost its kernel.*n\.partial\.html") as caught:
        run(book, tmp_path / "n.html")
    assert time.perf_counter() - start < 30
    assert "\n" not in str(caught.value)
    partial = (tmp_path / "n.partial.html").read_text()
    assert "before-the-end" in partial
    assert "never-reached" not in partial
    assert "Not finished: cell 2" in partial
    assert not (tmp_path / "n.html").exists()


def test_raising_cell_is_named_with_its_error_on_one_line(tmp_path: Path) -> None:
    book = write(tmp_path / "n.ipynb", text("# T"), code("raise ValueError('two\\nlines')"))
    with pytest.raises(CellError, match=r"cell 1 \(T\) raised ValueError: two lines"):
        run(book, tmp_path / "n.html")


def test_cell_that_never_ends_is_stopped(tmp_path: Path) -> None:
    book = write(tmp_path / "n.ipynb", text("# T"), code("while True: pass"))
    with pytest.raises(CellError, match=r"cell 1 \(T\) ran longer than 2 s"):
        run(book, tmp_path / "n.html", timeout_s=2)


def test_no_kernel_outlives_its_run(tmp_path: Path) -> None:
    book = write(tmp_path / "n.ipynb", code("import os\nprint(os.getpid())", "pid"))
    pid = int(run(book, tmp_path / "n.html").text("pid"))
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.1)
    pytest.fail(f"kernel {pid} still runs ten seconds after its report was written")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_kernel_that_is_not_installed_runs_here_with_a_note(tmp_path: Path) -> None:
    kernel = {"name": "conda-env-x-py", "display_name": "x", "language": "python"}
    made = run(write(tmp_path / "n.ipynb", text("# T"), code("print(1)"), kernel=kernel), tmp_path / "n.html")
    assert "asks for the kernel &#x27;conda-env-x-py&#x27;" in made.path.read_text().replace("'", "&#x27;")


def test_kernel_of_another_language_is_refused(tmp_path: Path) -> None:
    book = write(tmp_path / "n.ipynb", code("1"), kernel={"name": "ir", "display_name": "R", "language": "R"})
    with pytest.raises(lab.LabError, match="written for a R kernel"):
        run(book, tmp_path / "n.html")


def test_unknown_parameter_is_refused_before_anything_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    book = write(tmp_path / "n.ipynb", code("tokens = 1", "parameters"), code(f"open({str(mark)!r}, 'w')"))
    with pytest.raises(lab.LabError, match="no parameter 'token': it sets tokens"):
        run(book, tmp_path / "n.html", token=2)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "says"), [(None, "no such notebook file"), ("{", "not a notebook"), ("[]", "not a notebook")], ids=str
)
def test_what_is_no_notebook_is_refused(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    if content is not None:
        path.write_text(content)
    with pytest.raises(lab.LabError, match=says) as caught:
        run(path, tmp_path / "n.html")
    assert "\n" not in str(caught.value)


def test_large_outputs_stay_small(tmp_path: Path) -> None:
    """A 4096 x 4096 tensor, 10,000 rows and 50 figures: the page stays under 10 MB."""
    book = write(
        tmp_path / "n.ipynb",
        code("import torch, pandas as pd\nfrom matplotlib import pyplot as plt"),
        code("torch.zeros(4096, 4096)"),
        code("table = pd.DataFrame({'layer': 0, 'expert': range(10_000), 'assignments': 1})\ntable"),
        code("for _ in range(50):\n    plt.plot(torch.randn(1000))\n    plt.show()"),
    )
    assert run(book, tmp_path / "n.html").path.stat().st_size < 10e6


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: lab.plot.phases([1, 2]), "pandas DataFrame, got list"),
        (lambda: error_bins(_one(), _one(), arm_a="x", arm_b="y", kind="abs"), "'relative' and 'ulp', got 'abs'"),
        (lambda: Explorer([1], print, label="x", control="knob"), "control is 'knob'"),
    ],
    ids=["plot-a-list", "kind", "control"],
)
def test_wrong_kinds_of_argument_are_named(call: Any, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        call()


def _one() -> Any:
    import torch

    return torch.ones(1)
