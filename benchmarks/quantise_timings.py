"""Timings of the quantisers: on a CUDA GPU, and on one CPU thread beside ggml's C library where ggml-python is there.

    PYTHONPATH=.:kernels python benchmarks/quantise_timings.py --out DIR [--on cuda,cpu] [--only q2_k,...] [--gib 1]

Before anything is timed on a GPU its bytes are compared with the CPU's for every kind of weight of the tests; on the
CPU with ggml's. A wrong result has no time. `gb_per_s` counts the fp32 input. GPU: Gaussian weights of --gib GiB (half
that where memory is short), wall clock around a synchronised call, median of five. CPU: 2^22 weights, the thread's own
time, both libraries in turns, median of nine; `ratio_to_c` is C's time over ours.
"""

import argparse
import csv
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.runner import measured_on
from moe_lab.errors import LabError
from moe_lab.formats import FORMATS
from tests.support.weight_cases import KINDS, weights

NAMES = ("q8_0", "q4_0", "mxfp4", "nvfp4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
GPU_TARGET_GB_PER_S, CPU_TARGET_RATIO = 2.0, 0.3
TIMED = ("ms_p50", "ms_min", "ms_max", "n", "gb_per_s", "ratio_to_c", "target")
COLUMNS = ["where", "format", "values", "ok", *TIMED, "device", "driver", "torch", "triton", "commit"]


def written_by_c(name: str, x: torch.Tensor) -> torch.Tensor:
    """ggml's bytes for fp32 rows [N, Kd]."""
    import ggml

    f = FORMATS[name]
    assert f.ggml_type is not None
    out = torch.empty(len(x), f.row_bytes(x.shape[1]), dtype=torch.uint8)
    source = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    target, (n, kd) = ctypes.c_void_p(out.data_ptr()), x.shape
    ggml.ggml_quantize_chunk(f.ggml_type, source, target, 0, n, kd, None)
    return out


def wrong_kinds(name: str, ours: Callable[[torch.Tensor], torch.Tensor], truth: Callable) -> list[str]:
    """Kinds of weights whose bytes differ from the truth's, with the number of blocks."""
    wrong, size = [], FORMATS[name].block_bytes
    for kind in KINDS:
        w = weights(kind, 2048, 256)
        differ = int((ours(w).view(-1, size) != truth(name, w).view(-1, size)).any(-1).sum())
        wrong += [f"{kind}: {differ}"] * (differ > 0)
    return wrong


def seconds_on_gpu(run: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def seconds_of_thread(run: Callable[[], Any]) -> float:
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def timed(seconds: list[float], values: int) -> dict[str, Any]:
    mid = statistics.median(seconds)
    ms = {"ms_p50": mid, "ms_min": min(seconds), "ms_max": max(seconds)}
    return {**{k: f"{v * 1e3:.2f}" for k, v in ms.items()}, "n": len(seconds), "gb_per_s": f"{values * 4e-9 / mid:.3f}"}


def on_gpu(name: str, gib: float) -> dict[str, Any]:
    quantise = FORMATS[name].quantize
    head = {"where": "cuda", "format": name, "target": f">= {GPU_TARGET_GB_PER_S} GB/s"}
    wrong = wrong_kinds(name, lambda w: quantise(w.cuda()).cpu(), lambda _, w: quantise(w))
    if wrong:
        return {**head, "ok": f"WRONG: {', '.join(wrong)}"}
    free = torch.cuda.mem_get_info()[0] / 2**30
    rows = int((gib if free > 3 * gib + 6 else gib / 2) * 2**30 / 4 / 4096)
    w = torch.randn(rows, 4096, device="cuda")
    for _ in range(2):
        quantise(w)
    seconds = [seconds_on_gpu(lambda: quantise(w)) for _ in range(5)]
    ok = w.numel() * 4e-9 / statistics.median(seconds) >= GPU_TARGET_GB_PER_S
    return {**head, "values": w.numel(), "ok": "yes" if ok else "slow", **timed(seconds, w.numel())}


def on_cpu(name: str) -> dict[str, Any]:
    quantise, w = FORMATS[name].quantize, torch.randn(1024, 4096)
    head = {"where": "cpu, one thread", "format": name, "values": w.numel(), "target": f">= {CPU_TARGET_RATIO} of C"}
    if find_spec("ggml") is None:
        return {
            **head,
            "ok": "ggml-python is missing",
            **timed([seconds_of_thread(lambda: quantise(w))] * 1, w.numel()),
        }
    wrong = wrong_kinds(name, quantise, written_by_c)
    if wrong:
        return {**head, "ok": f"WRONG: {', '.join(wrong)}"}
    ours, theirs = [], []
    for _ in range(9):
        ours.append(seconds_of_thread(lambda: quantise(w)))
        theirs.append(seconds_of_thread(lambda: written_by_c(name, w)))
    ratio = statistics.median(theirs) / statistics.median(ours)
    ok = "yes" if ratio >= CPU_TARGET_RATIO else "slow"
    return {**head, "ok": ok, "ratio_to_c": f"{ratio:.2f}", **timed(ours, w.numel())}


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for place in args.on.split(","):
        for name in args.only.split(","):
            yield on_gpu(name, args.gib) if place == "cuda" else on_cpu(name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the quantisers; writes quantise_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for quantise_timings.csv")
    parser.add_argument("--on", default="cuda,cpu", help="where: cuda, cpu")
    parser.add_argument("--only", default=",".join(NAMES), help="formats to time, by name")
    parser.add_argument("--gib", type=float, default=1.0, help="GiB of fp32 weights on the GPU")
    args = parser.parse_args()
    if "cuda" in args.on and not torch.cuda.is_available():
        raise LabError("quantise_timings --on cuda needs a CUDA GPU; torch sees none. Use --on cpu.")
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    known, bad = measured_on(), 0
    with (args.out / "quantise_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for row in rows_of(args):
            table.writerow({**row, **known})
            f.flush()
            bad += row["ok"].startswith("WRONG")
            cells = (f"{row.get(c, '')!s:>9}" for c in ("ms_p50", "gb_per_s", "ratio_to_c"))
            print(f"{row['where']:16} {row['format']:6} {row['ok']:6}", *cells, flush=True)
    print(", ".join(known.values()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
