"""Routing and planning on a GPU: the bits of torch on the CPU, one launch, no host in between, any batch."""

import pytest
import torch

from moe_lab.routing import Routing, route, route_plan
from moe_lab.routing import plan as lab_plan
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.route import plan, router, topk
from moe_lab_kernels.route import route_plan as fused
from tests.support.kernel_cases import DTYPES, same_bits
from tests.support.routing_cases import ROUTERS, differs, guarded_outputs, logits, picks, plan_differs, vectors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
KINDS = ("normal", "ties", "saturated", "underflow", "broken")


@pytest.mark.parametrize("name", ROUTERS)
def test_topk_has_the_bits_of_torch_on_the_cpu(name: str) -> None:
    spec, more = ROUTERS[name][0], vectors(name, device="cuda")
    for seed, kind in enumerate(KINDS):
        for t in (1, 199, 2048):
            z = logits(t, spec.width, seed, kind)
            assert differs(z.cuda(), spec, **more) is None, (kind, t)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_topk_of_16_bit_and_strided_logits(dtype: torch.dtype) -> None:
    spec = ROUTERS["R128-K8-normalised"][0]
    for kind in ("normal", "ties", "broken"):  # of broken rows this wide nearly all hold +inf
        z = logits(99, 128, kind=kind).to(dtype).cuda()
        assert differs(z, spec) is None, kind
        assert all(same_bits(a, b) for a, b in zip(topk.topk(z, spec), topk.topk(z.float(), spec), strict=True)), kind
    assert differs(logits(128, 99).cuda().T, spec) is None
    assert differs(logits(99, 257).cuda()[:, 1::2], spec) is None


def test_outputs_are_written_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, z = ROUTERS["R60-K4-softmax"][0], logits(37, 60, kind="broken").cuda()
    with guarded_outputs(monkeypatch):
        ids, weights, affected = topk.topk(z, spec)
        groups = plan.plan(ids, weights, 60)
    want = route(z.cpu(), spec, backend="torch")
    assert torch.equal(ids.cpu(), want.ids)
    assert same_bits(weights, want.weights)
    assert int(affected.sum()) == int(want.affected_rows)
    assert plan_differs(groups, plan.plan_ref(want.ids, want.weights, 60)) is None


@pytest.mark.parametrize("kind", ["uniform", "one", "skewed", "odd"])
@pytest.mark.parametrize(
    ("k", "e", "width"), [(8, 128, 128), (6, 60, 62), (12, 512, 768), (16, 1024, 1024), (1, 1, 1)],
    ids=["K8-E128", "K6-E60-R62", "K12-E512-R768", "K16-E1024", "K1-E1"],
)  # fmt: skip
@pytest.mark.parametrize("t", [0, 1, 9, 64, 129, 199, 600, 8192], ids="T{}".format)
def test_plan_is_the_reference(t: int, k: int, e: int, width: int, kind: str) -> None:
    r = picks(t, k, e, width, seed=t, kind=kind)
    got = plan.plan(r.ids.cuda(), r.weights.cuda(), e, width)
    assert plan_differs(got, plan.plan_ref(r.ids, r.weights, e, width)) is None


def test_plan_of_131072_tokens() -> None:
    r = picks(131_072, 8, 128, 128, kind="skewed")
    got = plan.plan(r.ids.cuda(), r.weights.cuda(), 128)
    assert plan_differs(got, plan.plan_ref(r.ids, r.weights, 128)) is None


def test_both_plan_forms_agree_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    r = picks(128, 8, 128, 128, kind="skewed")
    got = []
    for limit in (2**30, 0):
        monkeypatch.setattr(plan, "SMALL_PAIRS", limit)
        got.append(plan.plan(r.ids.cuda(), r.weights.cuda(), 128))
    assert plan_differs(*got) is None


@pytest.mark.parametrize("t", range(1, 9), ids="T{}".format)
@pytest.mark.parametrize("name", ROUTERS)
def test_route_and_plan_of_a_few_tokens(name: str, t: int) -> None:
    spec, z = ROUTERS[name][0], logits(t, ROUTERS[name][0].width, t, "broken" if t == 7 else "ties")
    with backend.count_launches() as count:
        got, groups = route_plan(z.cuda(), spec, **vectors(name, device="cuda"))
    assert count.launches == (1 if fused.unserved(z, spec) is None else 2)
    want = route(z, spec, backend="torch", **vectors(name))
    assert torch.equal(got.ids.cpu(), want.ids)
    assert same_bits(got.weights, want.weights)
    assert int(got.affected_rows) == int(want.affected_rows)
    got_plan = plan.Plan(*(getattr(groups, f) for f in plan.Plan._fields))
    assert plan_differs(got_plan, plan.plan_ref(want.ids, want.weights, spec.num_experts, spec.width)) is None


@pytest.mark.parametrize("t", [1, 8, 300], ids="T{}".format)
def test_routing_and_planning_are_captured_in_a_graph(t: int) -> None:
    """Capture fails on any look from the host; replays see new logits."""
    name = "R256-K8-top2-groups-bias"
    spec, more = ROUTERS[name][0], vectors(name, device="cuda")
    z = logits(t, spec.width).cuda()
    for _ in range(2):
        route_plan(z, spec, **more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routing, groups = route_plan(z, spec, **more)
    for seed in (1, 2):
        new = logits(t, spec.width, seed, "broken")
        z.copy_(new)
        graph.replay()
        want = route(new, spec, backend="torch", **vectors(name))
        assert torch.equal(routing.ids.cpu(), want.ids)
        assert same_bits(routing.weights, want.weights)
        assert int(routing.affected_rows) == int(want.affected_rows)
        plan_got = plan.Plan(*(getattr(groups, f) for f in plan.Plan._fields))
        assert plan_differs(plan_got, plan.plan_ref(want.ids, want.weights, spec.num_experts)) is None


def test_impossible_ids_are_counted_not_raised() -> None:
    ids = torch.tensor([[0, 8], [-1, -2], [7, 2**30]], dtype=torch.int32, device="cuda")
    got = lab_plan(Routing(ids, torch.ones(3, 2, device="cuda")), 8)
    assert int(got.invalid) == 3
    assert got.counts.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("x", DTYPES, ids="x-{}".format)
@pytest.mark.parametrize("w", DTYPES, ids="w-{}".format)
def test_router_rows_keep_their_bits(x: str, w: str) -> None:
    rows = torch.randn(1300, 2304, device="cuda").to(DTYPES[x])  # the whole form; the slices take the spread one
    weights, bias = torch.randn(160, 2304, device="cuda").to(DTYPES[w]), torch.randn(160, device="cuda")
    whole = router.router(rows, weights, bias)
    size = rows.double().abs() @ weights.double().abs().T
    wrong = ((whole - router.router_ref(rows, weights, bias)).double().abs() / size).max()
    assert float(wrong) <= tol("router/product")
    for some in (slice(0, 1), slice(17, 18), slice(3, 12), slice(0, 64), slice(31, 200), slice(0, 1024)):
        assert same_bits(router.router(rows[some], weights, bias), whole[some]), some
