"""The house's rules that a reader cannot see at a glance: import order, packages, generated files, sizes, versions."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# A room may import its own floor and those above it in this list; the package itself (lazy names) stands outside.
FLOORS = (
    {"errors", "_types", "checks", "protocols", "tolerances", "system", "card"},
    {"moe_lab_kernels"},
    {"spec", "families", "models", "formats", "timing", "trace", "sample"},
    {"tap"},
    {"activations"},
    {"checkpoint"},
    {"routing", "workspace", "arms", "weights", "block", "numerics"},
    {"stream"},
    {"layer", "execution"},
    {"assembly", "open", "export"},
    {"analysis", "caching", "parity", "simulate", "bench", "hf", "plots", "inspect", "layouts", "runs", "strategies"}
    | {"replay"},
    {"explore", "report", "cli", "__main__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
SOURCES = sorted([*(ROOT / "moe_lab").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
MODULES = [path for path in SOURCES if path != ROOT / "moe_lab" / "__init__.py"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] == "moe_lab_kernels" or len(parts) == 1 else parts[1]


def imported(node: ast.AST) -> list[str]:
    """Our own modules that an import statement names; `from moe_lab import x` counts as `moe_lab.x`."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        names = [f"moe_lab.{a.name}" for a in node.names] if node.module == "moe_lab" else [node.module or ""]
    else:
        return []
    return [name for name in names if name.split(".")[0] in ("moe_lab", "moe_lab_kernels")]


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_down(path: Path) -> None:
    room = room_of(module_name(path))
    assert room in FLOOR, f"moe_lab/{room} stands on no floor: add it to FLOORS where it belongs"
    for node in ast.walk(ast.parse(path.read_text())):
        for name in imported(node):
            target = room_of(name)
            assert target in FLOOR, f"line {getattr(node, 'lineno', 0)} imports {name}, which no floor holds"
            assert FLOOR[target] <= FLOOR[room], f"line {getattr(node, 'lineno', 0)}: {room} imports {name}, above it"


def test_no_import_circles() -> None:
    names = {module_name(path): path for path in MODULES}
    graph = {}
    for name, path in names.items():
        found = {t for node in ast.parse(path.read_text()).body for t in imported(node)}
        found |= {f"{t}.{a.name}" for t, a in _from_names(path)}
        graph[name] = {t for t in found if t in names and t != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import circle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def _from_names(path: Path) -> list[tuple[str, ast.alias]]:
    body = ast.parse(path.read_text()).body
    return [(node.module or "", a) for node in body if isinstance(node, ast.ImportFrom) for a in node.names]


def test_kernels_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow Hugging Face's `kernels`"


def test_every_source_folder_is_packaged() -> None:
    find = PROJECT["tool"]["setuptools"]["packages"]["find"]
    packaged = {name for where in find["where"] for name in find_packages(ROOT / where, include=find["include"])}
    assert packaged == {module_name(path / "__init__.py") for path in {source.parent for source in SOURCES}}


def test_notebook_folder_shadows_no_package() -> None:
    assert not {p.name for p in (ROOT / "notebooks").iterdir()} & {"moe_lab", "moe_lab_kernels"}


@pytest.mark.parametrize("folder", ["moe_lab", "kernels", "tests", "tools", "data"])
def test_no_file_is_too_long(folder: str) -> None:
    files = [p for p in (ROOT / folder).rglob("*.py") if "work" not in p.relative_to(ROOT).parts]
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"split these by their jobs: {long}"


def test_environment_yml_follows_pyproject() -> None:
    check = subprocess.run([sys.executable, "tools/sync_env.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stderr


def test_environment_yml_names_the_workbench_and_installs_the_project() -> None:
    text = (ROOT / "environment.yml").read_text()
    for name in ("jupyterlab", "torch", "triton", "matplotlib", "pandas", "ipywidgets"):
        assert re.search(rf'^      - "{name}\b', text, flags=re.M), f"{name} is not named"
    assert re.search(r'^      - "-e \.\[[\w,]+\]"$', text, flags=re.M)


def test_constraints_pin_exactly_the_direct_dependencies() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    listed = {
        re.match(r"[\w.-]+", d)[0] for d in [*PROJECT["project"]["dependencies"], *itertools.chain(*extras.values())]
    }
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    assert set(pinned) == listed - {"moe-lab"}
    assert pinned["torch"] == "2.13.0"
    assert pinned["triton"] == "3.7.1"


def test_missing_extra_names_an_extra_that_has_the_package() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    has = {extra: {re.match(r"[\w.-]+", d)[0] for d in needs} for extra, needs in extras.items()}
    has["report"] |= has["lab"]  # moe-lab[report] installs moe-lab[lab]
    calls = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtra":
                calls += 1
                extra = ast.literal_eval(node.args[1])
                assert extra in has, f"{path.name}:{node.lineno} names the extra {extra!r}; there are {', '.join(has)}"
                if isinstance(node.args[0], ast.Constant):
                    assert node.args[0].value in has[extra], f"{path.name}:{node.lineno}: {extra} lacks that package"
    assert calls > 3


def test_one_version() -> None:
    import moe_lab

    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), flags=re.M)
    assert cited is not None
    assert {PROJECT["project"]["version"], cited[1]} == {moe_lab.__version__}
