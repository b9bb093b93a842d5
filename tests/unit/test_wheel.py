"""A wheel built from this tree, installed into an environment without the tree, used from another folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build", reason="building a wheel needs the extra `dev` (package `build`)")
    out, tree = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("tree")
    # From a copy: setuptools leaves build/ behind, and what lay there before would find its way into the wheel.
    for folder in ("moe_lab", "kernels"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(tree)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-2000:] + built.stderr[-2000:]
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Interpreter of a new environment: the wheel, this environment's packages below it, but not its own install."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    # A path in a .pth adds packages without running the .pth files there, so the editable install stays out.
    (site / "below.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder / "bin" / "python")


def run(python: str, *arguments: str, cwd: Path, **variables: str) -> str:
    # nbconvert's stock templates are data files of the environment whose packages are borrowed.
    # PYTHONPATH would put a checkout before the installed wheel.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"JUPYTER_PATH": str(Path(sys.prefix) / "share" / "jupyter"), **variables}
    done = subprocess.run([python, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_wheel_holds_code_templates_and_type_marks_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("moe_lab/py.typed", "moe_lab_kernels/py.typed", "moe_lab/report/templates/moe_lab/index.html.j2"):
        assert needed in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"moe_lab", "moe_lab_kernels"}
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "moe_lab").rglob("*.py")}
    sources |= {p.relative_to(ROOT / "kernels").as_posix() for p in (ROOT / "kernels").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_installed_wheel_computes_elsewhere(python: str, tmp_path: Path) -> None:
    code = (
        "import moe_lab as lab, moe_lab_kernels, torch\n"
        "print(lab.route(torch.randn(5, 8), lab.RouterSpec(8, 2)).ids.shape, lab.__file__, moe_lab_kernels.__file__)"
    )
    shape, *files = run(python, "-c", code, cwd=tmp_path).rsplit(maxsplit=2)
    assert shape == "torch.Size([5, 2])"
    assert not [f for f in files if f.startswith(str(ROOT))]


def test_installed_wheel_exports_a_notebook(python: str, tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text(
        '{"cells": [{"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# T $x^2$"}],'
        ' "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    )
    run(python, "-m", "nbconvert", "--to", "moe_html", "n.ipynb", cwd=tmp_path)
    page = (tmp_path / "n.html").read_text()
    assert "<msup>" in page
    assert "<script" not in page


def test_installed_wheel_has_its_command(python: str, tmp_path: Path) -> None:
    assert "doctor" in run(python, "-m", "moe_lab", "--help", cwd=tmp_path)


def test_installed_wheel_says_where_the_small_model_is(python: str, tmp_path: Path) -> None:
    code = "import moe_lab as lab\ntry:\n    lab.sample()\nexcept lab.LabError as error:\n    print(error)"
    assert "MOE_LAB_DATA" in run(python, "-c", code, cwd=tmp_path)


def test_your_own_runs_from_an_empty_folder(python: str, tmp_path: Path) -> None:
    """The notebook with user's own objects needs the wheel, the folder that holds the small model, and no checkout."""
    shutil.copy(ROOT / "notebooks" / "07_your_own.ipynb", tmp_path)
    code = (
        "import moe_lab, sys\nfrom moe_lab.report import run\n"
        "made = run('07_your_own.ipynb', 'page.html', tokens=32, decoded=6, folder=sys.argv[1])\n"
        "print(made.path.name, moe_lab.__file__)"
    )
    written = tmp_path / "written"
    written.mkdir()
    page, package = run(python, "-c", code, str(written), cwd=tmp_path, MOE_LAB_DATA=str(ROOT / "data")).split()[-2:]
    assert not package.startswith(str(ROOT))
    assert "INCORRECT" in (tmp_path / page).read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"07_your_own.ipynb", "page.html", "written"}
    assert len(list((written / "runs").glob("*.parquet"))) == 2
    assert "interpreter" in (written / "judged.csv").read_text()
