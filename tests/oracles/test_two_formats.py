"""Two formats of the same experts in one report, against numpy: the sides' bits by ggml's arithmetic as the tests write
it down, their errors by weights as the `gguf` package decodes them."""

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="its tables are the oracle")
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

import moe_lab as lab
from moe_lab.parity import draw, nmse, quantized, wide_layer
from moe_lab.tolerances import tol
from tests.support import ggml_arms

ARMS = {"gemv": ggml_arms.decode_arm, "mmq": ggml_arms.prefill_arm}
SIDES = (("gemv", "q4_k"), ("mmq", "q8_0"), ("mmq", "q4_k"), ("gemv", "q6_k"))


def experts(layer: lab.MoELayer) -> dict[str, np.ndarray]:
    return {part: q.data.numpy() for part, q in layer.experts.stack.parts.items()}


def by_numpy(x: np.ndarray, routing: lab.Routing, product) -> np.ndarray:
    """sum over slots of w * down(silu(gate) * up), product(part, expert, rows [1, Kd]) -> [1, N]."""
    out = np.zeros(x.shape)
    for t in range(len(x)):
        for expert, weight in zip(routing.ids[t].tolist(), routing.weights[t].tolist(), strict=True):
            gate, up = (product(part, expert, x[t : t + 1]) for part in ("gate", "up"))
            out[t] += weight * product("down", expert, gate / (1 + np.exp(-gate.astype(np.float64))) * up)[0]
    return out


@pytest.fixture(scope="module")
def layer() -> lab.MoELayer:
    return wide_layer("q6_k", "q6_k", d_model=512, d_expert=256, experts=3, top_k=2, seed=6)


@pytest.fixture(scope="module")
def report(layer: lab.MoELayer):
    names = [f"{arm}:{format}" for arm, format in SIDES]
    return lab.compare(layer, draw("gaussian", 12, 512, seed=6), names)


@pytest.mark.parametrize(("arm", "format"), SIDES, ids=lambda v: v)
def test_a_side_is_numpys(arm: str, format: str, layer: lab.MoELayer, report) -> None:
    x, routing, own = report.given.x.numpy(), report.given.routing, experts(quantized(layer, format))
    name = f"{arm}:{format}"

    def coded(part: str, expert: int, rows: np.ndarray) -> np.ndarray:
        return ARMS[arm](own[part][expert], rows.astype(np.float32), format)

    def exact(part: str, expert: int, rows: np.ndarray) -> np.ndarray:
        w = dequantize(own[part][expert], Kind[format.upper()])
        return rows.astype(np.float64) @ w.astype(np.float64).T

    out = report.outputs[name]
    assert nmse(out, torch.from_numpy(by_numpy(x, routing, coded))) < tol("emulation/layer")
    error = nmse(out, torch.from_numpy(by_numpy(x, routing, exact)))
    assert error > 1e-6
    assert report.checks.set_index("arm").nmse[name] == pytest.approx(error, rel=1e-9)
    rows = report.table
    said = [*rows[rows.arm_a == name].nmse_a, *rows[rows.arm_b == name].nmse_b]
    assert said == pytest.approx([error] * 3, rel=1e-9)


def test_quantised_weights_are_those_of_the_decoded_ones(layer: lab.MoELayer) -> None:
    for part, raw in experts(layer).items():
        values = np.stack([dequantize(one, Kind.Q6_K) for one in raw])
        again = lab.quantize(torch.from_numpy(values), "q4_k")
        assert torch.equal(again.data, quantized(layer, "q4_k").experts.stack.part(part).data)
