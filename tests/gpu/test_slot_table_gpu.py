"""The launches around a decode step's experts: the bits of their references, many times over."""

import pytest
import torch

from moe_lab_kernels.route import topk
from moe_lab_kernels.route.route_plan import unserved
from moe_lab_kernels.rows import shared_gate
from moe_lab_kernels.slots import route_table, slot_table
from tests.support.kernel_cases import same_bits
from tests.support.routing_cases import ROUTERS, logits, picks, vectors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
REPEATS = 100


@pytest.mark.parametrize("t", [1, 8])
@pytest.mark.parametrize("router", ["R128-K8-normalised", "R60-K4-softmax", "R384-K6-sqrt-softplus-bias"])
def test_router_and_table_in_one_launch_have_the_bits_of_two(router: str, t: int) -> None:
    spec, own = ROUTERS[router][0], vectors(router, device="cuda")
    e = spec.num_experts
    slot_of = torch.randperm(e, generator=torch.Generator().manual_seed(t)).int()
    ends = [v.cuda() for v in (slot_of, torch.argsort(slot_of).int())]
    for seed in range(REPEATS):
        z = logits(t, spec.width, seed, ("normal", "ties", "broken")[seed % 3]).cuda()
        if unserved(z, spec):
            pytest.skip("two launches serve it")
        ids, weights, affected = topk.topk(z, spec, **own)
        want = slot_table.slot_table(ids, weights, affected, *ends, width=spec.width, everyone=True)
        made = route_table.route_table(z, spec, *ends, everyone=True, **own)
        assert torch.equal(made.ids, ids)
        assert same_bits(made.weights, weights)
        assert all(same_bits(got, one) for got, one in zip(made.table, want, strict=True)), seed


@pytest.mark.parametrize(("t", "k"), [(1, 8), (7, 6), (8, 16)])
def test_the_table_is_the_references(t: int, k: int) -> None:
    for seed in range(REPEATS):
        r = picks(t, k, 60, 64, seed, ("uniform", "one", "skewed", "odd")[seed % 4])
        g = torch.Generator().manual_seed(seed)
        slot_of, owner = (torch.randint(-1, n, (m,), generator=g).int() for n, m in ((41, 60), (60, 41)))
        affected = torch.ones(t, dtype=torch.int32)
        want = slot_table.slot_table_ref(r.ids, r.weights, affected, slot_of, owner, 3, width=64, everyone=True)
        given = (v.cuda() for v in (r.ids, r.weights, affected, slot_of, owner))
        made = slot_table.slot_table(*given, 3, width=64, everyone=True)
        for name, got, one in zip(slot_table.SlotTable._fields, made, want, strict=True):
            assert same_bits(got.cpu(), one), (seed, name)


def test_the_gate_is_the_references() -> None:
    for seed in range(REPEATS):
        g = torch.Generator().manual_seed(seed)
        d = (256, 2048, 2880)[seed % 3]
        x, v = torch.randn(8, d, generator=g).bfloat16().cuda(), torch.randn(d, generator=g).cuda()
        assert same_bits(shared_gate.shared_gate(x, v), shared_gate.shared_gate_ref(x, v)), seed
