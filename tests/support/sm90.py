"""What the compile tests share: launchers run without a GPU, kernels compiled for Hopper, facts read off the code.

A script of `compile_*_for_sm90` calls launchers in a process of its own, without the interpreter, and prints facts as
JSON; a test reads them through `facts_of`.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.launch.ahead import compile_job, job_of
from tools.variants.facts import use_of

ROOT = Path(__file__).resolve().parents[2]


def compiled(call: Callable[[], Any]) -> list[Any]:
    """Triton's compiled kernels of every launch of `call`, in order. `ahead.aim` comes first."""
    with record_launches() as made:
        call()
    return [compile_job(job_of(launch)) for launch in made]


def facts(kernel: Any) -> dict[str, Any]:
    """What the tests ask of a kernel's PTX and machine code."""
    ptx, use = kernel.asm["ptx"], use_of(kernel.asm["cubin"])
    return {
        "target": re.search(r"\.target\s+(\w+)", ptx).group(1),
        "fused": len(re.findall(r"\bfma\.rn\.f32", ptx)),
        # float64 exp looks at its argument's high word as if it were fp32; float64 reciprocals start from a rough one
        "flushes": "ftz" in re.sub(r"ex2\.approx\.ftz|abs\.ftz|rcp\.approx\.ftz\.f64", "", ptx),
        "rough_division": "div.full" in ptx or "div.approx" in ptx,
        "dp4a": ptx.count("dp4a.s32"),
        "tf32": "tf32" in ptx,
        "mma": sorted(set(re.findall(r"\b(wgmma|mma\.sync)", ptx))),
        "looks": len(re.findall(r"\bld\.volatile\.global", ptx)),
        "releases": len(re.findall(r"\.release\b", ptx)),
        "shared_stores": ptx.count("st.shared"),
        "barriers": len(re.findall(r"\bbar\.sync", ptx)),
        "wide_loads": len(re.findall(r"\bld\.global\.nc\.v4\.b32", ptx)),
        "stores": sorted(set(re.findall(r"\bst\.global\.([\w.]+)", ptx))),
        "cubin": len(kernel.asm["cubin"]),
        "stack": use["STACK"],
    }


def facts_of(script: str, *arguments: str) -> dict[str, Any]:
    """What tests/support/<script>.py prints, from a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, str(ROOT / "tests" / "support" / f"{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
