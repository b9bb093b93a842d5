"""Decode in all its forms on the torch path: one set of bits, whoever routes and wherever the shared expert runs."""

import functools
import threading

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ARMS, get_arm
from moe_lab.arms.by_rows import ByRows, Range
from moe_lab.arms.gemv import Gemv
from moe_lab.errors import LabError
from moe_lab.execution import device_routing
from moe_lab.execution.device_routing import Header
from moe_lab.execution.parts import settle
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.spec import RouterSpec, SharedSpec
from moe_lab.workspace import poisoned
from tests.support.decode_layers import D, E, F, K, decode_layer, decode_rows, taken

layer = functools.cache(decode_layer)
FORMS = {
    "side": {"shared": "side"},
    "fused": {"shared": "fused"},
    "device": {"routing": "device", "verify_routing": True},
    "device-side": {"routing": "device", "shared": "side"},
    "device-fused": {"routing": "device", "shared": "fused", "verify_routing": True},
    "device-fused-expert-order": {"routing": "device", "shared": "fused", "combine_order": "expert"},
    "device-fused-fp32-stores": {"routing": "device", "shared": "fused", "stores": "fp32"},
    "device-side-chunks-of-3": {"routing": "device", "shared": "side", "chunk_rows": 3},
}


def plain(form: str) -> lab.Options:
    """The options that may change bits, and host routing on the main stream."""
    return lab.Options(**{k: v for k, v in FORMS[form].items() if k in ("combine_order", "stores")})


@pytest.mark.parametrize("tokens", [0, 1, 7, 8])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_bits_of_host_and_main(form: str, tokens: int) -> None:
    x = decode_rows(tokens)
    with poisoned():
        want = layer()(x, "gemv", options=plain(form))
        got = layer()(x, "gemv", options=lab.Options(**FORMS[form]))
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.routing.ids, want.routing.ids)
    assert got.timing.submissions == want.timing.submissions == min(tokens, 1)


@pytest.mark.parametrize(
    "ids", [[[-1, -1], [-1, -1]], [[3, -1], [-1, 3]], [[3, 3], [3, 3]], [[5, 5], [0, -1]]], ids=str
)
@pytest.mark.parametrize("form", ["fused", "device", "device-fused"])
def test_odd_picks(form: str, ids: list[list[int]]) -> None:
    picks, x = Routing(torch.tensor(ids), torch.tensor([[0.5, -2.0], [1.0, 0.25]])), decode_rows(2)
    with poisoned():
        got = layer()(x, "gemv", routing=picks, options=lab.Options(**FORMS[form]))
    assert torch.equal(got.out, layer()(x, "gemv", routing=picks).out)


@pytest.mark.parametrize("form", ["device", "device-fused", "fused"])
def test_zero_experts_and_factors_on_the_output(form: str) -> None:
    from dataclasses import replace

    own = layer()
    router = RouterSpec(E - 4, K, zero_experts=4, scale=2.5, scale_on="output")
    spec = replace(own.spec, router=router, shared=replace(own.spec.shared, combine="average"))
    cut = {name: taken(own.experts.stack.part(name), torch.arange(E - 4)) for name in ("gate", "up", "down")}
    zero = MoELayer.from_tensors(spec, router=own.router, shared=own.shared, **cut)
    x = decode_rows(8)
    assert torch.equal(zero(x, "gemv", options=lab.Options(**FORMS[form])).out, zero(x, "gemv").out)
    assert bool((zero.route(x).ids >= E - 4).any())


@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 40])
@pytest.mark.parametrize("arm", ["gemv", "grouped", "mmq", "mmq_folded", "gemv_mmq"])
def test_arms_that_take_a_plan_have_host_routings_bits_for_any_tokens(arm: str, tokens: int) -> None:
    x = decode_rows(tokens)
    for shared in ("main", "side"):
        with poisoned():
            got = layer()(x, arm, options=lab.Options(routing="device", shared=shared, verify_routing=True))
        want = layer()(x, arm)
        assert torch.equal(got.out, want.out)
        assert got.timing.submissions == want.timing.submissions
    ids = torch.where(torch.arange(tokens)[:, None] % 3 == 0, -1, want.routing.ids)
    picks = Routing(ids, want.routing.weights)
    skipped = layer()(x, arm, routing=picks, options=lab.Options(routing="device"))
    assert torch.equal(skipped.out, layer()(x, arm, routing=picks).out)


def test_table_is_gemv_for_one_token_and_refuses_two() -> None:
    x = decode_rows(1)
    for form in FORMS:
        options = lab.Options(**FORMS[form])
        assert torch.equal(layer()(x, "table", options=options).out, layer()(x, "gemv", options=options).out), form
    assert layer()(x, "table").arm == "table"
    with pytest.raises(LabError, match=r"arm 'table' serves T <= 1 tokens, x has T=2; arm 'gemv' has the same bits"):
        layer()(decode_rows(2), "table")
    with pytest.raises(LabError, match="arm 'table' serves T <= 1"):
        layer()(decode_rows(2), "gemv", options=lab.Options(shared_arm="table"))
    assert layer()(decode_rows(0), "table").out.shape == (0, D)


class ByTable:
    """An arm of the user's that goes by a slot table alone."""

    name, own = "by_table", Gemv()
    supports, experts, experts_on_device = own.supports, own.experts, own.experts_on_device


REFUSALS = {
    "T=9-by-table": (
        {"routing": "device"},
        9,
        ByTable(),
        "T <= 8 tokens, x has T=9.*one of the arms 'gemv', 'grouped'",
    ),
    "T=9-fused": ({"routing": "device", "shared": "fused"}, 9, "gemv", "T=9 goes by the plan, which has no group for"),
    "arm-of-the-host": (
        {"routing": "device"},
        2,
        "reference",
        "'reference' wants its groups from the host.*'table', 'gemv', or for any number of tokens 'gemv', 'grouped'",
    ),
    "per-token": ({"routing": "device"}, 2, "per_token", "'per_token' wants its groups from the host"),
    "fused-per-token": ({"shared": "fused"}, 2, "per_token", "'per_token' does not take a further group"),
    "fused-other-arm": ({"shared": "fused", "shared_arm": "reference"}, 2, "gemv", "shared_arm asks for 'reference'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    options, tokens, arm, message = REFUSALS[case]
    with pytest.raises(LabError, match=message):
        layer()(decode_rows(tokens), arm, options=lab.Options(**options))


@pytest.mark.wrong_types
def test_options_that_contradict_each_other() -> None:
    with pytest.raises(LabError, match="verify_routing checks routing on the device"):
        lab.Options(verify_routing=True)
    with pytest.raises(LabError, match=r"Options\.shared is 'beside'"):
        lab.Options(shared="beside")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"shared_formats": ("q8_0",) * 3}, "gate is q2_k, the shared expert's q8_0"),
        (
            {"shared_width": 2 * F, "shared": SharedSpec(2 * F, True)},
            r"gate is \[256, 256\], the shared expert's \[512, 256\]",
        ),
        ({"shared": SharedSpec(F, True, limit=3.0)}, "clamps at 3.0, the routed ones at None"),
    ],
    ids=["formats", "widths", "limits"],
)
def test_fused_only_where_one_launch_serves_both(how: dict, message: str) -> None:
    own = decode_layer(**how)
    with pytest.raises(LabError, match=f"shared='fused' cannot be: .*{message}.*Take 'main' or 'side'"):
        own(decode_rows(1), "gemv", options=lab.Options(shared="fused"))
    x = decode_rows(3)
    assert torch.equal(own(x, "gemv", options=lab.Options(shared="side")).out, own(x, "gemv").out)


def test_a_layer_changed_in_place_is_asked_again() -> None:
    from dataclasses import replace

    own, x, fused = decode_layer(), decode_rows(2), lab.Options(shared="fused")
    own(x, "gemv", options=fused)
    own.spec = replace(own.spec, limit=1.0)
    with pytest.raises(LabError, match=r"clamps at None, the routed ones at 1\.0"):
        own(x, "gemv", options=fused)


def test_without_a_shared_expert_its_place_does_not_matter() -> None:
    own = layer()
    from dataclasses import replace

    stack = own.experts.stack
    alone = MoELayer.from_tensors(replace(own.spec, shared=None), router=own.router, gate=stack.gate, up=stack.up,
                                  down=stack.down)  # fmt: skip
    x = decode_rows(2)
    for shared in ("side", "fused"):
        assert torch.equal(alone(x, "gemv", options=lab.Options(shared=shared)).out, alone(x, "gemv").out)


PLANTED = {
    "an id": (lambda call: call.routing.ids.view(-1)[1:2].fill_(0), r"expert id of token 0, slot 1 is 0 on the device"),
    "a weight's last bit": (
        lambda call: call.routing.weights.view(torch.int32).view(-1)[5:6].add_(1),
        r"weight of token 1, slot 1 is \d+ on the device",
    ),
    "the order of pairs": (lambda call: call.made.token[0:1].fill_(1), r"launch table's token of pair 0 \(token"),
    "the launch table": (lambda call: call.made.chunks[1, 2:].add_(1), "launch table differs at chunk 1"),
    "a row of the launch table": (lambda call: call.made.row[0:1].add_(1), r"launch table's row of pair 0 \(token"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_check_names_the_first_bit_that_differs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = PLANTED[case]
    verify = device_routing.DeviceCall.verify

    def spoiled(self, *given):
        plant(self)
        return verify(self, *given)

    monkeypatch.setattr(device_routing.DeviceCall, "verify", spoiled)
    x = next(x for s in range(9) if len(set(layer().route(x := decode_rows(2, s)).ids.flatten().tolist())) == 2 * K)
    with pytest.raises(LabError, match=f"device routing: {message}"):
        layer()(x, "gemv", options=lab.Options(routing="device", verify_routing=True))


def test_the_header_tells_what_was_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Header] = []
    chunks = device_routing.DeviceCall.chunks
    monkeypatch.setattr(device_routing.DeviceCall, "chunks", lambda self: seen.append(self.read()) or chunks(self))
    y = layer()(decode_rows(3), "gemv", options=lab.Options(routing="device"))
    assert torch.equal(seen[0].ids, y.routing.ids)
    assert torch.equal(seen[0].weights, y.routing.weights)
    assert torch.equal(seen[0].slots, y.routing.ids), "resident: an expert's slot is its number"
    assert seen[0].whole
    assert seen[0].chunks == len(y.routing.ids.unique())


def test_an_error_on_the_main_path_leaves_nothing_behind() -> None:
    class Broken(Gemv):
        name = "broken"

        def experts(self, *args) -> None:
            raise RuntimeError("planted")

    x, options = decode_rows(8), lab.Options(shared="side")
    want = layer()(x, "gemv").out
    for _ in range(3):
        with pytest.raises(LabError, match="arm 'broken' raised RuntimeError in experts: planted"):
            layer()(x, Broken(), options=options)
        assert torch.equal(layer()(x, "gemv", options=options).out, want)


def test_an_arm_that_takes_a_live_buffers_name_is_refused_by_name() -> None:
    """The seeds' planted overlap in a whole call: the buffer of down rows used as scratch."""

    class Greedy(Gemv):
        name = "greedy"

        def experts(self, x, stack, schedule, groups, y, ctx) -> None:
            ctx.empty("hidden", y.shape, y.dtype, y.device)
            super().experts(x, stack, schedule, groups, y, ctx)

        def shared(self, x, stack, ctx):
            ctx.empty("y", x.shape, x.dtype, x.device).fill_(0)
            return super().shared(x, stack, ctx)

    with pytest.raises(LabError, match="'shared expert' asks for buffer 'y' of lane 'main', which 'call' still uses"):
        layer()(decode_rows(2), Greedy())
    own_lane = layer()(decode_rows(2), Greedy(), options=lab.Options(shared="side")).out
    assert torch.equal(own_lane, layer()(decode_rows(2), "gemv").out)


def test_threads_do_not_share_scratch() -> None:
    x = [decode_rows(8, seed) for seed in range(4)]
    want = [layer()(v, "gemv").out for v in x]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(5):
            got = layer()(x[i], "gemv", options=lab.Options(shared="side", routing="device")).out
            wrong.extend([i] * (not torch.equal(got, want[i])))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong


@pytest.mark.parametrize(("tokens", "message"), [(1, "lives on cpu"), (8, "lives on cpu")])
def test_capture_refuses_a_cpu(tokens: int, message: str) -> None:
    with pytest.raises(LabError, match=f"capture makes a CUDA graph, but this layer {message}"):
        layer().capture(tokens)


def few_and_many() -> ByRows:
    return ByRows("few_and_many", (Range(2, ARMS["gemv"]), Range(None, ARMS["reference"])))


def test_more_picks_than_a_slot_table_serves_are_refused_before_any_work() -> None:
    wide, x = decode_layer(("q8_0",) * 3, experts=40, top_k=33), decode_rows(2)
    with pytest.raises(LabError, match=r"serves K <= 32 picks a token, this router makes K=33: take routing='host'"):
        settle(wide, "gemv", lab.Options(routing="device"), "torch", 2)
    with pytest.raises(LabError, match=r"serves K <= 32 picks a token"):
        wide(x, "gemv", options=lab.Options(routing="device"))
    assert wide(x, "gemv").out.isfinite().all()


def test_groups_go_to_the_arm_of_their_size() -> None:
    arm, x = few_and_many(), decode_rows(8)
    got, gemv, reference = (layer()(x, a, options=lab.Options(shared_arm="gemv")) for a in (arm, "gemv", "reference"))
    assert got.arm == "few_and_many"
    counts = lab.plan(got.routing, E).counts
    few = [bool((counts[got.routing.ids[t].long()] <= 2).all()) for t in range(8)]
    many = [bool((counts[got.routing.ids[t].long()] > 2).all()) for t in range(8)]
    for t in range(8):
        if few[t]:
            assert torch.equal(got.out[t], gemv.out[t])
        if many[t]:
            assert torch.equal(got.out[t], reference.out[t])
    assert not torch.equal(got.out, gemv.out)
    assert not torch.equal(got.out, reference.out)
    whole = ByRows("all", (Range(None, ARMS["gemv"]),))
    assert torch.equal(layer()(x, whole).out, gemv.out)
    split = ByRows("split", (Range(1, ARMS["gemv"]), Range(3, Gemv()), Range(None, ARMS["gemv"])))
    assert torch.equal(layer()(x, split).out, gemv.out), "one arithmetic, however the groups are dealt"


def test_the_seeds_policy_is_gemv_up_to_eight_rows_and_mmq_above() -> None:
    x = decode_rows(12)
    few, nine = torch.arange(4, 8).repeat(12, 1), torch.arange(4).repeat(12, 1)
    ids = torch.where(torch.arange(12)[:, None] < 3, few, nine)  # experts 4..7 get 3 rows, 0..3 get 9
    picks, own = Routing(ids, torch.full((12, 4), 0.25)), lab.Options(shared_arm="gemv")
    got = layer()(x, "gemv_mmq", routing=picks, options=own)
    assert torch.equal(got.out[:3], layer()(x, "gemv", routing=picks, options=own).out[:3])
    assert torch.equal(got.out[3:], layer()(x, "mmq", routing=picks, options=own).out[3:])
    assert not torch.equal(got.out[3:], layer()(x, "gemv", routing=picks, options=own).out[3:])
    assert layer()(x, "gemv_mmq", routing=picks).timing.shared_arm == "gemv_mmq"


def test_what_an_arm_of_arms_refuses() -> None:
    with pytest.raises(LabError, match=r"rows up to \[8\]; wanted rising bounds with None"):
        ByRows("x", (Range(8, ARMS["gemv"]),))
    with pytest.raises(LabError, match="rising bounds"):
        ByRows("x", (Range(8, ARMS["gemv"]), Range(4, ARMS["gemv"]), Range(None, ARMS["gemv"])))
    with pytest.raises(LabError, match="at least 1"):
        ByRows("x", (Range(0, ARMS["gemv"]), Range(None, ARMS["gemv"])))
    with pytest.raises(LabError, match="'x' cannot run this layer on cuda: its part 'gemv': it serves"):
        get_arm(ByRows("x", (Range(None, ARMS["gemv"]),)), ("no_such",) * 3, "cuda")


def test_a_pointer_table_stands_where_an_arena_stands() -> None:
    from moe_lab_kernels.slots.pointer_table import PointerTable

    own, other = quantize(torch.randn(3, 4, 256), "q2_k").data, quantize(torch.randn(2, 4, 256), "q2_k").data
    table = PointerTable.of([own, other])
    assert (len(table), table.shape, table.stride()) == (5, (5, 4, 84), (0, 84, 1))
    assert table.address.tolist() == [t.data_ptr() for t in (*own, *other)]
    assert torch.equal(table[4], other[1])
    for wrong, message in (
        ([own, other[:, :2]], r"source 1 is torch.uint8 \[2, 2, 84\]; wanted uint8 \[S, 4, 84\]"),
        ([own, other.repeat(1, 1, 2)[..., :84]], r"with strides \(168, 1\), source 0 on cpu with \(84, 1\)"),
        ([], "at least one source"),
    ):
        with pytest.raises(LabError, match=message):
            PointerTable.of(wrong)
    with pytest.raises(LabError, match="slot 5 of 5"):
        table[5]
