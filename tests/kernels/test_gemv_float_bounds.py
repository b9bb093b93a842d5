"""The float kernel reads no byte behind codes, scales, biases or activations: all end where a forbidden page begins."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, mmap
import torch
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float.operands import Bias, Pairs, Rows
from tests.support.float_cases import weight

def at_the_edge(t):
    "A copy of `t` whose last byte is the last before a page that must not be touched."
    if t is None:
        return None
    pages = -(-t.nbytes // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = pages * mmap.PAGESIZE - t.nbytes
    return torch.frombuffer(area, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape).copy_(t)

for format, kd in (("bf16", 264), ("fp8_block", 272), ("nvfp4_ct", 272), ("mxfp4_oss", 288), ("int8_g32", 288),
                   ("q3_k", 256), ("q8_0", 288), ("mxfp4", 288)):
    w = weight(format, 8, kd)
    edge = w._replace(data=at_the_edge(w.data), scales=at_the_edge(w.scales), second=at_the_edge(w.second))
    x = at_the_edge(torch.randn(3, kd).bfloat16())
    pairs = Pairs(at_the_edge(torch.arange(3).int()), at_the_edge(torch.tensor([[1, 0, 3]]).int()))
    bias = Bias(at_the_edge(torch.randn(2, 8)))
    out, ref = (torch.full((3, 8), float("nan")) for _ in range(2))
    gf.gemv_float(Rows(x), pairs, edge, out, bias=bias)
    gf.gemv_float_ref(Rows(x), pairs, w, ref, bias=bias)
    assert torch.equal(out, ref), format
"""


def test_no_read_behind_any_operand() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-500:]}"
