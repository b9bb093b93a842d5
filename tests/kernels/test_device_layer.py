"""A decode step through the kernels in the interpreter: device routing, slots by address, the shared expert fused."""

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.routing import Routing
from moe_lab.workspace import poisoned
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.gemv.lane_rows import quantize_lanes_ref
from moe_lab_kernels.slots.pointer_table import PointerTable
from tests.support.decode_layers import decode_layer, decode_rows
from tests.support.kernel_cases import same_bits

DEVICE = lab.Options(routing="device", verify_routing=True)
pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def test_all_forms_have_the_bits_of_host_and_main() -> None:
    layer, x = decode_layer(experts=3, top_k=1), decode_rows(2)
    with poisoned():
        want = layer(x, "gemv")
        assert want.timing.backend == "interpreter"
        fused = layer(x, "gemv", options=lab.Options(routing="device", shared="fused", verify_routing=True))
        side = layer(x[:1], "table", options=lab.Options(routing="device", shared="side"))
    assert torch.equal(fused.out, want.out)
    assert torch.equal(side.out, want.out[:1])
    assert fused.timing.launches < want.timing.launches, "one launch serves routed and shared experts"


@pytest.mark.parametrize("two", [False, True], ids=["one", "gate-and-up"])
def test_addresses_give_the_bits_of_an_arena(two: bool) -> None:
    """Slots in three allocations, one of them strided; entries that mean nothing lead nowhere."""
    layer = decode_layer(experts=5, top_k=2)
    stack, x = layer.experts.stack, decode_rows(3)
    rows = quantize_lanes_ref(x, "q2_k")
    row_of = torch.tensor([0, 2, 1, 0, 2, 2], dtype=torch.int32)
    chunks = torch.tensor(
        [[4, 0, 2], [0, 2, 1], [-1, 0, 3], [5, 0, 3], [2**31 - 1, 0, 3], [2, 3, 2]], dtype=torch.int32
    )
    w = {name: stack.part(name).data[:, :32] for name in ("gate", "up")}
    tables = {n: PointerTable.of([t[:2].clone(), t[2:3].clone(), t.repeat(2, 1, 1)[3::5][:1], t[4:].clone()])
              for n, t in w.items()}  # fmt: skip
    made = []
    for source in (w, tables):
        out, out2 = (torch.full((6, 32), 7.0) for _ in range(2))
        second = {"w2": source["up"], "out2": out2} if two else {}
        gemv.gemv(rows, row_of, source["gate"], chunks, "q2_k", out, max_rows=2, **second)
        ref, ref2 = (torch.full((6, 32), 7.0) for _ in range(2))
        gemv.gemv_ref(rows, row_of, source["gate"], chunks, "q2_k", ref,
                      **({"w2": source["up"], "out2": ref2} if two else {}))  # fmt: skip
        assert same_bits(out, ref)
        assert same_bits(out2, ref2)
        made.append((out, out2))
    assert same_bits(made[0][0], made[1][0])
    assert same_bits(made[0][1], made[1][1])
    assert (made[1][0][5] == 7).all(), "a pair in no chunk was written"


def test_arena_and_addresses_are_not_mixed() -> None:
    stack = decode_layer(experts=4, top_k=2).experts.stack
    rows, out = quantize_lanes_ref(decode_rows(1), "q2_k"), torch.zeros(1, 256)
    table = PointerTable.of([stack.up.data])
    with pytest.raises(LabError, match="both tensors or both tables of addresses"):
        gemv.gemv(rows, torch.zeros(1, dtype=torch.int32), stack.gate.data, torch.zeros(1, 3, dtype=torch.int32),
                  "q2_k", out, w2=table, out2=out.clone())  # fmt: skip


def test_a_live_cache_is_looked_up_by_the_kernels() -> None:
    x = decode_rows(1)
    picks = Routing(torch.tensor([[9, -1, -1, -1]]), torch.full((1, 4), 0.5))
    with lab.ExpertCache(slots=1) as cache:
        own = lab.open(lab.sample()).layer(3, cache=cache)
        own.experts.device_table()  # from here on the table is told what arrives
        made = [own(x, "gemv", routing=picks, options=how) for how in (DEVICE, DEVICE, lab.Options())]
    assert [y.timing.misses for y in made] == [1, 0, 0]
    assert all(torch.equal(y.out, made[2].out) for y in made)


@pytest.mark.parametrize("arm", ["grouped", "gemv_mmq"])
def test_work_lists_made_on_the_device_have_the_hosts_bits(arm: str) -> None:
    layer, x = decode_layer(experts=3, top_k=1), decode_rows(11)
    picks = Routing(torch.tensor([[1], *[[0]] * 9, [-1]]), torch.linspace(-1, 1, 11)[:, None])
    with poisoned():
        got = layer(x, arm, routing=picks, options=DEVICE)
    assert torch.equal(got.out, layer(x, arm, routing=picks).out)
