"""Weights with separate scales on a GPU: decoding and encoding have the CPU's bits, whatever the tile or the size."""

import pytest
import torch

from moe_lab.formats import FORMATS, QuantTensor
from moe_lab.formats.transposed import TransposedTensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize.scaled import Tile, dequantize_scaled, dequantize_scaled_ref
from moe_lab_kernels.dequantize.transposed import TransposedTile, dequantize_transposed
from moe_lab_kernels.storage import minifloat
from tests.support.kernel_cases import DTYPES, same_bits
from tests.support.scaled_cases import ONE_OF_A_KIND, PACKED, SCALED, every_code, operands, quantised, shapes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


@jit
def _to_e4m3(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, minifloat.f32_to_e4m3(tl.load(x + i)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", SCALED)
def test_decoding_has_the_cpus_bits(format, dtype) -> None:
    for shape in shapes_of(format):
        for q in (quantised(format, shape), every_code(format, shape)):
            args, more = operands(q)
            want = dequantize_scaled_ref(*args, **more, out_dtype=DTYPES[dtype])
            args, more = operands(q.to("cuda"))
            assert same_bits(dequantize_scaled_ref(*args, **more, out_dtype=DTYPES[dtype]), want), "torch on CUDA"
            assert same_bits(dequantize_scaled(*args, **more, out_dtype=DTYPES[dtype]), want), shape


@pytest.mark.parametrize("format", ONE_OF_A_KIND)
def test_no_tile_changes_a_bit(format) -> None:
    q = every_code(format, (2, 130, 2176)).to("cuda")
    args, more = operands(q)
    want = dequantize_scaled(*args, **more)
    for tile in (Tile(256, 1), Tile(4096, 4), Tile(512, 2, 4), Tile(1024, 8, 2)):
        assert same_bits(dequantize_scaled(*args, **more, tile=tile), want), tile


@pytest.mark.parametrize("format", PACKED)
def test_transposed_values_are_the_plain_ones(format) -> None:
    for shape in ((2, 70, 96), (1, 1408, 2048), (3, 5, 64)):
        q = every_code(format, shape)
        t = TransposedTensor.of(q.to("cuda"))
        assert same_bits(t.dequantize(), q.dequantize())
        one = dequantize_transposed(t.data, t.scales, format, second=t.global_scale, tile=TransposedTile(8, 256, 1))
        assert same_bits(one, t.columns(torch.bfloat16))


@pytest.mark.parametrize("format", SCALED)
def test_encoding_has_the_cpus_bytes(format) -> None:
    w = torch.randn(2, 256, 512, generator=torch.Generator().manual_seed(3))
    w[0, :128, :128], w[0, 200, :128], w[1, 3, :256], w[1, 4, 7] = 0.0, 6e-38, 1e-44, 3e4
    here, there = QuantTensor.encode(w, FORMATS[format]), QuantTensor.encode(w.cuda(), FORMATS[format])
    for name, t in here.tensors.items():
        assert same_bits(there.tensors[name], t), name


def test_q04_casts_to_e4m3_clamp_first() -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf"), float("nan"), 2.0**-10], device="cuda")
    x = torch.cat([x, torch.randn(4088, device="cuda") * torch.logspace(-12, 6, 4088, device="cuda")])
    out = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    backend.launch(_to_e4m3, (1,), x, out, 4096, device=x.device)
    assert torch.equal(out.cpu(), minifloat.e4m3_codes(x.cpu()))
    assert torch.equal(minifloat.e4m3_codes(x).cpu(), out.cpu())


def test_weights_past_two_gib_are_addressed_in_64_bits() -> None:
    """Output offsets pass 2^31 in the last expert, code offsets 2^31 bytes too."""
    book = quantised("fp8_block", (128, 16384)).to("cuda")
    experts, n = 9, 16384
    data = torch.zeros(experts, n, 16384, dtype=torch.uint8, device="cuda")
    scales = torch.zeros(experts, n // 128, 128, device="cuda")
    data[-1, -128:], scales[-1, -1:] = book.data, book.scales
    assert data.numel() > 2**31
    out = dequantize_scaled(data, scales, "fp8_block", 16384)
    assert same_bits(out[-1, -128:], dequantize_scaled(book.data, book.scales, "fp8_block", 16384))
    assert not out[:-1].any()


def test_strided_rows_and_experts() -> None:
    q = quantised("nvfp4_modelopt", (4, 6, 512)).to("cuda")
    args, more = operands(q)
    wide = torch.full((4, 6, 300), 255, dtype=torch.uint8, device="cuda")
    wide[..., :256] = q.data
    got = dequantize_scaled(wide[..., :256], *args[1:], **more)
    assert same_bits(got, dequantize_scaled(*args, **more))
    assert same_bits(dequantize_scaled(q.data[::2], q.scales[::2], *args[2:], second=q.global_scale[::2]), got[::2])
