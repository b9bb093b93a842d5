"""The int8 grouped product compiles for Hopper: int8 tensor cores, nothing spilled, no product fused unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_mmq_for_sm90.py"
# the launch that lays scales and sums out; the product itself fuses where its code asks for it: `primitives.fma`
SIDES = "sides-"


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kind_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 2 * 8
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}


def test_the_tensor_cores_multiply(compiled: dict[str, dict]) -> None:
    assert {tuple(v["mma"]) for name, v in compiled.items() if not name.startswith(SIDES)} == {("wgmma",)}


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_arithmetic_is_what_the_reference_does(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert facts["fused"] == 0 or not name.startswith(SIDES), f"{name}: products are fused into additions"


def test_rows_leave_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    assert {tuple(v["stores"]) for name, v in compiled.items() if not name.startswith(SIDES)} == {("v4.b32",)}
