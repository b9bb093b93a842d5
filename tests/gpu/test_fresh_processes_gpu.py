"""Fault G19 on a GPU: three fresh processes, none with a compiled kernel or a table of its own, give the same bits."""

from pathlib import Path

import pytest
import torch

from tests.support.fresh_process import said_thrice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


def test_three_processes_agree(tmp_path: Path) -> None:
    first, *others = said_thrice("cuda", tmp_path)
    assert others == [first, first]
    assert all(said[1] != "auto" for said in first.values()), "the arm that was taken is in the record"
    assert all("num_warps=" in str(said[-1]) for said in first.values()), "and so is each kernel's tile"
