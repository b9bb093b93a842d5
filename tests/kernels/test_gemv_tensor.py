"""The float GEMV on the tensor cores: the instruction's sums, rows alone and among sixteen, operands that lie oddly."""

import pytest
import torch

from moe_lab.arms.gemv_float import float_matmul
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import quantize
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv_float.operands import Pairs
from moe_lab_kernels.gemv_float.ref import values_ref
from moe_lab_kernels.gemv_float.tensor import TensorTile, gemv_tensor, gemv_tensor_ref
from moe_lab_kernels.gemv_float.tensor_ref import chains, parts_of, refusal
from moe_lab_kernels.gemv_float.tensor_steps import products_of, summed
from tests.support import float_cases as fc
from tests.support.kernel_cases import Guarded, among_poison, nmse, same_bits

BF16 = torch.bfloat16
N, KD = 21, 320  # two blocks of 16 weight rows, a second step that starts early


def cut(c: float, *products: float) -> float:
    """The instruction's sum of these products of 1 and a factor."""
    b = torch.zeros(16)
    b[: len(products)] = torch.tensor(products)
    return float(summed(products_of(torch.ones(16), b), torch.tensor(c)))


@pytest.mark.parametrize(
    ("c", "products", "want"),
    [
        (2.0**25, [3.0], 2.0**25),  # nearest would be 4 more
        (2.0**25, [-1.0], 2.0**25 - 2),  # nearest even would be 2^25
        (-(2.0**25), [-3.0], -(2.0**25)),
        (2.0**23, [0.25] * 4, 2.0**23 + 1),  # 25 bits below the largest are kept, and added exactly
        (2.0**23, [0.125] * 8, 2.0**23),  # those below are cut one by one
        (0.0, [0.1015625, -0.1015625], 0.0),
        (0.0, [2.0**24, 1.0, -(2.0**24)], 1.0),
        (1.5, [], 1.5),
    ],
)
def test_sums_are_cut_towards_zero(c: float, products: list[float], want: float) -> None:
    assert cut(c, *products) == want


def test_an_infinity_or_nan_stays_one() -> None:
    assert cut(1.0, float("inf")) == float("inf")
    assert cut(1.0, float("inf"), float("-inf")) != cut(1.0, float("inf"), float("-inf"))


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_value_of_a_group_has_its_instruction(group: int) -> None:
    order = chains(group)
    assert order.shape == (group // 16, 16)
    assert sorted(order.flatten().tolist()) == list(range(group))


def odd_weight(format: str, how: str):
    """Scales and biases in 32 bits, or in 16: by words, or one by one where a row has no whole steps of them."""
    w = fc.weight(format, N, KD if how == "halves" else 512)
    if how == "fp32":
        return w
    dtype = torch.float16 if how == "halves" else BF16
    return w._replace(scales=w.scales.to(dtype), second=w.second.to(dtype))


def product(op, x: torch.Tensor, pairs: Pairs, w, **options) -> Guarded:
    out = Guarded((len(pairs.row_of), N), torch.float32, "cpu")
    op(x, pairs, w, out.view, **options)
    assert out.intact()
    return out


def chunks(*entries: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.int32)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("format", "how"), [("int4_g64", "halves"), ("int4_g32", "words"), ("int4_g128", "fp32")])
def test_a_row_alone_has_the_bits_it_has_among_thirteen(format: str, how: str) -> None:
    w = odd_weight(format, how)
    x = fc.rows_of(13, w.kd, BF16).x
    x = x * torch.exp2(torch.randint(-4, 5, x.shape, generator=torch.Generator().manual_seed(1)).to(BF16))
    if how == "halves":
        x = among_poison(x, float("nan"))
    row_of = torch.arange(13, dtype=torch.int32)
    row_of[4], row_of[5] = -1, 13  # no rows
    together = Pairs(row_of, chunks((1, 0, 13), (2, 0, 13), (-1, 0, 13), (0, 0, 0)), 16)
    got = product(gemv_tensor, x, together, w).view
    assert same_bits(got, product(gemv_tensor_ref, x, together, w).view)
    assert not got[4:6].any()
    there = (row_of >= 0) & (row_of < 13)
    assert nmse(got[there], x[row_of[there]].float() @ values_ref(w, 1).T) <= tol("gemv/float product")
    alone, tile = Pairs(row_of, chunks((1, 6, 1), (1, 8, 5)), 8), TensorTile(1) if how == "fp32" else None
    some = product(gemv_tensor, x, alone, w, tile=tile).view
    assert same_bits(some[[6, *range(8, 13)]], got[[6, *range(8, 13)]])


@pytest.mark.usefixtures("interpreter")
def test_a_nan_row_spoils_itself_alone_and_pairs_in_no_chunk_are_left_alone() -> None:
    w, x = fc.weight("int4_g64", N, 256), fc.rows_of(4, 256, BF16).x
    pairs = Pairs(torch.arange(5).int() % 4, chunks((1, 0, 4)), 8)
    clean, spoilt = product(gemv_tensor, x, pairs, w).view, x.clone()
    spoilt[2, 100] = float("nan")
    got = product(gemv_tensor, spoilt, pairs, w).view
    assert got[[2, 4]].isnan().all()  # the last is poison as it was
    assert same_bits(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.usefixtures("interpreter")
def test_float_matmul_takes_it_for_any_number_of_rows() -> None:
    x, q = fc.rows_of(2, 256, BF16).x, quantize(torch.randn(5, 256), "int4_g64")
    whole = float_matmul(x, q)
    assert same_bits(float_matmul(x[1:], q), whole[1:])
    assert nmse(whole, x.float() @ q.dequantize().T) <= tol("gemv/float product")
    assert float_matmul(x[:0], q).shape == (0, 5)


@pytest.mark.wrong_types
def test_what_does_not_fit_is_refused_before_a_launch() -> None:
    w, x = fc.weight("int4_g64", N, 256), fc.rows_of(4, 256, BF16).x
    pairs, out = Pairs(torch.arange(4).int(), chunks((0, 0, 4)), 16), torch.empty(4, N)
    bytes_, short = fc.weight("int8_g64", N, 256), fc.weight("int4_g64", N, 192)
    for error, match, call in (
        (
            LabError,
            "4-bit integers here, not int8_g64",
            lambda: gemv_tensor(x, pairs, bytes_, out),
        ),
        (LabError, "from 256 on here, got Kd=192", lambda: gemv_tensor(x, pairs, short, out)),
        (LabError, "max_rows=3", lambda: gemv_tensor(x, pairs._replace(max_rows=3), w, out)),
        (LabError, "leave `to` out", lambda: gemv_tensor(x, pairs._replace(to=pairs.row_of), w, out)),
        (LabError, "x has no rows", lambda: gemv_tensor(x[:0], pairs, w, out)),
        (LabError, "x must have shape", lambda: gemv_tensor(x[:, :128], pairs, w, out)),
        (LabTypeError, "x must be bf16", lambda: gemv_tensor(x.half(), pairs, w, out)),
        (LabError, "wants a second", lambda: gemv_tensor(x, pairs, w._replace(second=None), out)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_how_a_row_is_cut() -> None:
    assert refusal("int4_g128", 256) is None
    assert refusal("int4_g32", 288) is None
    assert (parts_of(8191), parts_of(8192)) == (4, 8)
