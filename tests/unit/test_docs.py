"""What the documents point at exists: links and their headings, files, modules and names."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] + [
    page
    for room in ("benchmarks", "data", "kernels", "moe_lab", "tests", "tools")
    for page in sorted((ROOT / room).rglob("README.md"))
    if "work" not in page.relative_to(ROOT).parts
]
BESIDE = (ROOT, ROOT / "moe_lab", ROOT / "kernels" / "moe_lab_kernels", ROOT / "benchmarks", ROOT / "tests")
FILE = re.compile(r"`([\w./-]+/[\w.-]+\.(?:py|md|csv|json|ipynb|npz|gguf|toml|txt|parquet))(?:::[\w.]+)?`")
NAME = re.compile(r"`((?:moe_lab|moe_lab_kernels)(?:\.\w+)+)")
# Said to be absent (it would shadow a package), and a key of GGUF files.
NO_FILES, NO_NAMES = {"kernels/__init__.py"}, {"moe_lab.moe_layers"}
EVERY = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def _headings(page: Path) -> set[str]:
    """Anchors as GitHub makes them of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@EVERY
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith(("http://", "https://", "mailto:")):
            file, _, heading = link.partition("#")
            target = (page.parent / file).resolve() if file else page
            assert target.exists(), f"{link}: there is no such file"
            assert not heading or heading in _headings(target), f"{link}: there is no such heading"


@EVERY
def test_files_named_exist(page: Path) -> None:
    named = set(FILE.findall(page.read_text())) - NO_FILES
    missing = {name for name in named if not any((base / name).exists() for base in (page.parent, *BESIDE))}
    assert not missing


@EVERY
def test_modules_and_names_exist(page: Path) -> None:
    named = set(NAME.findall(page.read_text())) - NO_NAMES
    missing = {name for name in named if not _there(name)}
    assert not missing


def _there(name: str) -> bool:
    """Whether the longest part that is a module holds the next one, if any, by its text: nothing is imported."""
    parts = name.split(".")
    base = ROOT / "kernels" if parts[0] == "moe_lab_kernels" else ROOT
    for n in range(len(parts), 0, -1):
        path = base.joinpath(*parts[:n])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.exists():
            return n == len(parts) or re.search(rf"\b{parts[n]}\b", file.read_text()) is not None
    return False


def test_what_is_missing_is_found() -> None:
    assert _there("moe_lab.routing.route")
    assert not _there("moe_lab.routing_checks.check_route")
    assert not _there("moe_lab.routing.sold_elsewhere")
    assert "two-commands" in _headings(ROOT / "README.md")
