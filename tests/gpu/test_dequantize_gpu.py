"""Decoding on a GPU: the bits of the torch reference, for every format, dtype, address and size."""

import pytest
import torch

from moe_lab.formats import quantize
from moe_lab_kernels.dequantize import dequantize as dq
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import PIECES
from tests.support.kernel_cases import DTYPES, Guarded, among_poison, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]


def random_rows(format: str, *shape: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(sum(shape))
    size = (*shape[:-1], shape[-1] * BLOCKS[format].bytes)
    return torch.randint(256, size, generator=draw, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", BLOCKS)
def test_bits_of_the_reference(format: str, dtype: str) -> None:
    for shape in ((3, 7, 5), (1, 1), (0, 4), (199, 37), (1, 4099)):
        raw = random_rows(format, *shape)
        values = raw.shape[-1] // BLOCKS[format].bytes * BLOCKS[format].values
        out = Guarded((*raw.shape[:-1], values), DTYPES[dtype], "cuda")
        dq.dequantize(among_poison(raw, 255), format, DTYPES[dtype], out=out.view)
        assert same_bits(out.view, dq.dequantize_ref(raw, format, DTYPES[dtype]))
        assert same_bits(out.view, dq.dequantize_ref(raw.cpu(), format, DTYPES[dtype]))
        assert out.intact()


@pytest.mark.parametrize("cut", [dq.Cut(64, 1), dq.Cut(256, 2), dq.Cut(2048, 8)], ids=str)
@pytest.mark.parametrize("format", BLOCKS)
def test_no_cut_changes_a_bit(format: str, cut: dq.Cut) -> None:
    raw = random_rows(format, 7, 301)
    assert same_bits(
        dq.dequantize(raw, format, torch.bfloat16, cut=cut), dq.dequantize_ref(raw, format, torch.bfloat16)
    )


@pytest.mark.parametrize("format", [f for f, b in BLOCKS.items() if b.alignment < 4])
def test_rows_at_any_address_their_blocks_allow(format: str) -> None:
    raw = random_rows(format, 19, 33)
    for skew in range(0, 16, BLOCKS[format].alignment):
        buffer = torch.full((raw.numel() + 32,), 255, dtype=torch.uint8, device="cuda")
        moved = buffer[skew : skew + raw.numel()].view(raw.shape)
        moved.copy_(raw)
        assert same_bits(dq.dequantize(moved, format, torch.float32), dq.dequantize_ref(raw, format))


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q8_0"])
def test_quantised_weights_decode_as_on_the_cpu(format: str) -> None:
    q = quantize(torch.randn(64, 2048, generator=torch.Generator().manual_seed(5)), format)
    there = q.to("cuda")
    assert same_bits(there.dequantize(), q.dequantize())
    strided = there.data.repeat(1, 2)[:, : q.data.shape[1]]
    assert same_bits(there.codec.dequantize(strided), q.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["mxfp4", "q2_k"])
def test_more_values_than_32_bits_count(format: str) -> None:
    """2^31 + 2^20 values: the last rows would land before the first ones, were offsets 32-bit."""
    block = BLOCKS[format]
    rows = (2**31 + 2**20) // 4096
    raw = random_rows(format, rows, 4096 // block.values)
    out = dq.dequantize(raw, format, torch.bfloat16)
    for part in (slice(0, 512), slice(2**31 // 4096 - 8, 2**31 // 4096 + 8), slice(rows - 512, rows)):
        assert same_bits(out[part], dq.dequantize_ref(raw[part], format, torch.bfloat16))


@pytest.mark.parametrize("format", PIECES)
def test_planes_hold_the_same_bits(format: str) -> None:
    for shape in ((3, 7, 5), (1, 1), (64, 33), (0, 4), (2, 1, 4099)):
        raw = random_rows(format, *shape)
        n, kd = shape[-2], shape[-1] * BLOCKS[format].values
        packed = planar.repack(raw, format)
        assert torch.equal(packed.cpu(), planar.repack_ref(raw.cpu(), format))
        assert torch.equal(planar.restore(packed, format, n, kd), raw)
        for dtype in DTYPES.values():
            got = dequantize_planar(packed, format, n, kd, dtype)
            assert same_bits(got, dq.dequantize_ref(raw, format, dtype))


@pytest.mark.slow
def test_planes_of_more_values_than_32_bits_count() -> None:
    rows = (2**31 + 2**20) // 4096
    raw = random_rows("q2_k", rows, 16)
    packed = planar.repack(raw, "q2_k")
    assert torch.equal(planar.restore(packed, "q2_k", rows, 4096), raw)
    out = dequantize_planar(packed, "q2_k", rows, 4096)
    for part in (slice(0, 512), slice(2**31 // 4096 - 8, 2**31 // 4096 + 8), slice(rows - 512, rows)):
        assert same_bits(out[part], dq.dequantize_ref(raw[part], "q2_k", torch.bfloat16))
