"""Decode timings of the float GEMV on a CUDA GPU: routed layers at T = 1, 4, 8, and their launches in other tiles.

    PYTHONPATH=.:kernels python benchmarks/float_decode_timings.py --out DIR [--cells bf16:qwen3-30b-a3b,..]
        [--tokens 1,4,8] [--sweep 1,8] [--workers 14] [--seconds 60] [--budget-ms 3]

A cell is a format (fp8_block+fp8: e4m3 activations) and a model. Every format is checked first, on a small layer: its
products against the torch reference bit for bit, the gated form against its parts. Every cell is compared with fp32
mathematics on a fresh input, in poisoned buffers; a wrong result has no time. Layers are timed by graph replay over
rotating routings (moe_lab.bench.runner). The floor is the bytes that must move over the larger of the two bandwidths
measured in the same run; the target is max(14 us, 2 floors) at T = 1 and 2 floors + 6 us above. `--sweep`: T at which
single launches are timed in several tiles too. `--workers` processes compile beforehand; what `--seconds` do not reach
is named.
"""

import argparse
import csv
import functools
import itertools
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench import float_layer as fl
from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.gemv_float.tiles import DOWN_MANY_FULL, DOWN_ONE_TALL, FloatTile

QWEN, DEEPSEEK, MIXTRAL, V41 = "qwen3-30b-a3b", "deepseek-v3-like", "mixtral-8x7b", "v4.1-like"
OSS, GEMMA = "gpt-oss-120b-like", "gemma4-26b-a4b-like"
FORMATS = ("bf16", "fp8_block", "mxfp4_oss", "nvfp4_modelopt", "int4_g64", "int8_g64", "fp8_block+fp8", "nvfp4_ct",
           "mxfp8")  # fmt: skip
CELLS = tuple(f"{f}:{m}" for m in (QWEN, OSS, DEEPSEEK, V41, MIXTRAL, GEMMA) for f in FORMATS)
WITH_BIASES = ("bf16", "mxfp4_oss")  # of gpt-oss's layers: its own formula too, and so a program of their own
COLUMNS = ["what", "model", "T", "format", "tile", "us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "floor_us",
           "ratio_to_floor", "target_us", "ok", "nmse", "n", "method", "device", "driver", "torch", "triton",
           "commit"]  # fmt: skip
SHOWN = ("what", "format", "model", "T", "tile", "us_p50", "floor_us", "ratio_to_floor", "target_us", "ok", "nmse")
SMALL = LayerShape("small", 768, 512, 6, 2)
GATE_ONE = [FloatTile(2, 2), FloatTile(4, 4, registers=128)]
DOWN_ONE = [FloatTile(8, 8, registers=128), FloatTile(4, 4, registers=80)]
GATE_MANY = [FloatTile(2, 2, 1, 1, 80), FloatTile(4, 4, 1, 1, 128), FloatTile(2, 8, 4, 1, 128)]
DOWN_MANY = [FloatTile(4, 4, 1, 1, 80), FloatTile(8, 8, 1, 1, 128), FloatTile(4, 16, 4, 1, 160)]


def describe(tile: FloatTile) -> str:
    """rows x sums, rows of x that share, warps, registers."""
    return f"{tile.rows}x{tile.sums} s{tile.shared} w{tile.warps} r{tile.registers or '-'}"


def parse(cell: str) -> tuple[str, bool, str, str]:
    """Format, whether activations are e4m3, model, the cell's name for both of the first."""
    name, model = cell.split(":")
    return name.removesuffix("+fp8"), name.endswith("+fp8"), model, name


def tiles(tokens: int) -> tuple[list[FloatTile], list[FloatTile]]:
    """Tiles worth a try, of the gated launch and of down."""
    return (GATE_ONE, DOWN_ONE) if tokens == 1 else (GATE_MANY, DOWN_MANY)


@functools.cache
def small(name: str, oai: bool) -> fl.Layer:
    """A layer whose programs are those of any layer of this format: sizes are not part of a program."""
    format, fp8, *_ = parse(f"{name}:-")
    return fl.make_layer(SMALL, format, 1, "cuda", oai=oai, fp8=fp8)


def prepare(job: tuple) -> tuple[str, list[str]]:
    """A job of `prepare_all`: its format, and what differs from the torch reference where it was a check."""
    what, name, oai, tokens, tile = job
    if what == "sum":
        shape = LayerShape("sum", 768, 512, 2 * tokens, tokens)
        fl.weighted_sum(fl.make_call(shape, *routings(shape, 1)[0], "cuda"))
        return name, []
    w = small(name, oai)
    if what == "bits":
        seed = time.time_ns() % 9999
        return name, [f"{part} (T = {tokens})" for part in fl.check(SMALL, w, tokens, seed, "cuda")[1]]
    c, launch = fl.make_call(SMALL, *routings(SMALL, tokens)[0], "cuda"), backend.launch
    rows = fl.rows_of(c.x if what == "gated" else c.hidden, w)
    backend.launch = lambda kernel, grid, *args, device, **meta: kernel.warmup(
        *args, grid=grid, enable_fp_fusion=False, **meta)  # fmt: skip
    try:
        if what == "gated":
            fl.gated(c, w, tile, "launch", rows)
        else:
            fl.down(c, w, tile, "weights", rows)
    finally:
        backend.launch = launch
    return name, []


def prepare_all(cells: list[str], tokens: list[int], sweep: list[int], workers: int) -> dict[str, list[str]]:
    """Check every format and compile every program that will be wanted, from several processes; what was wrong."""
    jobs: dict[tuple, None] = {}
    for t, cell in itertools.product(sorted({1 if t == 1 else 8 for t in tokens}, reverse=True), cells):
        _, _, model, name = parse(cell)
        swept = any((u == 1) == (t == 1) for u in sweep)
        own, (gates, downs) = (name, model == OSS and name in WITH_BIASES, t), tiles(t) if swept else ([], [])
        jobs |= {("gated", *own, tile): None for tile in (None, *gates)}
        other = DOWN_ONE_TALL if t == 1 else DOWN_MANY_FULL  # which of two is wanted is a matter of sizes
        jobs |= {("down", *own, tile): None for tile in (None, other, *downs)}
        jobs["sum", "", False, SHAPES[model].top_k, None] = None
    names = dict.fromkeys(parse(cell)[3] for cell in cells)
    jobs |= {("bits", name, False, t, None): None for name in names for t in (1, 8)}
    wrong: dict[str, list[str]] = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for name, differs in pool.map(prepare, jobs):
            wrong[name] = wrong.get(name, []) + differs
    return wrong


def measure(cell: str, tokens: list[int], sweep: list[int], roof: float, budget: float) -> Iterator[dict[str, Any]]:
    """Rows of one cell. A wrong result gives one row with its error and no time."""
    format, fp8, model, name = parse(cell)
    shape = SHAPES[model]
    w = fl.make_layer(shape, format, 1, "cuda", oai=model == OSS and name in WITH_BIASES, fp8=fp8)
    each = fl.bytes_a_weight(format)
    for t in tokens:
        far = fl.distance(shape, w, t, time.time_ns() % 100_000, "cuda")
        head = {"model": model, "T": t, "format": name, "nmse": f"{far:.2e}"}
        if not far <= tol("gemv/fp8 rows" if fp8 else "store/bf16"):
            yield {"what": "WRONG: nmse", **head}
            continue
        picks = routings(shape, t)
        calls, hit = [fl.make_call(shape, *pick, "cuda") for pick in picks], experts_hit(picks)
        whole, part = layer_bytes(shape, t, hit, each, each), hit * shape.d_model * shape.d_expert * each
        jobs: list[tuple] = [("layer", None, whole, [lambda c=c: fl.run(c, w) for c in calls])]
        if t in sweep:
            gates, downs = tiles(t)
            rows = [(fl.rows_of(c.x, w), fl.rows_of(c.hidden, w)) for c in calls]
            jobs += [
                (
                    "gated",
                    g,
                    2 * part,
                    [lambda c=c, g=g, r=r: fl.gated(c, w, g, "launch", r[0]) for c, r in zip(calls, rows, strict=True)],
                )
                for g in (None, *gates)
            ]
            jobs += [
                (
                    "down",
                    g,
                    part,
                    [lambda c=c, g=g, r=r: fl.down(c, w, g, "weights", r[1]) for c, r in zip(calls, rows, strict=True)],
                )
                for g in (None, *downs)
            ]
        for what, tile, moved, todo in jobs:
            row = {"what": what, **head, "tile": describe(tile) if tile else ""}
            try:
                timed = time_calls(todo, budget)
            except Exception as e:  # a tile that does not compile is a result too
                yield row | {"method": f"{type(e).__name__}: {e}"[:90]}
                continue
            floor = moved / roof / 1e3
            row |= {f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)}
            row |= {"bytes": int(moved), "gb_per_s": f"{moved / timed.us_p50 / 1e3:.0f}", "floor_us": f"{floor:.2f}"}
            row |= {"ratio_to_floor": f"{timed.us_p50 / floor:.2f}", "n": timed.n, "method": timed.method}
            if what == "layer":
                limit = max(14.0, 2 * floor) if t == 1 else 2 * floor + 6
                row |= {"target_us": f"{limit:.1f}", "ok": "ok" if timed.us_p50 <= limit else "slow"}
            yield row


def write(args: argparse.Namespace, begin: float) -> int:
    """Check and time everything into the CSV; how many results were wrong."""
    cells, tokens, sweep = args.cells.split(","), _numbers(args.tokens), _numbers(args.sweep)
    broken = prepare_all(cells, tokens, sweep, args.workers)
    print(f"checked and compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    where, roofs, wrong = measured_on(), bandwidth_gb_per_s(), 0
    with (args.out / "float_decode_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for name, value in roofs.items():
            print(f"{where['device']}: {name} {value:.0f} GB/s", flush=True)
            table.writerow({"what": f"bandwidth {name}", "gb_per_s": f"{value:.0f}", "method": "4 GiB", **where})
        # the first layer that a process times comes out a tenth too slow
        list(measure(cells[0], [1], [], max(roofs.values()), args.budget_ms))
        for cell in cells:
            if time.perf_counter() - begin > args.seconds:
                print("not reached:", " ".join(cells[cells.index(cell) :]))
                break
            differs = broken[parse(cell)[3]]
            if differs:
                wrong += 1
                print("WRONG bits:", cell, ", ".join(differs), flush=True)
                continue
            for row in measure(cell, tokens, sweep, max(roofs.values()), args.budget_ms):
                wrong += row["what"].startswith("WRONG")
                table.writerow({**row, **where})
                f.flush()
                failed = row["method"] if "us_p50" not in row and "method" in row else ""
                print(*(row.get(k, "") for k in SHOWN), failed, flush=True)
            torch.cuda.empty_cache()
    return wrong


def _numbers(text: str) -> list[int]:
    return [int(t) for t in text.split(",") if t]


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of decode layers on the float GEMV; writes a CSV.")
    parser.add_argument("--out", type=Path, required=True, help="folder for float_decode_timings.csv")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--sweep", default="", help="T at which single launches are timed in several tiles")
    parser.add_argument("--budget-ms", type=float, default=3.0)
    parser.add_argument("--workers", type=int, default=14, help="processes that check and compile beforehand")
    parser.add_argument("--seconds", type=float, default=3600, help="no cell is started after so many")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("float_decode_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    wrong = write(args, begin)
    print(f"{wrong} wrong, {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
