"""What a number was measured on: versions, device, backend, commit. Every record and report carries it."""

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def backend() -> str:
    """The backend that device="auto" work takes here: "cuda", "interpreter" (TRITON_INTERPRET=1) or "torch"."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    return "cuda" if torch.cuda.is_available() else "torch"


def environment() -> dict[str, str]:
    """Keys: moe_lab, commit, python, torch, triton, numpy, backend, device, threads, system. Never raises."""
    return {
        "moe_lab": _version("moe-lab", sys.modules["moe_lab"].__version__),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "backend": backend(),
        "device": _device(),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
    }


def commit(root: Path = ROOT) -> str:
    """Short commit of the source tree `root`, "+" after it when files differ; "none" in a wheel.

    A copy without .git may name it in a file COMMIT: as `git describe --always --dirty=+` or `git rev-parse` print it.
    """
    if not (root / ".git").exists():
        return _written(root)
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "none"
    return found.stdout.strip()


def _written(root: Path) -> str:
    """What COMMIT says beside pyproject.toml, shortened as git does; "none" without it or when it is no commit."""
    if not (root / "pyproject.toml").is_file():  # an installed package's folder is no source tree
        return "none"
    try:
        found = re.match(r"([0-9a-f]{7,40})(\+?)(?:\s|$)", (root / "COMMIT").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return "none"
    return found[1][:7] + found[2] if found else "none"


def driver() -> str:
    """Version of the GPU's driver; "none" without a CUDA device, "unknown" when nvidia-smi does not tell."""
    if not torch.cuda.is_available():
        return "none"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.splitlines()[0] if found else "unknown"


def _version(package: str, otherwise: str = "not installed") -> str:
    """What is installed; `otherwise` for a source tree on the path that nobody installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
