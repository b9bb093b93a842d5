"""The table of kernel variants: it has what is launched, nothing in it spills, and compiling again says the same."""

import importlib.util
import linecache
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from moe_lab.arms import ARMS
from moe_lab.errors import LabError
from moe_lab_kernels.backend import count_launches, record_launches
from moe_lab_kernels.grouped.tiles import TOKENS
from moe_lab_kernels.launch.ahead import job_of
from moe_lab_kernels.rows.activation import swiglu
from moe_lab_kernels.storage.blocks import GEMV_FORMATS
from tools.variants.__main__ import PATH
from tools.variants.facts import name_of, short_name
from tools.variants.sources import digest
from tools.variants.table import Row, read, sampled, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(read(PATH).values())


def test_no_variant_spills(rows: list[Row]) -> None:
    assert {f"{r.kernel} {r.variant}": r.spill_bytes for r in rows if r.spill_bytes} == {}


def test_the_table_is_whole(rows: list[Row]) -> None:
    assert len({(r.triton, r.target) for r in rows}) == 1
    assert min(min(r.registers, r.code_bytes) for r in rows) > 0
    assert max(r.registers for r in rows) <= 255
    assert max(r.shared_bytes for r in rows) <= 227 * 1024, "what a program may have on Hopper"


def test_every_arm_format_and_width_of_a_tile_is_in_it(rows: list[Row]) -> None:
    kernels = Counter(r.kernel for r in rows)
    for room in ("route", "slots", "rows", "dequantize", "gemv", "gemv_float", "grouped", "mmq", "storage"):
        assert any(name.startswith(f"{room}.") for name in kernels), room
    used = {r.used_by.split()[0] for r in rows}
    assert {"gemv", "grouped", "mmq", "mmq_folded"} <= used & set(ARMS)
    gemv = [r.variant for r in rows if r.kernel == "gemv.mlp.gemv_mlp"]
    assert all(any(f"FORMAT={f} " in v for v in gemv) for f in GEMV_FORMATS)
    grouped = [r.variant for r in rows if r.kernel == "grouped.grouped_gemm.grouped"]
    for tokens in TOKENS:
        forms = {word for v in grouped if f"TOKENS={tokens} " in v for word in v.split() if word.startswith("GATED=")}
        assert forms == {"GATED=0", "GATED=1"}, tokens


def test_a_fresh_process_launches_what_the_table_has_and_compiles_a_sample_alike() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "tools.variants", "--check", "--every", "200"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=900)
    assert done.returncode == 0, f"{done.stdout}{done.stderr[-2000:]}"


def test_rows_read_back_as_written(tmp_path: Path, rows: list[Row]) -> None:
    write(tmp_path / "some.csv", {r.key: r for r in rows[:3]})
    assert list(read(tmp_path / "some.csv").values()) == rows[:3]
    assert read(tmp_path / "none.csv") == {}


def test_a_sample_is_the_same_each_time_and_about_as_large_as_asked() -> None:
    keys = [("kernel", str(n)) for n in range(800)]
    assert sampled(keys, 8) == sampled(reversed(keys), 8)
    assert 60 < len(sampled(keys, 8)) < 140


KERNEL = """
from triton import jit
import triton.language as tl

STEP = tl.constexpr(4)

@jit
def helper(x):
    return x * 2

@jit
def kernel(at, n):
    tl.store(at + STEP, helper(n))
"""


def digest_of(folder: Path, text: str) -> str:
    path = folder / "made.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("made", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    linecache.checkcache(str(path))
    return digest(module.kernel)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (lambda text: text, True),
        (lambda text: "\n\n# moved down\n" + text, True),
        (lambda text: text.replace("return x * 2", "return x * 2  # twice"), True),
        (lambda text: text.replace("return x * 2", "return x * 3"), False),
        (lambda text: text.replace("constexpr(4)", "constexpr(8)"), False),
        (lambda text: text.replace("at + STEP", "at"), False),
    ],
    ids=["as it was", "lines moved", "comment", "device function", "constant", "kernel"],
)
def test_a_kernel_is_compiled_again_where_its_text_changed(tmp_path: Path, change, same: bool) -> None:
    assert (digest_of(tmp_path, change(KERNEL)) == digest_of(tmp_path, KERNEL)) == same


def test_recorded_launches_start_nothing_and_name_what_tells_them_apart() -> None:
    x = torch.ones(2, 64)
    with record_launches() as made, count_launches() as count:
        swiglu(x, x)
        swiglu(x.bfloat16(), x.bfloat16(), limit=7.0)
    names = [name_of(job_of(launch)) for launch in made]
    assert count.launches == 0
    assert {short_name(job_of(launch)) for launch in made} == {"rows.activation.gated"}
    assert names[0] != names[1]
    assert "out:f32" in names[0]
    assert "out:bf16" in names[1]
    with pytest.raises(LabError, match="swiglu is a GPU kernel"):
        swiglu(x, x)
