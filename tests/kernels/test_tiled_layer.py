"""The decode arm on tiles: a layer's call has the same bits alone, in a batch and by the device's routing."""

import pytest
import torch

import moe_lab as lab
from moe_lab.arms.tiled import TiledGemv
from moe_lab.bench import gemv_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab.workspace import poisoned
from moe_lab_kernels.gemv import tiled
from tests.support.decode_layers import decode_layer, decode_rows
from tests.support.kernel_cases import nmse

TINY = LayerShape("tiny", 256, 128, 3, 2)
FORMATS = ("q8_0", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def layer() -> lab.MoELayer:
    return decode_layer(FORMATS, experts=3, top_k=1)


@pytest.fixture(scope="module")
def arm(layer: lab.MoELayer) -> TiledGemv:
    return TiledGemv(layer.experts.stack)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_all_forms_have_the_same_bits(layer: lab.MoELayer, arm: TiledGemv) -> None:
    x = decode_rows(2)
    with poisoned():
        want = layer(x, arm)
        on_device = layer(x, arm, options=lab.Options(routing="device", verify_routing=True))
        alone = layer(x[1:], arm)
    assert want.timing.backend == "interpreter"
    assert torch.equal(on_device.out, want.out)
    assert torch.equal(alone.out, want.out[1:])
    # other last bits than gemv's, which now and then give a hidden value its neighbour's code
    assert nmse(want.out, layer(x, "gemv").out) <= tol("gemv/layer")
    assert arm.nbytes == sum(q.nbytes for q in layer.experts.stack.parts.values())


@pytest.mark.usefixtures("interpreter")
def test_it_serves_the_layer_it_was_made_for(layer: lab.MoELayer, arm: TiledGemv) -> None:
    with pytest.raises(LabError, match="not those whose tiles the arm holds"):
        decode_layer(FORMATS, experts=3, top_k=1)(decode_rows(1), arm)
    with pytest.raises(LabError, match="fused"):
        layer(decode_rows(1), arm, options=lab.Options(shared="fused"))
    with pytest.raises(LabError, match="q8_1"):
        layer(decode_rows(1), arm, options=lab.Options(activation="bf16"))


def test_it_wants_kernels_and_tiles(arm: TiledGemv) -> None:
    assert arm.supports(FORMATS, "torch") is not None
    with pytest.raises(LabError, match=r"give layer\.experts\.stack, got NoneType"):
        TiledGemv(None)  # type: ignore[arg-type]
    with pytest.raises(LabError, match="no tiles"):
        TiledGemv(decode_layer(("int8_g64",) * 3, experts=3, top_k=1).experts.stack)


@pytest.mark.usefixtures("interpreter")
def test_the_benchmarks_check_finds_an_unwritten_element(monkeypatch: pytest.MonkeyPatch) -> None:
    w = gemv_layer.with_tiles(gemv_layer.make_weights(TINY, 1, "cpu", "q8_0", "q4_0"), TINY)
    assert gemv_layer.check_tiled(TINY, w, 1, 1, "cpu") == []
    right = tiled.gemv_tiled

    def forgetful(rows, row_of, weight, chunks, format, out, **options) -> torch.Tensor:
        right(rows, row_of, weight, chunks, format, out, **options)
        out[-1, -1] = float("nan")
        return out

    monkeypatch.setattr(tiled, "gemv_tiled", forgetful)
    assert "tiled down" in gemv_layer.check_tiled(TINY, w, 1, 1, "cpu")
