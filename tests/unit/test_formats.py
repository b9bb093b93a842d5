"""Formats: layouts, sizes, integer forms, refusals."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import FORMATS, QuantTensor, get_format, quantize

BLOCKS = {"q8_0": (32, 34), "q2_k": (256, 84), "q3_k": (256, 110), "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2)}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_sizes(name: str) -> None:
    assert (FORMATS[name].block, FORMATS[name].block_bytes) == BLOCKS[name]


@pytest.mark.parametrize("name", ["q8_0", "q2_k", "q3_k"])
@pytest.mark.parametrize("shape", [(60, 256), (3, 5, 512), (1, 1, 768)], ids=str)
def test_quantise_keeps_shape_and_error_small(name: str, shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    q = quantize(w, name)
    assert q.shape == shape
    assert q.dequantize().shape == shape
    assert q.nbytes == w.numel() // BLOCKS[name][0] * BLOCKS[name][1]
    error = (q.dequantize() - w).square().mean() / w.square().mean()
    assert error < {"q8_0": 1e-4, "q3_k": 0.03, "q2_k": 0.13}[name], "bits decide the error: 8, 3.4 and 2.6 a weight"


@pytest.mark.parametrize("name", ["q8_0", "q2_k", "q3_k"])
def test_integer_form_is_the_dequantised_weight(name: str) -> None:
    q = quantize(torch.randn(7, 512, generator=torch.Generator().manual_seed(2)), name)
    form = q.codec.integer_form(q.data)
    w = form.codes.double() * form.scale.double().repeat_interleave(form.group, -1)
    if form.mins is not None:
        w = w - form.mins.double().repeat_interleave(16, -1) * form.min_scale.double().repeat_interleave(form.group, -1)
    assert torch.equal(form.codes, form.codes.round())
    assert form.codes.abs().max() <= 4096
    assert torch.allclose(w, q.dequantize().double(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_dense_formats_round_to_their_dtype(name: str) -> None:
    w = torch.randn(3, 8)
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[name]
    assert torch.equal(quantize(w, name).dequantize(), w.to(dtype).float())


def test_all_zero_blocks_decode_to_zero() -> None:
    for name in ("q8_0", "q2_k", "q3_k"):
        assert torch.equal(quantize(torch.zeros(2, 256), name).dequantize(), torch.zeros(2, 256))


def test_q29_tiny_block_maximum_gives_zero_codes() -> None:
    x = torch.zeros(1, 32)
    x[0, 3] = 1e-40
    assert torch.equal(quantize(x, "q8_0").data, torch.zeros(1, 34, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: quantize(torch.randn(4, 704), "q2_k"), ("q2_k", "256", "704")),
        (lambda: quantize(torch.tensor([[float("nan")] * 32]), "q8_0"), ("q8_0", "32 of 32")),
        (lambda: get_format("q9_z"), ("q9_z", "q2_k", "bf16")),
        (lambda: QuantTensor.from_bytes(torch.zeros(83, dtype=torch.uint8), "q2_k", (1, 256)), ("84", "83")),
        (lambda: QuantTensor.from_bytes(torch.zeros(84, dtype=torch.uint8), "q2_k", (1, 128)), ("256", "128")),
        (lambda: quantize(torch.randn(2, 256), "q2_k")[0], ("matrix",)),
    ],
    ids=["row_not_whole_blocks", "nan_weights", "unknown_format", "byte_count", "shape", "index_a_matrix"],
)
def test_refusals_name_the_numbers(make, words: tuple[str, ...]) -> None:
    with pytest.raises(LabError) as e:
        make()
    for word in words:
        assert word in str(e.value)


def test_raw_bytes_must_be_uint8() -> None:
    with pytest.raises(LabTypeError, match="int8"):
        QuantTensor.from_bytes(torch.zeros(84, dtype=torch.int8), "q2_k", (1, 256))


def test_indexing_slices_experts() -> None:
    q = quantize(torch.randn(4, 8, 256), "q3_k")
    assert q[2].shape == (8, 256)
    assert torch.equal(q[2].dequantize(), q.dequantize()[2])
