"""lab.compare on arms with 8-bit activations: emulation, attribution, blocks, operands, flips."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.layer import Options, SharedWeights
from moe_lab.numerics.emulation import arithmetic_of, emulate
from moe_lab.parity import (
    Mixed,
    NextLayer,
    Setting,
    attribute_layer,
    attribute_product,
    draw,
    emulate_layer,
    error_map,
    heavy_tailed,
    nmse,
    product_errors,
    wide_layer,
)
from moe_lab.parity.operands import Operands
from moe_lab.parity.terms import factors, terms
from moe_lab.spec import SharedSpec
from moe_lab.tolerances import tol

FORMATS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "mxfp4", "nvfp4"]
D, F, E, K, T = 512, 256, 4, 3, 16


@pytest.fixture(scope="module")
def layer() -> lab.MoELayer:
    """Four experts of q2_k and q3_k, and a shared one of q8_0."""
    routed = wide_layer(d_model=D, d_expert=F, experts=E, top_k=K, seed=1)
    shared = SharedWeights(*(lab.quantize(heavy_tailed(*s, seed=9), "q8_0") for s in ((F, D), (F, D), (D, F))))
    spec = replace(routed.spec, shared=SharedSpec(F))
    parts = routed.experts.stack.parts
    return lab.MoELayer.from_tensors(spec, router=routed.router_weights, shared=shared, **parts)


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return draw("gaussian", T, D, seed=1)


@pytest.fixture(scope="module")
def report(layer: lab.MoELayer, x: torch.Tensor):
    return lab.compare(layer, x, ["gemv", "mmq", "reference"])


@pytest.mark.parametrize("stores", ["fp32", "input"])
@pytest.mark.parametrize("arm", ["gemv", "mmq"])
def test_an_arms_own_choices_give_its_output(arm: str, stores: str, layer: lab.MoELayer, x: torch.Tensor) -> None:
    rows = x if stores == "fp32" else x.bfloat16()
    options = Options(stores=stores)
    routing = layer.route(rows)
    how = Setting(arm, stores="fp32" if stores == "fp32" else "bf16")
    own, made = layer(rows, arm, routing=routing, options=options).out, emulate_layer(layer, rows, routing, how)
    if stores == "fp32":
        assert nmse(made, own) < tol("emulation/layer")
    else:
        assert (made == own).double().mean() > 0.9  # bf16 hides an order of adding nearly everywhere


def test_all_choices_switched_are_the_other_side(layer: lab.MoELayer, x: torch.Tensor) -> None:
    a = Setting("gemv")
    b = Setting("mmq", lab.Arithmetic(k_split=2), stores="bf16", weight_place="hidden", combine_order="expert")
    routing = layer.route(x)
    letters = frozenset("abcdefghij")
    both = [emulate_layer(layer, x, routing, how) for how in (b, Mixed(a, b, letters))]
    assert torch.equal(*both)
    single = [emulate_layer(layer, x, routing, Mixed(a, b, frozenset(c))) for c in "abcdhij"]
    outs = [emulate_layer(layer, x, routing, a), *single, both[0]]
    assert all(not torch.equal(p, q) for i, p in enumerate(outs) for q in outs[:i]), "a switch does nothing of its own"


def test_the_order_of_the_experts_is_a_choice_of_bits_alone(layer: lab.MoELayer, x: torch.Tensor) -> None:
    routing = layer.route(x)
    rank, expert = (emulate_layer(layer, x, routing, Setting(combine_order=o)) for o in ("rank", "expert"))
    assert 0 < nmse(expert, rank) < 1e-12


def test_table_has_the_public_columns_and_says_who_took_what(report) -> None:
    first = ["arm_a", "arm_b", "bit_equal", "equal_share", "max_ulp", "p999_ulp", "nmse_ab", "nmse_a", "nmse_b"]
    assert list(report.table.columns) == [*first, "flip_share"]
    assert report.table["flip_share"].isna().all()
    assert report.checks.set_index("arm")["shared_arm"].to_dict() == {a: a for a in ("gemv", "mmq", "reference")}
    assert report.reference.dtype == torch.float64
    row = report.table.iloc[0]
    a, b = report.outputs["gemv"], report.outputs["mmq"]
    assert row.equal_share == (a == b).double().mean()
    assert row.nmse_a == nmse(a, report.reference)
    assert row.nmse_b > row.nmse_a  # raw sums


def test_shared_and_routed_arms_are_separate(layer: lab.MoELayer, x: torch.Tensor) -> None:
    both = lab.compare(layer, x[:8], ["gemv", "mmq"], options=Options(shared_arm="reference"))
    assert set(both.checks["shared_arm"]) == {"reference"}
    alone = lab.compare(layer, x[:8], ["gemv", "mmq"])
    assert both.table["nmse_ab"][0] != alone.table["nmse_ab"][0]
    emulated = emulate_layer(layer, x[:8], layer.route(x[:8]), Setting("mmq"), options=both.given.options)
    assert nmse(emulated, both.outputs["mmq"]) < tol("emulation/layer")


def test_attribution_explains_the_tables_difference(report, x: torch.Tensor) -> None:
    df = report.attribution
    assert df.attrs["apart_a"] < tol("emulation/layer")
    assert df.attrs["apart_b"] < tol("emulation/layer")
    own = {"nmse_ab": "nmse_ab", "error_a": "nmse_a", "error_b": "nmse_b"}
    assert all(df.attrs[k] == pytest.approx(report.table[v][0], rel=0.02) for k, v in own.items())
    assert df["share"].sum() == pytest.approx(df.attrs["nmse_ab"])
    assert df["choice"].tolist() == list("abcdefghij")
    by = df.set_index("choice")
    assert by["share"].idxmax() == by["error_share"].idxmax() == "d"
    assert not by.differs[list("ghij")].any()
    assert report.attribution is df, "made twice"


def test_reports_of_other_arms_say_what_they_lack(layer: lab.MoELayer, x: torch.Tensor) -> None:
    other = lab.compare(layer, x[:4], ["gemv", "reference"])
    with pytest.raises(LabError, match="two arms with 8-bit activations"):
        _ = other.attribution
    assert other.first_difference.operands is None


MEASURED = {"q2_k": (3.0e-5, 1.1e-4), "q4_k": (3.0e-5, 1.5e-4)}


@pytest.mark.parametrize("format", ["q2_k", "q4_k", "q5_k"])
def test_raw_sums_and_not_the_block_cost_the_accuracy(format: str) -> None:
    x, q = draw("gaussian", 256, 2048), lab.quantize(heavy_tailed(24, 2048), format)
    by = (df := attribute_product(x, q)).set_index("choice")
    gained = df.attrs["error_b"] - df.attrs["error_a"]
    assert by.error_share["d"] > 0.8 * gained
    assert by.error_share["a"] < 0.2 * gained
    assert by.error_first["d"] > 2.5 * df.attrs["error_a"]
    assert by.error_first["c"] < 1.2 * df.attrs["error_a"]


@pytest.mark.parametrize("format", ["q3_k", "q6_k", "q8_0", "mxfp4", "nvfp4"])
def test_formats_without_a_minimum_differ_by_the_scale_alone(format: str) -> None:
    x, q = draw("gaussian", 64, 1024), lab.quantize(heavy_tailed(16, 1024), format)
    df = attribute_product(x, q)
    assert df.attrs["nmse_ab"] < 2e-7
    assert df.set_index("choice").share.idxmax() == "b"


@pytest.mark.parametrize("arm", ["gemv", "mmq"])
@pytest.mark.parametrize("format", FORMATS)
def test_terms_of_sixteen_values_add_up_to_the_product(format: str, arm: str) -> None:
    from moe_lab.numerics.emulation import quantize_for

    x, q = draw("swiglu", 5, 512, seed=4), lab.quantize(heavy_tailed(7, 512), format)
    arithmetic = arithmetic_of(format, arm)
    made = terms(quantize_for(x, format, arithmetic), factors(q, arithmetic)).value.sum(-1)
    assert nmse(emulate(x, q, arithmetic), made) < tol("gemv/emulation")


def test_block_errors_are_the_products_error_cut_up() -> None:
    x, q = draw("gaussian", 64, 2048), lab.quantize(heavy_tailed(24, 2048), "q2_k")
    exact = x.double() @ q.dequantize().double().T
    found = product_errors(x, q, Setting("gemv"), Setting("mmq"))
    wholes = [nmse(emulate(x, q, arithmetic_of("q2_k", arm)), exact) for arm in ("gemv", "mmq")]
    assert found[:2].sum(1).tolist() == pytest.approx(wholes, rel=0.1)
    eights = found.unflatten(1, (-1, 8)).mean(1)  # of every eight sub-blocks d2s6 keeps no raw sum of the last two
    assert (eights[1, :6] > 2.5 * eights[1, 6:].max()).all()
    assert (eights[0].max() / eights[0].min()) < 1.3
    wide = product_errors(x, q, Setting("gemv"), Setting("mmq"), width=256)
    assert wide.shape == (3, 8)
    with pytest.raises(LabError, match="multiple of 16"):
        product_errors(x, q, Setting("gemv"), Setting("mmq"), width=24)


def test_error_map_of_a_layer_shows_the_sub_blocks(report, layer: lab.MoELayer, x: torch.Tensor) -> None:
    df = report.error_map
    assert set(df.part) == {"gate", "up", "down"}
    assert df[df.part == "gate"].block.max() == D // 16 - 1
    kept_raw = df.block % 8 < 6
    loud, quiet = (df[(df.part != "down") & m].nmse_b.mean() for m in (kept_raw, ~kept_raw))
    assert loud > 2 * quiet
    assert df[df.part == "down"].nmse_ab.max() < 1e-6
    coarse = error_map(layer, x, ["gemv", "mmq"], width=256)
    assert coarse[coarse.part == "up"].block.max() == 1
    assert coarse.nmse_b.sum() == pytest.approx(df.nmse_b.sum(), rel=0.25)


def test_error_maps_of_streamed_layers_are_refused() -> None:
    with lab.ExpertCache(slots=4) as cache, pytest.raises(LabError, match="without a cache"):
        error_map(lab.open(lab.sample()).layer(1, cache=cache), torch.zeros(1, 256), ["gemv", "mmq"])


def test_first_difference_shows_both_sides_operands(report, layer: lab.MoELayer, x: torch.Tensor) -> None:
    first = report.first_difference
    found = first.operands
    assert isinstance(found, Operands)
    assert (found.part, found.token) == ("gate", first.token)
    assert found.expert == int(layer.route(x).ids[first.token, found.slot])
    assert (found.a.arm, found.b.arm) == ("gemv", "mmq")
    assert found.a.value != found.b.value
    assert len(found.a.codes) == len(found.b.codes) == len(found.a.weight_codes) == found.last - found.first + 1
    values = x[first.token, found.first : found.last + 1].reshape(-1, 32)
    scales = values.abs().amax(1) / 127
    assert found.a.scales == pytest.approx(scales.tolist(), rel=1e-3)
    restored = torch.tensor(found.a.codes).reshape(-1, 32) * torch.tensor(found.a.scales)[:, None]
    assert (restored - values).abs().max() <= scales.max()
    q = layer.experts.stack.matrix("gate", found.expert)
    w = q.dequantize()[found.row, found.first : found.last + 1]
    per = len(found.a.weight_codes) // len(found.a.weight_scales)
    made = torch.tensor(found.a.weight_codes).float().reshape(-1, per) * torch.tensor(found.a.weight_scales)[:, None]
    made = made - torch.tensor(found.a.weight_minima)[:, None]
    assert made.flatten().tolist() == pytest.approx(w.tolist(), abs=1e-6)


def test_equal_arms_have_no_first_difference(layer: lab.MoELayer, x: torch.Tensor) -> None:
    same = lab.compare(layer, x[:6], ["gemv", "per_token"])
    assert same.first_difference is None
    assert same.table["equal_share"][0] == 1.0
    assert same.attribution.attrs["nmse_ab"] == 0.0


def test_flips_in_the_next_layer_are_of_what_it_would_read(layer: lab.MoELayer, x: torch.Tensor) -> None:
    loud = NextLayer(layer, lambda out: torch.where(out > 0, out.abs().sqrt() * 3, out))
    report = lab.compare(layer, x, ["gemv", "mmq"], after=loud)
    picked = {name: layer.route(loud.carry(out)).ids.sort(1).values for name, out in report.outputs.items()}
    want = (picked["gemv"] != picked["mmq"]).any(1)
    assert report.flips["flipped"].tolist() == want.tolist()
    assert report.table["flip_share"][0] == want.double().mean()
    none = lab.compare(layer, x, ["gemv", "mmq"], after=NextLayer(layer, lambda out: x))
    assert none.table["flip_share"][0] == 0.0
    with pytest.raises(LabError, match=r"made rows of shape \(16, 3\)"):
        lab.compare(layer, x, ["gemv", "mmq"], after=NextLayer(layer, lambda out: out[:, :3]))


def test_ten_choices_at_once_are_sampled_with_their_error(x: torch.Tensor, layer: lab.MoELayer) -> None:
    goal = Setting("mmq", lab.Arithmetic(k_split=2), stores="bf16", weight_place="hidden", combine_order="expert")
    df = attribute_layer(layer, x, "gemv", goal, rows=1, most=24)
    assert df.attrs["evaluated"] < 2 * 2 * 10 + 2 * 10
    assert "orders" in df.attrs["method"]
    assert df["share"].sum() == pytest.approx(df.attrs["nmse_ab"])
    assert np.isfinite(df["share_se"]).all()


def test_a_wide_layer_is_really_quantised_and_seeded() -> None:
    one, two = wide_layer(d_model=512, d_expert=256), wide_layer(d_model=512, d_expert=256)
    assert one.experts.formats == ("q2_k", "q2_k", "q3_k")
    assert torch.equal(one.experts.stack.up.data, two.experts.stack.up.data)
    assert one(draw("gaussian", 4, 512), "gemv").out.isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [({"arm": "reference"}, "'gemv'"), ({"stores": "fp8"}, "'bf16'"), ({"weight_place": "input"}, "'hidden'"),
     ({"combine_order": "slot"}, "'rank'")],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)  # fmt: skip
@pytest.mark.wrong_types
def test_settings_that_cannot_be(wrong: dict, says: str) -> None:
    with pytest.raises(LabError, match=says):
        replace(Setting(), **wrong)
