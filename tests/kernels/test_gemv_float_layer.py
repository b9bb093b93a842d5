"""The decode arms through the float kernels: layers of every formula against the reference, bits alone and together."""

import pytest
import torch

from moe_lab.arms import ARMS, ArmContext, DeviceWork, ExpertStack
from moe_lab.arms.gemv_float import float_matmul
from moe_lab.bench import float_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.execution.options import Options
from moe_lab.formats import quantize
from moe_lab.tolerances import tol
from tests.support import float_layers as fl
from tests.support.kernel_cases import nmse

pytestmark = pytest.mark.usefixtures("interpreter")
FORMATS = {
    "bf16": ("bf16",) * 3, "mxfp4": ("mxfp4",) * 3, "mixed": ("q2_k", "int4_g64", "bf16"),
    "q2_k+q3_k": ("q2_k", "q2_k", "q3_k"), "q8_0": ("q8_0",) * 3,
}  # fmt: skip


CASES = [("bf16", f) for f in fl.FORMULAS] + [("mxfp4", "oai-biases")]
CASES += [("mixed", "plain"), ("mixed", "weight-inside")]
CASES += [("q8_0", f) for f in fl.OF_ONE_LAUNCH] + [("q2_k+q3_k", "geglu-before")]


@pytest.mark.parametrize(("named", "formula"), CASES)
def test_every_formula_against_the_reference(named: str, formula: str) -> None:
    formats = FORMATS[named]
    layer, x = fl.make(formats, formula), fl.rows(1 if named == "q2_k+q3_k" else 2)  # which takes seconds a row
    routing = layer.route(x)
    got = layer(x, "gemv", routing=routing)
    assert got.timing.backend == "interpreter"
    row = "store/bf16" if formats[0] == "bf16" else "gemv/layer"
    assert nmse(got.out, layer(x, "reference", routing=routing).out) <= tol(row)


@pytest.mark.parametrize("activation", [None, "fp8"], ids=["as-they-come", "e4m3"])
def test_a_token_alone_has_its_bits(activation: str | None) -> None:
    layer, x = fl.make(("fp8_block",) * 3, "weight-inside"), fl.rows(3)
    routing, options = layer.route(x), Options(activation=activation)
    together = layer(x, "gemv", routing=routing, options=options).out
    assert torch.equal(layer(x, "per_token", routing=routing, options=options).out, together)


def test_chunks_made_on_the_device_may_be_padded() -> None:
    layer, x = fl.make(("bf16",) * 3, "oai-biases"), fl.rows(2)
    routing = layer.route(x)
    want = layer(x, "gemv", routing=routing).out
    stack: ExpertStack = layer.experts.stack  # type: ignore[union-attr]
    order = routing.ids.flatten().sort(stable=True).indices
    chunks = [[int(routing.ids.flatten()[p]), i, 1] for i, p in enumerate(order)] + [[-1, 0, 0]] * 3
    none = torch.zeros(2, dtype=torch.int32)
    work = DeviceWork(
        token=torch.cat([(order // fl.K).int(), none]),
        weight=torch.full((len(order) + 2,), float("nan")),  # of no use here
        row=torch.cat([order.int(), none]),
        chunks=torch.tensor(chunks, dtype=torch.int32),
        most_rows=1,
    )
    y = torch.zeros(2, fl.K, fl.D, dtype=torch.bfloat16)
    context = ArmContext(layer.spec, "interpreter", torch.bfloat16)
    ARMS["gemv"].experts_on_device(x, stack, work, y, context)  # type: ignore[attr-defined]
    weights = routing.weights[..., None]
    assert torch.equal((y[:, 0].float() * weights[:, 0] + y[:, 1].float() * weights[:, 1]).bfloat16(), want)


def test_float_matmul_has_the_same_bits_in_any_chunks() -> None:
    x, q = fl.rows(9), quantize(torch.randn(6, fl.D), "int8_g32")
    whole = float_matmul(x, q)
    assert torch.equal(float_matmul(x, q, chunk_rows=3), whole)
    assert nmse(whole, x.float() @ q.dequantize().T) <= tol("gemv/float product")


def test_the_benchmark_checks_what_it_times(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LayerShape("tiny", 256, 256, 4, 2)
    w = float_layer.make_layer(shape, "mxfp4_oss", 1, "cpu", oai=True)
    nmse_of, wrong = float_layer.check(shape, w, 1, 3, "cpu")
    assert not wrong
    assert nmse_of <= tol("store/bf16")
    product = float_layer.gf.gemv_float

    def forgetful(rows, pairs, weight, out, **more) -> torch.Tensor:
        product(rows, pairs, weight, out, **more)
        out[-1, -1] = float("nan")
        return out

    monkeypatch.setattr(float_layer.gf, "gemv_float", forgetful)
    assert "gate" in float_layer.check(shape, w, 1, 3, "cpu")[1]
