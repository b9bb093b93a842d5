"""A user's arms on a GPU, compiled: in parity and timing tables beside ours, the wrong twin without a time."""

import pytest
import torch

import moe_lab as lab
from moe_lab.bench.cell import Settings
from moe_lab.bench.weights import make_layer
from moe_lab.bench.workloads import LayerShape
from tests.support.own_arms import OneTileShort, TorchGemv, TritonGemv

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPE = LayerShape("small", 512, 768, 8, 2)
ARMS = ["reference", "gemv", TorchGemv(), TritonGemv(), OneTileShort()]
QUICK = Settings(cell_ms=20, least=5, most=10)


@pytest.mark.parametrize("format", ["q8_0", "q2_k"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_arms_agree_and_the_wrong_twin_does_not(format: str, dtype: torch.dtype) -> None:
    x = torch.randn(9, SHAPE.d_model, generator=torch.Generator().manual_seed(2)).to("cuda", dtype)
    report = lab.compare(make_layer(SHAPE, format, "cuda"), x, ARMS)
    assert report.backend == "cuda"
    assert dict(zip(report.checks.arm, report.checks.status, strict=True)) == {
        "reference": "PASSED", "gemv": "PASSED", "own_torch": "PASSED", "own_triton": "PASSED",
        "own_wrong": "INCORRECT",
    }  # fmt: skip


def test_they_are_timed_beside_ours() -> None:
    x = torch.randn(4, SHAPE.d_model, generator=torch.Generator().manual_seed(2)).cuda()
    table = lab.bench(make_layer(SHAPE, "q8_0", "cuda"), x, ARMS, settings=QUICK)
    print(table[["arm", "state", "status", "p50", "unit", "method", "reason"]].to_string())
    ended = table.groupby("arm")["status"].agg(set)
    assert ended["own_wrong"] == {"INCORRECT"}
    assert ended["own_triton"] == ended["own_torch"] == ended["gemv"] == {"PASSED"}
    assert table[table.arm == "own_wrong"].p50.isna().all()


def test_running_out_of_memory_is_a_row_not_the_end() -> None:
    class Greedy(TorchGemv):
        name = "own_greedy"

        def product(self, weight, row):
            return torch.empty(2**40, device="cuda")

    x = torch.randn(4, SHAPE.d_model, device="cuda")
    table = lab.bench(make_layer(SHAPE, "q8_0", "cuda"), x, [Greedy(), "gemv"], settings=QUICK)
    assert table.status[0] == "OOM"
    assert set(table.status[1:]) == {"PASSED"}
