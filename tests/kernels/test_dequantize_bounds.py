"""The decoding kernels read no byte behind the blocks: they end where a forbidden page begins."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, mmap
import torch
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.dequantize.dequantize import dequantize, dequantize_ref
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.storage.planar import repack, repack_ref, restore
from moe_lab_kernels.storage.planar_layout import PIECES

def at_the_edge(t):
    "A copy of uint8 `t` whose last byte is the last before a page that must not be touched."
    pages = -(-t.numel() // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = pages * mmap.PAGESIZE - t.numel()
    return torch.frombuffer(area, dtype=torch.uint8, count=t.numel(), offset=offset).view(t.shape).copy_(t)

for format, block in BLOCKS.items():
    print(format, flush=True)
    for blocks in (1, 2, 4) if block.bytes % 4 else (4,):  # starts at every address modulo 4
        raw = torch.randint(120, (1, blocks * block.bytes), dtype=torch.uint8)
        edge = at_the_edge(raw)
        assert torch.equal(dequantize(edge, format, torch.float32), dequantize_ref(raw, format))
    if format in PIECES:
        kd = 4 * block.values
        planes = at_the_edge(repack(edge, format))
        assert torch.equal(planes, repack_ref(raw, format))
        assert torch.equal(restore(planes, format, 1, kd), raw)
        assert torch.equal(dequantize_planar(planes, format, 1, kd, torch.float32), dequantize_ref(raw, format))
"""


def test_no_read_behind_the_blocks() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"exit {done.returncode} at {done.stdout.split()[-1:]}: {done.stderr[-500:]}"
