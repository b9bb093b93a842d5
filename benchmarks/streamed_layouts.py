"""What keeping streamed experts in planes or tiles costs: one expert from page-locked host memory into a GPU's slot.

    PYTHONPATH=.:kernels python benchmarks/streamed_layouts.py --out DIR [--pairs q2_k+q3_k,...] [--repeats 5]

Experts of a DeepSeek-V3-like layer (D 7168, F 2048), genuinely quantised, lie page-locked in host memory; a cache of 8
slots on the GPU takes one after the other. First every slot's bytes are compared with the experts repacked by torch.
    alone    milliseconds from asking for one expert until it is there, the device idle before and after (median)
    in line  milliseconds an expert where eight are asked for at once (median)
Copies alone are what layout raw does.
"""

import argparse
import csv
import statistics
import tempfile
import time
from pathlib import Path

import torch

from moe_lab.bench.runner import measured_on
from moe_lab.bench.weights import make_matrices
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import LAYOUTS, refusal, repacked
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.geometry import PART_NAMES
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.source import ExpertSource

EXPERTS, SLOTS, D, F = 24, 8, 7168, 2048
COLUMNS = ["pair", "layout", "expert_mb", "alone_ms", "in_line_ms", "in_line_gb_s", "device", "driver", "torch",
           "triton", "commit"]  # fmt: skip


def write_source(pair: str, folder: Path) -> tuple[ExpertSource, dict[str, QuantTensor]]:
    """A file of one layer's experts, and their raw tensors."""
    gate_up, down = pair.split("+")
    draw, path = torch.Generator().manual_seed(3), folder / "experts.bin"
    sizes = ((EXPERTS, F, D), (EXPERTS, F, D), (EXPERTS, D, F))
    formats = (gate_up, gate_up, down)
    parts = {n: make_matrices(s, f, draw, "cuda").to("cpu") for n, s, f in zip(PART_NAMES, sizes, formats, strict=True)}
    slices, at = [], 0
    with path.open("wb") as file:
        for name, q in parts.items():
            slices.append((name, q.format, at, q.nbytes // EXPERTS, q.shape))
            file.write(q.data.contiguous().numpy().data)
            at += q.nbytes
    return ExpertSource(path, {0: slices}), parts


def right(cache: ExpertCache, source: ExpertSource, parts: dict[str, QuantTensor], layout: str) -> bool:
    """Whether a lease shows the bytes that torch repacks on the host."""
    with cache.lease(source, 0, [0, 5]) as lease:
        for name, q in parts.items():
            for expert, slot in zip((0, 5), lease.slots.tolist(), strict=True):
                if not torch.equal(lease.views(name)[slot].cpu(), repacked(q[expert], layout).data):
                    return False
    return True


def timed(cache: ExpertCache, source: ExpertSource, at_once: int, repeats: int) -> float:
    """Median milliseconds an expert, `at_once` asked for together; each of them a miss."""
    times = []
    for _ in range(repeats):
        for first in range(0, EXPERTS, at_once):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with cache.lease(source, 0, range(first, first + at_once)):
                pass
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin) / at_once)
    return statistics.median(times[EXPERTS // at_once :])


def measure(
    pair: str, layout: str, raw: MemorySource, parts: dict[str, QuantTensor], repeats: int
) -> dict[str, object]:
    """One row; None in the times where the bytes are wrong."""
    source = raw.kept_as(layout)
    nbytes = source.expert_nbytes(0)
    row: dict[str, object] = {"pair": pair, "layout": layout, "expert_mb": round(nbytes / 1e6, 2)}
    with ExpertCache(slots=SLOTS) as cache:
        cache.bind(source, "cuda")
        if not right(cache, source, parts, layout):
            print(f"WRONG BYTES: {pair} {layout}", flush=True)
            return row
        alone, in_line = timed(cache, source, 1, repeats), timed(cache, source, SLOTS, repeats)
    return {
        **row, "alone_ms": round(alone, 4), "in_line_ms": round(in_line, 4),
        "in_line_gb_s": round(nbytes / in_line / 1e6, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", default="q2_k+q3_k,q4_k+q6_k,q8_0+q8_0,mxfp4+mxfp4")
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    about = measured_on()
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "streamed_layouts.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        for pair in given.pairs.split(","):
            with tempfile.TemporaryDirectory() as folder:
                source, parts = write_source(pair, Path(folder))
                held = MemorySource(source, locked=True)
                for layout in LAYOUTS:
                    if any(refusal(layout, q.format, *q.shape[1:]) for q in parts.values()):
                        continue
                    row = {**measure(pair, layout, held, parts, given.repeats), **about}
                    rows.writerow(row)
                    file.flush()
                    print({name: row.get(name) for name in COLUMNS[:6]}, flush=True)
                del held


if __name__ == "__main__":
    main()
