"""Raw blocks to values: the launcher has the bits of the reference, at every address and tail."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.dequantize import dequantize as dq
from moe_lab_kernels.dequantize.steps import UNITS
from moe_lab_kernels.storage.blocks import BLOCKS
from tests.support.kernel_cases import DTYPES, Guarded, among_poison, same_bits

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # random scales hold NaN and infinity
]


def random_rows(format: str, *shape: int) -> torch.Tensor:
    """uint8 [*shape[:-1], shape[-1] blocks] of random bytes: every code, scale and special value there is."""
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randint(256, (*shape[:-1], shape[-1] * BLOCKS[format].bytes), generator=draw, dtype=torch.uint8)


def decoded(format: str, raw: torch.Tensor, dtype: str, **more) -> Guarded:
    out = Guarded(
        (*raw.shape[:-1], raw.shape[-1] // BLOCKS[format].bytes * BLOCKS[format].values), DTYPES[dtype], "cpu"
    )
    dq.dequantize(raw, format, DTYPES[dtype], out=out.view, **more)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", BLOCKS)
def test_bits_of_the_reference(format: str, dtype: str) -> None:
    raw = random_rows(format, 3, 7, 5)
    out = decoded(format, among_poison(raw, 255), dtype)
    assert same_bits(out.view, dq.dequantize_ref(raw, format, DTYPES[dtype]))
    assert out.intact()


@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 37, 199], ids="B{}".format)
@pytest.mark.parametrize("format", ["q3_k", "q8_0", "mxfp4"])
def test_any_number_of_blocks_and_programs(format: str, blocks: int) -> None:
    raw = random_rows(format, blocks, 1)
    out = decoded(format, raw, "bf16", cut=dq.Cut(256, 1))
    assert same_bits(out.view, dq.dequantize_ref(raw, format, torch.bfloat16))
    assert out.intact()


@pytest.mark.parametrize("skew", range(0, 16, 2))
@pytest.mark.parametrize("format", [f for f, b in BLOCKS.items() if b.alignment < 4])
def test_rows_at_any_address_their_blocks_allow(format: str, skew: int) -> None:
    raw = random_rows(format, 9, 3)
    skew += BLOCKS[format].alignment == 1
    buffer = torch.full((raw.numel() + 32,), 255, dtype=torch.uint8)
    moved = buffer[skew : skew + raw.numel()].view(raw.shape)
    moved.copy_(raw)
    assert same_bits(decoded(format, moved, "f32").view, dq.dequantize_ref(raw, format))


@pytest.mark.parametrize("format", BLOCKS)
def test_units_cover_a_block_once(format: str) -> None:
    cut = UNITS[format]
    starts = [
        8 * (cut.runs * cut.period * (u // cut.period) + u % cut.period + cut.period * j)
        for u in range(cut.per_block)
        for j in range(cut.runs)
    ]
    assert sorted(starts) == list(range(0, BLOCKS[format].values, 8))


def test_q31_scales_of_nvfp4_widen_with_their_bias() -> None:
    """Scale bytes 0x38, 0x01 and 0x7e are 1, 2^-9 and 448, in fp32 and in bf16."""
    raw = torch.full((1, 36), 0x22, dtype=torch.uint8)  # every code is 1
    raw[0, :4] = torch.tensor([0x38, 0x01, 0x7E, 0x7F], dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        got = dq.dequantize(raw, "nvfp4", dtype).view(4, 16)
        assert torch.equal(got, torch.tensor([1, 2**-9, 448, 0], dtype=dtype)[:, None].expand(4, 16))


@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused_by_name() -> None:
    raw = random_rows("q2_k", 4, 2)
    with pytest.raises(LabError, match="'q9_k' is no block format; there are q4_0"):
        dq.dequantize(raw, "q9_k")
    with pytest.raises(LabError, match=r"multiples of 110 bytes, got shape \[4, 168\]"):
        dq.dequantize(raw, "q3_k")
    with pytest.raises(LabTypeError, match=r"uint8 bytes, got torch\.int8"):
        dq.dequantize(raw.view(torch.int8), "q2_k")
    with pytest.raises(LabTypeError, match=r"fp32, fp16 or bf16, got torch\.float64"):
        dq.dequantize(raw, "q2_k", torch.float64)
    with pytest.raises(LabError, match=r"raw must be contiguous"):
        dq.dequantize(raw.T.contiguous().T, "q2_k")
    with pytest.raises(LabError, match=r"multiples of 4 bytes"):
        dq.dequantize(torch.zeros(170, dtype=torch.uint8)[2:].view(1, 168), "q2_k")
    with pytest.raises(LabError, match=r"out must have shape \[4, 512\], got \[4, 256\]"):
        dq.dequantize(raw, "q2_k", out=torch.zeros(4, 256, dtype=torch.bfloat16))
