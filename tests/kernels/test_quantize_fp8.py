"""fp8 activation rows: launcher and reference give the same bits, and the codes are the nearest of e4m3."""

import itertools

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.rows.arithmetic import Arithmetic
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8, quantize_fp8_ref
from moe_lab_kernels.rows.quantize_rows import Tile
from tests.support.activation_cases import KINDS, case
from tests.support.kernel_cases import DTYPES, among_poison, same_bits

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy under the interpreter, on purpose
]
CHOICES = [
    Arithmetic(block=block, rounding=rounding, scale_dtype=scale)
    for block, rounding, scale in itertools.product((32, 128), ("divide", "reciprocal", "multiply"), ("fp32", "e8m0"))
]


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


def assert_same(got, want) -> None:
    assert torch.equal(raw(got[0]), raw(want[0])), "codes"
    assert same_bits(got[1], want[1]), "scale"


def with_everything() -> torch.Tensor:
    x = torch.cat([case(kind, rows=2, kd=320) for kind in KINDS])
    x[0, 3], x[2, 100], x[4, 200], x[4, 201] = float("nan"), float("inf"), -float("inf"), -float("nan")
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("floor", [0.0, 1e-4], ids=["no-floor", "floor"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda a: f"{a.block}-{a.rounding}-{a.scale_dtype}")
def test_bits_of_the_reference(choice: Arithmetic, floor: float, dtype: str) -> None:
    x = with_everything().to(DTYPES[dtype])
    assert_same(quantize_fp8(x, choice, floor=floor), quantize_fp8_ref(x, choice, floor=floor))


def test_codes_are_the_nearest_and_ties_go_to_even() -> None:
    """Every finite code, every midpoint of two, and the floats beside the midpoints, under a scale of 1."""
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (table[1:] + table[:-1]) / 2
    beside = [torch.nextafter(middle, table[:-1]), torch.nextafter(middle, table[1:])]
    at = torch.arange(126, dtype=torch.uint8)
    values = torch.cat([table, middle, *beside])
    want = torch.cat([torch.arange(127, dtype=torch.uint8), at + at % 2, at, at + 1])
    groups = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.nn.functional.pad(groups, (1, 0), value=448.0)  # each group of 128 begins with 448
    for sign in (1, -1):
        codes, scale = quantize_fp8(sign * x)
        assert (scale == 1).all()
        assert torch.equal(raw(codes)[:, 1:].flatten()[: len(values)] & 0x7F, want)
        assert ((raw(codes) >= 0x80) == (sign * x).signbit()).all()


@pytest.mark.parametrize("op", [quantize_fp8, quantize_fp8_ref], ids=["kernel", "reference"])
def test_scales_raised_to_powers_of_two(op) -> None:
    x = torch.zeros(6, 128)
    x[:, 0] = torch.tensor([448.0, 449.0, 447.0, 0.0, 1e-44, 3e38])
    codes, scale = op(x, Arithmetic(scale_dtype="e8m0"))
    assert scale.flatten().tolist() == [1.0, 2.0, 1.0, 2.0**-126, 2.0**-126, 2.0**120]
    assert (codes.float()[:, 0] * scale[:, 0] - x[:, 0]).abs().max() <= 3e38 / 16


@pytest.mark.parametrize("op", [quantize_fp8, quantize_fp8_ref], ids=["kernel", "reference"])
def test_what_is_not_a_number_stays_where_it_is(op) -> None:
    x = case("gauss", rows=3, kd=256)
    clean_codes, clean_scale = op(x)
    x[1, 5] = float("nan")
    codes, scale = op(x)
    assert raw(codes)[1, 5] == 0x7F
    assert scale.isfinite().all()
    x[1, 5] = float("inf")
    codes, scale = op(x)
    assert scale[1, 0].isinf()
    assert raw(codes)[1, 5] == 0x7F
    for rows in (raw(codes)[[0, 2]], raw(codes)[1, 128:]):
        assert not ((rows & 0x7F) == 0x7F).any()
    assert torch.equal(raw(codes)[[0, 2]], raw(clean_codes)[[0, 2]])
    assert torch.equal(scale[[0, 2]], clean_scale[[0, 2]])


def test_rows_of_2880_are_padded_with_zeros() -> None:
    codes, scale = quantize_fp8(case("gauss", rows=3, kd=2880))
    assert (codes.shape, scale.shape) == ((3, 2944), (3, 23))
    assert not raw(codes)[:, 2880:].any()
    assert quantize_fp8(torch.zeros(0, 96))[0].shape == (0, 128)


def test_strides_tiles_and_neighbours_do_not_matter() -> None:
    x = case("gauss", rows=8, kd=512).bfloat16()
    for view in (x[:, 32:416], x[:, ::2], x.t().contiguous().t(), among_poison(x, float("nan"))):
        assert_same(quantize_fp8(view, tile=Tile(256, 1)), quantize_fp8(view.contiguous().clone()))


@pytest.mark.parametrize(
    "choice", [Arithmetic(scale_dtype="fp16"), Arithmetic(sum="raw"), Arithmetic(rounding="divide_even")], ids=str
)
def test_choices_of_int8_are_refused(choice: Arithmetic) -> None:
    with pytest.raises(LabError, match="fp8 has fp32 or e8m0 scales, no sums"):
        quantize_fp8(torch.zeros(1, 128), choice)


@pytest.mark.parametrize("floor", [-1.0, float("inf"), float("nan")])
def test_other_floors_are_refused(floor: float) -> None:
    with pytest.raises(LabError, match="floor must be a finite number >= 0"):
        quantize_fp8(torch.zeros(1, 128), floor=floor)
