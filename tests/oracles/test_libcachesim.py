"""LRU, LFU and Belady against libcachesim, one key at a time: a voice that shares no line with ours."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_lab import caching
from moe_lab.simulate import simulate
from moe_lab.trace import RoutingTrace

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libcachesim") is None, reason="libcachesim is not installed")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("libcachesim_misses.py")
NAMES = {"LRU": "lru", "LFU": "lfu", "Belady": "belady"}
CAPACITIES = [1, 2, 3, 5, 8, 13, 24, 32]


def sequences() -> dict[str, list[int]]:
    """Seeded keys and the picks of a recorded layer, one after another."""
    rng = np.random.default_rng(11)
    trace = RoutingTrace.load(ROOT / "data" / "trace.parquet", tokens=(3000, 3150))
    skewed = np.minimum(rng.geometric(0.15, 500) - 1, 39)
    return {
        "uniform": rng.integers(0, 40, 500).tolist(),
        "skewed": skewed.tolist(),
        "cyclic": [*range(14)] * 36,
        "recorded-layer-0": trace.layer(0).ravel().tolist(),
        "recorded-layer-5": trace.layer(5).ravel().tolist(),
    }


@pytest.fixture(scope="module")
def theirs() -> dict[str, int]:
    asked = {"policies": list(NAMES), "capacities": CAPACITIES, "sequences": list(sequences().values())}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("their_name", NAMES)
@pytest.mark.parametrize("case", sequences())
def test_misses_are_equal_at_every_capacity(theirs: dict[str, int], case: str, their_name: str):
    number = list(sequences()).index(case)
    ids = np.array(sequences()[case]).reshape(-1, 1, 1)
    table = simulate(ids, CAPACITIES, [NAMES[their_name]])
    ours = dict(zip(table.capacity_slots, table.misses, strict=True))
    assert ours == {capacity: theirs[f"{their_name}/{capacity}/{number}"] for capacity in CAPACITIES}


@pytest.mark.parametrize("case", sequences())
def test_the_lru_curve_of_one_pass_is_theirs_too(theirs: dict[str, int], case: str):
    number = list(sequences()).index(case)
    ids = np.array(sequences()[case]).reshape(-1, 1, 1)
    table = caching.miss_ratio(ids, CAPACITIES, ["lru"])
    assert table.misses.tolist() == [theirs[f"LRU/{capacity}/{number}"] for capacity in CAPACITIES]
