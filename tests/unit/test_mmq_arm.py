"""The int8 prefill arms where torch computes: near the reference, a row's bits its own, refusals by name."""

import functools

import pytest
import torch

from moe_lab.arms import layer_tolerance
from moe_lab.bench.cell import Settings
from moe_lab.bench.check import too_far
from moe_lab.bench.harness import bench
from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer, Options, SharedWeights
from moe_lab.parity import compare, nmse
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec
from moe_lab.tolerances import tol
from tests.support import float_layers as fl

E, K, D, F = 6, 3, 256, 256
MIXES = {
    "q2_k+q3_k": ("q2_k", "q2_k", "q3_k"),
    "q4_k+q6_k": ("q4_k", "q4_k", "q6_k"),
    "gate-and-up-differ": ("q5_k", "q8_0", "mxfp4"),
    "q8_0": ("q8_0",) * 3,
}


@functools.cache
def make_layer(formats: tuple[str, ...], activation: str = "silu", limit: float | None = None) -> MoELayer:
    g = torch.Generator().manual_seed(5)
    normal = lambda *s: torch.randn(*s, generator=g) * s[-1] ** -0.5  # noqa: E731
    shapes = ((E, F, D), (E, F, D), (E, D, F))
    gate, up, down = (quantize(normal(*s), f) for s, f in zip(shapes, formats, strict=True))
    spec = MoESpec(RouterSpec(E, K), D, F, activation=activation, limit=limit, shared=SharedSpec(F, True))  # type: ignore[arg-type]
    own = SharedWeights(*(quantize(normal(*s[1:]), f) for s, f in zip(shapes, formats, strict=True)), normal(D))
    return MoELayer.from_tensors(spec, router=normal(E, D) * 4, gate=gate, up=up, down=down, shared=own)


def rows(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).to(dtype)


@pytest.mark.parametrize("arm", ["mmq", "mmq_folded"])
@pytest.mark.parametrize("formats", MIXES.values(), ids=MIXES)
def test_near_the_reference(formats: tuple[str, ...], arm: str) -> None:
    layer, x = make_layer(formats), rows(37)
    if arm == "mmq_folded" and formats[0] == "q8_0":
        with pytest.raises(LabError, match=r"'mmq_folded'.*q8_0.*fold"):
            layer(x, arm)
        return
    y = layer(x, arm)
    assert (y.arm, y.timing.shared_arm) == (arm, arm)
    assert 0 < nmse(y.out, layer(x, "reference").out) <= tol("mmq/layer")


@pytest.mark.parametrize("stores", ["input", "fp32"])
@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("arm", ["mmq", "mmq_folded"])
def test_batched_is_alone(arm: str, tokens: int, stores: str) -> None:
    layer, x, options = make_layer(MIXES["q2_k+q3_k"]), rows(tokens), Options(stores=stores)  # type: ignore[arg-type]
    y = layer(x, arm, options=options)
    one = [layer(x[t : t + 1], arm, options=options).out for t in range(tokens)]
    assert torch.equal(torch.cat([*one, x[:0]]), y.out)


def test_experts_without_picks_and_one_that_takes_all() -> None:
    layer, x = make_layer(MIXES["q4_k+q6_k"]), rows(12)
    ids = torch.zeros(12, K, dtype=torch.int32)
    y = layer(x, "mmq", routing=Routing(ids, torch.full((12, K), 0.25)))
    assert nmse(y.out, layer(x, "reference", routing=y.routing).out) <= tol("mmq/layer")


@pytest.mark.parametrize("how", [{"activation": "gelu_tanh"}, {"limit": 0.05}], ids=str)
def test_other_activations(how: dict) -> None:
    layer, x = make_layer(MIXES["q2_k+q3_k"], **how), rows(9)
    plain = make_layer(MIXES["q2_k+q3_k"])
    assert nmse(layer(x, "mmq").out, layer(x, "reference").out) <= tol("mmq/layer")
    assert not torch.equal(layer(x, "mmq").out, plain(x, "mmq").out)


def test_arms_are_different_arithmetic() -> None:
    layer, x = make_layer(MIXES["q2_k+q3_k"]), rows(9)
    outs = [layer(x, arm).out for arm in ("gemv", "mmq", "mmq_folded")]
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


def test_formats_without_integers_are_refused_by_name() -> None:
    with pytest.raises(LabError, match=r"'mmq' cannot run.*q2_k.*not bf16"):
        make_layer(("bf16",) * 3)(rows(2), "mmq")


@pytest.mark.parametrize(("arm", "formats", "row"), [
    ("mmq", ["q4_k", "q6_k"], "mmq/layer"), ("mmq", ["q3_k", "q8_0"], "bench/layer"),
    ("mmq_folded", ["q4_k"], "bench/layer"), ("mmq_folded", ["q4_k", "q4_0"], "bench/layer"),
    ("gemv_mmq", ["q2_k"], "mmq/layer"), ("gemv_mmq", ["mxfp4"], "bench/layer"),
    ("gemv", ["q2_k"], "bench/layer"), ("reference", ["q2_k"], "bench/layer"),
])  # fmt: skip
def test_an_arm_is_judged_by_its_own_arithmetic(arm: str, formats: list[str], row: str) -> None:
    """Sums of unquantised values against minima: 1e-3 of a layer instead of 1.5e-4."""
    assert layer_tolerance(arm, formats) == row


def test_raw_sums_are_right_and_a_row_without_an_expert_is_not() -> None:
    layer, x = make_layer(MIXES["q4_k+q6_k"]), rows(37, torch.float32)
    found = bench(layer, x, ["mmq"], settings=Settings(cell_ms=1.0, least=1, most=1, states=("warm",)))
    assert list(found.status) == ["PASSED"]
    assert tol("bench/layer") < found.error.max() <= tol("mmq/layer")
    assert list(compare(layer, x, arms=["mmq", "reference"]).checks.status) == ["PASSED", "PASSED"]
    y, want = layer(x, "mmq"), layer(x, "reference").out
    assert too_far(y.out, want, "mmq/layer")[1] is None
    broken = y.out.clone()
    broken[3] -= 0.2 * want[3]  # of one row a fifth
    assert "row" in (too_far(broken, want, "mmq/layer")[1] or "")


@pytest.mark.parametrize("formula", [f for f in fl.FORMULAS if f != "plain"])
def test_every_formula(formula: str) -> None:
    """Biases and activation of gpt-oss, clamps, and the routing weight anywhere; each counts."""
    layer, plain, x = fl.make(("q8_0", "q8_0", "mxfp4"), formula), fl.make(("q8_0", "q8_0", "mxfp4")), fl.rows(9)
    got = layer(x, "mmq")
    assert 0 < nmse(got.out, layer(x, "reference").out) <= tol("mmq/layer")
    assert not torch.equal(got.out, plain(x, "mmq").out)
    one = [layer(x[t : t + 1], "mmq").out for t in range(9)]
    assert torch.equal(torch.cat(one), got.out)
