"""q8_1 rows: the launcher, the reference and a numpy emulation give the same bits."""

import numpy as np
import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.rows import quantize_rows
from tests.support.kernel_cases import DTYPES, among_poison, same_bits

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy under the interpreter, on purpose
]
T = (0, 1, 7, 8, 9, 37, 199)


def rows(t: int, kd: int, dtype: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(t)
    x = torch.randn(t, kd, generator=draw) * torch.exp(2 * torch.randn(t, 1, generator=draw))
    return x.to(DTYPES[dtype])


def emulate(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition, value by value in numpy fp32, for finite rows."""
    v = x.float().numpy().reshape(len(x), -1, 32)
    d = np.abs(v).max(-1) / np.float32(127)
    with np.errstate(invalid="ignore"):
        quotient = np.where(d[..., None] == 0, 0, v / d[..., None])
    whole = np.trunc(quotient)
    codes = whole + np.sign(quotient) * (np.abs(quotient - whole) >= 0.5)
    for half in (16, 8, 4, 2, 1):
        v = v[..., :half] + v[..., half:]
    return codes.reshape(x.shape).astype(np.int8), d.astype(np.float16), v[..., 0].astype(np.float16)


@pytest.mark.parametrize("t", T, ids="T{}".format)
def test_bits_of_the_reference(t: int) -> None:
    x = rows(t, 704, "f32")
    for got, want in zip(quantize_rows.quantize_q8_1(x), quantize_rows.quantize_q8_1_ref(x), strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_emulation(dtype: str) -> None:
    x = rows(37, 1408, dtype)
    for got, want in zip(quantize_rows.quantize_q8_1(x), emulate(x), strict=True):
        assert same_bits(got, torch.from_numpy(want))


def test_halves_round_away_from_zero() -> None:
    x = torch.zeros(1, 32)
    x[0, :7] = torch.tensor([127.0, 0.5, -0.5, 1.5, -2.5, 0.49999997, -126.5])
    codes, scale, _ = quantize_rows.quantize_q8_1(x)
    assert codes[0, :7].tolist() == [127, 1, -1, 2, -3, 0, -127]
    assert scale.item() == 1


def test_a_zero_block_is_all_zeros() -> None:
    x = torch.cat([torch.zeros(1, 32), -torch.zeros(1, 32)])
    for part in quantize_rows.quantize_q8_1(x):
        assert same_bits(part, torch.zeros_like(part))


@pytest.mark.parametrize("exponent", [-45, -40, -38, -10, -7], ids="1e{}".format)
def test_subnormal_values_and_scales_survive(exponent: int) -> None:
    x = torch.linspace(-1, 1, 64).view(1, 64) * 10.0**exponent
    for got, want in zip(quantize_rows.quantize_q8_1(x), quantize_rows.quantize_q8_1_ref(x), strict=True):
        assert same_bits(got, want)
    if exponent == -40:
        assert quantize_rows.quantize_q8_1(x)[0].abs().max() >= 126, "fp32 subnormals were flushed"
    if exponent == -7:
        assert quantize_rows.quantize_q8_1(x * 100)[1].max() > 0, "fp16 subnormal scales were flushed"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30], ids=str)
def test_what_is_not_finite_shows_in_its_block_alone(bad: float) -> None:
    x = rows(3, 96, "f32")
    clean = quantize_rows.quantize_q8_1(x)
    x[1, 40] = bad
    for got, want, before in zip(
        quantize_rows.quantize_q8_1(x), quantize_rows.quantize_q8_1_ref(x), clean, strict=True
    ):
        assert same_bits(got, want)
        assert same_bits(got[[0, 2]], before[[0, 2]])
    assert not quantize_rows.quantize_q8_1(x)[1][1, 1].isfinite()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 32:96],
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(8, 128),
        lambda x: x.t().contiguous().t(),
        lambda x: x.flip(0),
    ],
    ids=["columns", "every-other", "expanded", "transposed", "reversed"],
)
def test_strides_do_not_matter(view) -> None:
    x = view(rows(8, 128, "bf16"))
    for got, want in zip(quantize_rows.quantize_q8_1(x), quantize_rows.quantize_q8_1(x.contiguous()), strict=True):
        assert same_bits(got, want)


def test_nothing_past_the_row_is_read() -> None:
    x = rows(5, 96, "f32")
    for got, want in zip(
        quantize_rows.quantize_q8_1(among_poison(x, float("nan"))), quantize_rows.quantize_q8_1(x), strict=True
    ):
        assert same_bits(got, want)


@pytest.mark.parametrize("shape", [(2, 33), (2, 0), (64,), (2, 2, 32)], ids=str)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(LabError, match=r"quantize_q8_1.*Kd"):
        quantize_rows.quantize_q8_1(torch.zeros(shape))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(LabTypeError, match=r"fp32 or fp16 or bf16, got torch\.float64"):
        quantize_rows.quantize_q8_1(torch.zeros(2, 32, dtype=torch.float64))
