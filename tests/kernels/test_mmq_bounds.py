"""The int8 product reads no byte behind raw blocks: they end where a forbidden page begins."""

from tests.support.page_edge import run_program

PROGRAM = """
import torch
from tests.support.page_edge import at_the_edge
from moe_lab.formats import quantize, quantize_activations
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import MmqRows, layout_for

torch.manual_seed(0)
work = WorkList(torch.tensor([[1, 0, 3]], dtype=torch.int32), 16)
for format, kd in (("q3_k", 256), ("q8_0", 128), ("mxfp4", 128)):
    raw = quantize(torch.randn(2, 4, kd), format).data
    w = Weight(at_the_edge(raw), format, kd)
    q = quantize_activations(torch.randn(3, kd), layout_for(format))
    rows = MmqRows(q.codes, q.scale, q.total, layout_for(format))
    want = mmq.mmq_product_ref(rows, None, w, work, torch.full((3, 4), float("nan")))
    for stages in (1, 2):
        got = mmq.mmq_product(rows, None, w, work, torch.full_like(want, float("nan")), tile=Tile(64, 4, stages, 1))
        assert torch.equal(got, want), (format, stages)
print("whole")
"""


def test_no_read_behind_the_weights() -> None:
    done = run_program(PROGRAM)
    assert done.stdout == "whole\n", f"exit {done.returncode}: {done.stderr[-500:]}"
