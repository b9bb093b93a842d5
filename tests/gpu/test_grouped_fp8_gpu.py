"""fp8 rows times fp8 weights on the GPU: near the reference, fused as unfused, a row's bits its own; decoded slots."""

from dataclasses import replace

import pytest
import torch

from moe_lab.tolerances import tol
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped.grouped_gemm import grouped_product
from moe_lab_kernels.grouped.tiles import TOKENS, Tile
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8
from tests.support.grouped_cases import GroupedCase, grouped_case
from tests.support.kernel_cases import nmse, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
COUNTS = [3, 0, 70, 129]


def rows_of(x: torch.Tensor) -> g8.Fp8Rows:
    return g8.Fp8Rows(*quantize_fp8(torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).contiguous()))


def product(case: GroupedCase, x: g8.Fp8Rows, op=g8.fp8_product, **options) -> torch.Tensor:
    out = torch.full((case.pairs, case.gate.data.shape[1]), float("nan"), device="cuda")
    return op(x, case.row_of, case.gate, case.work, out, **options)


@pytest.mark.parametrize(("n", "kd"), [(200, 512), (150, 200), (704, 2880)], ids=str)
@pytest.mark.parametrize("tokens", TOKENS, ids="tile{}".format)
def test_near_the_reference_whatever_the_tile(n: int, kd: int, tokens: int) -> None:
    case = grouped_case("fp8_block", n, kd, COUNTS, tokens=tokens, device="cuda")
    x = rows_of(case.x)
    got = product(case, x)
    assert nmse(got.cpu(), product(case, x, g8.fp8_product_ref).cpu()) <= tol("grouped/fp8 product")
    assert same_bits(got, product(replace(case, tokens=16), x, tile=Tile(64, 4, 3)))
    assert same_bits(got, product(case, x, tile=Tile(64, 4, 3, resident=2)))
    for pair in (0, 3, 150):
        assert same_bits(product(case.alone(pair), x), got[pair : pair + 1]), pair


@pytest.mark.parametrize("tokens", TOKENS, ids="tile{}".format)
@pytest.mark.parametrize("n", [256, 150])
def test_hidden_rows_leave_quantised_as_a_launch_of_its_own_would(n: int, tokens: int) -> None:
    case = grouped_case("fp8_block", n, 512, COUNTS, tokens=tokens, device="cuda")
    x, groups = rows_of(case.x), -(-n // g8.GROUP)
    codes = torch.full((case.pairs, groups * g8.GROUP), 9, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    h = g8.Fp8Rows(codes, torch.full((case.pairs, groups), 9.0, device="cuda"))
    g8.fp8_gate_up(x, case.row_of, case.gate, case.up, case.work, h)
    plain = torch.empty(case.pairs, n, dtype=torch.bfloat16, device="cuda")
    g8.fp8_gate_up(x, case.row_of, case.gate, case.up, case.work, plain)
    want, scale = quantize_fp8(torch.nn.functional.pad(plain, (0, -n % g8.GROUP)))
    assert torch.equal(h.codes.view(torch.uint8), want.view(torch.uint8))
    assert same_bits(h.scale, scale)


@pytest.mark.parametrize("tokens", [16, 64, 128], ids="tile{}".format)
def test_biases_and_weights_inside(tokens: int) -> None:
    draw = torch.Generator().manual_seed(7)
    case = grouped_case("fp8_block", 200, 512, COUNTS, tokens=tokens, device="cuda")
    case = replace(case, expert=[5, 0, 3, 1])
    biases = tuple(torch.randn(6, 200, generator=draw).bfloat16().cuda() for _ in range(2))
    how = Gate(limit=1.0, limit_mode="oai", weight=torch.rand(case.pairs, generator=draw).cuda())
    x, made = rows_of(case.x), []
    for op in (g8.fp8_gate_up, g8.fp8_gate_up_ref):
        h = torch.full((case.pairs, 200), float("nan"), dtype=torch.bfloat16, device="cuda")
        made.append(op(x, case.row_of, case.gate, case.up, case.work, h, how=how, biases=biases))
    assert nmse(made[0], made[1]) <= tol("store/bf16")


@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k", "q6_k", "mxfp4_oss", "int4_g64", "fp8_block"])
def test_decoded_slots_have_the_bits_of_weights_decoded_in_the_product(format: str) -> None:
    case = grouped_case(format, 200, 512, COUNTS, tokens=64, device="cuda")
    w = case.gate._replace(data=case.gate.data.contiguous())
    want, out = case.product().view, torch.full((case.pairs, 200), float("nan"), device="cuda")
    scratch = torch.empty(decoded.scratch_values(w, 3), dtype=torch.bfloat16, device="cuda")
    for first, work in decoded.waves(case.work, len(w.data), 3):
        grouped_product(case.x, case.row_of, decoded.decode_slots(w, first, 3, scratch), work, out)
    assert same_bits(out, want)
