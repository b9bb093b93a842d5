"""The float64 formula against an independent loop and the fp32 reference arm, for every kind of layer."""

from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.layer import SharedWeights
from moe_lab.parity import exact_layer, nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.stream.provider import ResidentExperts
from moe_lab.weights import Latent, ResidualNorms, RouterWeights

T, D, F, E, K = 9, 64, 32, 5, 2


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * shape[-1] ** -0.5


def make(d: int = D, *, gated: bool = True, **settings) -> lab.MoELayer:
    zero = settings.pop("zero_experts", 0)
    more = {
        key: settings.pop(key) for key in ("biases", "shared_weights", "latent_weights", "norms") if key in settings
    }
    spec = MoESpec(RouterSpec(E, K, zero_experts=zero), D, F, gated=gated, **settings)
    gate = normal(E, F, d, seed=2) if gated else None
    return lab.MoELayer.from_tensors(
        spec, router=RouterWeights(normal(E + zero, D)), gate=gate, up=normal(E, F, d, seed=3),
        down=normal(E, d, F, seed=4), biases=more.get("biases"), shared=more.get("shared_weights"),
        latent=more.get("latent_weights"), norms=more.get("norms"),
    )  # fmt: skip


def shared_weights(*, vector: bool = False) -> SharedWeights:
    parts = [lab.quantize(normal(*s, seed=i), "f32") for i, s in enumerate([(F, D), (F, D), (D, F)], start=5)]
    return SharedWeights(*parts, normal(D) if vector else None)


def norms() -> ResidualNorms:
    return ResidualNorms(*(1 + normal(D, seed=20 + i) for i in range(5)), torch.tensor([0.7]))


BIASES = {"gate": normal(E, F, seed=8), "up": normal(E, F, seed=9), "down": normal(E, D, seed=10)}
LAYERS = {
    "plain": {},
    "gelu": {"activation": "gelu_tanh"},
    "relu2-ungated": {"activation": "relu2", "gated": False},
    "clamped": {"limit": 0.2},
    "oai-biased": {"limit": 0.5, "limit_mode": "oai", "expert_bias": True, "biases": BIASES},
    "weight-inside": {"weight_place": "hidden"},
    "zero-experts": {"zero_experts": 2},
    "shared-gated": {"shared": SharedSpec(F, True), "shared_weights": shared_weights(vector=True)},
    "shared-averaged": {"shared": SharedSpec(F, combine="average"), "shared_weights": shared_weights()},
    "latent": {"d": 16, "latent": 16, "latent_weights": Latent(normal(16, D), normal(D, 16))},
    "normed-residual": {
        "feed_forward": "normed_residual", "shared": SharedSpec(F), "shared_weights": shared_weights(),
        "norms": norms(),
    },
}  # fmt: skip


@pytest.mark.parametrize("case", LAYERS)
def test_float64_formula_is_the_reference_arms(case: str) -> None:
    layer, x = make(**LAYERS[case]), 3 * normal(T, D, seed=12)
    y = layer(x, "reference")
    exact = exact_layer(layer, x, y.routing)
    assert exact.dtype == torch.float64
    assert 0 < nmse(y.out, exact) < 1e-12


def test_it_is_the_loop_over_tokens_and_slots() -> None:
    layer, x = make(), normal(T, D, seed=12)
    ids = torch.tensor([[0, 1]] * (T - 2) + [[3, -1], [2, 2]])
    weights = torch.rand(T, K, generator=torch.Generator().manual_seed(0))
    gate, up, down = (layer.experts.stack.part(p).dequantize().double() for p in ("gate", "up", "down"))
    want = torch.zeros(T, D, dtype=torch.float64)
    for t in range(T):
        for k, e in enumerate(ids[t].tolist()):
            if e >= 0:
                v = x[t].double()
                hidden = torch.nn.functional.silu(gate[e] @ v) * (up[e] @ v)
                want[t] += weights[t, k].double() * (down[e] @ hidden)
    assert nmse(exact_layer(layer, x, Routing(ids, weights)), want) < 1e-28


def test_rounding_inside_would_show() -> None:
    """A stage left in fp32 costs 1e-15; float64 throughout leaves the two orders of adding apart by less than 1e-30."""
    layer, x = make(), normal(T, D, seed=12)
    routing = layer.route(x)
    flipped = Routing(routing.ids.flip(1), routing.weights.flip(1))
    assert nmse(exact_layer(layer, x, routing), exact_layer(layer, x, flipped)) < 1e-30


def test_streamed_experts_give_the_same(tmp_path) -> None:
    resident = lab.open(lab.sample()).layer(1)
    x = normal(T, 256, seed=3)
    routing = resident.route(x)
    assert isinstance(resident.experts, ResidentExperts)
    with lab.ExpertCache(slots=4) as cache:
        streamed = lab.open(lab.sample()).layer(1, cache=cache)
        assert torch.equal(exact_layer(streamed, x, routing), exact_layer(resident, x, routing))


def test_bf16_rows_are_taken_as_they_are() -> None:
    layer = make()
    x = normal(T, D, seed=12).bfloat16()
    routing = replace(layer.route(x))
    assert torch.equal(exact_layer(layer, x, routing), exact_layer(layer, x.float(), routing))
