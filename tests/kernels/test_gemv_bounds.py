"""The kernel reads no byte behind the weights: they end where a forbidden page begins, so one byte more ends it all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, mmap, sys
import torch
from moe_lab.formats import quantize
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.rows import quantize_rows

def at_the_edge(t):
    "A copy of uint8 `t` whose last byte is the last before a page that must not be touched."
    pages = -(-t.numel() // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = pages * mmap.PAGESIZE - t.numel()
    held = torch.frombuffer(area, dtype=torch.uint8, count=t.numel(), offset=offset).view(t.shape)
    return held.copy_(t)

format, n, kd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
w = at_the_edge(quantize(torch.randn(2, n, kd), format).data)
assert w.data_ptr() % 2 == 0
x = torch.randn(3, kd)
rows = quantize_rows.quantize_q8_1(x)
chunks = torch.tensor([[1, 0, 3]], dtype=torch.int32)
out, ref = torch.full((3, n), float("nan")), torch.full((3, n), float("nan"))
every = torch.arange(3, dtype=torch.int32)
gemv.gemv(rows, every, w, chunks, format, out)
gemv.gemv_ref(rows, every, w, chunks, format, ref)
assert torch.equal(out, ref)
"""


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q8_0"])
def test_no_read_behind_the_weights(format: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, format, "5", "256"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-500:]}"
