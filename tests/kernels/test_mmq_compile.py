"""The int8 grouped product compiles for Hopper: int8 tensor cores, nothing spilled, no product fused unasked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_mmq_for_sm90.py"
# the launches that lay scales and sums out, or take weights apart; the products themselves fuse where their code asks
# for it: `primitives.fma`
BEFORE = ("sides-", "open-")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_kind_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 2 * (8 + 4)
    assert {v["target"] for v in compiled.values()} <= {"sm_90", "sm_90a"}


def test_the_tensor_cores_multiply(compiled: dict[str, dict]) -> None:
    """Exact forms by the instruction of a warp, whose sums start from a constant; folded ones by that of four."""
    for name, facts in compiled.items():
        if not name.startswith(BEFORE):
            assert facts["mma"] == (["wgmma"] if "q8_k" in name else ["mma.sync"]), name


def test_little_is_spilled(compiled: dict[str, dict]) -> None:
    """A few registers by tiles that were measured quicker than those that spill none (docs/kernels.md)."""
    spilled = {name: v["stack"] for name, v in compiled.items() if v["stack"]}
    assert set(spilled) <= {"q2_k-d2s6-64", "wide-q2_k-d2s6", "wide-q6_k-d4"}
    assert max(spilled.values(), default=0) <= 256


def test_arithmetic_is_what_the_reference_does(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert facts["fused"] == 0 or not name.startswith(BEFORE), f"{name}: products are fused into additions"


def test_rows_leave_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    assert {tuple(v["stores"]) for name, v in compiled.items() if not name.startswith(BEFORE)} == {("v4.b32",)}
