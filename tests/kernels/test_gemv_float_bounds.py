"""The float kernel reads no byte behind codes, scales, biases or activations: all end where a forbidden page begins."""

from tests.support.page_edge import run_program

PROGRAM = """
import torch
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float.operands import Bias, Pairs, Rows
from tests.support.float_cases import weight
from tests.support.page_edge import at_the_edge

for format, kd in (("bf16", 264), ("fp8_block", 272), ("nvfp4_ct", 272), ("mxfp4_oss", 288), ("int8_g32", 288),
                   ("q3_k", 256), ("q8_0", 288), ("mxfp4", 288)):
    w = weight(format, 8, kd)
    more = {name: at_the_edge(t) for name in ("scales", "second") if (t := getattr(w, name)) is not None}
    edge = w._replace(data=at_the_edge(w.data), **more)
    x = at_the_edge(torch.randn(3, kd).bfloat16())
    pairs = Pairs(at_the_edge(torch.arange(3).int()), at_the_edge(torch.tensor([[1, 0, 3]]).int()))
    bias = Bias(at_the_edge(torch.randn(2, 8)))
    out, ref = (torch.full((3, 8), float("nan")) for _ in range(2))
    gf.gemv_float(Rows(x), pairs, edge, out, bias=bias)
    gf.gemv_float_ref(Rows(x), pairs, w, ref, bias=bias)
    assert torch.equal(out, ref), format
"""


def test_no_read_behind_any_operand() -> None:
    done = run_program(PROGRAM)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-500:]}"
