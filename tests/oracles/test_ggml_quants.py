"""Formats against ggml's C library and the gguf package: the bytes others write, and the values they read."""

import ctypes

import numpy as np
import pytest
import torch

from moe_lab.formats import get_format

ggml = pytest.importorskip("ggml", reason="ggml-python is the C oracle")
gguf_quants = pytest.importorskip("gguf").quants
gguf = pytest.importorskip("gguf")

FORMATS = ("q8_0", "q2_k", "q3_k")


def weights(kind: str, blocks: int = 1024) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    normal = torch.randn(blocks, 256, generator=g)
    if kind == "gaussian":
        return normal
    if kind == "heavy_tail":
        return normal**3 * 0.02
    if kind == "positive":
        return torch.rand(blocks, 256, generator=g)
    if kind == "negative":
        return -torch.rand(blocks, 256, generator=g)
    if kind == "tiny":
        return normal * 1e-9
    if kind == "sparse":
        return normal * (torch.rand(blocks, 256, generator=g) < 0.1)
    if kind == "subnormal":
        return normal * 1e-40
    return torch.cat([torch.zeros(4, 256), torch.ones(2, 256), torch.full((2, 256), -0.5)])


def ggml_quantize(x: torch.Tensor, name: str) -> np.ndarray:
    f = get_format(name)
    source, out = x.contiguous().numpy(), np.zeros((len(x), f.row_bytes(256)), dtype=np.uint8)
    pointer = source.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ggml.ggml_quantize_chunk(f.ggml_type, pointer, out.ctypes.data_as(ctypes.c_void_p), 0, len(x), 256, None)
    return out


@pytest.mark.parametrize(
    "kind", ["gaussian", "heavy_tail", "positive", "negative", "tiny", "subnormal", "sparse", "constant"]
)
@pytest.mark.parametrize("name", FORMATS)
def test_quantiser_writes_ggmls_bytes(name: str, kind: str) -> None:
    x = weights(kind)
    ours, theirs = get_format(name).quantize(x).numpy(), ggml_quantize(x, name)
    differing = int((ours != theirs).any(-1).sum())
    assert differing == 0, f"{differing} of {len(x)} rows differ"


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("source", ["quantised", "random_bytes"])
@pytest.mark.parametrize("name", FORMATS)
def test_decoder_reads_ggufs_values(name: str, source: str) -> None:
    f = get_format(name)
    rng = np.random.default_rng(3)
    raw = (
        ggml_quantize(weights("gaussian", 4096), name)
        if source == "quantised"
        else rng.integers(0, 256, (4096, f.row_bytes(256)), dtype=np.uint8)
    )
    ours = f.dequantize(torch.from_numpy(raw)).numpy()
    theirs = gguf_quants.dequantize(raw, gguf.GGMLQuantizationType(f.ggml_type))
    both_nan = np.isnan(ours) & np.isnan(theirs)  # random bytes make NaN scales; their payload is not defined
    assert np.array_equal(ours.view(np.int32)[~both_nan], theirs.view(np.int32)[~both_nan])
