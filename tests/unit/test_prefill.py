"""Prefill strategies: one result whichever way rows are handed over, counted as they were; and what a row costs."""

import functools

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ARMS
from moe_lab.bench.batching import measure_batching
from moe_lab.bench.cell import Settings
from moe_lab.bench.cost import cost_curve, crossover
from moe_lab.bench.parts import measure_parts, quantised_to
from moe_lab.bench.workloads import LayerShape
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.strategies import MICRO_BATCH, STRATEGIES, Strategy
from moe_lab.weights import RouterWeights
from tests.support import frames

E, K, D, F = 6, 2, 256, 256


@functools.cache
def make_layer(*, hashed: bool = False) -> MoELayer:
    g = torch.Generator().manual_seed(3)
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    weights = {p: quantize(torch.randn(*s, generator=g) * s[-1] ** -0.5, "q2_k") for p, s in shapes.items()}
    router: object = torch.randn(E, D, generator=g)
    if hashed:
        router = RouterWeights(router, hash_table=torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(50)]))
    return MoELayer.from_tensors(lab.MoESpec(lab.RouterSpec(E, K, hash_routing=hashed), D, F), router=router, **weights)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(4))


ONE_ARITHMETIC = [name for name, s in STRATEGIES.items() if s.arm in ("gemv", "per_token")]


@pytest.mark.parametrize("tokens", [0, 1, 7, MICRO_BATCH, MICRO_BATCH + 1, 37])
@pytest.mark.parametrize("name", ONE_ARITHMETIC)
def test_strategies_of_one_arithmetic_have_the_same_bits(name: str, tokens: int) -> None:
    layer, x = make_layer(), rows(tokens)
    at_once = layer(x, "gemv")
    y = lab.prefill(layer, x, name)
    assert y.out.equal(at_once.out)
    assert y.routing.ids.equal(at_once.routing.ids)
    assert y.routing.weights.equal(at_once.routing.weights)
    assert y.strategy == name


@pytest.mark.parametrize(
    ("name", "calls", "submissions"),
    [("token_loop", 37, 37), ("router_batched", 1, 37), ("micro_batch", 3, 3), ("batched", 1, 1), ("grouped", 1, 1)],
)
def test_calls_and_submissions_are_the_strategys(name: str, calls: int, submissions: int) -> None:
    y = lab.prefill(make_layer(), rows(37), name)
    assert (len(y.timings), y.submissions) == (calls, submissions)
    assert y.wall_ms == pytest.approx(sum(t.wall_ms for t in y.timings))


def test_weight_reads_fall_with_the_rows_a_call() -> None:
    read = {name: lab.prefill(make_layer(), rows(37), name).total("weight_bytes") for name in STRATEGIES}
    assert read["token_loop"] == read["router_batched"] > read["micro_batch"] > read["batched"] > 0


def test_a_strategy_or_an_arm_of_ones_own() -> None:
    layer, x = make_layer(), rows(10)
    y = lab.prefill(layer, x, Strategy("threes", "gemv", 3))
    assert (len(y.timings), y.strategy) == (4, "threes")
    assert y.out.equal(layer(x, "gemv").out)
    assert lab.prefill(layer, x, "reference").out.equal(layer(x, "reference").out)
    both = measure_batching(layer, x, arms=["gemv", Strategy("twos", "gemv", 2)], tokens=[4], repeats=1)
    assert list(both.arm) == ["gemv", "twos"]


def test_given_picks_and_token_ids_are_cut_with_the_rows() -> None:
    x = rows(10)
    picks = make_layer().route(x)
    mixed = lab.Routing(picks.ids.flip(0), picks.weights.flip(0))
    assert lab.prefill(make_layer(), x, "token_loop", routing=mixed).out.equal(
        make_layer()(x, "gemv", routing=mixed).out
    )
    ids = torch.arange(10) * 3
    hashed = make_layer(hashed=True)
    assert lab.prefill(hashed, x, "micro_batch", token_ids=ids).out.equal(hashed(x, "gemv", token_ids=ids).out)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Strategy("s", "gemv", 0), r"Strategy\.rows is 0; wanted at least 1 row a call"),
        (lambda: Strategy(" ", "gemv"), "a strategy's name is ' '"),
        (lambda: lab.prefill(make_layer(), rows(2), "nope"), "no strategy or arm is called 'nope'; known: token_loop"),
        (lambda: lab.prefill(make_layer(), rows(2), 3), "strategy is a int; wanted a name"),
        (
            lambda: measure_batching(make_layer(), rows(2), arms=["gemv", Strategy("gemv", "gemv", 1)], tokens=[1]),
            "'gemv' was named twice",
        ),
    ],
    ids=["rows", "name", "unknown", "type", "twice"],
)
def test_refusals_say_what_is_wanted(call, message: str) -> None:
    with pytest.raises(lab.LabError, match=message):
        call()


def test_cost_curve_is_the_ratio_to_one_row() -> None:
    curve = frames.cost_curves().set_index(["arm", "rows"])
    assert curve.loc[("shared", 4), "c"] == pytest.approx(0.25)
    assert curve.loc[("alone", 4), "c"] == pytest.approx(1.0)
    assert curve.loc[("alone", 4), "c_low"] == pytest.approx(0.9)
    assert curve.loc[("alone", 4), "c_floor"] == curve.loc[("alone", 4), "c_predicted"] == 1.0
    assert curve.loc[("shared", 4), "row_us"] == pytest.approx(2.5)


def test_cost_curve_leaves_out_what_it_cannot_compare() -> None:
    df = frames.benched({"shared": {1: 10.0, 2: 10.0}, "late": {2: 5.0, 4: 6.0}})
    assert set(cost_curve(df).arm) == {"shared"}
    wrong = df.assign(status="INCORRECT")
    with pytest.raises(lab.LabError, match="no arm was timed with one row"):
        cost_curve(wrong)
    with pytest.raises(
        lab.LabError, match=r"cost_curve wants a frame of lab\.bench or lab\.runs; this one lacks .*p20"
    ):
        cost_curve(df.rename(columns={"p20": "time_ms_p20"}))
    with pytest.raises(lab.LabError, match=r"crossover wants a frame of cost_curve; this one lacks rows, time_us"):
        crossover(df, "shared", "late")


@pytest.mark.parametrize("column", ["zz", "arm", "layer"])
def test_a_total_is_of_a_column_of_numbers(column: str) -> None:
    with pytest.raises(lab.LabError, match=f"no column '{column}' to add up; it has tokens, route_ms"):
        lab.prefill(make_layer(), rows(3), "token_loop").total(column)


def test_crossover_is_the_first_m_from_which_an_arm_stays_ahead() -> None:
    curve = cost_curve(
        frames.benched({"a": {1: 9.0, 2: 30.0, 4: 30.0, 8: 30.0}, "b": {1: 10.0, 2: 20.0, 4: 40.0, 8: 80.0}})
    )
    assert list(crossover(curve, "a", "b").rows) == [4]
    assert np.isnan(crossover(curve, "b", "a").rows[0])
    with pytest.raises(lab.LabError, match="'a' and 'zz' were not measured"):
        crossover(curve, "a", "zz")


def test_cost_curve_reads_what_the_bench_measures() -> None:
    quick = Settings(shrink=1, cell_ms=1, least=1, most=2, states=("warm",))
    dense = LayerShape("dense", 256, 256, 1, 1)
    df = lab.bench(dense, arms=["gemv"], tokens=[1, 4], formats=["q2_k"], settings=quick)
    assert list(cost_curve(df).rows) == [1, 4]


@pytest.mark.parametrize("activation", ["q8_1", None])
def test_parts_add_up_to_the_call(activation: str | None) -> None:
    df = measure_parts(make_layer(), rows(8), "gemv", activation=activation, repeats=2)
    assert df.share.sum() >= 1 - 1e-9
    assert (df.part == "rows to 8 bits").any() == (activation is not None)
    assert set(df[df.reads == "weights"].part) == {"router's product", "experts' products"}
    with pytest.raises(lab.LabError, match="at least one row"):
        measure_parts(make_layer(), rows(0))


class Own:
    """The reference arithmetic under a name of its own."""

    name = "own"

    def supports(self, formats, backend):
        return None

    def experts(self, *step):
        ARMS["reference"].experts(*step)


EIGHT_BITS = {"rows to 8 bits", "hidden rows to 8 bits"}


@pytest.mark.parametrize("arm", ["gemv", "per_token", "mmq", "mmq_folded", "gemv_mmq", "grouped", "reference", Own()])
def test_parts_are_steps_that_the_arm_does(arm: object) -> None:
    found = set(measure_parts(make_layer(), rows(4), arm, repeats=1).part) & EIGHT_BITS
    assert found == (EIGHT_BITS if arm in ("gemv", "per_token", "mmq", "mmq_folded", "gemv_mmq") else set())
    assert set(measure_parts(make_layer(), rows(4), arm, activation="q8_1", repeats=1).part) >= EIGHT_BITS


def test_rows_are_quantised_as_each_format_asks() -> None:
    said = {a: [quantised_to(ARMS[a], f, 3) for f in ("q2_k", "bf16")] for a in ("gemv", "table", "reference")}
    assert said == {"gemv": ["q8_1", None], "table": ["q8_1", None], "reference": [None, None]}
    assert [quantised_to(ARMS["gemv_mmq"], "q2_k", n) for n in (8, 9)] == ["q8_1", "d2s6"]


def test_one_token_count_is_no_range_of_shares() -> None:
    one = frames.parts().query("tokens == tokens.min()")
    assert lab.plot.parts(one).get_title(loc="left").startswith("50% of a layer call")
    assert lab.plot.parts(frames.parts()).get_title(loc="left").startswith("25% to 50% of a layer call")
