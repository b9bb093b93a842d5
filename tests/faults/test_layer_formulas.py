"""Fault table, rows that touch layers: R13, R14, R23, R25, Q26, G05, G14, G22, G23; arms refusing a formula by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_lab import hf
from moe_lab.arms.dense import activate_dense
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, Options
from moe_lab.routing import Routing, plan
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.source import ExpertSource
from moe_lab.tolerances import tol
from moe_lab.weights import RouterWeights, SharedWeights, as_quant

D, F, E = 256, 256, 4
ARMS = ["reference", "gemv", "per_token"]


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def quantised(name: str = "q8_0", **factors: float) -> dict:
    shapes = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
    return {p: quantize(factors.get(p, 1.0) * normal(*s, seed=i), name) for i, (p, s) in enumerate(shapes.items())}


def layer(zero: int = 2, top_k: int = 2, **router) -> MoELayer:
    spec = MoESpec(RouterSpec(E, top_k, zero_experts=zero, **router), D, F)
    return MoELayer.from_tensors(spec, router=normal(E + zero, D), **quantised())


def streamed(resident: MoELayer, folder: Path) -> MoELayer:
    """The same layer, its experts in a file."""
    stack, slices, path = resident.experts.stack, [], folder / "experts.bin"
    with path.open("wb") as file:
        for part, q in stack.parts.items():
            slices.append((f"blk.0.{part}", q.format, file.tell(), q.nbytes // E, tuple(q.shape)))
            file.write(q.data.numpy().tobytes())
    cache = ExpertCache(slots=2)
    source = ExpertSource(path, {0: slices})
    return MoELayer.streamed(resident.spec, router=resident.router_weights, source=source, layer=0, cache=cache)


def close(got: torch.Tensor, want: torch.Tensor, arm: str = "reference") -> bool:
    bound = tol("reference/loop") if arm == "reference" else tol("gemv/layer") ** 0.5
    return bool((got - want).norm() <= bound * want.norm()) and bool(got.isfinite().all())


@pytest.mark.parametrize("arm", ARMS)
def test_r13_zero_experts_give_the_row_itself(arm: str) -> None:
    own, x = layer(), normal(3, D)
    ids, weights = torch.tensor([[5, 1]] * 3), torch.tensor([[0.6, 0.4]] * 3)
    alone = own(x, "reference", routing=Routing(ids[:, 1:], weights[:, 1:])).out
    assert close(own(x, arm, routing=Routing(ids, weights)).out, 0.6 * x + alone, arm)


def test_r13_a_bias_of_the_experts_width_is_refused() -> None:
    spec = MoESpec(RouterSpec(E, 2, zero_experts=2), D, F, correction_bias=True)
    with pytest.raises(LabError, match=r"correction bias has shape \(4,\).*\[6\]"):
        MoELayer.from_tensors(spec, router=normal(6, D), biases={"correction": torch.zeros(4)}, **quantised())


@pytest.mark.parametrize("d", [300, 100])
def test_r14_identity_experts_reach_the_last_element(d: int) -> None:
    spec, x = MoESpec(RouterSpec(E, 2, zero_experts=2), d, 32), normal(3, d)
    shapes = {"gate": (E, 32, d), "up": (E, 32, d), "down": (E, d, 32)}
    parts = {part: as_quant(normal(*s), part, s) for part, s in shapes.items()}
    own = MoELayer.from_tensors(spec, router=normal(E + 2, d), **parts)
    y = own(x, "reference", routing=Routing(torch.tensor([[4, 5]] * 3), torch.tensor([[0.25, 0.5]] * 3)))
    assert torch.equal(y.out, 0.75 * x)


@pytest.mark.parametrize("arm", ["gemv", "per_token"])
def test_q26_sums_of_large_activations_do_not_overflow(arm: str) -> None:
    """32 values of 3000 sum to 96,000, which fp16 does not hold; q4_k's minimums are multiplied with such sums."""
    spec = MoESpec(RouterSpec(E, 2), D, F)
    # gate and up small enough that the hidden values keep an fp16 scale of their own: the sums of x are the subject
    own = MoELayer.from_tensors(spec, router=normal(E, D), **quantised("q4_k", gate=0.01, up=0.01))
    x, routing = torch.full((2, D), 3000.0), Routing(torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5))
    got, want = (own(x, name, routing=routing).out for name in (arm, "reference"))
    assert got.isfinite().all()
    assert want.isfinite().all()
    assert (got - want).square().sum() <= tol("gemv/layer") * want.square().sum()


def test_zero_experts_are_nobodys_load() -> None:
    y = layer()(normal(2, D), "reference", routing=Routing(torch.tensor([[4, 5], [4, 5]]), torch.full((2, 2), 0.5)))
    assert y.timing.weight_bytes == 0
    assert torch.equal(y.out, normal(2, D))


@pytest.mark.parametrize("on", ["weights", "output"])
@pytest.mark.parametrize("path", [*ARMS, "streamed"])
def test_r23_the_factor_is_applied_once(path: str, on: str, tmp_path: Path) -> None:
    """A router whose best is always the zero expert: the output is 2.5 x, on every path."""
    own = layer(zero=1, top_k=1, normalize=True, scale=2.5, scale_on=on)
    own.router_weights = RouterWeights(torch.cat([torch.zeros(E, D), torch.ones(1, D)]))
    x = normal(4, D).abs()
    own = streamed(own, tmp_path) if path == "streamed" else own
    try:
        out = own(x, "gemv" if path == "streamed" else path).out
    finally:
        if path == "streamed":
            own.experts.cache.close()
    assert torch.equal(out, 2.5 * x)


@pytest.mark.parametrize("arm", ARMS)
def test_r25_minus_one_is_skipped_and_others_refused(arm: str) -> None:
    own, x = layer(zero=0), normal(1, D)
    alone = own(x, "reference", routing=Routing(torch.tensor([[2]]), torch.tensor([[0.5]]))).out
    got = own(x, arm, routing=Routing(torch.tensor([[-1, 2]]), torch.tensor([[0.5, 0.5]]))).out
    assert close(got, alone, arm)
    for bad in (-2, E):
        with pytest.raises(LabError, match=rf"\[0, 0\] is {bad}"):
            own(x, arm, routing=Routing(torch.tensor([[bad, 2]]), torch.tensor([[0.5, 0.5]])))


def test_g05_counts_of_experts_that_no_block_divides() -> None:
    ids = torch.tensor([[0], [1], [2], [3], [4], [4]])
    assert plan(Routing(ids, torch.ones(6, 1)), 5).counts.tolist() == [1, 1, 1, 1, 2]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("view", ["columns", "every_second", "expanded", "transposed"])
def test_g14_strides_of_x_do_not_matter(view: str, arm: str) -> None:
    big = normal(8, 2 * D)
    x = {
        "columns": big[:, :D],
        "every_second": big[:, ::2],
        "expanded": big[:1, :D].expand(8, D),
        "transposed": big[:, :D].t().contiguous().t(),
    }[view]
    own = layer()
    assert not x.is_contiguous()
    assert torch.equal(own(x, arm).out, own(x.contiguous(), arm).out)


def test_g22_the_down_bias_is_weighed_once() -> None:
    spec = MoESpec(RouterSpec(E, 2), D, F, expert_bias=True)
    parts = {"gate": normal(E, F, D), "up": normal(E, F, D), "down": torch.zeros(E, D, F)}
    biases = {"gate": torch.zeros(E, F), "up": torch.zeros(E, F), "down": torch.ones(E, D)}
    own = MoELayer.from_tensors(spec, router=normal(E, D), biases=biases, **parts)
    routing = Routing(torch.tensor([[0, 3]] * 5), torch.tensor([[0.25, 0.75]] * 5))
    assert torch.equal(own(normal(5, D), "reference", routing=routing).out, torch.ones(5, D))


def test_g23_activation_values() -> None:
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    oai = MoESpec(RouterSpec(1, 1), 4, 2, limit=7.0, limit_mode="oai", alpha=1.702)
    silu = MoESpec(RouterSpec(1, 1), 4, 2)
    interleaved = activate_dense(row[:, ::2], row[:, 1::2], oai)
    halves = activate_dense(row[:, :2], row[:, 2:], silu)
    assert interleaved[0].tolist() == pytest.approx([2.537387, 14.909643], rel=1e-6)
    assert halves[0].tolist() == pytest.approx([2.193176, 7.046377], rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "want"), [("before", [0.0, 10.0, 0.0, -10.0]), ("after", [0.0, 10.0, 0.0, -10.0])], ids=["before", "after"]
)
def test_the_gate_is_clamped_from_above_only(mode: str, want: list[float]) -> None:
    """silu(-50) is 0 within 1e-20; a clamp from below would make it silu(-10)."""
    g, u = torch.tensor([[-50.0, 50.0, -50.0, 50.0]]), torch.tensor([[50.0, 50.0, -50.0, -50.0]])
    spec = MoESpec(RouterSpec(1, 1), 4, 4, limit=10.0, limit_mode=mode)
    h = activate_dense(g, u, spec)[0]
    ten = 10.0 if mode == "after" else float(torch.nn.functional.silu(torch.tensor(10.0)))
    assert h.tolist() == pytest.approx([v * ten for v in want], abs=1e-18)


FORMULAS = {
    "expert biases": {"expert_bias": True},
    "activation 'relu2'": {"activation": "relu2"},
    "experts without a gate": {"gated": False},
    "limit_mode 'oai'": {"limit_mode": "oai"},
    "limit_mode 'after'": {"limit_mode": "after", "limit": 0.02},
    "routing weight on the input": {"weight_place": "input"},
    "routing weight on the hidden": {"weight_place": "hidden"},
}


def odd_layer(**change) -> MoELayer:
    spec = MoESpec(RouterSpec(E, 2), D, F, **change)
    parts = quantised()
    if not spec.gated:
        parts["gate"] = None
    widths = {"gate": F, "up": F, "down": D}
    biases = {p: normal(E, w) for p, w in widths.items()} if spec.expert_bias else None
    return MoELayer.from_tensors(spec, router=normal(E, D), biases=biases, **parts)


DECODED = ("activation 'relu2'", "experts without a gate")  # what the arms with kernels lack


@pytest.mark.parametrize("formula", DECODED)
@pytest.mark.parametrize("arm", ["gemv", "per_token", "grouped"])
def test_an_arm_refuses_a_formula_by_name(formula: str, arm: str) -> None:
    with pytest.raises(LabError, match=rf"{arm}.*{formula}"):
        odd_layer(**FORMULAS[formula])(normal(3, D), arm)


@pytest.mark.parametrize("formula", FORMULAS)
def test_auto_takes_an_arm_that_has_the_formula(formula: str) -> None:
    own, x = odd_layer(**FORMULAS[formula]), normal(3, D)
    y = own(x)
    assert y.arm == ("reference" if formula in DECODED else "gemv")
    assert close(y.out, own(x, "reference").out, y.arm)


def test_a_formula_changes_the_result() -> None:
    """Else the refusals above would guard nothing."""
    x = normal(3, D)
    plain = odd_layer()(x, "reference").out
    changes = [change for change in FORMULAS.values() if change != {"weight_place": "hidden"}]
    assert all(not torch.equal(odd_layer(**change)(x, "reference").out, plain) for change in changes)


def test_weight_on_the_hidden_is_the_weight_on_the_output_up_to_rounding() -> None:
    x = normal(9, D)
    assert close(odd_layer(weight_place="hidden")(x, "reference").out, odd_layer()(x, "reference").out)


@pytest.mark.parametrize("arm", ["reference", "gemv"])
def test_the_shared_experts_clamp_is_its_own(arm: str) -> None:
    spec = MoESpec(RouterSpec(E, 2), D, F, limit=0.01, shared=SharedSpec(F, limit=None))
    parts = {p: quantize(normal(*s), "q8_0") for p, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
    own = MoELayer.from_tensors(spec, router=normal(E, D), shared=SharedWeights(**parts), **quantised())
    x = 20 * normal(6, D)
    open_ = own(x, arm).out
    own.spec = replace(spec, shared=SharedSpec(F, limit=0.01))
    both = own(x, arm).out
    own.spec = replace(spec, limit=None)
    none = own(x, arm).out
    assert not torch.equal(open_, both)
    assert not torch.equal(open_, none)


def test_averaging_halves_the_total_and_stores_round_once() -> None:
    parts = {p: quantize(normal(*s), "q8_0") for p, s in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F)))}
    spec = MoESpec(RouterSpec(E, 2), D, F, shared=SharedSpec(F))
    own = MoELayer.from_tensors(spec, router=normal(E, D), shared=SharedWeights(**parts), **quantised())
    x = normal(6, D)
    total = own(x, "gemv", options=Options(stores="fp32")).out
    own.spec = replace(spec, shared=SharedSpec(F, combine="average"))
    assert torch.equal(own(x, "gemv", options=Options(stores="fp32")).out, total / 2)


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        ({"router_bias": True}, {}, "wants a router bias"),
        ({}, {"biases": {"router": torch.zeros(E)}}, "has no router bias"),
        ({"correction_bias": True}, {}, "wants a correction bias"),
        ({"per_expert_scale": True}, {}, "wants a per-expert scale"),
        ({"expert_bias": True}, {}, "wants a gate bias"),
        ({}, {"biases": {"up": torch.zeros(E, F), "down": torch.zeros(E, D)}}, "has no up bias"),
        ({}, {"biases": {"sideways": torch.zeros(E)}}, "sideways"),
        ({"expert_bias": True}, {"biases": {"up": torch.zeros(E, F)}}, "lack down"),
        ({"latent": 16}, {}, "gate has shape"),
        ({"gated": False}, {}, "gated is False"),
        ({"shared": SharedSpec(F)}, {}, "wants shared expert"),
        ({"router_input": "normed"}, {}, "router input scale"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_the_spec_wants_and_what_is_given_agree(change: dict, more: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        MoELayer.from_tensors(MoESpec(RouterSpec(E, 2), D, F, **change), router=normal(E, D), **quantised(), **more)


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "tanh"},
        {"limit": 0.0},
        {"limit": float("inf")},
        {"limit_mode": "oai", "activation": "gelu_tanh"},
        {"gated": False, "limit": 1.0},
        {"weight_place": "input", "expert_bias": True},
        {"feed_forward": "normed_residual"},
        {"latent": 0},
    ],
    ids=str,
)
def test_specs_that_cannot_be(change: dict) -> None:
    with pytest.raises(LabError):
        MoESpec(RouterSpec(E, 2), D, F, **change)


def test_shared_specs_that_cannot_be() -> None:
    with pytest.raises(LabError, match=r"mean.*sum, average"):
        SharedSpec(F, combine="mean")
    with pytest.raises(LabError, match="limit"):
        SharedSpec(F, limit=-1.0)


def test_hash_layers_need_their_table_and_token_ids() -> None:
    spec = MoESpec(RouterSpec(E, 2, hash_routing=True), D, F)
    with pytest.raises(LabError, match="hash table"):
        MoELayer.from_tensors(spec, router=normal(E, D), **quantised())
    table = torch.tensor([[0, 3], [2, 2]])
    own = MoELayer.from_tensors(spec, router=RouterWeights(normal(E, D), hash_table=table), **quantised())
    x = normal(2, D)
    with pytest.raises(LabError, match="token_ids is missing"):
        own(x)
    assert own(x, token_ids=torch.tensor([1, 0])).routing.ids.tolist() == [[2, 2], [0, 3]]


def test_floats_are_wrapped_where_they_stand() -> None:
    w = normal(2, 3, 4)
    assert as_quant(w, "up", (2, 3, 4)).data.data_ptr() == w.data_ptr()


def test_from_module_wants_a_module() -> None:
    with pytest.raises(LabTypeError, match="str"):
        hf.from_module("mixtral")
