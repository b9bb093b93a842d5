"""lab.compare on two formats of the same experts: named formats, a second file's layer, a common truth, refusals."""

from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError, LabTypeError
from moe_lab.parity import NextLayer, attribute_layer, draw, exact_layer, heavy_tailed, nmse, quantized, wide_layer
from moe_lab.spec import RouterSpec
from moe_lab.tolerances import tol

D, F, E, K, T = 512, 256, 4, 2, 16


@pytest.fixture(scope="module")
def plain() -> lab.MoELayer:
    """Four experts whose weights nobody has quantised yet: bf16."""
    spec = lab.MoESpec(lab.RouterSpec(E, K, normalize=True), d_model=D, d_expert=F)
    made = {
        n: heavy_tailed(E, *s, seed=i) for i, (n, s) in enumerate((("gate", (F, D)), ("up", (F, D)), ("down", (D, F))))
    }
    router = torch.randn(E, D, generator=torch.Generator().manual_seed(3)) / D**0.5
    return lab.MoELayer.from_tensors(spec, router=router, **{n: w.bfloat16() for n, w in made.items()})


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return draw("gaussian", T, D, seed=2)


@pytest.fixture(scope="module")
def report(plain: lab.MoELayer, x: torch.Tensor):
    return lab.compare(plain, x, ["mmq:q4_k", "gemv:q8_0", "reference"], truth=plain)


def test_sides_are_the_arms_on_quantised_weights(report, plain: lab.MoELayer, x: torch.Tensor) -> None:
    for name, format in (("mmq:q4_k", "q4_k"), ("gemv:q8_0", "q8_0")):
        parts = {n: lab.quantize(q.dequantize(), format) for n, q in plain.experts.stack.parts.items()}
        own = lab.MoELayer.from_tensors(plain.spec, router=plain.router, **parts)
        assert torch.equal(report.outputs[name], own(x, name.split(":")[0], routing=plain.route(x)).out)
    assert report.checks["status"].tolist() == ["PASSED"] * 3
    assert quantized(plain, "q4_k") is quantized(plain, "q4_k"), "quantised anew"


def test_errors_are_against_what_the_report_says(report, plain: lab.MoELayer, x: torch.Tensor) -> None:
    assert report.against == "truth's weights, bf16"
    true = exact_layer(plain, x, plain.route(x))
    row = report.table.iloc[0]
    assert (row.nmse_a, row.nmse_b) == tuple(nmse(report.outputs[name], true) for name in ("mmq:q4_k", "gemv:q8_0"))
    assert row.nmse_a > 10 * row.nmse_b  # four bits lose more than eight, and more than their activations do
    alone = lab.compare(plain, x, ["mmq:q4_k", "gemv:q8_0"])
    assert alone.against == "each side's own weights"
    own = exact_layer(quantized(plain, "q4_k"), x, plain.route(x))
    assert alone.table.nmse_a[0] == nmse(alone.outputs["mmq:q4_k"], own) < 0.2 * row.nmse_a
    assert alone.checks["nmse"].tolist() == report.checks["nmse"].tolist()[:2], "an arm is judged by its own weights"
    assert "truth" in repr(report._repr_html_())


def test_equal_formats_are_equal(x: torch.Tensor) -> None:
    layer = wide_layer(d_model=D, d_expert=F, experts=E, seed=4)
    same = lab.compare(layer, x, ["gemv", "gemv:q2_k+q3_k"], other=wide_layer(d_model=D, d_expert=F, experts=E, seed=4))
    assert list(same.outputs) == ["gemv", "gemv:q2_k+q3_k", "gemv:other"]
    assert same.table["bit_equal"].all()
    assert same.first_difference is None
    assert "w" not in set(same.attribution["choice"])
    assert same.attribution.attrs["nmse_ab"] == 0.0


def test_the_format_is_a_choice_beside_the_others(report) -> None:
    df = report.attribution
    by = df.set_index("choice")
    assert (by.value_a["w"], by.value_b["w"]) == ("q4_k", "q8_0")
    assert by["share"].idxmax() == by["error_share"].abs().idxmax() == "w"
    assert by.error_share["w"] < 0 < df.attrs["weights_ab"]  # eight bits make it better
    assert by["share"].sum() == pytest.approx(df.attrs["nmse_ab"])
    assert by.error_share["d"] < 0  # of q4_k's raw sums the other side has none
    assert max(df.attrs["apart_a"], df.attrs["apart_b"]) < tol("emulation/layer")
    assert [df.attrs[f"error_{s}"] for s in "ab"] == pytest.approx([report.table[f"nmse_{s}"][0] for s in "ab"])


def test_errors_of_each_sides_own_weights_leave_the_formats_out(plain: lab.MoELayer, x: torch.Tensor) -> None:
    alone = lab.compare(plain, x, ["gemv:q8_0", "gemv:q4_k"]).attribution
    assert alone.attrs["error_b"] < 1e-3 < alone.attrs["nmse_ab"]
    direct = attribute_layer(quantized(plain, "q8_0"), x, "gemv", "gemv", second=quantized(plain, "q4_k"))
    assert direct[direct.differs].choice.tolist() == ["w"]
    assert direct.attrs["nmse_ab"] == alone.attrs["nmse_ab"]


def test_first_difference_shows_both_formats(report, plain: lab.MoELayer) -> None:
    found = report.first_difference.operands
    assert (found.a.format, found.b.format) == ("q4_k", "q8_0")
    for side in (found.a, found.b):
        q = quantized(plain, side.format).experts.stack.matrix(found.part, found.expert)
        codes, scales = torch.tensor(side.weight_codes).float(), torch.tensor(side.weight_scales)
        made = codes.reshape(len(scales), -1) * scales[:, None]
        made = made - torch.tensor(side.weight_minima)[:, None] if side.weight_minima is not None else made
        want = q.dequantize()[found.row, found.first : found.last + 1]
        assert made.flatten().tolist() == pytest.approx(want.tolist(), abs=1e-6)
    assert found.a.sums is not None
    assert found.b.weight_minima is None


def test_unquantised_weights_multiply_rows_as_they_are(plain: lab.MoELayer, x: torch.Tensor) -> None:
    report = lab.compare(plain, x, ["gemv", "gemv:q4_k"], truth=plain)
    a, b = report.first_difference.operands.a, report.first_difference.operands.b
    first = slice(report.first_difference.operands.first, report.first_difference.operands.last + 1)
    assert a.codes == x[report.first_difference.token, first].tolist()
    assert (a.format, a.scales, b.format) == ("bf16", [1.0], "q4_k")
    assert report.attribution.query("differs").choice.tolist() == ["w"]
    assert report.attribution.attrs["error_a"] < 1e-12 < report.attribution.attrs["error_b"]
    assert report.hazards.query("arm == 'gemv'").empty
    assert report.error_map.nmse_a.max() < 1e-12 < report.error_map.nmse_b.min()


def test_block_errors_name_each_sides_blocks(report) -> None:
    df = report.error_map
    assert df[df.part == "gate"].block_a.max() == D // 256 - 1
    assert df[df.part == "gate"].block_b.max() == D // 32 - 1
    by_block = df.groupby(["part", "block_b"]).nmse_ab.sum()
    assert (by_block > 0).all()


def test_flips_hazards_and_layouts_of_a_format(report, plain: lab.MoELayer, x: torch.Tensor) -> None:
    names = ["gemv:q4_k", "gemv:q4_k@planar", "mmq:q4_k"]
    found = lab.compare(plain, x, names, after=NextLayer(plain, lambda out: x + 20 * out))
    assert list(found.outputs) == names
    assert found.table.bit_equal.tolist() == [True, False, False]
    assert found.table.flip_share.tolist()[0] == 0.0
    raw = found.hazards.query("hazard == 'raw-sum decorrelation' and arm == 'mmq:q4_k'")
    assert set(raw.part) == {"gate", "up", "down"}


class Doubled:
    """A user's arm: twice what the reference makes."""

    name = "doubled"

    def supports(self, formats, backend) -> None:
        return None

    def experts(self, x, stack, schedule, groups, y, ctx) -> None:
        from moe_lab.arms import ARMS

        ARMS["reference"].experts(x, stack, schedule, groups, y, ctx)
        y *= 2


def test_a_second_layer_gets_every_arm_the_users_too(plain: lab.MoELayer, x: torch.Tensor) -> None:
    other = quantized(plain, "q6_k")
    found = lab.compare(plain, x, ["reference", Doubled()], other=other)
    assert list(found.outputs) == ["reference", "doubled", "reference:other", "doubled:other"]
    assert torch.equal(found.outputs["reference:other"], other(x, "reference", routing=plain.route(x)).out)
    assert found.checks.status.tolist() == ["PASSED", "INCORRECT"] * 2
    named = lab.compare(plain, x, ["gemv", "gemv:other"], other=other)
    assert list(named.outputs) == ["gemv", "gemv:other"]


def spread(layer: lab.MoELayer, **changed) -> lab.MoELayer:
    """The layer with parts, or its spec, replaced."""
    spec = changed.pop("spec", layer.spec)
    return lab.MoELayer.from_tensors(
        spec, router=changed.pop("router", layer.router), **layer.experts.stack.parts | changed
    )


REFUSED = {
    "another spec": (lambda p: spread(p, spec=replace(p.spec, limit=7.0)), "layer.limit = None there and 7.0 in other"),
    "other shapes": (lambda p: wide_layer(d_model=D, d_expert=2 * F, experts=E), "layer.d_expert = 256 there and 512"),
    "more experts": (lambda p: wide_layer(d_model=D, d_expert=F, experts=8), "router.num_experts = 4 there and 8"),
    "experts in another order": (
        lambda p: spread(p, **{n: q.dequantize().flip(0) for n, q in p.experts.stack.parts.items()}), "gate of expert 0"
    ),
    "another layer's router": (lambda p: spread(p, router=p.router.flip(0)), "the router differs by"),
    "weights that are not finite": (
        lambda p: spread(p, up=p.experts.stack.up.dequantize() * float("nan")), "up of expert 0 differs by nan"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_pairs_that_are_no_pair_are_refused(case: str, plain: lab.MoELayer, x: torch.Tensor) -> None:
    made, says = REFUSED[case]
    with pytest.raises(LabError, match=r"other is a layer of another spec|other holds other experts") as caught:
        lab.compare(plain, x, ["gemv"], other=made(plain))
    assert says in str(caught.value)
    with pytest.raises(LabError, match="truth "):
        lab.compare(plain, x, ["gemv", "reference"], truth=made(plain))


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        (["gemv", "gemv:"], "names no weights"),
        (["gemv", "gemv@tiles:q4_k"], "behind the arm, such as gemv:q4_k or gemv:q4_k@tiles"),
        (["gemv", "gemv:other"], "wants a second layer"),
        (["gemv", "magic:q4_k"], "no arm is called"),
        (["gemv:q4_k", "gemv:q4_k"], "named twice"),
        (["gemv:q4_k"], "at least two arms"),
        (["gemv:q9_z", "gemv:q4_k+q4_k+q4_k"], "q9_z"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, list) else "",
)
def test_names_that_mean_nothing_are_refused(arms: list[str], says: str, plain: lab.MoELayer, x: torch.Tensor) -> None:
    with pytest.raises(LabError, match=says):
        lab.compare(plain, x, arms)


@pytest.mark.wrong_types
def test_rows_and_routers_are_tensors(plain: lab.MoELayer, x: torch.Tensor) -> None:
    with pytest.raises(LabTypeError, match=r"x is a list.* torch\.as_tensor makes one"):
        lab.compare(plain, x.tolist(), ["gemv", "reference"])
    parts = plain.experts.stack.parts
    with pytest.raises(LabTypeError, match="the router is a list"):
        lab.MoELayer.from_tensors(plain.spec, router=plain.router.tolist(), **parts)


def test_an_arms_layout_is_the_layers(plain: lab.MoELayer, x: torch.Tensor) -> None:
    with pytest.raises(LabError, match=r"gemv@planar.*layer\.repacked"):
        plain(x, "gemv@planar")


@pytest.mark.wrong_types
def test_a_second_layer_is_a_layer(plain: lab.MoELayer, x: torch.Tensor) -> None:
    with pytest.raises(LabTypeError, match=r"other is 'model\.gguf'"):
        lab.compare(plain, x, ["gemv"], other="model.gguf")


def test_a_format_that_rows_do_not_fill_fails_alone() -> None:
    spec = lab.MoESpec(RouterSpec(2, 1), d_model=96, d_expert=64)
    narrow = lab.MoELayer.from_tensors(
        spec, router=heavy_tailed(2, 96), gate=heavy_tailed(2, 64, 96), up=heavy_tailed(2, 64, 96),
        down=heavy_tailed(2, 96, 64),
    )  # fmt: skip
    found = lab.compare(narrow, draw("gaussian", 4, 96), ["reference", "gemv:q8_0", "gemv:q4_k"])
    assert found.checks.status.tolist() == ["PASSED", "PASSED", "UNSUPPORTED"]
    assert "gate cannot be quantised to q4_k" in found.checks.reason[2]
    with lab.ExpertCache(slots=8) as cache, pytest.raises(LabError, match="open the layer without a cache"):
        quantized(lab.open(lab.sample()).layer(1, cache=cache), "q4_k")
