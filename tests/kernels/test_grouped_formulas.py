"""The grouped products with biases, every clamp and the routing weight inside: kernels against references, layers of
every formula against the reference arm, biases by expert where slots move; persistent grids."""

from dataclasses import replace

import pytest
import torch

from moe_lab.arms import ArmContext, ExpertStack, Group, Schedule
from moe_lab.arms import grouped as arm
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.tolerances import tol
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped import grouped_gemm, sides
from moe_lab_kernels.grouped.operands import Scatter
from moe_lab_kernels.grouped.tiles import Tile
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8
from tests.support import float_layers as fl
from tests.support.grouped_cases import GroupedCase, grouped_case
from tests.support.kernel_cases import nmse, same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
COUNTS = [2, 0, 19, 1]
FORMATS = {"bf16": ("bf16",) * 3, "mxfp4_oss": ("mxfp4_oss",) * 3, "mixed": ("q2_k", "int4_g64", "bf16")}


def biased(format: str, n: int, kd: int) -> tuple[GroupedCase, list[torch.Tensor], torch.Tensor]:
    """A case whose slots hold experts 5, 0, 3 and 1 of six, their biases between others' numbers; and pair weights."""
    draw = torch.Generator().manual_seed(7)
    case = replace(grouped_case(format, n, kd, COUNTS), expert=[5, 0, 3, 1])
    both = torch.randn(2, 6, n + 4, generator=draw).bfloat16()
    return case, [b[:, 2 : 2 + n] for b in both], torch.rand(case.pairs, generator=draw)


@pytest.mark.parametrize(
    "how",
    [Gate(limit=1.0, limit_mode="oai"), Gate(gelu=True), Gate(limit=0.5, limit_mode="after")],
    ids=["oai", "gelu", "after"],
)
def test_biases_clamps_and_weights_are_the_references(how: Gate) -> None:
    case, (gate, up), weight = biased("bf16", 60, 72)
    how = how._replace(weight=weight)
    got = case.gated(how=how, biases=(gate, up))
    want = case.gated(grouped_gemm.grouped_gate_up_ref, how=how, biases=(gate, up))
    assert same_bits(got.view, want.view)
    assert not same_bits(got.view, case.gated(how=how).view)
    assert got.intact()


@pytest.mark.parametrize("format", ["bf16", "mxfp4_oss"])
def test_a_bias_is_its_experts_wherever_it_lies(format: str) -> None:
    case, (bias, _), _ = biased(format, 60, 64)
    order = torch.randperm(case.pairs, generator=torch.Generator().manual_seed(3)).int()
    sent = case.product(to=Scatter(order // 2, order % 2, 2), bias=bias)
    assert same_bits(sent.view[order.long()], case.product(grouped_gemm.grouped_product_ref, bias=bias).view)
    zero = replace(case, x=torch.zeros_like(case.x))
    whose = torch.tensor([5, 0, 3, 1]).repeat_interleave(torch.tensor(COUNTS))
    assert same_bits(zero.product(bias=bias).view, bias[whose].float())


def test_biases_that_belong_to_nobody_are_refused() -> None:
    case, (gate, up), _ = biased("bf16", 60, 64)
    with pytest.raises(LabError, match=r"6 biases for 4 slots; WorkList.expert says which tile has which"):
        replace(case, expert=None).product(bias=gate)
    with pytest.raises(LabError, match=r"biases of gate and up have other dtypes, shapes or strides"):
        case.gated(biases=(gate, up.float()))
    with pytest.raises(LabError, match=r"bias must have shape \[X, 60\], got \[6, 50\]"):
        case.product(bias=gate[:, :50])


@pytest.mark.parametrize("programs", [1, 4])
def test_persistent_grids_have_the_bits_of_others(programs: int) -> None:
    case = replace(grouped_case("bf16", 150, 72, [17, 0, 1]), tile=Tile(64, 4, 1))
    other = replace(case, tile=Tile(64, 4, 1, resident=programs))
    assert same_bits(other.product().view, case.product().view)
    assert other.product().intact()


def fp8_rows(x: torch.Tensor) -> g8.Fp8Rows:
    return g8.Fp8Rows(*quantize_fp8(torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).contiguous()))


@pytest.mark.parametrize("tokens", [16, 64, 128])
def test_fp8_with_biases_and_weights(tokens: int) -> None:
    """Wide tiles read scales in the order of pairs; a row that does not exist counts as zeros."""
    case, (gate, up), weight = biased("fp8_block", 150, 200)
    case = replace(case, tokens=tokens)
    case.row_of[3] = 99
    x, how = fp8_rows(case.x), Gate(limit=1.0, limit_mode="oai", weight=weight)
    made = [torch.full((case.pairs, 150), 5.0, dtype=torch.bfloat16) for _ in range(4)]
    call = (x, case.row_of, case.gate, case.up, case.work)
    g8.fp8_gate_up(*call, made[0], how=how, biases=(gate, up))
    g8.fp8_gate_up_ref(*call, made[1], how=how, biases=(gate, up))
    assert same_bits(made[0], made[1])
    hidden = fp8_rows(made[0])
    w, back = grouped_case("fp8_block", 150, 150, COUNTS).gate, torch.randperm(case.pairs).int()
    for op, out in ((g8.fp8_product, made[2]), (g8.fp8_product_ref, made[3])):
        op(hidden, None, w, case.work, out, to=Scatter(back, torch.zeros_like(back), 1), bias=gate,
           tile=Tile(64, 4, 1, resident=2))  # fmt: skip
    assert same_bits(made[2], made[3])


def test_scales_in_the_order_of_pairs() -> None:
    scale = torch.rand(9, 20)[:, :17]
    row_of = torch.tensor([3, 8, 9, -1, 0] * 15, dtype=torch.int32)
    assert same_bits(sides.sides(scale, row_of, 75), sides.sides_ref(scale, row_of, 75))
    assert same_bits(sides.sides(scale, None, 9), scale.T)


CASES = [("bf16", "oai-biases"), ("bf16", "weight-on-input"), ("mixed", "weight-inside")]  # clamps: above


@pytest.mark.parametrize(("named", "formula"), CASES)
def test_layers_of_every_formula(named: str, formula: str) -> None:
    layer, x = fl.make(FORMATS[named], formula), fl.rows(3)
    routing = layer.route(x)
    got = layer(x, "grouped", routing=routing)
    assert got.timing.backend == "interpreter"
    assert nmse(got.out, layer(x, "reference", routing=routing).out) <= tol("store/bf16")
    if "weight" in formula:  # a plan on the device has weights of its own
        planned = layer(x, "grouped", routing=routing, options=Options(routing="device"))
        assert torch.equal(planned.out, got.out)


@pytest.mark.parametrize("formula", ["oai-biases", "weight-on-input"])
def test_fp8_layers(formula: str) -> None:
    layer, x = fl.make(("fp8_block",) * 3, formula), fl.rows(3)
    routing, options = layer.route(x), Options(activation="fp8")
    got = layer(x, "grouped", routing=routing, options=options)
    assert 0 < nmse(got.out, layer(x, "reference", routing=routing).out) <= tol("gemv/fp8 rows")


@pytest.mark.parametrize("decoded", [False, True], ids=["as-they-lie", "decoded-in-waves"])
def test_biases_follow_experts_into_other_slots(decoded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The experts of a resident layer, moved to slots in another order, as a cache holds them."""
    layer, x = fl.make(FORMATS["mxfp4_oss"], "oai-biases"), fl.rows(4)
    stack = layer.experts.stack  # type: ignore[union-attr]
    order = torch.tensor([4, 2, 0, 3, 1])
    parts = [replace(q, data=q.data[order], scales=q.scales[order]) for q in stack.parts.values()]
    moved = ExpertStack(*parts, {int(e): slot for slot, e in enumerate(order)}, stack.biases)
    plan = Schedule(torch.arange(4).repeat(2), torch.tensor([0] * 4 + [1] * 4), torch.ones(8), ())
    groups = [Group(0, 0, 3), Group(2, 3, 4), Group(4, 7, 1)]
    context, made = ArmContext(layer.spec, "interpreter", torch.bfloat16), []
    for some in (stack, moved):
        if some is moved and decoded:
            monkeypatch.setattr(arm, "decode_from", lambda weights: 0)
            monkeypatch.setattr(arm, "DECODED_BYTES", 2 * 3 * 2 * fl.D * fl.F)
        y = torch.full((4, 2, fl.D), float("nan"), dtype=torch.bfloat16)
        arm.Grouped().experts(x, some, plan, groups, y, context)
        made.append(y)
    assert not made[0].isnan().any()
    assert same_bits(made[0], made[1])
