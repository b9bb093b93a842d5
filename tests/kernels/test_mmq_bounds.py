"""The int8 product reads no byte behind raw blocks: they end where a forbidden page begins."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, mmap
import torch
from moe_lab.formats import quantize, quantize_activations
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import MmqRows, layout_for

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
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.stdout == "whole\n", f"exit {done.returncode}: {done.stderr[-500:]}"
