"""Layers whose experts have scales of their own: the reference serves them, integer activations are refused by name."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor, quantize
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from tests.support.scaled_cases import heavy_tailed, quantised

E, K, D, F = 6, 2, 128, 192
SHAPES = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
MIXES = {
    "fp8_block": ("fp8_block",) * 3,
    "nvfp4_modelopt": ("nvfp4_modelopt",) * 3,
    "nvfp4_ct": ("nvfp4_ct",) * 3,
    "mxfp4_oss": ("mxfp4_oss",) * 3,
    "mxfp8": ("mxfp8",) * 3,
    "int4_g64": ("int4_g64",) * 3,
    "int8_g32-and-fp8_block": ("int8_g32", "int8_g32", "fp8_block"),
}


def layer_of(parts: dict, shared: SharedWeights | None = None) -> MoELayer:
    spec = MoESpec(RouterSpec(E, K, normalize=True), D, F, shared=SharedSpec(F) if shared else None)
    return MoELayer.from_tensors(spec, router=heavy_tailed((E, D), 9) * 20, shared=shared, **parts)


def rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))


@pytest.mark.parametrize("formats", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_the_reference_has_the_bits_of_the_decoded_layer(formats: tuple[str, ...], tokens: int) -> None:
    parts = {p: quantised(f, s, seed=i) for i, ((p, s), f) in enumerate(zip(SHAPES.items(), formats, strict=True))}
    own = SharedWeights(*(q[0] for q in parts.values()))
    decoded = {p: q.dequantize() for p, q in parts.items()}
    plain = SharedWeights(*(quantize(w[0], "f32") for w in decoded.values()))
    x = rows(tokens)
    got, want = layer_of(parts, own)(x), layer_of(decoded, plain)(x, "reference")
    assert got.arm == "reference"
    assert torch.equal(got.out, want.out)
    assert got.timing.weight_bytes < want.timing.weight_bytes or tokens == 0


@pytest.mark.parametrize("arm", ["gemv", "per_token"])
def test_integer_activations_are_refused_by_name(arm: str) -> None:
    layer = layer_of({p: quantised("nvfp4_ct", s) for p, s in SHAPES.items()})
    with pytest.raises(LabError, match="nvfp4_ct weights meet no q8_1"):
        layer(rows(1), arm, options=Options(activation="q8_1"))


def test_expert_bytes_count_the_scales() -> None:
    parts = {p: quantised("nvfp4_modelopt", s) for p, s in SHAPES.items()}
    assert layer_of(parts).experts.stack.expert_bytes == 3 * (D * F // 2 + D * F // 16 + 4)


def test_q28_an_expert_of_vanishing_scales_is_finite_and_changes_nothing_else() -> None:
    parts = {p: quantised("fp8_block", s, seed=3) for p, s in SHAPES.items()}
    dead = {}
    for name, q in parts.items():
        data, scales = q.data.clone(), q.scales.clone()
        data[0], scales[0] = 0x7E, 1e-23
        dead[name] = QuantTensor.from_parts(data, scales, None, "fp8_block", q.shape)
    x = 1 + rows(4) / 16
    ids, weights = torch.tensor([[0, 1]] * 4, dtype=torch.int32), torch.full((4, 2), 0.5)
    alone = layer_of(dead)(x, routing=Routing(ids[:, :1], weights[:, :1] * 2)).out
    product = x[0] @ dead["gate"].dequantize()[0, 0]
    assert 1e-20 < float(product) < 1e-17
    assert bool(alone.isfinite().all())
    both = layer_of(dead)(x, routing=Routing(ids, weights)).out
    lively = layer_of(parts)(x, routing=Routing(ids[:, 1:], weights[:, 1:])).out
    assert torch.equal(both, lively)
