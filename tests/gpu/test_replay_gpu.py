"""The replay on a GPU: three clocks that do not contradict each other, and no output bit changed by watching."""

from pathlib import Path

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.replay import Recording, run, timeline
from moe_lab.replay.rows import DEVICE_PARTS, HOST_PARTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
TOKENS = 12


@pytest.fixture(scope="module")
def recorded() -> dict[object, Recording]:
    """The same tokens at each level through equal caches, after one pass that compiles the kernels."""
    ckpt = lab.open(ROOT / "data" / "lab-42m.gguf")
    found = {}
    for level in (0, 0, 1, 2, "S"):
        with lab.ExpertCache(slots=48) as cache:
            found[level] = run(ckpt, cache=cache, tokens=TOKENS, device="cuda", level=level, digest=True)
    found["resident"] = run(ckpt, tokens=TOKENS, device="cuda", digest=True)
    return found


def test_no_level_changes_a_bit(recorded: dict[object, Recording]):
    assert len({r.digest for r in recorded.values()}) == 1


@pytest.mark.parametrize("level", [1, 2, "S"])
def test_the_hosts_parts_add_up_to_the_wall(recorded: dict[object, Recording], level: object):
    table = recorded[level].table
    assert (table[list(HOST_PARTS)] >= 0).all(axis=None)
    assert (table[list(HOST_PARTS)].sum(axis=1) / table.wall_ms - 1).abs().max() < 0.01


@pytest.mark.parametrize("level", [0, 1, 2, "S"])
def test_the_calls_and_what_lies_between_them_add_up_to_the_step(recorded: dict[object, Recording], level: object):
    one = recorded[level]
    assert (one.table.between_ms >= 0).all()
    found = one.table.groupby("step")[["wall_ms", "between_ms"]].sum()
    assert found.sum(axis=1).to_numpy() == pytest.approx(one.step_ms, rel=1e-6)


def test_the_drivers_own_work_is_a_small_part(recorded: dict[object, Recording]):
    one = recorded[2]
    steps = one.table.groupby("step").wall_ms.sum()
    assert np.median(steps.to_numpy() / one.step_ms) > 0.8  # of the median step: other programs may hold up any one


def test_device_times_are_there_from_level_2_on(recorded: dict[object, Recording]):
    assert recorded[1].table[list(DEVICE_PARTS)].isna().all(axis=None)
    device = recorded[2].table[list(DEVICE_PARTS)]
    assert (device >= 0).all(axis=None)
    assert (device.routed_gpu_ms > 0).all()
    busy = device[["route_gpu_ms", "routed_gpu_ms", "shared_gpu_ms"]].sum().sum()
    assert busy < sum(recorded[2].step_ms)


def test_a_side_stream_hides_the_shared_expert():
    ckpt = lab.open(ROOT / "data" / "lab-42m.gguf")
    side = run(ckpt, tokens=TOKENS, device="cuda", level=2, options=lab.Options(shared="side"), digest=True)
    main = run(ckpt, tokens=TOKENS, device="cuda", level=2, digest=True)
    assert side.digest == main.digest
    assert (side.table.shared_hidden_ms <= side.table.shared_gpu_ms).all()
    assert (main.table.shared_hidden_ms == 0).all()


def test_the_devices_lanes_lie_within_the_hosts(recorded: dict[object, Recording]):
    table = timeline(recorded[2], 2, 4)
    assert {"host", "compute", "reader 0"} <= set(table.lane)
    first, last = table[table.lane == "host"].begin_ms.min(), sum(recorded[2].step_ms[2:5])
    compute = table[table.lane == "compute"]
    assert (compute.begin_ms > first - 0.5).all()  # the two clocks are joined to within a fraction of a millisecond
    assert (compute.end_ms < last + 5).all()
