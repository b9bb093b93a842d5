"""The grouped GEMM compiles for Hopper, with one kind of tensor-core instruction in every tile and nothing spilled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "compile_grouped_for_sm90.py"


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict]:
    """variant -> facts, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_tile_and_format_is_machine_code(compiled: dict[str, dict]) -> None:
    assert len(compiled) == 25
    assert {v["target"] for v in compiled.values()} == {"sm_90a"}


def test_one_instruction_for_one_row_and_for_hundreds(compiled: dict[str, dict]) -> None:
    """The tensor core's own order of addition is part of a row's bits."""
    assert {tuple(v["mma"]) for v in compiled.values()} == {("wgmma",)}


def test_nothing_is_spilled(compiled: dict[str, dict]) -> None:
    assert {name: v["stack"] for name, v in compiled.items() if v["stack"]} == {}


def test_arithmetic_is_what_the_references_do(compiled: dict[str, dict]) -> None:
    for name, facts in compiled.items():
        assert not facts["flushes"], f"{name}: subnormals are flushed"
        assert not facts["rough_division"], f"{name}: a division is not correctly rounded"
        assert not facts["tf32"], name
        if not name.startswith("q4_k"):  # whose one fused step is exact in its product, and asked for by name
            assert facts["fused"] == 0, f"{name}: products are fused into additions"


def test_rows_leave_16_bytes_at_a_time(compiled: dict[str, dict]) -> None:
    """Stores of single values cost more than the product itself where an expert has many rows."""
    floats = {tuple(v["stores"]) for name, v in compiled.items() if not name.startswith("fp8-gated")}
    assert floats == {("v4.b32",)}
    # quantised rows are half as wide, and have a scale beside them
    assert all({"v2.b32", "v4.b32"} & set(v["stores"]) for v in compiled.values())
