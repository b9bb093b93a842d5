"""docs/streaming.md names a test for every streaming fault: the rows are all there, and so are the tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOC = ROOT / "docs" / "streaming.md"
FAULTS = ("S01", "S02", "S04", "S05", "S07", "S08", "S10", "S11", "S13", "S14", "S16", "S17", "S19")
MODES = (
    "short read", "EIO", "truncated file", "checksum", "slow disk", "slot evicted", "poison of", "eviction of",
    "duplicate keys",
    "more distinct experts", "prefetch races", "a fill that fails", "cancellation", "shutdown", "memory refused",
    "memory too small", "the limit of locked memory",
    "a swallowed asynchronous error", "wrong but plausible bytes", "memory beyond", "drift",
)  # fmt: skip


def rows() -> list[tuple[str, list[tuple[str, str]]]]:
    """(fault, [(file, test)]) of the table "Fault by fault"."""
    part = DOC.read_text().split("## Fault by fault")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| ")][1:]
    return [(cells[0].strip(), re.findall(r"`([\w/]+\.py)::(\w+)`", cells[2])) for cells in lines]


@cache
def named_in(file: str) -> frozenset[str]:
    """Test functions of a file, those in classes too."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


@pytest.mark.parametrize(("fault", "tests"), rows(), ids=[fault for fault, _ in rows()])
def test_every_named_test_is_there(fault: str, tests: list[tuple[str, str]]):
    assert tests, fault
    for file, name in tests:
        assert name in named_in(file), f"{fault}: {file} has no {name}"


@pytest.mark.parametrize("fault", FAULTS + MODES)
def test_every_fault_has_a_row(fault: str):
    assert [name for name, _ in rows() if name.startswith(fault)], fault
