"""Weights with separate scales against those who make such files: transformers, gguf, and recorded answers of
compressed-tensors and MLX."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.formats import FORMATS, QuantTensor
from tests.support.kernel_cases import same_bits
from tests.support.scaled_cases import every_code, heavy_tailed, quantised

RECORDED = Path(__file__).parent / "recorded" / "scaled_formats.npz"
AFFINE = ("int4_g32", "int4_g64", "int4_g128", "int8_g32", "int8_g128")


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    with np.load(RECORDED) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files if name != "made_by"}


@pytest.fixture(scope="module")
def fp8_reader():
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    return module.Fp8Dequantize(None)._dequantize_one


def stored(recorded: dict[str, torch.Tensor], format: str) -> QuantTensor:
    get = lambda name: recorded.get(f"{format}/{name}")  # noqa: E731
    shape = tuple(recorded["w"].shape)
    return QuantTensor.from_parts(get("data"), get("scales"), get("global_scale"), format, shape, biases=get("biases"))


@pytest.mark.parametrize("format", ["nvfp4_ct", *AFFINE])
def test_the_makers_files_have_the_makers_values(recorded, format: str) -> None:
    assert torch.equal(stored(recorded, format).dequantize(), recorded[f"{format}/values"])


@pytest.mark.parametrize("format", ["nvfp4_ct", *AFFINE])
def test_we_write_the_makers_bytes(recorded, format: str) -> None:
    want, got = stored(recorded, format), QuantTensor.encode(recorded["w"], FORMATS[format])
    if format == "nvfp4_ct":
        # blocks of zeros: theirs get a scale of 2^-9 or more, ours 0; the codes are 0 in both
        zero = (recorded["w"].unflatten(-1, (-1, 16)) == 0).all(-1)
        assert got.scales is not None
        assert want.scales is not None
        assert torch.equal(got.scales[~zero], want.scales[~zero])
    else:
        zero = (recorded["w"].unflatten(-1, (-1, FORMATS[format].block)) == 0).all(-1)
        for name in ("scales", "biases"):  # a group of zeros: theirs has scale 1e-7, ours 0
            assert torch.equal(got.tensors[name][~zero], want.tensors[name][~zero])
    assert torch.equal(got.data, want.data)
    assert torch.equal(got.dequantize(), want.dequantize())


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)], ids=str)
def test_fp8_blocks_as_transformers_reads_them(fp8_reader, shape: tuple[int, ...]) -> None:
    q = every_code("fp8_block", shape)
    codes = q.data.view(torch.float8_e4m3fn)
    assert same_bits(q.dequantize(), fp8_reader(codes, q.scales, torch.float32))


def test_mxfp8_as_transformers_reads_it(fp8_reader) -> None:
    q = quantised("mxfp8", (8, 256))
    assert same_bits(q.dequantize(), fp8_reader(q.data.view(torch.float8_e4m3fn), q.scales, torch.float32))


def test_packed_fp4_experts_as_transformers_reads_them(fp8_reader) -> None:
    q = quantised("mxfp4_oss", (8, 256))
    assert same_bits(q.dequantize(), fp8_reader(q.data.view(torch.int8), q.scales, torch.float32))


def test_mxfp4_oss_as_transformers_reads_it() -> None:
    """All nibbles under all exponents; 255 is infinite there, NaN by the format's definition and here."""
    module = pytest.importorskip("transformers.integrations.mxfp4")
    data = torch.arange(256, dtype=torch.uint8).repeat(16).view(1, 256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1)
    theirs = module._convert_moe_packed_tensors(data.view(1, 256, 1, 16), scales, dtype=torch.float32).mT
    ours = QuantTensor.from_parts(data, scales, None, "mxfp4_oss", (1, 256, 32)).dequantize()
    assert same_bits(ours[:, :255], theirs[:, :255].contiguous())
    assert ours[:, 255].isnan().all()


@pytest.mark.parametrize(
    ("format", "gguf_format", "group"), [("mxfp4_oss", "MXFP4", 32), ("nvfp4_modelopt", "NVFP4", 16)]
)
def test_gguf_holds_the_same_values_in_another_order(format: str, gguf_format: str, group: int) -> None:
    """A GGUF block keeps the low half of a group in low nibbles; its scale bytes mean the same between the extremes."""
    gguf = pytest.importorskip("gguf")
    q = QuantTensor.encode(heavy_tailed((16, 512), seed=4), FORMATS[format])
    assert q.scales is not None
    codes = torch.stack([q.data & 15, q.data >> 4], -1).flatten(-2).unflatten(-1, (-1, group))
    halves = codes[..., : group // 2] | codes[..., group // 2 :] << 4
    if format == "mxfp4_oss":
        raw = torch.cat([q.scales[..., None], halves], -1).flatten(-2)
        want = q.dequantize()
    else:
        raw = torch.cat([q.scales.unflatten(-1, (-1, 4)), halves.unflatten(-2, (-1, 4)).flatten(-2)], -1).flatten(-2)
        want = QuantTensor.from_parts(q.data, q.scales, torch.tensor(1.0), format, q.shape).dequantize()
    theirs = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[gguf_format])
    assert torch.equal(torch.from_numpy(theirs), want)
    assert torch.equal(QuantTensor.from_bytes(raw, gguf_format.lower(), q.shape).dequantize(), want)
