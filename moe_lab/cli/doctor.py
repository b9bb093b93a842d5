"""`moe-lab doctor`: what this machine can run, and what to install for what it cannot."""

from importlib.util import find_spec
from typing import Any

import torch

from moe_lab.system.environment import environment

EXTRAS = {
    "pandas": ("lab", "tables and recordings"),
    "pyarrow": ("lab", "routing traces"),
    "matplotlib": ("lab", "plots"),
    "ipywidgets": ("lab", "explorers"),
    "nbclient": ("report", "running notebooks"),
    "nbconvert": ("report", "HTML reports"),
    "latex2mathml": ("report", "formulas in reports"),
    "transformers": ("hf", "Hugging Face models"),
    "gguf": ("hf", "writing GGUF files"),
}


def checks() -> list[dict[str, Any]]:
    """Rows: check, state ("ok", "absent", "off"), detail."""
    env = environment()
    rows = [
        {"check": name, "state": "ok", "detail": env[name]}
        for name in ("moe_lab", "commit", "python", "torch", "numpy", "system")
    ]
    rows.append(_triton(env))
    rows.append(_gpu())
    rows.append({"check": "backend", "state": "ok", "detail": _backend_text(env["backend"])})
    for package, (extra, use) in EXTRAS.items():
        there = find_spec(package) is not None
        detail = use if there else f"{use}: pip install 'moe-lab[{extra}]'"
        rows.append({"check": package, "state": "ok" if there else "absent", "detail": detail})
    rows.append(_model())
    rows.append(_calibration())
    return rows


def _triton(env: dict[str, str]) -> dict[str, Any]:
    if find_spec("triton") is None:
        return {
            "check": "triton",
            "state": "absent",
            "detail": "kernels need it (Linux: pip install triton); torch paths run without",
        }
    return {"check": "triton", "state": "ok", "detail": env["triton"]}


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {
            "check": "gpu",
            "state": "absent",
            "detail": "no CUDA device; arms run in torch, kernels under TRITON_INTERPRET=1",
        }
    p = torch.cuda.get_device_properties(0)
    return {
        "check": "gpu",
        "state": "ok",
        "detail": f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB",
    }


def _backend_text(backend: str) -> str:
    texts = {
        "cuda": "cuda: compiled Triton kernels",
        "interpreter": "interpreter: Triton kernels on the CPU (TRITON_INTERPRET=1)",
        "torch": "torch: the references on the CPU",
    }
    return texts[backend]


def _calibration() -> dict[str, Any]:
    """What is known of the disk under this folder, which readers of experts go by."""
    from pathlib import Path

    from moe_lab.errors import LabError
    from moe_lab.stream.calibration import load_calibration, reading_for

    try:
        surface, reading = load_calibration().disk_of(Path.cwd()), reading_for(Path.cwd())
    except LabError as e:
        return {"check": "disk", "state": "off", "detail": str(e)}
    how = f"readers take {reading.threads} threads, requests of {reading.request_bytes >> 10} KiB"
    if surface is None:
        return {"check": "disk", "state": "absent", "detail": f"not calibrated (moe-lab calibrate): {how}"}
    return {"check": "disk", "state": "ok", "detail": f"{surface.mount}, calibrated {surface.date}: {how}"}


def _model() -> dict[str, Any]:
    from moe_lab.errors import LabError
    from moe_lab.sample import sample

    try:
        return {"check": "sample model", "state": "ok", "detail": str(sample())}
    except LabError as e:
        return {"check": "sample model", "state": "absent", "detail": str(e)}
