"""Where a streamed step's time goes, as torch's profiler sees it: calls of the driver, copies, kernels, and gaps.

    PYTHONPATH=.:kernels python benchmarks/streamed_where.py --out DIR --tiers host [--cells 0.5:perfect,0.5:demand]
        [options of streamed_model]

Some steps of a cell of `streamed_model` under the profiler, which slows the host down: shares and counts are what to
read, not milliseconds. A row: cell, lane (driver: what the host asked CUDA for, copy: bytes on their way to the device,
kernel), name, how often and how long a step, the longest. Lane "device" has the time in which copies ran beside
kernels and in which neither ran.
"""

import csv
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.streamed_bench import Bench, check, prepare
from benchmarks.streamed_cells import held, steps, trial
from benchmarks.streamed_model import arguments
from moe_lab.bench.runner import measured_on

COLUMNS = ["tier", "residency", "mode", "lane", "name", "count_a_step", "ms_a_step", "longest_ms", "steps", "device",
           "driver", "torch", "triton", "commit"]  # fmt: skip
PROFILED, BIG_COPY_MS = 12, 0.05
Span = tuple[float, float]


def spans_of(profile: Any) -> dict[tuple[str, str], list[Span]]:
    """(lane, name) -> begin and end in ms of everything that was noted."""
    found: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        name, on_device = event.name(), event.device_type().name == "CUDA"
        begin = event.start_ns() / 1e6
        span = (begin, begin + event.duration_ns() / 1e6)
        if on_device:
            copied = name.startswith(("Memcpy", "Memset"))
            found["copy" if copied else "kernel", name if copied else "kernels"].append(span)
        elif name.startswith("cu"):
            found["driver", name].append(span)
    return found


def union(spans: list[Span]) -> list[Span]:
    """The same instants, each once."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((begin, end))
    return out


def length(spans: list[Span]) -> float:
    """Milliseconds."""
    return sum(end - begin for begin, end in spans)


def rows(found: dict[tuple[str, str], list[Span]], count: int) -> list[dict[str, Any]]:
    """A row a (lane, name), most time first, and the device's own."""
    out = []
    for (lane, name), spans in sorted(found.items(), key=lambda item: (item[0][0], -length(item[1]))):
        longest = max(end - begin for begin, end in spans)
        out.append({"lane": lane, "name": name, "count_a_step": len(spans) / count,
                    "ms_a_step": length(spans) / count, "longest_ms": longest})  # fmt: skip
    copies = union([s for (lane, _), spans in found.items() if lane == "copy" for s in spans])
    kernels = union([s for (lane, _), spans in found.items() if lane == "kernel" for s in spans])
    busy = union([*copies, *kernels])
    beside = length(copies) + length(kernels) - length(busy)
    idle = busy[-1][1] - busy[0][0] - length(busy) if busy else 0.0
    for name, ms in (("copies beside kernels", beside), ("neither", idle)):
        out.append({"lane": "device", "name": name, "count_a_step": "", "ms_a_step": ms / count, "longest_ms": ""})
    return out


def profiled(bench: Bench, tier: str, cell: str, trace: Path | None = None) -> list[dict[str, Any]]:
    """The rows of one cell, after a trial of its own that makes what is made once; `trace`: where its timeline goes."""
    from torch.profiler import ProfilerActivity, profile

    residency, mode = float(cell.partition(":")[0]), cell.partition(":")[2]
    one = held(bench, tier, residency)
    try:
        trial(bench, tier, one, mode)
        first, count = bench.segment.start, min(PROFILED, len(bench.segment) - 2)
        for layer, experts in one.groups:
            one.cache.lease(one.source, layer, experts).release()
        steps(bench, range(first, first + 2), one, mode)
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.args.device == "cuda" else [])]
        with profile(activities=kinds) as seen:
            steps(bench, range(first + 2, first + 2 + count), one, mode)
        if trace is not None:
            seen.export_chrome_trace(str(trace))
        about = {"tier": tier, "residency": residency, "mode": mode, "steps": count}
        return [{**about, **r} for r in rows(spans_of(seen), count)]
    finally:
        one.close()


def main() -> int:
    """Write streamed_where.csv and print it."""
    cells = "0.5:demand,0.5:perfect,0.25:perfect"
    if "--cells" in sys.argv:
        at = sys.argv.index("--cells")
        cells = sys.argv[at + 1]
        del sys.argv[at : at + 2]
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    begin, path = time.perf_counter(), (args.folder or args.out) / "streamed_where.gguf"

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

    about = measured_on()
    try:
        bench = prepare(args, path, say)
        with open(args.out / "streamed_where.csv", "w", newline="") as out:
            table = csv.DictWriter(out, COLUMNS, restval="")
            table.writeheader()
            for tier in args.tiers:
                check(bench, tier, say)
                for cell in cells.split(","):
                    for row in profiled(bench, tier, cell):
                        table.writerow(row | about)
                        say(" ".join(str(row[name]) for name in COLUMNS[:8]))
                    out.flush()
    finally:
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
