"""MoELayer: arms against the plain loop, bits that must not move, waves, refusals, records."""

import functools

import pytest
import torch

import moe_lab as lab
from moe_lab.arms import ArmContext, ExpertStack
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.tolerances import tol

E, K, D, F = 8, 3, 256, 512
TOKENS = [0, 1, 7, 8, 9, 37, 199]


@functools.cache
def make_layer(formats=("q2_k", "q2_k", "q3_k"), *, shared: bool = True, experts: int = E, top_k: int = K) -> MoELayer:
    g = torch.Generator().manual_seed(5)
    normal = lambda *s: torch.randn(*s, generator=g) * s[-1] ** -0.5  # noqa: E731
    shapes = ((experts, F, D), (experts, F, D), (experts, D, F))
    gate, up, down = (quantize(normal(*s), f) for s, f in zip(shapes, formats, strict=True))
    spec = MoESpec(RouterSpec(experts, top_k), D, F, shared=SharedSpec(F, True) if shared else None)
    own = SharedWeights(*(quantize(normal(*s[1:]), "q8_0") for s in shapes), normal(D)) if shared else None
    return MoELayer.from_tensors(spec, router=normal(experts, D) * 4, gate=gate, up=up, down=down, shared=own, number=2)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))


def plain_loop(layer: MoELayer, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Token by token, slot by slot, in float64: no grouping, no kernels."""
    gate, up, down = (layer.experts.stack.part(p).dequantize().double() for p in ("gate", "up", "down"))
    mlp = lambda v, g, u, d: d @ (torch.nn.functional.silu(g @ v) * (u @ v))  # noqa: E731
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t, v in enumerate(x.double()):
        for k in range(routing.top_k):
            e = int(routing.ids[t, k])
            if e >= 0:
                out[t] += float(routing.weights[t, k]) * mlp(v, gate[e], up[e], down[e])
        if layer.shared is not None:
            s = layer.shared
            shared = mlp(v, *(q.dequantize().double() for q in (s.gate, s.up, s.down)))
            out[t] += torch.sigmoid(v @ s.gate_vector.double()) * shared
    return out


@pytest.mark.parametrize("tokens", TOKENS)
def test_reference_is_the_loop_over_tokens_and_slots(tokens: int) -> None:
    layer, x = make_layer(), rows(tokens)
    y = layer(x, "reference")
    want = plain_loop(layer, x, y.routing)
    assert y.out.shape == x.shape
    assert tokens == 0 or (y.out - want).abs().max() <= tol("reference/loop") * want.abs().max()


@pytest.mark.parametrize(
    "formats", [("q2_k", "q2_k", "q3_k"), ("q8_0", "q8_0", "q8_0"), ("q3_k", "q2_k", "q8_0")], ids="-".join
)
def test_gemv_stays_within_its_activations_rounding(formats) -> None:
    layer, x = make_layer(formats), rows(64)
    y = layer(x, "gemv")
    assert nmse(y.out, layer(x, "reference", routing=y.routing).out) <= tol("gemv/layer")


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [(t, d) for t in TOKENS for d in (torch.bfloat16, torch.float32, torch.float16) if t < 100 or d == torch.bfloat16],
    ids=str,
)
def test_per_token_and_batched_have_the_same_bits(tokens: int, dtype: torch.dtype) -> None:
    layer, x = make_layer(), rows(tokens).to(dtype)
    batched, alone = layer(x, "gemv"), layer(x, "per_token")
    assert torch.equal(batched.out, alone.out)
    assert batched.out.dtype == dtype
    for t in range(0, tokens, 13):
        assert torch.equal(layer(x[t : t + 1], "gemv").out[0], batched.out[t])


@pytest.mark.parametrize("chunk_rows", range(1, 9))
def test_chunk_rows_change_no_bit_and_count_reads(chunk_rows: int) -> None:
    layer, x = make_layer(shared=False), rows(37)
    y = layer(x, "gemv", options=Options(chunk_rows=chunk_rows))
    assert torch.equal(y.out, layer(x, "gemv").out)
    counts = torch.bincount(y.routing.ids.flatten(), minlength=E)
    assert y.timing.weight_bytes == int((-(-counts // chunk_rows)).sum()) * layer.experts.stack.expert_bytes


@pytest.mark.parametrize("arm", ["reference", "gemv", "per_token"])
@pytest.mark.parametrize("case", ["one_expert_takes_all", "skipped_slots", "duplicates", "k_equals_e"])
def test_odd_picks(case: str, arm: str) -> None:
    layer = make_layer(top_k=E if case == "k_equals_e" else K)
    x = rows(9)
    ids = {
        "one_expert_takes_all": torch.tensor([[5, -1, -1]] * 9),
        "skipped_slots": torch.tensor([[-1, -1, -1], [-1, 2, 0]] + [[0, 1, 2]] * 7),
        "duplicates": torch.tensor([[3, 3, 1], [1, 1, 1]] + [[0, 1, 2]] * 7),
        "k_equals_e": torch.arange(E).flip(0).repeat(9, 1),
    }[case]
    routing = Routing(ids, torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)))
    want = plain_loop(layer, x, routing)
    got = layer(x, arm, routing=routing).out
    assert nmse(got, want) <= (1e-12 if arm == "reference" else tol("gemv/layer"))


def test_combine_order_changes_only_the_rounding() -> None:
    layer, x = make_layer(), rows(37)
    rank, expert = (layer(x, "gemv", options=Options(combine_order=o)).out for o in ("rank", "expert"))
    assert not torch.equal(rank, expert)
    assert (rank - expert).abs().max() <= tol("reference/loop") * rank.abs().max()


@pytest.mark.parametrize(
    ("dtype", "row"), [(torch.bfloat16, "store/bf16"), (torch.float16, "store/f16")], ids=["bf16", "f16"]
)
def test_store_points_cost_what_the_table_says(dtype: torch.dtype, row: str) -> None:
    layer, x = make_layer(), rows(64).to(dtype)
    routing = layer.route(x)
    stored = layer(x, "reference", routing=routing, options=Options(stores="input")).out
    exact = layer(x.float(), "reference", routing=routing).out
    assert 0 < nmse(stored.float(), exact) <= tol(row)
    fp32 = layer(x, "reference", routing=routing, options=Options(stores="fp32")).out
    assert torch.equal(fp32, exact.to(dtype))


def test_auto_says_what_it_took_and_refusals_name_the_format() -> None:
    x = rows(3)
    assert make_layer()(x).arm == "gemv"
    dense = make_layer(("bf16", "bf16", "bf16"), shared=False)
    assert dense(x).arm == "reference"
    with pytest.raises(LabError, match=r"bf16 weights meet no q8_1 activations"):
        dense(x, "gemv", options=Options(activation="q8_1"))
    with pytest.raises(LabError, match=r"arm 'reference' does not take Options.activation"):
        dense(x, "reference", options=Options(activation="bf16"))


def test_shared_and_routed_arms_are_set_apart() -> None:
    layer, x = make_layer(), rows(8)
    y = layer(x, "gemv", options=Options(shared_arm="reference"))
    assert (y.timing.arm, y.timing.shared_arm) == ("gemv", "reference")
    assert not torch.equal(y.out, layer(x, "gemv").out)


def test_a_users_arm_runs_and_is_named() -> None:
    class Zero:
        name = "zero"

        def supports(self, formats, backend):
            return None

        def experts(self, x, stack: ExpertStack, schedule, groups, y, ctx: ArmContext) -> None:
            y.zero_()

    layer, x = make_layer(shared=False), rows(4)
    y = layer(x, Zero())
    assert (y.arm, float(y.out.abs().max())) == ("zero", 0.0)
    table = lab.compare(layer, x, [Zero(), "gemv"]).table
    assert table.arm_a.tolist() == ["zero"]
    assert table.nmse_a.iloc[0] == pytest.approx(1.0)


def test_record_keeps_timings_and_picks() -> None:
    layer, x = make_layer(), rows(5)
    with lab.record() as rec:
        first, second = layer(x, "gemv"), layer(x[:2], "per_token")
    t = rec.timings
    assert t.arm.tolist() == ["gemv", "per_token"]
    assert t.submissions.tolist() == [1, 2]
    assert t.layer.tolist() == [2, 2]
    parts = t.route_ms + t.fetch_ms + t.compute_ms + t.other_ms
    assert (parts - t.wall_ms).abs().max() < 1e-6
    assert (t.other_ms >= 0).all()
    assert rec.trace.ids.shape == (7, 1, K)
    assert rec.trace.layer(2)[:5].tolist() == first.routing.ids.tolist()
    assert rec.trace.last_token()["ids"].tolist() == [second.routing.ids[-1].tolist()]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: m(torch.zeros(2, 255)), LabError, ("(2, 255)", "D=256")),
        (lambda m: m(torch.zeros(256)), LabError, ("(256,)",)),
        (lambda m: m(torch.zeros(2, 256, dtype=torch.int32)), LabTypeError, ("int32",)),
        (lambda m: m(torch.zeros(2, 256), "gemm"), LabError, ("gemm", "reference")),
        (lambda m: m(torch.zeros(2, 256), 7), LabTypeError, ("int",)),
        (
            lambda m: m(torch.zeros(2, 256), routing=Routing(torch.zeros(3, 3).int(), torch.zeros(3, 3))),
            LabError,
            ("T=3", "T=2"),
        ),
        (lambda m: Options(chunk_rows=9), LabError, ("chunk_rows", "9")),
        (lambda m: Options(combine_order="random"), LabError, ("combine_order", "random")),  # type: ignore[arg-type]
    ],
    ids=["width", "vector", "dtype", "arm", "arm_type", "routing_rows", "chunk_rows", "combine_order"],
)
@pytest.mark.wrong_types
def test_refusals_name_what_came_and_what_was_wanted(call, error, words) -> None:
    with pytest.raises(error) as e:
        call(make_layer())
    for word in words:
        assert word in str(e.value)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("biases", "says"),
    [
        ({"up": [[0.0] * 256] * 2, "down": torch.zeros(2, 256)}, r"biases\['up'\] is a list; wanted a torch tensor"),
        ([torch.zeros(2, 256)] * 3, "biases is a list; wanted a mapping from a name"),
    ],
    ids=["lists", "a list"],
)
def test_biases_that_are_no_tensors(biases, says: str) -> None:
    w, spec = torch.zeros(2, 256, 256), MoESpec(RouterSpec(2, 1), 256, 256, expert_bias=True)
    with pytest.raises(LabTypeError, match=says):
        MoELayer.from_tensors(spec, router=torch.zeros(2, 256), gate=w, up=w, down=w, biases=biases)


def test_constructor_refusals() -> None:
    spec = MoESpec(RouterSpec(2, 1), 256, 256)
    w = torch.zeros(2, 256, 256)
    with pytest.raises(LabError, match=r"up has shape \(2, 256, 512\)"):
        MoELayer.from_tensors(spec, router=torch.zeros(2, 256), gate=w, up=torch.zeros(2, 256, 512), down=w)
    with pytest.raises(LabError, match=r"router has shape \(3, 256\)"):
        MoELayer.from_tensors(spec, router=torch.zeros(3, 256), gate=w, up=w, down=w)
    with pytest.raises(LabTypeError, match="float64"):
        MoELayer.from_tensors(spec, router=torch.zeros(2, 256), gate=w.double(), up=w, down=w)


def test_the_layer_restores_torchs_thread_count() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        make_layer()(rows(4), "gemv")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
