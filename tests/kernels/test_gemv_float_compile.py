"""The float GEMV compiles for Hopper: wide loads, nothing spilled, sums that stay in the threads that make them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_float_for_sm90.py"


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_form_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 12
    assert {v["registers"] for v in compiled.values()} == {80, 96, 128}, "each tile that is used"
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}
    assert all(v["waits"] for v in compiled.values()), "early starts wait for the kernel before"


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_weights_come_16_bytes_at_a_time_and_8_of_nvfp4(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        wide = "v4.b32" if name.startswith("bf16") else "b64" if name.startswith("nvfp4") else "v2.b64"
        assert wide in facts["loads"], (name, facts["loads"])


def test_arithmetic_is_what_the_reference_does(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert not facts["tf32"], name


def test_sums_stay_in_the_threads_that_make_them(compiled: dict[str, dict]) -> None:
    assert {name: facts["shared"] for name, facts in compiled.items() if facts["shared"]} == {}
