"""The grouped arm where torch computes: near the reference, a row's bits its own, refusals by name."""

import functools
from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.parity import nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.tolerances import tol
from tests.support import float_layers as fl

E, K, D, F = 8, 3, 256, 512
MIXES = {
    "bf16": ("bf16",) * 3,
    "q2_k+q3_k": ("q2_k", "q2_k", "q3_k"),
    "gate-and-up-differ": ("q4_k", "q6_k", "q8_0"),
    "fp8_block": ("fp8_block",) * 3,
    "int4_g64": ("int4_g64",) * 3,
}
BOUND = {torch.bfloat16: "store/bf16", torch.float16: "store/f16", torch.float32: "store/bf16"}


@functools.cache
def make_layer(formats: tuple[str, ...], activation: str = "silu") -> MoELayer:
    g = torch.Generator().manual_seed(5)
    normal = lambda *s: torch.randn(*s, generator=g) * s[-1] ** -0.5  # noqa: E731
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    gate, up, down = (quantize(normal(*s), f) for s, f in zip(shapes, formats, strict=True))
    spec = MoESpec(RouterSpec(E, K), D, F, activation=activation, shared=SharedSpec(F, True))  # type: ignore[arg-type]
    own = SharedWeights(*(quantize(normal(*s[1:]), "bf16") for s in shapes), normal(D))
    return MoELayer.from_tensors(spec, router=normal(E, D) * 4, gate=gate, up=up, down=down, shared=own)


def rows(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("formats", MIXES.values(), ids=MIXES)
def test_near_the_reference(formats: tuple[str, ...], dtype: torch.dtype) -> None:
    """fp32 rows are rounded to bf16 for the products."""
    layer, x = make_layer(formats), rows(37, dtype)
    y = layer(x, "grouped")
    assert (y.arm, y.timing.shared_arm) == ("grouped", "grouped")
    assert 0 < nmse(y.out, layer(x, "reference").out) <= tol(BOUND[dtype])


@pytest.mark.parametrize("stores", ["input", "fp32"])
@pytest.mark.parametrize("tokens", [0, 1, 9, 64])
def test_batched_is_alone(tokens: int, stores: str) -> None:
    layer, x, options = make_layer(MIXES["q2_k+q3_k"]), rows(tokens), Options(stores=stores)  # type: ignore[arg-type]
    y = layer(x, "grouped", options=options)
    one = [layer(x[t : t + 1], "grouped", options=options).out for t in range(tokens)]
    assert torch.equal(torch.cat([*one, x[:0]]), y.out)


def test_one_expert_takes_all() -> None:
    layer, x = make_layer(MIXES["bf16"], "gelu_tanh"), rows(9)
    same = Routing(torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1))
    y = layer(x, "grouped", routing=same)
    assert nmse(y.out, layer(x, "reference", routing=same).out) <= tol("store/bf16")


def test_weights_are_counted_once_an_expert() -> None:
    layer = make_layer(MIXES["q2_k+q3_k"])
    y = layer(rows(64), "grouped")
    assert y.timing.weight_bytes == E * layer.experts.stack.expert_bytes + layer.shared_stack.expert_bytes


@pytest.mark.parametrize(
    ("change", "formats", "message"),
    [
        ({}, ("f32",) * 3, "serves bf16, .*, not f32"),
        ({"activation": "relu2"}, MIXES["bf16"], "it has no activation 'relu2'; arm 'reference' has"),
    ],
    ids=["format", "activation"],
)
def test_refused_by_name(change: dict, formats: tuple[str, ...], message: str) -> None:
    layer = make_layer(formats)
    plain = replace(layer.spec, shared=None, **change)
    stack = layer.experts.stack
    parts = {p: stack.part(p) for p in ("gate", "up", "down")}
    with pytest.raises(LabError, match=message):
        MoELayer.from_tensors(plain, router=layer.router, **parts)(rows(2), "grouped")


@pytest.mark.parametrize("formats", [("bf16",) * 3, ("mxfp4_oss",) * 3, ("q4_k", "q6_k", "q8_0")], ids="+".join)
@pytest.mark.parametrize("formula", [f for f in fl.FORMULAS if f != "plain"])
def test_every_formula(formula: str, formats: tuple[str, str, str]) -> None:
    """Biases by expert, every clamp, every place of the routing weight; a token alone has its bits."""
    layer, x = fl.make(formats, formula), fl.rows(19)
    routing = layer.route(x)
    y = layer(x, "grouped", routing=routing)
    assert nmse(y.out, layer(x, "reference", routing=routing).out) <= tol("store/bf16")
    alone = [layer(x[t : t + 1], "grouped", routing=Routing(routing.ids[t : t + 1], routing.weights[t : t + 1])).out
             for t in (0, 18)]  # fmt: skip
    assert torch.equal(torch.cat(alone), y.out[[0, 18]])


@pytest.mark.parametrize("formula", ["oai-biases", "weight-on-input", "weight-inside"])
def test_every_formula_with_fp8_rows(formula: str) -> None:
    layer, x = fl.make(("fp8_block",) * 3, formula), fl.rows(19)
    routing, options = layer.route(x), Options(activation="fp8")
    y = layer(x, "grouped", routing=routing, options=options)
    assert 1e-5 < nmse(y.out, layer(x, "reference", routing=routing).out) <= tol("gemv/fp8 rows")


@pytest.mark.parametrize("stores", ["input", "fp32"])
def test_fp8_rows_where_asked_for(stores: str) -> None:
    """Hidden rows quantised where they arise, and (fp32 stores) by themselves; a row's bits are its own."""
    whole = make_layer(MIXES["fp8_block"])
    parts = {p: whole.experts.stack.part(p) for p in ("gate", "up", "down")}
    layer = MoELayer.from_tensors(replace(whole.spec, shared=None), router=whole.router, **parts)
    x, options = rows(37), Options(activation="fp8", stores=stores)  # type: ignore[arg-type]
    y = layer(x, "grouped", options=options)
    assert 1e-4 < nmse(y.out, layer(x, "reference").out) <= tol("gemv/fp8 rows")
    alone = [layer(x[t : t + 1], "grouped", options=options).out for t in (0, 36)]
    assert torch.equal(torch.cat(alone), y.out[[0, 36]])


def test_fp8_rows_meet_fp8_weights_alone() -> None:
    options = Options(activation="fp8")
    with pytest.raises(LabError, match="fp8 rows meet fp8_block weights, not q2_k, q3_k"):
        make_layer(MIXES["q2_k+q3_k"])(rows(2), "grouped", options=options)
    with pytest.raises(LabError, match="bf16 weights meet no fp8 rows; where they are the shared expert's"):
        make_layer(MIXES["fp8_block"])(rows(2), "grouped", options=options)
