"""Decode on the GPU in all its forms: one set of bits, a hundred times over, whoever routes and wherever it runs."""

import functools
import itertools
import time
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import moe_lab as lab
from moe_lab import workspace
from moe_lab.arms import ExpertStack
from moe_lab.arms.gemv import Gemv
from moe_lab.errors import LabError
from moe_lab.execution.branch import run_halves
from moe_lab.execution.shared_lane import side_stream
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.stream.device_table import DeviceTable
from moe_lab.stream.table_experts import TableExperts
from tests.support.decode_layers import E, K, decode_layer, decode_rows, normed_layer, taken
from tests.support.wide_layers import FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
REPEATS = 100
LONG_CYCLES = 200_000_000  # about 100 ms: far longer than a host under load takes to queue a layer


@functools.cache
def layer(*formats: str) -> MoELayer:
    return decode_layer(formats or ("q2_k", "q2_k", "q3_k"), device="cuda")


def rows(tokens: int, seed: int = 0) -> torch.Tensor:
    return decode_rows(tokens, seed).cuda()


FORMS = {
    "device": {"routing": "device"},
    "device-checked": {"routing": "device", "verify_routing": True},
    "side": {"shared": "side"},
    "fused": {"shared": "fused"},
    "device-side": {"routing": "device", "shared": "side"},
    "device-fused": {"routing": "device", "shared": "fused"},
    "expert-order-device": {"routing": "device", "combine_order": "expert"},
    "fp32-stores-device-fused": {"routing": "device", "shared": "fused", "stores": "fp32"},
    "chunks-of-3-device": {"routing": "device", "chunk_rows": 3},
}
PLAIN = ("combine_order", "stores")


@functools.cache
def host_and_main(tokens: int, seed: int, **plain):
    return layer()(rows(tokens, seed), "gemv", options=lab.Options(**plain))


def only_plain(form: str) -> dict:
    return {k: v for k, v in FORMS[form].items() if k in PLAIN}


@pytest.mark.parametrize("tokens", [1, 2, 7, 8])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_bits_of_host_and_main(form: str, tokens: int) -> None:
    options = lab.Options(**FORMS[form])
    for seed in range(REPEATS):
        want, got = (
            host_and_main(tokens, seed, **only_plain(form)),
            layer()(rows(tokens, seed), "gemv", options=options),
        )
        assert torch.equal(got.out, want.out), seed
        assert torch.equal(got.routing.ids, want.routing.ids)
        assert torch.equal(got.routing.weights, want.routing.weights)


OTHERS = [("q4_k", "q4_k", "q6_k"), *((format,) * 3 for format in FORMATS if format not in ("q2_k", "q4_k"))]
ALWAYS = ("device", "side", "fused", "device-fused")  # compared for every input; the others for the first of them


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("formats", OTHERS, ids="-".join)
def test_every_format_has_one_set_of_bits(formats: tuple[str, ...], tokens: int) -> None:
    """Batched and token after token, host and device routing, main and side stream, fused and not, graph and eager."""
    own = layer(*formats)
    captured = own.capture(tokens, "gemv", options=lab.Options(shared="side"))
    for seed in range(REPEATS):
        x = rows(tokens, seed)
        want = own(x, "gemv").out
        assert torch.equal(captured(x).out, want), seed
        assert torch.equal(own(x, "per_token").out, want), seed
        for form in ALWAYS if seed else FORMS:
            plain = want if seed else own(x, "gemv", options=lab.Options(**only_plain(form))).out
            assert torch.equal(own(x, "gemv", options=lab.Options(**FORMS[form])).out, plain), (form, seed)


def test_table_is_gemv_for_one_token() -> None:
    for form in FORMS.values():
        x = rows(1)
        assert torch.equal(layer()(x, "table", options=lab.Options(**form)).out,
                           layer()(x, "gemv", options=lab.Options(**form)).out)  # fmt: skip
    with pytest.raises(LabError, match="T <= 1"):
        layer()(rows(2), "table")


@pytest.mark.parametrize("shared", ["main", "side", "fused"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_a_captured_layer_has_eager_bits_for_every_input(tokens: int, shared: str) -> None:
    captured = layer().capture(tokens, "gemv", options=lab.Options(shared=shared))
    for seed in range(REPEATS):
        x = rows(tokens, seed)
        got, want = captured(x), host_and_main(tokens, seed)
        assert torch.equal(got.out, want.out), seed
        assert torch.equal(got.routing.ids, want.routing.ids)
        assert torch.equal(got.routing.weights, want.routing.weights)
    assert got.timing.launches > 0
    assert got.timing.compute_ms > 0


@pytest.mark.parametrize("arm", ["gemv", "grouped", "mmq", "mmq_folded", "gemv_mmq"])
def test_many_tokens_in_a_graph(arm: str) -> None:
    own = layer()
    for tokens in (9, 40, 200):
        captured = own.capture(tokens, arm, options=lab.Options(shared="side"))
        for seed in range(REPEATS):
            x = rows(tokens, seed)
            want = own(x, arm)
            assert torch.equal(captured(x).out, want.out), (tokens, seed)
            assert torch.equal(own(x, arm, options=lab.Options(routing="device")).out, want.out), (tokens, seed)


def test_a_captured_layer_takes_other_picks_each_call() -> None:
    own = layer()
    x, first = rows(4), own.route(rows(4))
    captured = own.capture(4, "gemv", routing=first)
    for seed in range(REPEATS):
        picks = own.route(rows(4, seed + 1))
        picks = replace(picks, affected_rows=torch.tensor(seed % 3, dtype=torch.int32, device="cuda"))
        got = captured(x, routing=picks)
        assert torch.equal(got.out, own(x, "gemv", routing=picks).out)
        assert torch.equal(got.routing.ids, picks.ids)
        assert int(got.routing.affected_rows) == seed % 3
    with pytest.raises(LabError, match="captured for x"):
        captured(rows(3))
    with pytest.raises(LabError, match=r"captured for torch\.bfloat16"):
        captured(x.float())
    with pytest.raises(LabError, match="captured without"):
        own.capture(4, "gemv")(x, routing=first)


def test_results_of_a_captured_layer_stay() -> None:
    captured = layer().capture(1, "gemv")
    first = captured(rows(1, 1))
    kept = first.out.clone()
    captured(rows(1, 2))
    assert torch.equal(first.out, kept)


def test_a_slot_table_is_not_captured() -> None:
    stack = layer().experts.stack
    table = DeviceTable.identity(E, torch.device("cuda"))
    by_table = MoELayer(layer().spec, layer().router_weights, TableExperts(stack, table), layer().shared)
    with pytest.raises(LabError, match="wants every expert in memory"):
        by_table.capture(1)


def arena(slots: int) -> tuple[ExpertStack, DeviceTable, dict[int, int]]:
    """Every second expert in a slot of an arena that is laid out in another order."""
    own = layer().experts.stack
    chosen = torch.randperm(E, generator=torch.Generator().manual_seed(3))[:slots].tolist()
    order = torch.tensor(chosen)
    stack = ExpertStack(*(taken(own.part(name), order) for name in ("gate", "up", "down")), {})
    held = {e: s for s, e in enumerate(chosen)}
    return stack, DeviceTable.of(held, E, slots, torch.device("cuda")), held


SAYS = {
    "missing": "is in no slot of the arena",
    "outside": f"to slot {E // 2}, but the arena has S={E // 2} slots",
    "stale": "out of date",
}


@pytest.mark.parametrize("form", ["device", "device-side", "device-fused"])
@pytest.mark.parametrize("case", SAYS)
def test_an_expert_that_is_not_there_is_named(case: str, form: str) -> None:
    stack, table, held = arena(E // 2)
    by_table = MoELayer(layer().spec, layer().router_weights, TableExperts(stack, table), layer().shared)
    lost, *others = held
    if case == "stale":
        table.owner[held[lost]] = others[0]
    else:
        table.slot_of[lost] = -1 if case == "missing" else E // 2
    x, options, weights = rows(2), lab.Options(**FORMS[form]), torch.rand(2, K, device="cuda")
    ids = torch.tensor([others[:K], [others[3], lost, others[5], others[1]]], device="cuda")
    with pytest.raises(LabError, match=SAYS[case]) as error:
        by_table(x, "gemv", routing=Routing(ids, weights), options=options)
    assert f"expert {lost} (token 1, slot 1)" in str(error.value)
    kept = Routing(ids[:1], weights[:1])  # picks that do not need it are served as before
    got, want = by_table(x[:1], "gemv", routing=kept, options=options), layer()(x[:1], "gemv", routing=kept)
    assert torch.equal(got.out, want.out)


def test_through_a_slot_table_and_with_fetched_misses() -> None:
    stack, table, held = arena(E // 2)
    own = layer().experts.stack
    fetched: list[int] = []

    def fetch(experts) -> int:
        for expert in experts:
            slot, old = next((s, e) for e, s in held.items() if e not in wanted)
            for part in ("gate", "up", "down"):
                stack.part(part).data[slot].copy_(own.part(part).data[expert])
            table.slot_of[old], table.slot_of[expert], table.owner[slot] = -1, slot, expert
            del held[old]
            held[expert] = slot
            fetched.append(expert)
        return len(experts) * own.expert_bytes

    by_table = MoELayer(layer().spec, layer().router_weights, TableExperts(stack, table, fetch), layer().shared)
    for seed in range(REPEATS):
        x = rows(1 + seed % 2, seed)
        wanted = set(layer().route(x).ids.flatten().tolist())
        for form in ("device", "device-side"):
            got = by_table(x, "gemv", options=lab.Options(**FORMS[form]))
            assert torch.equal(got.out, layer()(x, "gemv").out), seed
    assert fetched


def test_an_error_on_the_main_path_joins_the_side_and_leaves_nothing_behind() -> None:
    class Broken(Gemv):
        name = "broken"

        def experts(self, *args) -> None:
            raise RuntimeError("planted")

        def shared(self, x, stack, ctx):
            torch.cuda._sleep(LONG_CYCLES)
            return super().shared(x, stack, ctx)

    own, x = layer(), rows(8)
    want = own(x, "gemv").out
    beside, late = side_stream(x.device, torch.cuda.current_stream().cuda_stream), 0
    for seed in range(20):
        with pytest.raises(LabError, match="planted"):
            own(x, Broken(), options=lab.Options(shared="side"))
        late += not beside.query()
        end = torch.cuda.Event()
        end.record()
        end.synchronize()
        time.sleep(0.005)  # a twentieth of the side's sleep, for what a stream says of itself
        assert beside.query(), "the main stream went on before the side"
        assert torch.equal(own(x, "gemv", options=lab.Options(shared="side")).out, want), seed
    assert late, "the side had always ended anyway: its sleep is too short to tell"


class Merged(workspace.Workspace):
    """The planted mistake: one free list for both streams."""

    def pool(self, lane: str) -> str:
        return "one"


@triton.jit
def _wait_for(flag, most):
    """Until the host has written `flag`, which lies in its memory, or for `most` looks."""
    looks = 0
    while (tl.load(flag, volatile=True) == 0) & (looks < most):
        looks += 1


class Slow(Gemv):
    """Both streams mark scratch of one size; the side looks whether its mark still stands once main's was written."""

    name = "slow"

    def __init__(self) -> None:
        self.written = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def experts(self, x, stack, schedule, groups, y, ctx):
        ctx.empty("mark", (4096,), torch.float32, x.device).fill_(3.0)
        torch.cuda.current_stream().synchronize()
        self.written.fill_(1)
        super().experts(x, stack, schedule, groups, y, ctx)

    def shared(self, x, stack, ctx):
        made = super().shared(x, stack, ctx)
        with ctx.phase("slow") as inner:
            mark = inner.empty("mark", (4096,), torch.float32, x.device).fill_(7.0)
            _wait_for[(1,)](self.written, 1 << 22)
            return torch.where((mark != 7.0).any(), float("nan"), made)


@pytest.mark.parametrize(
    ("kind", "survives"), [(workspace.Workspace, True), (Merged, False)], ids=["own-lanes", "merged"]
)
def test_side_scratch_merged_with_mains_is_overwritten_while_it_waits(kind, survives, monkeypatch) -> None:
    workspace.release_idle()
    monkeypatch.setattr(workspace, "Workspace", kind)
    x, own = rows(8), layer()
    want = own(x, "gemv").out
    got = own(x, Slow(), options=lab.Options(shared="side")).out
    workspace.release_idle()
    assert torch.equal(got, want) == survives


def test_a_repeated_shape_allocates_no_scratch() -> None:
    workspace.release_idle()
    x, own, options = rows(8), layer(), lab.Options(shared="side")
    own(x, "gemv", options=options)
    with workspace.borrowed(x.device) as one:
        first = one.allocations
    for _ in range(10):
        own(x, "gemv", options=options)
    with workspace.borrowed(x.device) as same:
        assert same is one
        assert same.allocations == first > 0


def test_device_routing_reads_back_one_header_and_waits_for_nothing_else() -> None:
    own, x = layer(), rows(8)
    options = lab.Options(routing="device")
    own(x, "gemv", options=options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = own(x, "gemv", options=options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert y.timing.weight_bytes > 0


def test_nan_rows_keep_the_others_bits() -> None:
    x = rows(8)
    bad = x.clone()
    bad[3] = float("nan")
    for form in FORMS:
        plain = lab.Options(**only_plain(form))
        a, b = layer()(x, "gemv", options=plain).out, layer()(bad, "gemv", options=lab.Options(**FORMS[form])).out
        keep = [0, 1, 2, 4, 5, 6, 7]
        assert torch.equal(a[keep], b[keep]), form


@pytest.mark.parametrize("formats", [("int8_g64", "int8_g64", "int4_g64"), ("q8_0",) * 3], ids="-".join)
def test_dense_branch_and_routed_tail_apart(formats: tuple[str, ...]) -> None:
    own = normed_layer(formats, device="cuda")
    for seed in range(REPEATS):
        x = rows(7, seed)
        want = own(x, "gemv").out
        for branch, tail in itertools.product(("per_token", "batched"), repeat=2):
            got = run_halves(own, x, branch=branch, tail=tail, to=[9, 2, 0, 15, 4, 7, 8])
            assert torch.equal(got.out, want), (branch, tail, seed)
    graph = own.capture(7, "gemv", options=lab.Options(shared="side"))
    assert torch.equal(graph(x).out, want)


@pytest.mark.parametrize("stores", ["input", "fp32"])
def test_one_row_a_chunk_or_eight_and_token_after_token(stores: str) -> None:
    own, one = layer(), lab.Options(stores=stores, chunk_rows=1)
    for seed in range(REPEATS):
        x = rows(8, seed)
        want = host_and_main(8, seed, stores=stores).out
        assert torch.equal(own(x, "gemv", options=one).out, want), seed
        assert torch.equal(own(x, "per_token", options=lab.Options(stores=stores)).out, want), seed
        t = seed % 8
        assert torch.equal(own(x[t : t + 1], "table", options=lab.Options(stores=stores)).out, want[t : t + 1]), seed
