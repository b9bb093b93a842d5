"""Activation quantisers on a GPU: the bits of the references there and on the CPU, and of the numpy definition."""

import itertools

import pytest
import torch

from moe_lab.formats import quantize_activations
from moe_lab_kernels.rows.arithmetic import Arithmetic, layout_of
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8, quantize_fp8_ref
from moe_lab_kernels.rows.quantize_rows import Tile, quantize_int8, quantize_int8_ref
from tests.support.activation_cases import INT8_LAYOUTS, KINDS, case, emulate
from tests.support.kernel_cases import DTYPES, Guarded, among_poison, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
CHOICES = [
    Arithmetic(block=block, rounding=rounding, **sums)
    for block, rounding, sums in itertools.product(
        (32, 64, 256),
        ("divide", "reciprocal", "multiply", "divide_even", "reciprocal_even", "multiply_even"),
        ({"sum": "raw_all", "sum_dtype": "fp32"}, {"sum": "quantised"}, {"safe_sum": True}),
    )
]
FP8_CHOICES = [
    Arithmetic(block=block, rounding=rounding, scale_dtype=scale)
    for block, rounding, scale in itertools.product((32, 128), ("divide", "reciprocal", "multiply"), ("fp32", "e8m0"))
]
BROKEN = torch.tensor([float("nan"), float("inf"), -float("inf"), -float("nan"), 3e38])


def bits(parts) -> list[torch.Tensor]:
    """Without absent sums; fp8 as bytes."""
    return [p.view(torch.uint8) if p.dtype == torch.float8_e4m3fn else p for p in parts if p is not None]


def assert_same(got, *wants) -> None:
    for want in wants:
        for i, (a, b) in enumerate(zip(bits(got), bits(want), strict=True)):
            assert same_bits(a, b), f"part {i}"


def every_kind(kd: int, rows: int = 40) -> torch.Tensor:
    return torch.cat([case(kind, rows=rows, kd=kd) for kind in KINDS])


def with_broken_values(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[torch.arange(5), torch.arange(5) * 37] = BROKEN
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kd", [256, 768, 2880], ids="K{}".format)
@pytest.mark.parametrize("layout", INT8_LAYOUTS)
def test_bits_of_the_definition(layout, kd, dtype) -> None:
    x = every_kind(kd).to(DTYPES[dtype])
    assert_same(quantize_int8(x.cuda(), layout), emulate(x.float(), layout_of(layout)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [0, 1, 7, 8, 9, 37, 199], ids="T{}".format)
@pytest.mark.parametrize("layout", INT8_LAYOUTS)
def test_bits_of_the_references(layout, t, dtype) -> None:
    x = torch.cat([every_kind(2880)[:: max(1, 400 // max(t, 1))][:t], with_broken_values(case("gauss", 9, 2880))])
    x = x[9 if t == 0 else 0 :].to(DTYPES[dtype])
    there = x.cuda()
    assert_same(quantize_int8(there, layout), quantize_int8_ref(x, layout), quantize_int8_ref(there, layout))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda a: f"{a.block}-{a.rounding}-{a.sum or 'safe'}")
@pytest.mark.parametrize("layout", ["q8_1", "ds4", "d2s6", "q8_k"])
def test_bits_with_choices_changed(layout, choice) -> None:
    x = torch.cat([every_kind(512, rows=6), with_broken_values(case("gauss", 9, 512))])
    assert_same(quantize_int8(x.cuda(), layout, choice), quantize_int8_ref(x, layout, choice))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", FP8_CHOICES, ids=lambda a: f"{a.block}-{a.rounding}-{a.scale_dtype}")
def test_fp8_bits_of_the_references(choice, dtype) -> None:
    x = torch.cat([every_kind(2880, rows=9), with_broken_values(case("gauss", 9, 2880))]).to(DTYPES[dtype])
    for floor in (0.0, 1e-4):
        got = quantize_fp8(x.cuda(), choice, floor=floor)
        assert_same(got, quantize_fp8_ref(x, choice, floor=floor), quantize_fp8_ref(x.cuda(), choice, floor=floor))


def test_every_fp8_midpoint_rounds_alike() -> None:
    """2^20 values between the codes, under a scale of 1, and each code's neighbours."""
    values = torch.linspace(-448, 448, 127 << 13)
    x = torch.nn.functional.pad(values.view(-1, 127), (1, 0), value=448.0)
    assert_same(quantize_fp8(x.cuda()), quantize_fp8_ref(x))


@pytest.mark.parametrize("layout", [*INT8_LAYOUTS, "fp8"])
def test_tiles_and_strides_change_no_bit(layout) -> None:
    x = case("gauss", rows=67, kd=2816).bfloat16()
    op = quantize_fp8 if layout == "fp8" else lambda v, **tile: quantize_int8(v, layout, **tile)
    want = op(x.cuda())
    for tile in (Tile(256, 1), Tile(512, 2), Tile(2048, 4), Tile(4096, 4)):
        assert_same(op(x.cuda(), tile=tile), want)
    there = x.cuda()
    for view in (there[:, 32:416], there[:, : 2816 // 2 : 2], there.t().contiguous().t(), there.flip(0)):
        assert_same(op(view), op(view.contiguous()))
    assert_same(op(among_poison(there, float("nan"))), want)


@pytest.mark.parametrize("layout", ["ds4", "d2s6"])
def test_nothing_is_written_past_the_outputs(layout, monkeypatch) -> None:
    """Outputs lie between guard values, with a row count that leaves the last program half empty."""
    made: list[Guarded] = []

    def guarded_empty(*shape, dtype, device):
        made.append(Guarded(shape, torch.float32 if dtype == torch.int8 else dtype, str(device)))
        if dtype == torch.int8:  # NaN cannot fill int8
            whole = torch.full((made[-1].whole.numel(),), -7, dtype=dtype, device=device)
            made[-1].whole, made[-1].view = whole, whole[64:-64].view(shape)
        return made[-1].view

    x = case("gauss", rows=67, kd=2880).cuda()
    want = quantize_int8(x, layout)
    monkeypatch.setattr(torch, "empty", guarded_empty)
    got = quantize_int8(x, layout)
    monkeypatch.undo()
    assert_same(got, want)
    assert len(made) == 3
    assert all(g.intact() for g in made)


def test_rows_past_two_gib_are_addressed_in_64_bits() -> None:
    wide = torch.zeros(9, 1 << 28, dtype=torch.bfloat16, device="cuda")
    x = wide[:, -4096:]
    x.copy_(case("gauss", rows=9, kd=4096))
    assert_same(quantize_int8(x, "ds4"), quantize_int8(x.contiguous(), "ds4"))


def test_quantize_activations_takes_the_kernel() -> None:
    x = case("gauss", rows=5, kd=768)
    for layout in (*INT8_LAYOUTS, "fp8"):
        here, there = quantize_activations(x, layout), quantize_activations(x.cuda(), layout)
        assert there.codes.is_cuda
        assert_same((there.codes, there.scale, there.total), (here.codes, here.scale, here.total))
