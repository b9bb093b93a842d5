"""The int8 grouped product in Triton's interpreter: bits of the reference, whatever the groups, tiles and widths."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab.tolerances import tol
from moe_lab_kernels.grouped.operands import Scatter
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import sides, sides_ref
from moe_lab_kernels.mmq.wide import WideTile
from moe_lab_kernels.primitives import fma_ref
from moe_lab_kernels.rows.arithmetic import Arithmetic
from moe_lab_kernels.rows.hidden import Gate, hidden_rows
from tests.support.kernel_cases import same_bits, worst_relative
from tests.support.mmq_cases import KINDS, MmqCase, mmq_case

pytestmark = pytest.mark.usefixtures("interpreter")
TWO_BLOCKS = ("q2_k-d2s6", "q4_k-q8_k", "nvfp4-d4")
RAGGED = {"empty-experts": [0, 3, 0, 5, 0], "one-takes-all": [0, 0, 41, 0], "T37": [1, 0, 17, 19]}


def check(case: MmqCase, **how) -> None:
    """Of raw blocks, though some formats would be opened."""
    case = replace(case, tile=case.tile or mmq.TILE_INTERPRETER)
    got, want = case.product(**how), case.product(mmq.mmq_product_ref, **how)
    assert got.intact()
    assert want.view.isfinite().any()
    assert same_bits(got.view, want.view)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_references(kind: str) -> None:
    check(mmq_case(kind, 40, 512 if kind in TWO_BLOCKS else 256, [2, 0, 9]))


@pytest.mark.parametrize("kind", ["q3_k-d4", "q8_0-d4", "q4_0-ds4", "mxfp4-d4"])
def test_operands_loaded_as_they_lie_have_the_bits_of_words_side_by_side(kind: str) -> None:
    """More than one stage takes the former, the interpreter's own tile the latter."""
    check(replace(mmq_case(kind, 20, 256, [2, 0, 9]), tile=Tile(64, 4, 2, 1)))


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q8_0-d4"])
def test_pieces_half_full_take_the_narrower_body(kind: str) -> None:
    """Of 64 rows: 40 take the whole one, 32 and 9 the half."""
    check(mmq_case(kind, 20, 256, [40, 32, 9], tokens=64))


@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_ragged_groups(counts: list[int]) -> None:
    check(mmq_case("q8_0-d4", 40, 64, counts), dtype="bf16")


@pytest.mark.parametrize(("kind", "kd"), [("q8_0-d4", 704), ("q4_0-ds4", 2880), ("mxfp4-d4", 1408), ("nvfp4-d4", 192)])
def test_widths_that_fill_no_step(kind: str, kd: int) -> None:
    """Rows are padded to 128 codes, weights are not."""
    check(mmq_case(kind, 33, kd, [3]))


@pytest.mark.parametrize("choice", [{"safe_sum": True}, {"sum": "raw_all"}, {"sum": "quantised"}, {"sum_dtype": "fp32"},
                                    {"scale_dtype": "fp32"}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q4_k-ds4"])
def test_other_sums_and_scales(kind: str, choice: dict) -> None:
    check(mmq_case(kind, 20, 256, [5], arithmetic=Arithmetic(**choice)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q5_k-ds4"])
def test_sums_past_fp16_make_the_references_nans(kind: str) -> None:
    case = mmq_case(kind, 20, 256, [5], size=2e4)
    assert case.rows.total is not None
    assert case.rows.total.isinf().any()
    got, want = case.product().view, case.product(mmq.mmq_product_ref).view
    assert not want.isfinite().all()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q2_k-q8_k"])
def test_a_rows_bits_are_its_own(kind: str) -> None:
    case = mmq_case(kind, 40, 256, [2, 0, 9])
    whole = case.product().view
    assert same_bits(replace(case, tokens=64).product().view, whole)
    assert same_bits(replace(case, tile=Tile(64, 4, 1, 2)).product().view, whole)
    for pair in (1, 10):
        assert same_bits(case.alone(pair).product().view, whole[pair : pair + 1])


@pytest.mark.parametrize("how", [Gate(limit=0.5), Gate(gelu=True), Gate(limit=0.5, limit_mode="oai")],
                         ids=["before", "gelu", "oai"])  # fmt: skip
def test_fused_is_two_products_and_an_activation(how: Gate) -> None:
    """With biases, each of its own expert, whatever the slot; the routing weight on the hidden rows."""
    case = mmq_case("q8_0-d4", 40, 64, [3, 0, 9])
    draw = torch.Generator().manual_seed(5)
    biases = (torch.randn(7, 40, generator=draw), torch.randn(7, 40, generator=draw))
    how = how._replace(weight=torch.rand(12, generator=draw))
    own = replace(case, experts=torch.tensor([6, 1, 0], dtype=torch.int32))
    gate = own.product(dtype="bf16", bias=biases[0]).view
    up = replace(own, gate=case.up).product(dtype="bf16", bias=biases[1]).view
    want = hidden_rows(gate, up, how)
    assert same_bits(own.gated(how=how, biases=biases).view, want)
    ref = own.gated(mmq.mmq_gate_up_ref, how=how, biases=biases).view
    assert worst_relative(want, ref) <= tol("activation/bf16")
    work, given = replace(own, tokens=128).work, {"how": how, "biases": biases}
    got = mmq.mmq_hidden(case.rows, case.row_of, case.gate, case.up, work, torch.bfloat16, **given)
    assert same_bits(got, want)


@pytest.mark.parametrize("tile", [None, WideTile(128, 16, 4, 1)], ids=["raw", "opened"])
def test_a_bias_is_added_before_the_one_rounding(tile: WideTile | None) -> None:
    case, bias = replace(mmq_case("q8_0-d4", 40, 128, [3, 0, 9]), tile=tile), 1e3 * torch.randn(3, 40)
    plain = case.product(mmq.mmq_product_ref).view
    want = plain + bias[[0] * 3 + [2] * 9]
    for op in (mmq.mmq_product, mmq.mmq_product_ref):
        assert same_bits(case.product(op, dtype="bf16", bias=bias).view, want.bfloat16())
    with pytest.raises(LabError, match="2 biases for 3 slots"):
        case.product(bias=bias[:2].contiguous())


def test_the_folded_form_is_fused_alike() -> None:
    case = mmq_case("q3_k-q8_k", 40, 256, [3])
    gate, up = case.product(dtype="bf16").view, replace(case, gate=case.up).product(dtype="bf16").view
    assert same_bits(case.gated().view, hidden_rows(gate, up, Gate()))


def test_scattered_rows() -> None:
    case = mmq_case("q8_0-d4", 24, 64, [3, 0, 20])
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3)).int()
    got = case.product(to=Scatter(order // 2, order % 2, 2))
    assert same_bits(got.view[order.long()], case.product().view)


def test_rows_that_do_not_exist_are_zero_and_pairs_in_no_tile_keep_what_was_there() -> None:
    case = mmq_case("q4_k-ds4", 24, 256, [6])
    case.row_of[2] = 99
    case.row_of[4] = -1
    out = torch.full((6, 24), -5.0)
    work = WorkList(torch.tensor([[0, 1, 4], [7, 5, 1], [-1, 0, 0]], dtype=torch.int32), 16)
    mmq.mmq_product(case.rows, case.row_of, case.gate, work, out)
    assert (out[[0, 5]] == -5).all()
    assert (out[[2, 4]] == 0).all()
    assert (out[[1, 3]] != -5).all()


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q4_k-ds4", "q3_k-d4", "q4_k-q8_k", "q6_k-q8_k"])
def test_sides_are_laid_out_for_tiles(kind: str) -> None:
    case = mmq_case(kind, 8, 512, [3, 0, 18])
    a, b = (f(case.rows, case.row_of, case.gate, case.work, case.pairs) for f in (sides, sides_ref))
    assert same_bits(a.scale, b.scale)
    assert (a.low is None) == (b.low is None)
    assert a.low is None or b.low is None or same_bits(a.low, b.low)
    assert a.tail == b.tail == (kind == "q2_k-d2s6")


def test_fma_rounds_once() -> None:
    """Against integers of any length: a * b + c where the float64 sum lies on a tie of fp32 that it only rounded to."""
    a, b = torch.tensor([1 + 2**-23, 3.0, 2.0**100]), torch.tensor([1 + 2**-23, 0.5, 2.0**100])
    c = torch.tensor([2.0**-60, 2.0**-60, 1.0])
    assert fma_ref(a, b, c).tolist() == [1 + 2**-22, 1.5, float("inf")]
    # 1 + 2^-24 is a tie of fp32; 2^-80 beyond float64 decides it
    tie = fma_ref(torch.tensor([1.0, 1.0]), torch.tensor([2.0**-24, 2.0**-24]), torch.tensor([1.0, 1.0]))
    assert tie.tolist() == [1.0, 1.0]
    up = fma_ref(torch.tensor([2.0**-24 * (1 + 2**-23)]), torch.tensor([1 + 2**-23]), torch.tensor([1.0]))
    assert up.item() == 1 + 2**-23


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": lambda c: c.rows._replace(layout="d4")}, "d2s6 or q8_k, got d4"),
        ({"rows": lambda c: c.rows._replace(total=None)}, "minima.*no sums"),
        ({"rows": lambda c: c.rows._replace(codes=c.rows.codes[:, :256].contiguous())}, "codes"),
        ({"gate": lambda c: c.gate._replace(format="q4_1")}, "q4_1"),
        ({"gate": lambda c: c.gate._replace(kd=384)}, "256 values.*384"),
        ({"work": lambda c: c.work._replace(tokens=24)}, "24"),
    ],
)
def test_refusals(change: dict, said: str) -> None:
    case = mmq_case("q2_k-d2s6", 8, 512, [3])
    call = {"rows": case.rows, "gate": case.gate, "work": case.work} | {k: v(case) for k, v in change.items()}
    with pytest.raises((LabError, LabTypeError), match=said):
        mmq.mmq_product(call["rows"], case.row_of, call["gate"], call["work"], torch.empty(3, 8))
