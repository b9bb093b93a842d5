"""Tensors that end where a forbidden page begins: a kernel that reads one byte more ends its process."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def at_the_edge(t: torch.Tensor) -> torch.Tensor:
    """A copy of `t` whose last byte is the last before a page that must not be touched."""
    pages = -(-t.nbytes // mmap.PAGESIZE)
    area = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(start + pages * mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    offset = pages * mmap.PAGESIZE - t.nbytes
    return torch.frombuffer(area, dtype=t.dtype, count=t.numel(), offset=offset).view(t.shape).copy_(t)


def run_program(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own, with Triton's interpreter: what it said and how it ended."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)
