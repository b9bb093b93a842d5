"""The kernel reads no byte behind the weights: they end where a forbidden page begins, so one byte more ends it all."""

import pytest

from tests.support.page_edge import run_program

PROGRAM = """
import sys
import torch
from tests.support.page_edge import at_the_edge
from moe_lab.formats import quantize
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.rows import quantize_rows
from moe_lab_kernels.storage.planar import repack_ref

format, n, kd, layout = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
raw = quantize(torch.randn(2, n, kd), format).data
w = at_the_edge(raw if layout == "raw" else repack_ref(raw, format)[:, None])
assert w.data_ptr() % 2 == 0
x = torch.randn(3, kd)
rows = quantize_rows.quantize_q8_1(x)
chunks = torch.tensor([[1, 0, 3]], dtype=torch.int32)
out, ref = torch.full((3, n), float("nan")), torch.full((3, n), float("nan"))
every = torch.arange(3, dtype=torch.int32)
gemv.gemv(rows, every, w, chunks, format, out, layout=layout)
gemv.gemv_ref(rows, every, w, chunks, format, ref, layout=layout)
assert torch.equal(out, ref)
"""


@pytest.mark.parametrize(("format", "layout"), [("q2_k", "raw"), ("q3_k", "raw"), ("q8_0", "raw"), ("q5_k", "planar")])
def test_no_read_behind_the_weights(format: str, layout: str) -> None:
    done = run_program(PROGRAM, format, "5", "256", layout)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-500:]}"
