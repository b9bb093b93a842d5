"""Fault G19 on a CPU: three fresh processes choose alike and give the same bits; what was chosen is in the record."""

from pathlib import Path

from tests.support.fresh_process import said_thrice


def test_three_processes_agree(tmp_path: Path) -> None:
    first, *others = said_thrice("cpu", tmp_path)
    assert others == [first, first]
    assert [said[1] for name, said in first.items() if name.startswith("auto")] == ["gemv", "gemv"]
