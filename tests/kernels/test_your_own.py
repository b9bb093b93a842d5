"""A user's Triton arm in the interpreter: right beside ours, on widths that fill no tile."""

import pytest
import torch

import moe_lab as lab
from moe_lab.bench.cell import Settings
from moe_lab.bench.weights import make_layer
from moe_lab.bench.workloads import LayerShape
from tests.support.own_arms import OneTileShort, TorchGemv, TritonGemv

pytestmark = pytest.mark.usefixtures("interpreter")
SHAPE = LayerShape("small", 96, 160, 4, 2)  # neither width is whole tiles of 64


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, SHAPE.d_model, generator=torch.Generator().manual_seed(2))


def test_it_agrees_and_the_wrong_twin_does_not(x: torch.Tensor) -> None:
    report = lab.compare(make_layer(SHAPE, "q8_0"), x, ["reference", TorchGemv(), TritonGemv(), OneTileShort()])
    assert report.backend == "interpreter"
    assert list(report.checks.status) == ["PASSED", "PASSED", "PASSED", "INCORRECT"]


def test_it_is_timed_as_what_it_is(x: torch.Tensor) -> None:
    quick = Settings(cell_ms=1, least=1, most=1, states=("warm",))
    table = lab.bench(make_layer(SHAPE, "q8_0"), x[:1], [TritonGemv(), OneTileShort()], settings=quick).set_index("arm")
    assert tuple(table.status) == ("PASSED", "INCORRECT")
    assert set(table.backend) == {"interpreter"}
    assert table.p50["own_triton"] > 0
    assert table.p50.isna()["own_wrong"]
