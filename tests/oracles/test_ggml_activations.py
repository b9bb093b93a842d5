"""ggml's own activation quantisers (C, for its CPU arm) against ours: the same bytes."""

import ctypes

import numpy as np
import pytest
import torch

from moe_lab.formats import Arithmetic, quantize_activations, to_blocks
from tests.support.activation_cases import KINDS, case

ggml = pytest.importorskip("ggml", reason="ggml-python is the C oracle")
# The C q8_1 differs from the CUDA one: it multiplies by 1 / d and sums codes.
C_CHOICES = {
    "q8_0": None,
    "q8_1": Arithmetic(rounding="reciprocal", sum="quantised"),
    "q8_k": None,
}


def c_rows(layout: str, x: torch.Tensor, size: int) -> np.ndarray:
    """The blocks that ggml writes for one row."""
    quantise = getattr(ggml.lib, f"quantize_row_{layout.replace('_k', '_K')}_ref")
    quantise.restype, quantise.argtypes = None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    source, out = x.contiguous().numpy(), np.zeros(size, dtype=np.uint8)
    quantise(source.ctypes.data_as(ctypes.c_void_p), out.ctypes.data_as(ctypes.c_void_p), source.size)
    return out


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "subnormal"])
@pytest.mark.parametrize("layout", C_CHOICES)
def test_bytes_are_ggmls(layout: str, kind: str) -> None:
    x = case(kind, rows=16, kd=4096)
    ours = to_blocks(quantize_activations(x, layout, C_CHOICES[layout])).flatten(1).numpy()
    theirs = np.stack([c_rows(layout, row, ours.shape[1]) for row in x])
    differing = int((ours != theirs).sum())
    assert differing == 0, f"{differing} of {ours.size} bytes differ"
