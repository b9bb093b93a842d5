"""lab.compare's explanations for arms in other layouts of the experts, and for the folded arm."""

from dataclasses import replace

import pandas as pd
import pytest
import torch

import moe_lab as lab
from moe_lab.cli import main
from moe_lab.cli.parity import why_lines
from moe_lab.errors import LabError
from moe_lab.formats import quantize_activations
from moe_lab.layer import SharedWeights
from moe_lab.numerics.emulation import arithmetic_of, emulate, quantize_for
from moe_lab.parity import (
    ParityReport,
    Setting,
    draw,
    emulate_layer,
    hazards,
    heavy_tailed,
    nmse,
    wide_layer,
)
from moe_lab.parity.layer_attribution import formats_of, side
from moe_lab.parity.setting import choices
from moe_lab.spec import SharedSpec
from moe_lab.tolerances import tol
from moe_lab_kernels.mmq.operands import FOLDED, MMQ_LAYOUTS

D, F, T = 256, 256, 2
MODEL = str(lab.sample())
PAIRS = [("gemv@planar", "mmq"), ("gemv", "mmq@planar"), ("gemv@tiles", "mmq@planar"), ("per_token@planar", "mmq")]


@pytest.fixture(scope="module")
def layer() -> lab.MoELayer:
    """Two experts of q2_k and q3_k, and a shared one of q8_0, whose scales cannot be folded."""
    routed = wide_layer(d_model=D, d_expert=F, experts=2, top_k=1, seed=1)
    shared = SharedWeights(*(lab.quantize(heavy_tailed(*s, seed=9), "q8_0") for s in ((F, D), (F, D), (D, F))))
    spec = replace(routed.spec, shared=SharedSpec(F))
    return lab.MoELayer.from_tensors(spec, router=routed.router_weights, shared=shared, **routed.experts.stack.parts)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return draw("gaussian", T, D, seed=1)


@pytest.fixture(scope="module")
def raw(layer: lab.MoELayer, x: torch.Tensor) -> ParityReport:
    return lab.compare(layer, x, ["gemv", "mmq"])


@pytest.fixture(scope="module")
def folded(layer: lab.MoELayer, x: torch.Tensor) -> ParityReport:
    return lab.compare(layer, x, ["gemv@planar", "mmq_folded"])


@pytest.fixture(scope="module")
def mixed(layer: lab.MoELayer, x: torch.Tensor) -> ParityReport:
    """The same arms on experts repacked into planes, one of them on tiles."""
    return lab.compare(layer.repacked("planar"), x, ["gemv@tiles", "mmq"])


def test_a_layout_changes_no_explanation(raw: ParityReport, mixed: ParityReport) -> None:
    """Every number is raw's, to the bit; outputs lie as near to what explains them."""
    pd.testing.assert_frame_equal(mixed.attribution, raw.attribution, check_exact=True)
    assert mixed.attribution["share"].sum() == pytest.approx(mixed.attribution.attrs["nmse_ab"])
    assert max(mixed.attribution.attrs[side] for side in ("apart_a", "apart_b")) < tol("emulation/layer")
    pd.testing.assert_frame_equal(mixed.error_map, raw.error_map, check_exact=True)
    numbers = ["hazard", "part", "count", "of", "factor", "says"]
    pd.testing.assert_frame_equal(mixed.hazards[numbers], raw.hazards[numbers], check_exact=True)
    assert set(mixed.hazards.arm) == {"gemv@tiles", "mmq", "gemv@tiles, mmq"}


@pytest.mark.parametrize("arms", PAIRS, ids="-".join)
def test_layouts_named_beside_raw_are_as_raw(
    arms: tuple[str, str], layer: lab.MoELayer, x: torch.Tensor, raw: ParityReport
) -> None:
    found = lab.compare(layer, x, arms)
    first, same = found.first_difference.operands, raw.first_difference.operands
    assert (first.a.arm, first.b.arm) == arms
    assert first._replace(a=same.a, b=same.b) == same
    assert (first.a[1:], first.b[1:]) == (same.a[1:], same.b[1:])
    assert found.hazards["count"].tolist() == raw.hazards["count"].tolist()
    settings = [side(arm, x, None, layer) for arm in arms]
    said = choices(*settings, formats_of(layer))
    assert [c.letter for c in said if c.differs] == list("abcde")


def test_streamed_experts_in_planes_are_explained() -> None:
    x = draw("gaussian", 1, 256)
    whole = lab.open(lab.sample()).layer(1)
    with lab.ExpertCache(slots=8) as cache:
        planes = lab.open(lab.sample(), layout="planar").layer(1, cache=cache)
        assert planes.experts.layout == "planar"
        routing = whole.route(x)
        assert torch.equal(*(emulate_layer(each, x, routing, Setting("mmq")) for each in (planes, whole)))


def test_one_arm_in_two_layouts_differs_in_no_choice(layer: lab.MoELayer, x: torch.Tensor) -> None:
    same = lab.compare(layer, x, ["gemv@planar", "gemv@tiles"])
    assert not same.attribution.differs.any()
    assert same.attribution.attrs["outputs_ab"] == same.table["nmse_ab"][0] < tol("emulation/layer")
    assert set(same.hazards.arm) == {"gemv@planar", "gemv@tiles", "gemv@planar, gemv@tiles"}
    assert why_lines(same) == ["no difference"]
    same.attribution.attrs["outputs_ab"] = 1e-15  # as on a GPU, where layouts add in orders of their own
    assert why_lines(same) == ["no choice differs; 1.0e-15 apart by the order of fp32 additions"]


@pytest.mark.parametrize("format", MMQ_LAYOUTS)
def test_the_folded_arithmetic_is_the_folded_products(format: str) -> None:
    x, q = draw("swiglu", 4, 768, seed=4), lab.quantize(heavy_tailed(9, 768), format)
    own = Setting("mmq_folded").arithmetic(format)
    if format not in FOLDED:
        assert own == arithmetic_of(format, "mmq")
        return
    rows, kernels = quantize_for(x, format, own), quantize_activations(x, "q8_k")
    assert torch.equal(rows.codes, kernels.codes)
    assert torch.equal(rows.scale, kernels.scale)
    product = lab.matmul(x, q, "mmq", activation="q8_k")
    assert nmse(emulate(x, q, own), product) < tol("mmq/emulation")
    assert nmse(emulate(x, q, arithmetic_of(format, "mmq")), product) > 1e-5


def test_the_folded_arm_is_explained(folded: ParityReport, layer: lab.MoELayer, x: torch.Tensor) -> None:
    df = folded.attribution
    assert max(df.attrs["apart_a"], df.attrs["apart_b"]) < tol("emulation/layer")
    assert df.attrs["error_b"] == pytest.approx(folded.table["nmse_b"][0], rel=0.01)
    assert df["share"].sum() == pytest.approx(df.attrs["nmse_ab"])
    assert df["error_share"].sum() == pytest.approx(df.attrs["error_b"] - df.attrs["error_a"])
    by = df.set_index("choice")
    assert by.index[by.differs].tolist() == list("abcefk")
    assert by.value_b["a"] == "q2_k: 256, q3_k: 256, q8_0: 32"
    assert by.share["a"] > 0.3 * df.attrs["nmse_ab"]
    assert by["first"]["c"] == by.share["c"] == 0.0  # scales in the codes have the numbers of scales beside them
    assert 0 < by["first"]["f"] < 1e-12  # integers over 256 values are an order of adding
    # the shared expert has nothing to fold: the layer gives it to the reference arm, which no numeric choice explains
    assert (
        (by.value_a["k"], by.value_b["k"]) == ("as routed", folded.checks.shared_arm[1]) == ("as routed", "reference")
    )
    assert by.share["k"] > 0.1 * df.attrs["nmse_ab"]
    prefill = choices(*(side(arm, x, None, layer) for arm in ("mmq", "mmq_folded")), formats_of(layer))
    assert [c.letter for c in prefill if c.differs] == list("abcdefk")
    assert "(a) scale block" in why_lines(folded)[0]
    assert "(k) shared expert's arm" in why_lines(folded)[0]


def test_the_folded_arms_blocks_hazards_and_operands(folded: ParityReport, x: torch.Tensor) -> None:
    df = folded.error_map
    assert (df.groupby("part").nmse_b.sum() > 1.2 * df.groupby("part").nmse_a.sum()).all()  # 256 values a scale
    assert set(folded.hazards[folded.hazards.arm == "mmq_folded"].hazard) <= {"raw-sum decorrelation"}
    found = folded.first_difference.operands
    rows = quantize_activations(x[found.token : found.token + 1], "q8_k")
    assert found.b.codes == rows.codes[0, found.first : found.last + 1].tolist()
    assert found.b.scales == [float(rows.scale[0, found.first // 256])]
    assert found.b.value != found.a.value


def test_two_prefill_arms_have_no_tail_trap() -> None:
    small = wide_layer(d_model=256, d_expert=256, experts=2, top_k=1)
    x = draw("gaussian", 519, 256)
    for arms, count in ((["mmq@planar", "mmq_folded"], 0), (["gemv@tiles", "mmq_folded"], 7)):
        assert hazards(small, x, arms).set_index("hazard")["count"]["tail trap"] == count


def test_why_takes_layouts_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    arms = "mmq_folded@planar,mmq_folded"
    code = main(["parity", MODEL, "--layer", "5", "--arms", arms, "--tokens", "1", "--why"])
    out = capsys.readouterr()
    assert (code, out.err) == (0, "")
    assert "layer 5: no difference" in out.out


@pytest.mark.parametrize("arm", ["gemv@rows", "grouped@planar", "mmq@"])
def test_names_that_stand_for_no_arithmetic(arm: str) -> None:
    with pytest.raises(LabError, match=r"Setting\.arm is .*'mmq_folded', alone or with @ and a layout \('raw'"):
        Setting(arm)


def test_a_name_with_a_layout_has_the_arms_arithmetic() -> None:
    for format in MMQ_LAYOUTS:
        assert Setting("mmq@planar").arithmetic(format) == Setting("mmq").arithmetic(format)
