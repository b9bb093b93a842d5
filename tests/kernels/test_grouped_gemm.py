"""The grouped GEMM in the interpreter: bits of its references, ragged groups, and what it must never touch.

The interpreter and the references both sum in float64, so their bits are one; how close the tensor cores' fp32 sums
come is for the GPU's tests.
"""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.grouped import grouped_gemm
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.steps import STEPS, Step
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.hidden import Gate
from tests.support.grouped_cases import GroupedCase, grouped_case
from tests.support.kernel_cases import same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
ALIKE = ("bf16", "int4_g32", "int4_g64", "int8_g64", "int8_g128")  # tested above, or but for a group's length
RAGGED = {
    "empty-experts": [0, 3, 0, 5, 0],
    "one-takes-all": [0, 0, 37, 0],
    "T1-K4": [1, 0, 1, 1, 1],
    "T7": [2, 7, 0, 5],
    "T9-K=E": [9, 9, 9],
    "many-tiles": [33, 0, 17, 16, 1],
    "T199": [199, 0],
    "T0": [0, 0, 0],
}


def agree(case: GroupedCase, dtype: str = "bf16") -> None:
    for got, want in (
        (case.product(), case.product(grouped_gemm.grouped_product_ref)),
        (case.gated(dtype=dtype), case.gated(grouped_gemm.grouped_gate_up_ref, dtype)),
    ):
        assert same_bits(got.view, want.view)
        assert got.intact()


@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
def test_ragged_groups(counts: list[int]) -> None:
    agree(grouped_case("bf16", 60, 64, counts))


@pytest.mark.parametrize(("n", "kd"), [(704, 64), (60, 704), (60, 1408), (60, 2880), (300, 72), (1, 8)])
def test_widths_that_fill_no_tile(n: int, kd: int) -> None:
    agree(grouped_case("bf16", n, kd, [3, 0, 2]))


@pytest.mark.parametrize("format", [f for f in STEPS if f not in ALIKE])
def test_every_format(format: str) -> None:
    agree(grouped_case(format, 20, 256, [2, 0, 1], dtype="f16" if format == "f16" else "bf16"))


@pytest.mark.parametrize("format", ["q2_k", "q3_k"])
def test_fp16_rows_take_fp16_weights(format: str) -> None:
    agree(grouped_case(format, 20, 512, [2, 0, 1], dtype="f16"), dtype="f16")


@pytest.mark.parametrize(
    ("format", "n", "kd"),
    [("fp8_block", 150, 200), ("nvfp4_modelopt", 20, 48), ("nvfp4", 20, 64), ("int4_g32", 20, 96)],
)
def test_rows_that_end_inside_a_step(format: str, n: int, kd: int) -> None:
    """Blocks of 128 x 128 cut both ways; a part of two groups of 16 of which one exists."""
    agree(grouped_case(format, n, kd, [2, 1]))


@pytest.mark.parametrize("step", [Step(32, 32), Step(64, 32), Step(64, 64), Step(128, 32), Step(128, 64),
                                  Step(128, 128), Step(256, 128)], ids=lambda s: f"{s.values}-in-{s.part}")  # fmt: skip
def test_q10_the_scale_belongs_to_the_value_not_to_the_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scale blocks of 128; steps of the loop and their parts smaller, equal and larger."""
    monkeypatch.setitem(STEPS, "fp8_block", step)
    codes = torch.full((1, 1, 256), 0x38, dtype=torch.uint8)
    w = Weight(codes, "fp8_block", 256, torch.tensor([[[1.0, 1000.0]]]), None)
    row, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    case = GroupedCase(torch.ones(1, 256).bfloat16(), row, w, w, one, 16)
    assert case.product().view.tolist() == [[128128.0]]


@pytest.mark.parametrize("options", [{"limit": 0.5}, {"gelu": True}, {"gelu": True, "limit": 0.25}], ids=str)
def test_fused_is_two_products_and_an_activation(options: dict) -> None:
    case = grouped_case("bf16", 60, 128, [3, 0, 5])
    gate, up = case.product(dtype="bf16").view, replace(case, gate=case.up).product(dtype="bf16").view
    op = activation.geglu if options.get("gelu") else activation.swiglu
    assert same_bits(case.gated(how=Gate(**options)).view, op(gate, up, limit=options.get("limit")))


@pytest.mark.parametrize("format", ["bf16", "q3_k"])
def test_a_rows_bits_are_its_own(format: str) -> None:
    """Other tiles, other neighbours, alone."""
    case = grouped_case(format, 20, 256, [2, 0, 19])
    whole = case.product().view
    for change in ({"tokens": 32}, {"tile": Tile(64, 4, 1, 2)}):
        assert same_bits(replace(case, **change).product().view, whole), change
    for pair in (0, 1, 20):
        assert same_bits(case.alone(pair).product().view, whole[pair : pair + 1]), pair


def test_scattered_rows() -> None:
    case = grouped_case("bf16", 60, 64, [3, 0, 5])
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3)).int()
    got = case.product(to=Scatter(order // 2, order % 2, 2))
    assert same_bits(got.view[order.long()], case.product().view)
    assert got.intact()


def test_what_no_tile_names_is_not_written() -> None:
    case = grouped_case("bf16", 60, 64, [3, 4])
    tiles = torch.tensor([[0, 0, 2], [-1, 2, 1], [2, 3, 1], [1, 5, 9], [1, 4, 0]], dtype=torch.int32)
    out = torch.full((7, 60), 5.0)
    grouped_gemm.grouped_product(case.x, case.row_of, case.gate, WorkList(tiles, 16), out)
    want = grouped_gemm.grouped_product_ref(
        case.x, case.row_of, case.gate, WorkList(tiles, 16), torch.full((7, 60), 5.0)
    )
    assert same_bits(out, want)
    assert (out[2:5] == 5).all()
    assert (out[5:] != 5).any()


def test_a_broken_row_stays_alone() -> None:
    """NaN and infinity in one row, a row that does not exist: the others keep their bits."""
    case = grouped_case("bf16", 60, 64, [3, 5])
    case.row_of[:] = torch.arange(8, dtype=torch.int32)
    whole = case.product().view.clone()
    case.x[2, 7], case.x[6, 0] = float("nan"), float("inf")
    case.row_of[4] = 99
    got = case.product().view
    assert got[2].isnan().all()
    assert not got[6].isfinite().any()
    assert (got[4] == 0).all()
    keep = [0, 1, 3, 5, 7]
    assert same_bits(got[keep], whole[keep])


def test_strides() -> None:
    """Rows of x and out, and weight rows and slots, apart from each other."""
    case = grouped_case("bf16", 60, 64, [3, 0, 5])
    wide = torch.full((case.pairs, 200), float("nan"), dtype=torch.bfloat16)
    wide[:, 8:72] = case.x
    w = torch.full((6, 120, 128), float("nan"), dtype=torch.bfloat16)
    w[::2, ::2, :64] = case.gate.data
    out = torch.full((case.pairs, 99), 5.0)
    grouped_gemm.grouped_product(
        wide[:, 8:72], case.row_of, Weight(w[::2, ::2, :64], "bf16", 64), case.work, out[:, 3:63]
    )
    assert same_bits(out[:, 3:63].contiguous(), case.product().view)
    assert (out[:, :3] == 5).all()
    assert (out[:, 63:] == 5).all()


@pytest.mark.wrong_types
def test_refusals_say_what_came_and_what_was_wanted() -> None:
    case = grouped_case("bf16", 60, 64, [3])
    out = torch.empty(3, 60)

    def product(**change) -> None:
        args = {"x": case.x, "row_of": case.row_of, "w": case.gate, "work": case.work, "out": out} | change
        grouped_gemm.grouped_product(**args)

    for change, error, message in (
        ({"x": case.x.float()}, LabTypeError, r"x must be .*bf16.*, got torch.float32"),
        ({"x": case.x[:, :60]}, LabError, r"x must have shape \[R, 64\], got \[3, 60\]"),
        ({"w": case.gate._replace(format="q9")}, LabError, "multiplies no 'q9'; it multiplies bf16"),
        ({"w": case.gate._replace(format="q2_k")}, LabError, "whole blocks of 256 values, got Kd=64"),
        ({"w": case.gate._replace(format="f16")}, LabTypeError, "w must be fp16, got torch.bfloat16"),
        ({"row_of": case.row_of[:2]}, LabError, r"row_of must have shape \[3\], got \[2\]"),
        ({"work": WorkList(case.work.tiles, 48)}, LabError, "tiles of 48 rows"),
        ({"out": out[:, :50]}, LabError, r"out must have shape \[P, 60\], got \[3, 50\]"),
        ({"out": out.to(torch.float64)}, LabTypeError, "out must be"),
    ):
        with pytest.raises(error, match=message):
            product(**change)
    with pytest.raises(LabError, match="gate is bf16 with Kd=64, up q8_0 with Kd=64"):
        grouped_gemm.grouped_gate_up(case.x, case.row_of, case.gate, case.up._replace(format="q8_0"), case.work, out)
    with pytest.raises(LabError, match="limit=0; it must be > 0"):
        grouped_gemm.grouped_gate_up(case.x, case.row_of, case.gate, case.up, case.work, out, how=Gate(limit=0))
