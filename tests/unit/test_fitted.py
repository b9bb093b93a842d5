"""The policy that is fitted on a recording: what it hears, that engine and simulator agree, and what it refuses."""

import copy

import numpy as np
import pytest

from moe_lab.errors import LabError, LabTypeError
from moe_lab.simulate import simulate, steps
from moe_lab.stream.policy import Fitted, make_policy
from moe_lab.stream.source import ExpertSource
from moe_lab.trace import RoutingTrace
from tests.support.expert_files import write_experts
from tests.unit.test_cache_counts import engine, same

E, LAYERS = 8, (0, 1)


def announced(tokens: int, seed: int) -> RoutingTrace:
    """Layer 0 picks at random, and layer 1 picks for each token what layer 0 picked for the one before."""
    first = np.random.default_rng(seed).integers(0, E, (tokens, 1))
    ids = {0: first, 1: np.roll(first, 1, 0)}
    weights = {n: np.ones((tokens, 1), np.float16) for n in LAYERS}
    return RoutingTrace.from_layers({n: i.astype(np.uint16) for n, i in ids.items()}, weights, num_experts=E, width=E)


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return Fitted.of(announced(1500, seed=0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    return write_experts(tmp_path_factory.mktemp("experts") / "x.bin", layers=LAYERS, experts=E)


@pytest.mark.parametrize("per_layer", [False, True], ids=["shared", "by-layer"])
@pytest.mark.parametrize("step_tokens", [1, 3], ids="{}-a-step".format)
def test_the_live_cache_counts_as_the_simulator(
    source: ExpertSource, fitted: Fitted, per_layer: bool, step_tokens: int
):
    trace = announced(40, seed=1)
    for slots in (6, 9):
        how = {"per_layer": per_layer, "step_tokens": step_tokens}
        one, other = Fitted(fitted.fits), Fitted(fitted.fits)  # a shared cache uses the object itself
        ran = engine(source, trace, slots=slots, policy=one, threads=1, **how)
        assert same(ran, steps(trace, slots, other, **how)), f"{slots} slots"


def test_it_hears_the_other_layers_although_its_slots_are_its_own(fitted: Fitted):
    """What layer 0 picks is what layer 1 picks next: told of it, it keeps that expert; alone it cannot know."""
    trace = announced(1000, seed=2)
    heard, lru = (simulate(trace, 8, [p], per_layer=True).set_index("layer").hit_rate[1] for p in (fitted, "lru"))
    lonely = np.where(np.arange(2)[None, :, None] == 1, trace.ids.astype(np.int64), -1)
    alone = simulate(lonely, 8, [fitted], per_layer=True).set_index("layer").hit_rate[1]
    assert alone == pytest.approx(lru, abs=0.05)
    assert heard > alone + 0.05


def test_copies_share_what_was_learnt_and_nothing_else(fitted: Fitted):
    other = copy.deepcopy(fitted)
    assert other.fits[0] is fitted.fits[0]
    other.on_request([(0, 3)])
    assert other.score((0, 3)) != fitted.score((0, 3))


def test_picks_that_are_none_and_layers_unlike_each_other_are_no_hindrance():
    ids = np.random.default_rng(0).integers(0, E, (200, 2, 2)).astype(np.uint16)
    ids[::7, 1] = np.iinfo(np.uint16).max
    weights = np.ones(ids.shape, np.float16)
    made = RoutingTrace.from_layers(
        {n: ids[:, n] for n in LAYERS}, {n: weights[:, n] for n in LAYERS}, num_experts=E, width=E
    )
    table = simulate(made, 6, [Fitted.of(made)])
    assert (table.hits + table.misses == table.requests).all()


def test_what_it_was_not_fitted_on_is_refused(fitted: Fitted):
    with pytest.raises(LabError, match="layer 2 is asked for; it was fitted on layers 0, 1"):
        simulate(np.zeros((1, 3, 1), int), 3, [fitted])
    with pytest.raises(LabError, match="layer 0 asks for expert 8 of the 8 it was fitted on"):
        simulate(np.full((1, 1, 1), 8), 3, [fitted])
    with pytest.raises(LabError, match="the trace to fit holds no token"):
        Fitted.of(announced(1500, 0).part(0, 0))
    with pytest.raises(LabError, match="unknown eviction policy 'fitted'"):
        make_policy("fitted")  # nothing is fitted by a name


@pytest.mark.wrong_types
def test_it_is_fitted_on_a_trace():
    with pytest.raises(LabTypeError, match=r"the trace to fit is 'x' .*; wanted a RoutingTrace"):
        Fitted.of("x")  # type: ignore[arg-type]
