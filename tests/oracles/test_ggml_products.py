"""ggml's own dot products (C, for its CPU arm) against `lab.matmul` and the numpy emulation of the tests."""

import ctypes

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.formats import quantize, quantize_activations, to_blocks
from moe_lab.parity import nmse
from moe_lab.tolerances import tol
from tests.support import ggml_arms

ggml = pytest.importorskip("ggml", reason="ggml-python is the C oracle")
K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
N, KD = 12, 2048


def c_dot(name: str, w: np.ndarray, x: np.ndarray) -> float:
    """One output by ggml's CPU kernel `name`."""
    dot = getattr(ggml.lib, name)
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    dot.restype, dot.argtypes = None, [ctypes.c_int, pointer, size, pointer, size, pointer, size, ctypes.c_int]
    out, w, x = np.zeros(1, np.float32), np.ascontiguousarray(w), np.ascontiguousarray(x)
    dot(KD, out.ctypes.data, 0, w.ctypes.data, 0, x.ctypes.data, 0, 1)
    return float(out[0])


@pytest.mark.parametrize("format", [*K_QUANTS, "q8_0", "q4_0", "mxfp4", "nvfp4"])
def test_products_of_the_cpu_arm(format: str) -> None:
    """Order and, in ggml's SIMD, fused steps differ in last bits; formats without super-blocks meet q8_0 rows."""
    draw = torch.Generator().manual_seed(8)
    ggml.lib.ggml_cpu_init()  # fills the table of fp16 values that its dots read
    x, w = torch.randn(5, KD, generator=draw) * 2, torch.randn(N, KD, generator=draw) * 0.05
    q, layout = quantize(w, format), "q8_k" if format in K_QUANTS else "q8_0"
    name = f"ggml_vec_dot_{format.replace('_k', '_K')}_{layout.replace('_k', '_K')}"
    if not hasattr(ggml.lib, name):
        pytest.skip(f"this build of ggml has no {name}")
    blocks = to_blocks(quantize_activations(x, layout)).flatten(1).numpy()
    theirs = torch.tensor([[c_dot(name, row, b) for row in q.data.numpy()] for b in blocks])
    for arm in ("gemv", "mmq"):
        assert nmse(lab.matmul(x, q, arm, activation=layout), theirs) <= tol("mmq/emulation"), arm
    if format in K_QUANTS:
        assert nmse(torch.from_numpy(ggml_arms.cpu_arm(q.data.numpy(), x.numpy(), format)), theirs) <= tol(
            "mmq/emulation"
        )
