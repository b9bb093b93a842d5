"""Decoding against ggml's C library and the gguf package, on random bytes and on blocks that ggml wrote."""

import ctypes
from functools import cache

import numpy as np
import pytest
import torch

from moe_lab.formats import FORMATS
from moe_lab_kernels.storage.blocks import BLOCKS
from tests.support.kernel_cases import same_bits

ggml = pytest.importorskip("ggml", reason="ggml-python is the C oracle")
gguf = pytest.importorskip("gguf")

BLOCK_COUNT = 4096
C_NAMES = {name: name.replace("_k", "_K") for name in BLOCKS}


@cache
def weights(blocks: int, width: int) -> np.ndarray:
    """Heavy-tailed values, some rows of them tiny, some huge, some zero."""
    draw = torch.Generator().manual_seed(11)
    w = torch.randn(blocks, width, generator=draw) * (1 + 2 * torch.rand(blocks, width, generator=draw) ** 8)
    w[1::16] *= 1e-6
    w[2::16] *= 3e3
    w[3::64] = 0
    return w.numpy()


@cache
def raw_blocks(name: str, source: str) -> torch.Tensor:
    """uint8 [BLOCK_COUNT, block_bytes]."""
    f = FORMATS[name]
    if source == "random_bytes":
        return torch.randint(
            256, (BLOCK_COUNT, f.block_bytes), generator=torch.Generator().manual_seed(3), dtype=torch.uint8
        )
    x, out = weights(BLOCK_COUNT, f.block), np.zeros((BLOCK_COUNT, f.block_bytes), np.uint8)
    pointer, importance = (a.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for a in (x, np.ones(f.block, np.float32)))
    to = out.ctypes.data_as(ctypes.c_void_p)
    ggml.ggml_quantize_chunk(f.ggml_type, pointer, to, 0, BLOCK_COUNT, f.block, importance)
    return torch.from_numpy(out)


def read_by_c(name: str, raw: torch.Tensor) -> torch.Tensor:
    decode = getattr(ctypes.CDLL(ggml.lib._name), f"dequantize_row_{C_NAMES[name]}")
    decode.argtypes, decode.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    out = torch.empty(len(raw), FORMATS[name].block)
    decode(raw.data_ptr(), out.data_ptr(), out.numel())
    return out


@pytest.mark.parametrize("source", ["quantised", "random_bytes"])
@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_ggmls(name: str, source: str) -> None:
    raw = raw_blocks(name, source)
    ours = FORMATS[name].dequantize(raw)
    assert same_bits(ours, read_by_c(name, raw))
    assert ours.isfinite().all() or source == "random_bytes"
    assert ours.unique().numel() > 50, "the blocks hold next to nothing"


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("source", ["quantised", "random_bytes"])
@pytest.mark.parametrize("name", BLOCKS)
def test_values_are_ggufs(name: str, source: str) -> None:
    raw = raw_blocks(name, source)
    theirs = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(FORMATS[name].ggml_type))
    assert same_bits(FORMATS[name].dequantize(raw), torch.from_numpy(theirs))


@pytest.mark.parametrize("name", BLOCKS)
def test_sizes_are_ggmls(name: str) -> None:
    kind = FORMATS[name].ggml_type
    assert (ggml.ggml_blck_size(kind), ggml.ggml_type_size(kind)) == (BLOCKS[name].values, BLOCKS[name].bytes)


def test_every_exponent_of_mxfp4_and_every_scale_of_nvfp4() -> None:
    for name, at in (("mxfp4", 0), ("nvfp4", 2)):
        raw = torch.full((256, BLOCKS[name].bytes), 0x7E, dtype=torch.uint8)
        raw[:, at] = torch.arange(256, dtype=torch.uint8)
        assert same_bits(FORMATS[name].dequantize(raw), read_by_c(name, raw))
