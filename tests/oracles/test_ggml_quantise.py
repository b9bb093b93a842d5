"""The bytes that our quantisers write against ggml's C library, without importance matrix.

16,384 blocks of every kind for blocks of 32 and 64; k-quants 2,048 of every kind and 16,384 Gaussian ones here (all
kinds at 16,384 were equal too; that takes a minute). No byte differs: the C library, built for plain x86-64, holds
no FMA instruction, and torch fuses nothing between operations.
"""

import ctypes

import numpy as np
import pytest
import torch

from moe_lab.formats import FORMATS
from tests.support.weight_cases import KINDS, weights

ggml = pytest.importorskip("ggml", reason="ggml-python is the C oracle")

SIMPLE, K_QUANTS = ("q4_0", "q8_0", "mxfp4", "nvfp4"), ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")


def written_by_c(name: str, x: torch.Tensor) -> torch.Tensor:
    f, x = FORMATS[name], x.contiguous()
    out = np.zeros((len(x), f.row_bytes(x.shape[1])), dtype=np.uint8)
    source = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))
    target = out.ctypes.data_as(ctypes.c_void_p)
    ggml.ggml_quantize_chunk(f.ggml_type, source, target, 0, len(x), x.shape[1], None)
    return torch.from_numpy(out)


def blocks_that_differ(name: str, x: torch.Tensor) -> torch.Tensor:
    """Indices of blocks."""
    size = FORMATS[name].block_bytes
    ours, theirs = FORMATS[name].quantize(x), written_by_c(name, x)
    return (ours.view(-1, size) != theirs.view(-1, size)).any(-1).nonzero().squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*SIMPLE, *K_QUANTS])
def test_bytes_are_ggmls(name: str, kind: str) -> None:
    blocks = 16_384 if name in SIMPLE or kind == "gaussian" else 2048
    differ = blocks_that_differ(name, weights(kind, blocks, FORMATS[name].block))
    assert not len(differ), f"{len(differ)} of {blocks} blocks, first {int(differ[0])}"


@pytest.mark.parametrize("name", [*SIMPLE, *K_QUANTS])
def test_rows_of_many_blocks_are_ggmls(name: str) -> None:
    assert not len(blocks_that_differ(name, weights("student_t3", 24, 2816)))


def test_mxfp4_exponents_are_ggmls_just_below_powers_of_two() -> None:
    """log2 in fp32 rounds up to the next integer there; up to 44 steps below 2^127, exhaustive for every exponent."""
    powers = torch.arange(1, 254, dtype=torch.int32) << 23
    largest = (powers[:, None] - torch.arange(-8, 64, dtype=torch.int32)).flatten().view(torch.float32)
    x = torch.zeros(len(largest), 32)
    x[:, 7] = largest
    assert not len(blocks_that_differ("mxfp4", x))


def test_nvfp4_scales_are_ggmls_over_the_whole_range() -> None:
    """Every boundary of the scale's rounding: subnormal scales, carries into the exponent, saturation."""
    halves = torch.arange(1, 15 * 16 * 2 + 20, dtype=torch.int32) + (110 << 5)  # exponent and five mantissa bits
    edge = (halves << 18).view(torch.float32)[:, None] * 6.0
    largest = torch.cat([edge * (1 + step * 2.0**-23) for step in range(-3, 4)], 1).flatten()
    x = weights("gaussian", len(largest), 64).clamp(-1, 1) * largest[:, None]
    x[:, ::16] = largest[:, None]
    assert not len(blocks_that_differ("nvfp4", x))


def test_q8_0_halves_are_ggmls() -> None:
    """amax = 127 makes the scale 1: values around every half code, three steps to each side."""
    half = torch.arange(-127, 127).repeat_interleave(7) + 0.5
    steps = torch.arange(-3, 4, dtype=torch.int32).repeat(254)
    v = (half.view(torch.int32) + steps).view(torch.float32)[: 254 * 7 // 31 * 31].view(-1, 31)
    assert not len(blocks_that_differ("q8_0", torch.cat([torch.full((len(v), 1), 127.0), v], 1)))
