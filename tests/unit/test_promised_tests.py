"""Tests that the documents name as evidence are there, under the name they are called by."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[a-z_/0-9]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("document", ["decode.md"])
def test_every_named_test_exists(document: str) -> None:
    named = NAMED.findall((ROOT / "docs" / document).read_text())
    assert len(named) > 10
    lost = [f"{path}::{name}" for path, name in named if f"def {name}(" not in (ROOT / path).read_text()]
    assert not lost
