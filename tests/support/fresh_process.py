"""Fault G19: what a layer computes in a process of its own, whose caches are empty. Prints one JSON object."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from moe_lab.timing import Timing
from tests.support.decode_layers import decode_layer, decode_rows

ROOT = Path(__file__).resolve().parents[2]
TOKENS = (1, 40)


def _about(timing: Timing) -> list[object]:
    """What a call says of its own choices."""
    return [timing.arm, timing.shared_arm, timing.backend, timing.submissions, timing.launches, timing.tiles]


def main(device: str) -> None:
    """Every arm that such a layer can take, and what `auto` takes."""
    layer = decode_layer(device=device)
    said: dict[str, object] = {}
    for tokens in TOKENS:
        x = decode_rows(tokens).to(device)
        for arm in ("auto", "gemv", "grouped", "mmq"):
            y = layer(x, arm)
            bits = y.out.float().cpu().contiguous().numpy().tobytes()
            said[f"{arm} T={tokens}"] = [hashlib.sha256(bits).hexdigest(), *_about(y.timing)]
    print(json.dumps({"said": said}))


def said_thrice(device: str, folder: Path) -> list[dict[str, object]]:
    """What three processes say that start at once, each with an empty cache of kernels and of tables under `folder`."""
    started = []
    for i in range(3):
        own = {"TRITON_CACHE_DIR": str(folder / f"kernels {i}"), "MOE_LAB_CACHE": str(folder / f"tables {i}")}
        command = [sys.executable, "-m", "tests.support.fresh_process", device]
        started.append(
            subprocess.Popen(command, env={**os.environ, **own}, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
    ends = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    return [json.loads(end)["said"] for end in ends]


if __name__ == "__main__":
    main(sys.argv[1])
