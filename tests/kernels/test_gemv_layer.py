"""The benchmark's layer: its own check passes on right kernels and fails on wrong ones."""

import pytest
import torch

from moe_lab.bench import gemv_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv

pytestmark = pytest.mark.usefixtures("interpreter")
TINY = LayerShape("tiny", 256, 256, 6, 2)


@pytest.fixture(scope="module")
def weights() -> gemv_layer.Weights:
    return gemv_layer.make_weights(TINY, seed=1, device="cpu")


def test_right_kernels_pass(weights: gemv_layer.Weights) -> None:
    nmse, wrong = gemv_layer.check(TINY, weights, 3, seed=3, device="cpu")
    assert not wrong
    assert nmse <= tol("gemv/layer")


def test_one_unwritten_element_is_found(weights: gemv_layer.Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(rows, row_of, w, chunks, format, out, **options) -> torch.Tensor:
        gemv.gemv(rows, row_of, w, chunks, format, out, **options)
        out[-1, -1] = float("nan")
        return out

    down = gemv_layer.down
    monkeypatch.setattr(gemv_layer, "down", lambda c, w, rows, tile=None, op=forgetful: down(c, w, rows, tile, op))
    nmse, wrong = gemv_layer.check(TINY, weights, 1, seed=1, device="cpu")
    assert wrong == ["down", "combine"]
    assert not nmse <= tol("gemv/layer")
