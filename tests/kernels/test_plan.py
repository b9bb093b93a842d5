"""Grouping by expert: exactly the reference in both forms, the order stable, impossible ids counted and left out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import Routing, route, route_plan
from moe_lab.routing import plan as lab_plan
from moe_lab.spec import RouterSpec
from moe_lab_kernels import backend
from moe_lab_kernels.route import plan
from moe_lab_kernels.route import route_plan as fused
from tests.support.routing_cases import ROUTERS, guarded_outputs, logits, picks, plan_differs, vectors

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]
FORMS = {"small": 2**30, "large": 0}
SHAPES = [(8, 128, 128), (6, 60, 60), (12, 512, 768), (16, 257, 257), (1, 3, 3), (4, 1, 1)]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(plan, "SMALL_PAIRS", FORMS[request.param])
    return request.param


@pytest.mark.parametrize("t", [0, 1, 7, 8, 9, 37, 199], ids="T{}".format)
def test_any_number_of_rows(form: str, t: int) -> None:
    r = picks(t, 4, 60, 64, kind="odd")
    assert plan_differs(plan.plan(r.ids, r.weights, 60, 64), plan.plan_ref(r.ids, r.weights, 60, 64)) is None


@pytest.mark.parametrize("kind", ["uniform", "one", "skewed", "odd"])
@pytest.mark.parametrize(("k", "e", "width"), SHAPES, ids=[f"K{k}-E{e}-R{r}" for k, e, r in SHAPES])
def test_any_shape(form: str, k: int, e: int, width: int, kind: str) -> None:
    r = picks(21, k, e, width, kind=kind)
    assert plan_differs(plan.plan(r.ids, r.weights, e, width), plan.plan_ref(r.ids, r.weights, e, width)) is None


def test_the_order_spelled_out(form: str) -> None:
    ids = torch.tensor([[2, 0], [-1, 2], [5, 2], [0, 3]], dtype=torch.int32)
    got = plan.plan(ids, torch.arange(8.0).view(4, 2), 4, 5)
    assert got.counts.tolist() == [2, 0, 3, 1]
    assert got.offsets.tolist() == [0, 2, 2, 5, 6]
    assert list(zip(got.token[:6].tolist(), got.slot[:6].tolist(), got.weight[:6].tolist(), strict=True)) == [
        (0, 1, 1.0), (3, 0, 6.0), (0, 0, 0.0), (1, 1, 3.0), (2, 1, 5.0), (3, 1, 7.0)]  # fmt: skip
    assert int(got.invalid) == 1


def test_every_output_is_written_and_nothing_else(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    r = picks(37, 6, 60, 60)
    with guarded_outputs(monkeypatch):
        got = plan.plan(r.ids, r.weights, 60)
    assert plan_differs(got, plan.plan_ref(r.ids, r.weights, 60)) is None


def test_launches() -> None:
    r = picks(9, 4, 8, 8)
    for limit, launches in ((1024, 1), (0, 3)):
        with pytest.MonkeyPatch.context() as patch, backend.count_launches() as count:
            patch.setattr(plan, "SMALL_PAIRS", limit)
            plan.plan(r.ids, r.weights, 8)
        assert count.launches == launches


@settings(max_examples=12, deadline=None)
@given(
    t=st.integers(0, 40), k=st.integers(1, 16), e=st.integers(1, 300), zero=st.integers(0, 20), seed=st.integers(0, 99)
)
def test_random_plans(t: int, k: int, e: int, zero: int, seed: int) -> None:
    r = picks(t, k, e, e + zero, seed, ("uniform", "one", "skewed", "odd")[seed % 4])
    want = plan.plan_ref(r.ids, r.weights, e, e + zero)
    for limit in FORMS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "SMALL_PAIRS", limit)
            assert plan_differs(plan.plan(r.ids, r.weights, e, e + zero), want) is None


def test_lab_plan_takes_the_kernel_and_still_refuses_impossible_ids() -> None:
    with backend.count_launches() as count:
        got = lab_plan(picks(5, 2, 8, 8), 8)
    assert count.launches == 1
    assert int(got.offsets[-1]) == 10
    with pytest.raises(LabError, match=r"ids\[0, 1\] is 8"):
        lab_plan(Routing(torch.tensor([[0, 8]]), torch.ones(1, 2)), 8)
    with pytest.raises(LabError, match="E=1025"):
        lab_plan(picks(1, 2, 8, 1025), 1025, backend="triton")
    assert len(lab_plan(picks(1, 2, 8, 1025), 1025).counts) == 1025


def test_wrong_input_is_refused() -> None:
    ids, w = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)
    with pytest.raises(LabTypeError, match="ids must be int32"):
        plan.plan(ids.long(), w, 8)
    with pytest.raises(LabError, match=r"weights must have shape \[3, 2\]"):
        plan.plan(ids, w[:2], 8)
    with pytest.raises(LabError, match=r"E=8.*R=4"):
        plan.plan(ids, w, 8, 4)
    with pytest.raises(LabError, match="contiguous"):
        plan.plan(torch.zeros(2, 3, dtype=torch.int32).T, w, 8)


@pytest.mark.parametrize(
    ("name", "t"),
    [
        ("R60-K4-softmax", 1),
        ("R256-K8-top2-groups-bias", 1),
        ("R768-K12-zero-experts-bias", 1),
        ("R128-K8-normalised", 2),
        ("R64-K6-max-norm-bias", 7),
        ("R128-K8-per-expert-scale", 8),
    ],
    ids=str,
)
def test_route_and_plan_in_one_launch(name: str, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, z = ROUTERS[name][0], logits(t, ROUTERS[name][0].width, kind="broken" if t > 2 else "ties")
    with guarded_outputs(monkeypatch), backend.count_launches() as count:
        got = fused.route_plan(z, spec, **vectors(name))
    assert count.launches == 1
    want = route(z, spec, backend="torch", **vectors(name))
    assert torch.equal(got.ids, want.ids)
    assert torch.equal(got.weights, want.weights)
    assert int(got.affected.sum()) == int(want.affected_rows)
    assert plan_differs(got.plan, plan.plan_ref(want.ids, want.weights, spec.num_experts, spec.width)) is None


def test_route_plan_of_many_tokens_is_two_calls() -> None:
    spec = RouterSpec(8, 2)
    for t, launches in ((0, 0), (8, 1), (9, 2)):
        with backend.count_launches() as count:
            routing, groups = route_plan(logits(t, 8), spec)
        assert count.launches == launches
        got = plan.Plan(*(getattr(groups, f) for f in plan.Plan._fields))
        assert plan_differs(got, plan.plan_ref(routing.ids, routing.weights, 8)) is None
    with pytest.raises(LabError, match="T=9"):
        fused.route_plan(logits(9, 8), spec)
    with pytest.raises(LabError, match=r"T=2 rows of R=256"):
        fused.route_plan(logits(2, 256), RouterSpec(256, 2))
