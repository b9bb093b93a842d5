"""The int8 grouped product on the GPU: the reference's bits, a row's bits its own whatever the batch or the tile."""

from dataclasses import replace

import pytest
import torch

from moe_lab.formats import quantize, quantize_activations
from moe_lab.numerics.emulation import arithmetic_of, emulate
from moe_lab.numerics.matmul import matmul
from moe_lab.tolerances import tol
from moe_lab_kernels.backend import count_launches
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.opened import opened_bytes
from moe_lab_kernels.mmq.operands import MmqRows, sides, sides_ref
from moe_lab_kernels.mmq.wide import wide_tile
from moe_lab_kernels.rows.arithmetic import Arithmetic
from moe_lab_kernels.rows.hidden import Gate, hidden_rows
from tests.support.kernel_cases import Guarded, nmse, same_bits
from tests.support.mmq_cases import KINDS, MmqCase, mmq_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
TOKENS = (16, 32, 64, 128)
RAGGED = {
    "empty-experts": [0, 3, 0, 5, 0],
    "one-takes-all": [0, 0, 300, 0],
    "T37": [1, 0, 17, 19],
    "T199": [199, 0, 70, 129],
}


def check(case: MmqCase, **how) -> None:
    got, want = case.product(**how), case.product(mmq.mmq_product_ref, **how)
    assert got.intact()
    assert same_bits(got.view, want.view)


@pytest.mark.parametrize("tokens", TOKENS, ids="tile{}".format)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_references_in_every_tile(kind: str, tokens: int) -> None:
    """Of raw blocks, and in the way that is taken by itself."""
    case = mmq_case(kind, 200, 1024, [2, 0, 150], tokens=tokens, device="cuda")
    check(replace(case, tile=mmq.mmq_tile(case.gate.format, kind.endswith("q8_k"), tokens, "cuda")))
    check(case)


@pytest.mark.parametrize("weights", [1, 9], ids="{}-open".format)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_references_with_opened_weights(kind: str, weights: int) -> None:
    """In the tile that ships, one weight at a time or all of them; many rows go that way by themselves."""
    case = mmq_case(kind, 200, 1024, [2, 0, 150, 300, 129], tokens=128, device="cuda")
    folded = kind.endswith("q8_k")
    tile = wide_tile(case.gate.format, folded, 128, "cuda")
    room = torch.full((weights * opened_bytes(case.gate, folded),), 0x7B, dtype=torch.uint8, device="cuda")

    def op(*args, **given):
        mmq.mmq_product(*args, **given, scratch=room)

    check_like(replace(case, tile=tile).product(op), case)  # type: ignore[arg-type]


def check_like(got: Guarded, case: MmqCase) -> None:
    assert got.intact()
    assert same_bits(got.view, case.product(mmq.mmq_product_ref).view)


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q8_0-d4"])
def test_many_rows_an_expert_open_their_weights(kind: str) -> None:
    case = mmq_case(kind, 200, 512, [600, 0, 500], tokens=128, device="cuda")
    with count_launches() as count:
        got = case.product()
    assert count.by_kernel["_wide"] == 1
    check_like(got, case)


@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q3_k-d4", "q2_k-q8_k"])
def test_ragged_groups(kind: str, counts: list[int]) -> None:
    check(mmq_case(kind, 320, 768, counts, tokens=64, device="cuda"), dtype="bf16")


@pytest.mark.parametrize("kind", ["q8_0-d4", "q4_0-ds4", "mxfp4-d4", "nvfp4-d4"])
@pytest.mark.parametrize("kd", [64, 704, 1408, 2880], ids="Kd{}".format)
def test_widths_that_fill_no_step(kind: str, kd: int) -> None:
    check(mmq_case(kind, 300, kd, [3, 0, 40], tokens=32, device="cuda"))


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q3_k-d4", "q6_k-d4", "q4_k-q8_k"])
def test_a_rows_bits_are_its_own(kind: str) -> None:
    case = mmq_case(kind, 200, 512, [2, 0, 150], device="cuda")
    whole = case.product().view
    for tokens in TOKENS:
        assert same_bits(replace(case, tokens=tokens).product().view, whole)
    for tile in (Tile(64, 4, 2, 2), Tile(128, 8, 3), Tile(128, 4, 2)):
        assert same_bits(replace(case, tokens=64, tile=tile).product().view, whole)
    for pair in (0, 1, 99, 151):
        assert same_bits(case.alone(pair).product().view, whole[pair : pair + 1]), pair


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("q3_k-d4", Gate(limit=0.5, limit_mode="oai")),
        ("q3_k-d4", Gate(gelu=True)),
        ("q2_k-q8_k", Gate(limit=0.5)),
        ("mxfp4-d4", Gate(limit=0.5, limit_mode="oai")),
    ],
    ids=["q3_k-oai", "q3_k-gelu", "folded-before", "mxfp4-oai"],
)
def test_fused_is_two_products_and_an_activation(kind: str, how: Gate) -> None:
    """With biases, each of its own expert, whatever the slot; the routing weight on the hidden rows."""
    case = mmq_case(kind, 200, 256, [3, 0, 50], device="cuda")
    draw = torch.Generator("cuda").manual_seed(5)
    biases = (torch.randn(7, 200, generator=draw, device="cuda"), torch.randn(7, 200, generator=draw, device="cuda"))
    how = how._replace(weight=torch.rand(53, generator=draw, device="cuda"))
    own = replace(case, experts=torch.tensor([6, 1, 0], dtype=torch.int32, device="cuda"))
    gate = own.product(dtype="bf16", bias=biases[0]).view
    assert same_bits(own.product(mmq.mmq_product_ref, dtype="bf16", bias=biases[0]).view, gate)
    up = replace(own, gate=case.up).product(dtype="bf16", bias=biases[1]).view
    want = hidden_rows(gate, up, how)
    assert same_bits(own.gated(how=how, biases=biases).view, want)
    for tokens in (16, 128):
        work, given = replace(own, tokens=tokens).work, {"how": how, "biases": biases}
        got = mmq.mmq_hidden(case.rows, case.row_of, case.gate, case.up, work, torch.bfloat16, **given)
        assert same_bits(got, want), tokens


@pytest.mark.parametrize("kind", KINDS)
def test_sides(kind: str) -> None:
    case = mmq_case(kind, 8, 512, [3, 0, 18], device="cuda")
    a, b = (f(case.rows, case.row_of, case.gate, case.work, case.pairs) for f in (sides, sides_ref))
    assert same_bits(a.scale, b.scale)
    assert a.low is None or b.low is None or same_bits(a.low, b.low)


@pytest.mark.parametrize("choice", [{"safe_sum": True}, {"sum": "raw_all"}, {"scale_dtype": "fp32"}], ids=str)
@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q5_k-ds4"])
def test_other_sums_and_scales(kind: str, choice: dict) -> None:
    check(mmq_case(kind, 64, 512, [5, 20], device="cuda", arithmetic=Arithmetic(**choice)))


def test_scattered_rows() -> None:
    case = mmq_case("q8_0-d4", 64, 64, [3, 0, 50], device="cuda")
    order = torch.randperm(53, generator=torch.Generator().manual_seed(3)).int().cuda()
    got = case.product(to=Scatter(order // 2, order % 2, 2))
    assert same_bits(got.view[order.long()], case.product().view)


@pytest.mark.parametrize("arm", ["gemv", "mmq"])
@pytest.mark.parametrize("format", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "mxfp4", "nvfp4"])
def test_matmul_is_the_emulation(format: str, arm) -> None:
    draw = torch.Generator().manual_seed(4)
    x, w = torch.randn(65, 1024, generator=draw).cuda(), torch.randn(96, 1024, generator=draw).cuda() * 0.05
    q = quantize(w, format)
    got = matmul(x, q, arm)
    assert nmse(got, emulate(x, q, arithmetic_of(format, arm))) <= tol("mmq/emulation")
    for t in (1, 2, 8, 9, 63, 64):
        assert same_bits(matmul(x[:t], q, arm), got[:t]), t


def test_offsets_past_32_bits() -> None:
    """The last of 200 slots [4096, 8192] of q2_k starts past 2^31."""
    slots, n, kd = 200, 4096, 8192
    data = torch.zeros(slots, n, kd // 256 * 84, dtype=torch.uint8, device="cuda")
    assert (slots - 1) * data.stride(0) > 2**31
    draw = torch.Generator().manual_seed(4)
    q = quantize((torch.randn(n, kd, generator=draw) * 0.05).cuda(), "q2_k")
    data[-1] = q.data
    x = torch.randn(1, kd, generator=draw).cuda()
    made = quantize_activations(x, "d2s6")
    rows = MmqRows(made.codes, made.scale, made.total, "d2s6")
    work = WorkList(torch.tensor([[slots - 1, 0, 1]], dtype=torch.int32, device="cuda"), 16)
    out = torch.full((1, n), float("nan"), device="cuda")
    mmq.mmq_product(rows, None, Weight(data, "q2_k", kd), work, out)
    assert same_bits(out, matmul(x, q, "mmq"))
