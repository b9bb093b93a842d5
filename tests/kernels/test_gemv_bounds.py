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
from moe_lab_kernels.storage.planar import repack_ref

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
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, format, "5", "256", layout], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-500:]}"
