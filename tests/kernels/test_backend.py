"""Who serves a tensor; what an import needs; what a refusal says."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.rows import quantize_rows

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run code with the project's two source roots and without TRITON_INTERPRET unless given."""
    base = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    roots = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    run = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(run, capture_output=True, text=True, env={**base, "PYTHONPATH": roots, **env}, timeout=300)


def test_cpu_tensors_outside_the_interpreter_are_refused() -> None:
    """Importing every kernel module needs no GPU; a launch says what is missing and what to do instead."""
    done = python("""
        import torch
        from moe_lab_kernels import primitives
        from moe_lab_kernels.gemv import gemv
        from moe_lab_kernels.gemv.raw import steps
        from moe_lab_kernels.rows import activation, combine, quantize_rows
        from moe_lab.errors import LabError
        x = torch.ones(2, 32)
        calls = {
            "quantize_q8_1": lambda: quantize_rows.quantize_q8_1(x),
            "swiglu": lambda: activation.swiglu(x, x),
            "combine": lambda: combine.combine(x[None], torch.ones(1, 2)),
        }
        for name, call in calls.items():
            try:
                call()
            except LabError as e:
                assert f"call {name}_ref" in str(e) and "TRITON_INTERPRET=1" in str(e) and "cpu" in str(e), e
                assert "no GPU was found here" in str(e) or torch.cuda.is_available(), e
            else:
                raise SystemExit(f"{name} ran")
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        try:
            quantize_rows.quantize_q8_1(x)
        except LabError as e:
            assert "was not when the kernels were imported" in str(e), e
        print("fine", quantize_rows.quantize_q8_1_ref(x)[1].dtype)
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "fine torch.float16"), done.stderr


def test_without_triton_the_references_run_and_the_kernels_say_so() -> None:
    done = python("""
        import sys
        sys.modules["triton"] = None
        import torch
        from moe_lab_kernels import backend
        from moe_lab_kernels.gemv import gemv
        from moe_lab_kernels.rows import activation, combine, quantize_rows
        from moe_lab.errors import LabError
        x = torch.ones(2, 32)
        rows = quantize_rows.quantize_q8_1_ref(x)
        assert rows[0].eq(127).all() and not backend.INTERPRETED
        try:
            quantize_rows.quantize_q8_1(x)
        except LabError as e:
            print(e)
    """)
    assert done.returncode == 0, done.stderr
    assert "quantize_q8_1 needs Triton, which is not installed" in done.stdout
    assert "quantize_q8_1_ref runs without it" in done.stdout


def test_a_triton_without_newer_names_is_enough() -> None:
    """Nothing of triton.language that only newer releases have is touched on import."""
    done = python("""
        import triton.language as tl
        for name in ("make_tensor_descriptor", "load_tensor_descriptor", "topk", "dot_scaled"):
            if hasattr(tl, name):
                delattr(tl, name)
        import triton
        if hasattr(triton, "constexpr_function"):
            del triton.constexpr_function
        from moe_lab_kernels.gemv import gemv
        from moe_lab_kernels.rows import activation, combine, quantize_rows
        print("fine")
    """)
    assert (done.returncode, done.stdout.strip()) == (0, "fine"), done.stderr


@pytest.mark.usefixtures("interpreter")
def test_launches_are_counted_as_they_start() -> None:
    x = torch.ones(2, 64)
    with backend.count_launches() as outer:
        quantize_rows.quantize_q8_1(x)
        with backend.count_launches() as inner:
            quantize_rows.quantize_q8_1(x)
            quantize_rows.quantize_q8_1(x[:0])
            quantize_rows.quantize_q8_1_ref(x)
    quantize_rows.quantize_q8_1(x)
    assert (outer.launches, inner.launches) == (2, 1)
    assert dict(outer.by_kernel) == {"_quantize": 2}


@pytest.mark.usefixtures("interpreter")
def test_devices_must_agree() -> None:
    with pytest.raises(LabError, match="swiglu: gate is on cpu but up is on meta; all tensors must share one device"):
        backend.serve("swiglu", gate=torch.ones(1), shared=None, up=torch.ones(1, device="meta"))
    assert backend.serve("swiglu", gate=torch.ones(1)) == "interpreter"
    assert not backend.has_dp4a("interpreter")


@pytest.mark.parametrize(("n", "want"), [(0, 1), (1, 1), (2, 2), (3, 4), (60, 64), (704, 1024), (1408, 2048)])
def test_next_power_of_2(n: int, want: int) -> None:
    assert backend.next_power_of_2(n) == want
