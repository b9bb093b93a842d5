"""A layer on the second GPU while the first is the current one: the first's bits by every route, nothing left behind.

What goes wrong here is silent: a kernel, an event or a graph that goes to the current GPU instead of the tensors'.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor, quantize
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing
from moe_lab.stream.memory_source import MemorySource
from tests.support.decode_layers import decode_layer, decode_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
FIRST, SECOND = "cuda:0", "cuda:1"
BLOCKS, FLOATS = ("q4_k", "q4_k", "q6_k"), ("int4_g64", "int4_g64", "int8_g64")
LAYOUTS = {
    "per_token": ("raw", "planar", "tiles"), "table": ("raw", "planar", "tiles"), "gemv": ("raw", "planar", "tiles"),
    "gemv_mmq": ("raw", "planar"), "grouped": ("raw", "planar"), "mmq": ("raw", "planar"), "mmq_folded": ("raw",),
}  # fmt: skip
CASES = [(arm, layout) for arm, layouts in LAYOUTS.items() for layout in layouts]
FORMS = {
    "device": {"routing": "device"}, "device-checked": {"routing": "device", "verify_routing": True},
    "side": {"shared": "side"}, "fused": {"shared": "fused"}, "device-side": {"routing": "device", "shared": "side"},
    "device-fused": {"routing": "device", "shared": "fused"}, "synchronous": {"sync_timing": True},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _the_first_stays_current() -> Iterator[None]:
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(SECOND)  # an error of the device would be told by the next test


@functools.cache
def layer(device: str, layout: str = "raw", formats: tuple[str, ...] = BLOCKS) -> MoELayer:
    return decode_layer(formats, device=device).repacked(layout)


def on_both(call: Callable[[str], torch.Tensor]) -> None:
    """The call's result on the second GPU has the first's bits, and lies there."""
    want, got = call(FIRST), call(SECOND)
    assert str(got.device) == SECOND
    assert torch.equal(got.cpu(), want.cpu())


def tokens_of(arm: str) -> tuple[int, ...]:
    return (1,) if arm == "table" else (1, 5, 40)


@pytest.mark.parametrize(("arm", "layout"), CASES, ids="-".join)
def test_an_arm_has_the_first_gpus_bits(arm: str, layout: str) -> None:
    for tokens in tokens_of(arm):
        on_both(lambda device, t=tokens: layer(device, layout)(decode_rows(t).to(device), arm).out)


@pytest.mark.parametrize(("arm", "layout"), [c for c in CASES if c[0] != "per_token"], ids="-".join)
def test_a_captured_graph_has_the_first_gpus_bits(arm: str, layout: str) -> None:
    def captured(device: str, tokens: int) -> torch.Tensor:
        graph = layer(device, layout).capture(tokens, arm)
        return torch.stack([graph(decode_rows(tokens, seed).to(device)).out for seed in range(3)])

    for tokens in tokens_of(arm)[:2]:
        on_both(lambda device, t=tokens: captured(device, t))
        want = [layer(SECOND, layout)(decode_rows(tokens, seed).to(SECOND), arm).out for seed in range(3)]
        assert torch.equal(captured(SECOND, tokens), torch.stack(want))


@pytest.mark.parametrize("form", FORMS)
def test_device_routing_and_the_side_stream(form: str) -> None:
    options = lab.Options(**FORMS[form])
    for seed, tokens in itertools.product(range(20), (1, 8)):
        want = layer(FIRST)(decode_rows(tokens, seed).to(FIRST), "gemv").out
        got = layer(SECOND)(decode_rows(tokens, seed).to(SECOND), "gemv", options=options)
        assert torch.equal(got.out.cpu(), want.cpu()), (seed, tokens)


@pytest.mark.parametrize("activation", [None, "fp8"])
def test_rows_as_they_come(activation: str | None) -> None:
    formats = FLOATS if activation is None else ("fp8_block",) * 3
    options = lab.Options(activation=activation)
    for arm, tokens in itertools.product(("gemv", "grouped"), (1, 8)):
        if arm == "gemv" or activation is None:
            on_both(lambda d, a=arm, t=tokens: layer(d, "raw", formats)(decode_rows(t).to(d), a, options=options).out)


@pytest.mark.parametrize("layout", ["raw", "planar"])
@pytest.mark.parametrize("locked", [False, True], ids=["file", "locked-memory"])
def test_a_streamed_cache_on_the_second_gpu(layout: str, locked: bool) -> None:
    with lab.open(lab.sample(), layout=layout) as ckpt:
        resident, source = ckpt.layer(2, FIRST), ckpt.expert_source
        rows = torch.randn(6, 3, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
        want = [resident(x.to(FIRST), "gemv").out.cpu() for x in rows]
        if locked:
            source = MemorySource(source, locked=True).kept_as(layout)
        for slots in (5, 32):
            with lab.ExpertCache(slots=slots) as cache:
                own = MoELayer.streamed(
                    resident.spec, router=resident.router_weights, source=source, layer=2, cache=cache,
                    shared=resident.shared, device=SECOND,
                )  # fmt: skip
                for options in (lab.Options(), lab.Options(routing="device"), lab.Options(shared="side")):
                    outs = [own(x.to(SECOND), "gemv", options=options).out for x in rows]
                    assert all(torch.equal(a.cpu(), b) for a, b in zip(outs, want, strict=True)), (slots, options)
                assert {str(out.device) for out in outs} == {SECOND}


def test_two_caches_of_two_gpus_side_by_side() -> None:
    ckpt = lab.open(lab.sample())
    caches = {device: lab.ExpertCache(slots=10) for device in (FIRST, SECOND)}
    own = {device: ckpt.layer(1, device, cache=cache) for device, cache in caches.items()}
    for seed in range(20):
        x = torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()
        outs = {d: own[d](x.to(d), "gemv", options=lab.Options(routing="device")).out for d in own}
        assert torch.equal(outs[FIRST].cpu(), outs[SECOND].cpu()), seed


MATMULS = [("gemv", None), ("gemv", "bf16"), ("mmq", None), ("mmq", "q8_k"), ("gemm", None), ("gemm", "q8_0")]


@pytest.mark.parametrize(("arm", "activation"), MATMULS, ids=str)
def test_matmul_has_the_first_gpus_bits(arm: str, activation: str | None) -> None:
    x, q = decode_rows(9), quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(1)), "q4_k")
    on_both(lambda d: lab.matmul(x.to(d), q.to(d), arm, activation))  # type: ignore[arg-type]


def test_both_gpus_at_once() -> None:
    """Queued in turn and read at the end: neither waits for the other, and none reads the other's scratch."""
    rows = [decode_rows(8, seed) for seed in range(50)]
    options = [lab.Options(**FORMS[form]) for form in ("device", "side", "device-fused")]
    made = [
        (layer(FIRST)(x.to(FIRST), "gemv", options=o).out, layer(SECOND)(x.to(SECOND), "gemv", options=o).out)
        for x, o in zip(rows, itertools.cycle(options), strict=False)
    ]
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in made)


def test_the_first_gpu_while_the_second_is_current() -> None:
    want = layer(FIRST)(decode_rows(8).to(FIRST), "gemv").out
    with torch.cuda.device(1):
        for form in FORMS:
            got = layer(FIRST)(decode_rows(8).to(FIRST), "gemv", options=lab.Options(**FORMS[form])).out
            assert torch.equal(got, want), form
        assert torch.equal(layer(FIRST).capture(8, "gemv")(decode_rows(8).to(FIRST)).out, want)
        assert torch.cuda.current_device() == 1


def moved(q: QuantTensor) -> QuantTensor:
    return q.to(FIRST)


def test_tensors_of_two_gpus_are_refused_by_name() -> None:
    own, x = layer(SECOND), decode_rows(4)
    far, near = x.to(FIRST), x.to(SECOND)
    with pytest.raises(LabError, match=r"x lives on cuda:0 but the layer on cuda:1"):
        own(far, "gemv")
    picks = own.route(near)
    with pytest.raises(LabError, match=r"routing holds T=4 tokens on cuda:0, x has T=4 on cuda:1"):
        own(near, "gemv", routing=Routing(picks.ids.to(FIRST), picks.weights.to(FIRST)))
    with pytest.raises(LabError, match=r"on cuda:1.*cuda:0"):
        own.capture(4, "gemv", routing=Routing(picks.ids.to(FIRST), picks.weights.to(FIRST)))
    captured = own.capture(4, "gemv")
    with pytest.raises(LabError, match=r"on cuda:1, got .* on cuda:0"):
        captured(far)
    with pytest.raises(LabError, match=r"branch is .*cuda:0.*cuda:1"):
        own(near, "gemv", branch=own.dense_branch(near).to(FIRST))
    parts = own.experts.by_slot.parts
    with pytest.raises(LabError, match=r"different devices: cuda:0, cuda:1"):
        MoELayer.from_tensors(
            own.spec, router=own.router_weights, gate=moved(parts["gate"]), up=parts["up"], down=parts["down"],
            shared=own.shared,
        )  # fmt: skip
    q = parts["gate"][0]
    with pytest.raises(LabError, match=r"x is on cuda:0, q on cuda:1"):
        lab.matmul(far, q)
