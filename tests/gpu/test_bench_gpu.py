"""The harness on a GPU: its clocks, what it sees through, and that it goes on after a failure."""

from dataclasses import replace

import pytest
import torch

import moe_lab as lab
from moe_lab.bench.cell import Settings
from moe_lab.bench.roof import roof
from moe_lab.bench.runner import Pass, time_pass
from moe_lab.bench.workloads import SHAPES
from tests.support import bench_arms as arms

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SMALL = replace(SHAPES["qwen3-30b-a3b"], name="small", experts=16)
QUICK = Settings(cell_ms=5.0, most=8)


def test_what_does_not_wait_is_captured_and_replays_fresh_inputs() -> None:
    x, stream = torch.zeros(1000, device="cuda"), torch.cuda.current_stream()
    run = Pass([lambda: x + 1, lambda: x * 2])
    timed = time_pass(run, 2, 1.0, before=lambda: x.add_(1))
    assert timed.method == "graph-replay, rotation of 2"
    assert len(timed.us) == timed.n >= 5
    torch.cuda.synchronize()
    assert torch.equal(run.outputs[0], x + 1)
    assert torch.equal(run.outputs[1], x * 2)
    assert torch.cuda.current_stream() == stream


def test_what_waits_for_the_device_is_timed_by_events_on_the_same_stream() -> None:
    x, stream = torch.ones(1000, device="cuda"), torch.cuda.current_stream()
    timed = time_pass(Pass([lambda: x * float(x.sum())]), 1, 1.0)
    assert timed.method == "eager-events, rotation of 1"
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.get_sync_debug_mode() == 0
    held = torch.cuda.memory_reserved()
    block = torch.empty(2**28, device="cuda")
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held  # no capture is left open, so memory goes back


def test_arms_are_timed_cold_and_warm_with_floors() -> None:
    frame = lab.bench(
        SMALL, arms=["reference", "gemv", arms.Honest()], formats=["q2_k+q3_k"], tokens=[1, 8], settings=QUICK
    )
    assert set(frame.status) == {"PASSED"}, frame[["arm", "status", "reason"]].to_string()
    assert set(frame.backend) == {"cuda"}
    assert frame.method.str.contains("rotation of").all()
    cold = frame[frame.state == "cold"]
    assert (cold.p50 >= 0.9 * cold.floor).all()
    # eight experts of this shape are 10 MB: the rotation has to hold several times the L2's 60 MB
    assert int(cold.method.iloc[0].split()[-1]) * 10.2e6 > torch.cuda.get_device_properties(0).L2_cache_size


@pytest.mark.parametrize(
    "name", ["LastOutput", "ByAddress", "ChangesRows", "ChangesWeights", "SlowAndWrong", "LazyLater"]
)
def test_wrong_arms_have_no_speed(name: str) -> None:
    frame = lab.bench(SMALL, arms=[getattr(arms, name)(), "gemv"], formats=["q8_0"], tokens=4, settings=QUICK)
    assert frame.status[0] == "INCORRECT", frame.reason[0]
    assert frame.p50[frame.status == "INCORRECT"].isna().all()
    assert frame.status.iloc[-1] == "PASSED"


def test_an_arm_out_of_memory_leaves_the_next_one_its_memory() -> None:
    class Greedy(arms.Honest):
        name = "greedy"

        def experts(self, x, *step) -> None:
            self.held = torch.empty(2**45, dtype=torch.uint8, device="cuda")

    frame = lab.bench(SMALL, arms=[Greedy(), "gemv"], formats=["q8_0"], tokens=1, settings=QUICK)
    assert list(frame.status) == ["OOM", "PASSED", "PASSED"]


def test_the_roof_holds_every_rate() -> None:
    found = roof("cuda")
    assert found.read_gb_per_s > 500
    assert 0.1 < found.launch_us < 20
    assert found.launch_us < found.eager_us
    assert {"fp32", "bf16"} <= set(found.tflops)
    if torch.cuda.get_device_capability() >= (8, 9):
        assert found.tflops["fp8"] > found.tflops["bf16"]
        assert found.tflops["int8"] > 0
