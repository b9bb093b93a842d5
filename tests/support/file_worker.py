"""Opens suspicious files, each in a process of its own, and says what happened: one JSON line a file.

    python -m tests.support.file_worker [open]  < paths, one a line

The imports come first, once; every file is then read in a forked child, so that its time and the memory it adds are
counted after the imports, and a crash or a hang takes only that child. The parent reports a child that ends without
an answer. What is read: every tensor, through `read` and through `raw`; with the word `open`, nothing.
"""

import hashlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import moe_lab as lab

# All that `lab.open` and `read` need, so that importing is not counted as the file's doing.
import moe_lab.open

LIMIT_S = 20


def look(path: Path) -> dict[str, Any]:
    """Open `path` and read it all. {"outcome": "load" | "error", ...}; only LabError is an expected error."""
    found: dict[str, Any] = {"tensors": {}, "errors": []}
    try:
        ckpt = lab.open(path)
    except lab.CheckpointError as error:
        return {"outcome": "error", "opened": False, "tensors": {}, "errors": [described(error)]}
    for name, info in ckpt.tensors.items():
        try:
            read = ckpt.read(name)
        except lab.CheckpointError as error:
            found["errors"].append(described(error))
            continue
        values = read.dequantize() if isinstance(read, lab.QuantTensor) else read
        found["tensors"][name] = {
            "format": info.format,
            "shape": list(info.shape),
            "sha256": hashlib.sha256(ckpt.raw(name).numpy().tobytes()).hexdigest(),
            "value_shape": list(values.shape),
            **statistics(values),
        }
    return {"outcome": "error" if found["errors"] else "load", "opened": True, "metadata": len(ckpt.metadata), **found}


def look_at_header(path: Path) -> dict[str, Any]:
    """Open `path` and read nothing of it but what opening reads."""
    try:
        with lab.open(path) as ckpt:
            return {"outcome": "load", "count": len(ckpt.tensors), "bytes": ckpt.size}
    except lab.CheckpointError as error:
        return {"outcome": "error", "errors": [described(error)]}


def statistics(values: torch.Tensor) -> dict[str, Any]:
    """What the index states of a tensor: count, sums in float64, and every value by flat position."""
    flat = values.float().double().reshape(-1)
    return {
        "count": flat.numel(),
        "sum": flat.sum().item(),
        "abs_sum": flat.abs().sum().item(),
        "values": flat.tolist(),
    }


def described(error: lab.CheckpointError) -> dict[str, Any]:
    """An error as data."""
    return {"reason": error.reason, "message": str(error), "file": error.file, "tensor": error.tensor}


def in_a_child(path: Path, look: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """`look(path)` in a forked child, with its seconds and added megabytes; {"outcome": "crash"} when it dies."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        signal.alarm(LIMIT_S)
        before, start, cpu = (
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            time.perf_counter(),
            time.process_time(),
        )
        try:
            answer = look(path)
        except BaseException as error:
            answer = {"outcome": "crash", "what": f"{type(error).__name__}: {error}"[:500]}
        answer["seconds"] = time.perf_counter() - start
        answer["cpu_seconds"] = time.process_time() - cpu
        answer["extra_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        with os.fdopen(there, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text and status == 0 else {"outcome": "crash", "what": f"wait status {status}"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = look_at_header if sys.argv[1:] == ["open"] else look
    for line in sys.stdin:
        print(json.dumps({"path": line.strip(), **in_a_child(Path(line.strip()), chosen)}), flush=True)
