"""Decoding weights with separate scales: the reference's bits from every format, shape, dtype and tile."""

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import QuantTensor
from moe_lab.formats.transposed import TransposedTensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.dequantize import scaled as dequantize_scaled
from moe_lab_kernels.dequantize.scaled import Tile, dequantize_scaled_ref
from moe_lab_kernels.dequantize.transposed import TransposedTile, dequantize_transposed, dequantize_transposed_ref
from moe_lab_kernels.storage import minifloat
from tests.support.kernel_cases import DTYPES, among_poison, same_bits
from tests.support.scaled_cases import ONE_OF_A_KIND, PACKED, every_code, operands, quantised, shapes_of

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@jit
def _to_e4m3(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, minifloat.f32_to_e4m3(tl.load(x + i)))


@jit
def _values(codes, out, N: tl.constexpr, KIND: tl.constexpr):
    i = tl.arange(0, N)
    c = tl.load(codes + i)
    if KIND == "e4m3":
        v = minifloat.e4m3_to_f32(c)
    elif KIND == "e2m1":
        v = minifloat.e2m1_to_f32(c.to(tl.int32) & 15)
    else:
        v = minifloat.e8m0_to_f32(c)
    tl.store(out + i, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ONE_OF_A_KIND)
def test_values_have_the_references_bits(format, dtype) -> None:
    for shape in shapes_of(format):
        for q in (quantised(format, shape), every_code(format, shape)):
            args, more = operands(q)
            guarded = (among_poison(args[0], 255), *args[1:])
            got = dequantize_scaled.dequantize_scaled(*guarded, **more, out_dtype=DTYPES[dtype])
            assert got.shape == shape
            assert same_bits(got, dequantize_scaled_ref(*args, **more, out_dtype=DTYPES[dtype])), shape


@pytest.mark.parametrize("tile", [Tile(256, 1), Tile(512, 2, 4), Tile(4096, 4)], ids=str)
@pytest.mark.parametrize("format", ["fp8_block", "nvfp4_ct", "int4_g32"])
def test_no_tile_changes_a_bit(format, tile) -> None:
    q = every_code(format, (3, 640))
    args, more = operands(q)
    got = dequantize_scaled.dequantize_scaled(*args, **more, tile=tile)
    assert same_bits(got, dequantize_scaled_ref(*args, **more))


@pytest.mark.parametrize("block_k", [32, 64, 128, 256, 512])
def test_q10_the_scale_belongs_to_the_value_not_to_the_tile(block_k: int) -> None:
    """Tiles in use are 256 values and wider; those below the block of 128 are the fault's own."""
    codes = torch.full((1, 256), 0x38, dtype=torch.uint8)
    scales = torch.tensor([[1.0, 1000.0]])
    w = dequantize_scaled.dequantize_scaled(codes, scales, "fp8_block", 256, out_dtype=torch.float32,
                                            tile=Tile(block_k, 1))  # fmt: skip
    assert float(torch.ones(1, 256) @ w.T) == 128128


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_q31_e4m3_block_scales_in_both_half_precisions(dtype: torch.dtype) -> None:
    codes = torch.full((3, 8), 0x22, dtype=torch.uint8)  # every nibble is 1.0
    scales = torch.tensor([[0x38], [0x01], [0x7E]], dtype=torch.uint8)
    got = dequantize_scaled.dequantize_scaled(codes, scales, "nvfp4_modelopt", 16, second=torch.tensor(1.0),
                                              out_dtype=dtype)  # fmt: skip
    assert got[:, 0].tolist() == [1.0, 2.0**-9, 448.0]


@pytest.mark.parametrize("format", PACKED)
def test_transposed_values_are_the_plain_ones(format) -> None:
    for shape in ((2, 70, 96), (5, 64)):
        q = every_code(format, shape)
        args, more = operands(q)
        assert same_bits(
            TransposedTensor.of(q).dequantize(), dequantize_scaled_ref(*args, **more, out_dtype=torch.float32)
        )


def test_no_tile_changes_a_transposed_bit() -> None:
    q = every_code("nvfp4_ct", (2, 70, 96))
    t = TransposedTensor.of(q)
    args, more = (t.data, t.scales, t.format), {"second": t.global_scale}
    want = dequantize_transposed_ref(*args, **more)
    for tile in (TransposedTile(8, 256, 4), TransposedTile(2, 1024, 4)):
        assert same_bits(dequantize_transposed(*args, **more, tile=tile), want), tile


def test_strided_rows_and_experts() -> None:
    q = quantised("nvfp4_modelopt", (4, 6, 512))
    args, more = operands(q)
    wide = torch.full((4, 6, 300), 255, dtype=torch.uint8)
    wide[..., :256] = q.data
    op, want = dequantize_scaled.dequantize_scaled, dequantize_scaled_ref(*args, **more)
    assert same_bits(op(wide[..., :256], *args[1:], **more), want)
    assert same_bits(op(q.data[::2], q.scales[::2], *args[2:], second=q.global_scale[::2]), want[::2])


def test_no_rows_launch_nothing() -> None:
    empty = torch.zeros(0, 64, dtype=torch.uint8)
    with backend.count_launches() as count:
        out = dequantize_scaled.dequantize_scaled(empty, torch.zeros(0, 4, dtype=torch.uint8), "mxfp4_oss", 128)
    assert out.shape == (0, 128)
    assert count.launches == 0


def test_q04_casts_to_e4m3_clamp_first() -> None:
    x = [448.0, 464.0, 465.0, 1000.0, -1000.0, float("inf"), float("nan"), 2.0**-10]
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(4088, generator=draw) * torch.logspace(-12, 6, 4088)
    x = torch.cat([torch.tensor(x), wide])
    out = torch.zeros(4096, dtype=torch.uint8)
    backend.launch(_to_e4m3, (1,), x, out, 4096, device=x.device)
    assert torch.equal(out, minifloat.e4m3_codes(x))
    assert minifloat.e4m3_values(out[:6]).tolist() == [448, 448, 448, 448, -448, 448]
    assert out[6] == 0x7F


@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "e8m0"])
def test_small_floats_decode_alike(kind: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256)
    backend.launch(_values, (1,), codes, out, 256, kind, device=out.device)
    want = getattr(minifloat, f"{kind}_values")(codes & 15 if kind == "e2m1" else codes)
    assert same_bits(out, want)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"kd": 100}, LabError, ("nvfp4_modelopt", "16", "100")),
        ({"scales": torch.zeros(4, 3, dtype=torch.uint8)}, LabError, ("scales", "[4, 4]", "[4, 3]")),
        ({"scales": torch.zeros(4, 4)}, LabTypeError, ("scales", "uint8", "float32")),
        ({"second": None}, LabError, ("nvfp4_modelopt", "multiplier", "none")),
        ({"format": "q2_k"}, LabError, ("q2_k", "fp8_block")),
        ({"out_dtype": torch.int8}, LabError, ("out_dtype", "int8")),
    ],
    ids=["row_not_whole_groups", "scale_shape", "scale_dtype", "no_global_scale", "block_format", "out_dtype"],
)
def test_refusals_name_the_numbers(change: dict, error: type, words: tuple[str, ...]) -> None:
    args = {
        "data": torch.zeros(4, 32, dtype=torch.uint8), "scales": torch.zeros(4, 4, dtype=torch.uint8),
        "format": "nvfp4_modelopt", "kd": 64, "second": torch.tensor(1.0), "out_dtype": torch.float32, **change,
    }  # fmt: skip
    for op in (dequantize_scaled.dequantize_scaled, dequantize_scaled_ref):
        with pytest.raises(error) as e:
            op(**args)
        for word in words:
            assert word in str(e.value)


def test_quant_tensors_decode_through_the_kernel() -> None:
    q = quantised("mxfp8", (2, 8, 64))
    with backend.count_launches() as count:
        values = q.dequantize()
    assert count.by_kernel == {"_dequantize_scaled": 1}
    assert isinstance(q[1], QuantTensor)
    assert same_bits(values[1], q[1].dequantize())
