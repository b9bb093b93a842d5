"""e4m3 rows times e4m3 weights in the interpreter: the bits of the reference, fused and unfused alike, ragged ends."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped.operands import Scatter
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8
from tests.support.grouped_cases import GroupedCase, grouped_case
from tests.support.kernel_cases import among_poison, same_bits

pytestmark = pytest.mark.usefixtures("interpreter")


def rows_of(x: torch.Tensor) -> g8.Fp8Rows:
    """Quantised, codes and scales among poison."""
    codes, scale = quantize_fp8(torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).contiguous())
    return g8.Fp8Rows(among_poison(codes.view(torch.uint8), 255).view(codes.dtype), among_poison(scale, float("nan")))


def hidden(case: GroupedCase, n: int) -> g8.Fp8Rows:
    groups = -(-n // g8.GROUP)
    codes = torch.full((case.pairs, groups * g8.GROUP), 9, dtype=torch.uint8).view(torch.float8_e4m3fn)
    return g8.Fp8Rows(codes, torch.full((case.pairs, groups), 9.0))


def same_rows(a: g8.Fp8Rows, b: g8.Fp8Rows) -> bool:
    return torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and same_bits(a.scale, b.scale)


CASES = {"whole": (128, 256), "ragged": (150, 200), "small": (20, 72)}


@pytest.mark.parametrize(("n", "kd"), CASES.values(), ids=CASES)
def test_product(n: int, kd: int) -> None:
    case = grouped_case("fp8_block", n, kd, [2, 0, 19, 1])
    x, out = rows_of(case.x), torch.full((case.pairs, n), 5.0)
    want = out.clone()
    g8.fp8_product(x, case.row_of, case.gate, case.work, out)
    g8.fp8_product_ref(x, case.row_of, case.gate, case.work, want)
    assert same_bits(out, want)


@pytest.mark.parametrize("options", [{}, {"gelu": True, "limit": 0.5}], ids=str)
@pytest.mark.parametrize(("n", "kd"), CASES.values(), ids=CASES)
def test_hidden_rows_leave_quantised_as_a_launch_of_its_own_would(n: int, kd: int, options: dict) -> None:
    case = grouped_case("fp8_block", n, kd, [2, 0, 5])
    x, h, want = rows_of(case.x), hidden(case, n), hidden(case, n)
    g8.fp8_gate_up(x, case.row_of, case.gate, case.up, case.work, h, how=Gate(**options))
    g8.fp8_gate_up_ref(x, case.row_of, case.gate, case.up, case.work, want, how=Gate(**options))
    assert same_rows(h, want)
    plain = torch.empty(case.pairs, n, dtype=torch.bfloat16)
    g8.fp8_gate_up(x, case.row_of, case.gate, case.up, case.work, plain, how=Gate(**options))
    padded = torch.nn.functional.pad(plain, (0, -n % g8.GROUP))
    assert same_rows(h, g8.Fp8Rows(*quantize_fp8(padded)))


def test_a_rows_bits_are_its_own_and_go_where_they_are_sent() -> None:
    case = grouped_case("fp8_block", 60, 256, [3, 0, 5])
    x, order = rows_of(case.x), torch.tensor([7, 2, 5, 0, 1, 6, 3, 4], dtype=torch.int32)
    whole, sent = (torch.full((8, 60), 5.0) for _ in range(2))
    g8.fp8_product(x, case.row_of, case.gate, case.work, whole)
    g8.fp8_product(x, case.row_of, case.gate, case.work, sent, to=Scatter(order // 2, order % 2, 2))
    assert same_bits(sent[order.long()], whole)
    for pair in (0, 4):
        one, alone = case.alone(pair), torch.empty(1, 60)
        g8.fp8_product(x, one.row_of, one.gate, one.work, alone, tile=Tile(64, 4, 1))
        assert same_bits(alone, whole[pair : pair + 1]), pair


def test_refusals() -> None:
    case = grouped_case("fp8_block", 60, 128, [3])
    x, out = rows_of(case.x), torch.empty(3, 60)
    with pytest.raises(LabError, match="multiplies fp8_block weights, got q8_0"):
        g8.fp8_product(x, case.row_of, case.gate._replace(format="q8_0"), case.work, out)
    with pytest.raises(LabError, match="tiles of 48 rows"):
        g8.fp8_product(x, case.row_of, case.gate, WorkList(case.work.tiles, 48), out)
    with pytest.raises(LabError, match="a tile of 64 weight rows; a scale serves 128"):
        g8.fp8_gate_up(x, case.row_of, case.gate, case.up, case.work, hidden(case, 60), tile=Tile(64, 4, 1))
    with pytest.raises(LabError, match=r"scale must have shape \[3, 1\]"):
        g8.fp8_product(x._replace(scale=torch.ones(3, 2)), case.row_of, case.gate, case.work, out)
