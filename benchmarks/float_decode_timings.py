"""Decode timings of the float GEMV on a CUDA GPU: whole routed layers and their parts at T = 1, 4, 8, several tiles.

    PYTHONPATH=.:kernels python benchmarks/float_decode_timings.py --out DIR [--cells bf16:qwen3-30b-a3b,..]
        [--tokens 1,4,8] [--budget-ms 10] [--sweep 1,8] [--jobs 12]

Every cell is checked first: products against the torch reference bit for bit, the gated form against its parts, the
layer against fp32 mathematics; fresh inputs, poisoned outputs; a wrong result has no time. Layers are timed by graph
replay over rotating routings (moe_lab.bench.runner). The floor is the bytes that must move over the larger of the two
bandwidths measured in the same run; the target is max(14 us, 2 floors) at T = 1 and 2 floors + 6 us above. `--sweep`
also times single launches in other tiles at these T; programs are compiled by `--jobs` processes beforehand.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench import float_layer as fl
from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.gemv_float.tiles import FloatTile

QWEN, DEEPSEEK, MIXTRAL = "qwen3-30b-a3b", "deepseek-v3-like", "mixtral-8x7b"
OSS, GEMMA = "gpt-oss-120b-like", "gemma4-26b-a4b-like"
CELLS = (
    *((f"bf16:{m}") for m in (QWEN, DEEPSEEK, MIXTRAL, OSS)), f"fp8_block:{QWEN}", f"fp8_block:{DEEPSEEK}",
    f"fp8_block+fp8:{QWEN}", f"fp8_block+fp8:{DEEPSEEK}", f"mxfp4_oss:{OSS}", f"mxfp4_oss:{DEEPSEEK}",
    *(f"{q}:{m}" for q in ("int4_g64", "int8_g64") for m in (QWEN, GEMMA, OSS)),
    *(f"nvfp4_modelopt:{m}" for m in (QWEN, DEEPSEEK)),
)  # fmt: skip
COLUMNS = ["what", "model", "T", "format", "tile", "us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "floor_us",
           "ratio_to_floor", "target_us", "ok", "nmse", "n", "method", "device", "driver", "torch", "triton",
           "commit"]  # fmt: skip
GATE_ONE = [FloatTile(1, 1), FloatTile(2, 2), FloatTile(4, 4), FloatTile(2, 2, registers=64)]
DOWN_ONE = [FloatTile(2, 2), FloatTile(4, 4), FloatTile(8, 8), FloatTile(4, 4, registers=64)]
GATE_MANY = [FloatTile(2, 2, *more) for more in ((8,), (4, 1, 96), (2, 1, 96))] + [FloatTile(4, 4, 4, 1, 128)]
DOWN_MANY = [FloatTile(4, 4, *more) for more in ((8,), (4, 1, 96), (2, 1, 96))] + [FloatTile(4, 8, 4, 1, 128)]


def describe(tile: FloatTile) -> str:
    """rows x sums, rows of x that share, warps, registers."""
    return f"{tile.rows}x{tile.sums} s{tile.shared} w{tile.warps} r{tile.registers or '-'}"


def parse(cell: str) -> tuple[str, bool, str]:
    """Format, whether activations are e4m3, model."""
    name, model = cell.split(":")
    return name.removesuffix("+fp8"), name.endswith("+fp8"), model


def tiles(tokens: int) -> tuple[list[FloatTile], list[FloatTile]]:
    """Tiles worth a try, of the gated launch and of down."""
    return (GATE_ONE, DOWN_ONE) if tokens == 1 else (GATE_MANY, DOWN_MANY)


def compile_cells(cells: list[str], tokens: list[int], sweep: list[int]) -> None:
    """Compile what `measure` will start, without starting it."""
    launch = backend.launch
    backend.launch = lambda kernel, grid, *args, device, **meta: kernel.warmup(
        *args, grid=grid, enable_fp_fusion=False, **meta)  # fmt: skip
    try:
        for cell in cells:
            format, fp8, model = parse(cell)
            shape = SHAPES[model]
            few = type(shape)(shape.name, shape.d_model, shape.d_expert, 2 * shape.top_k, shape.top_k)
            w = fl.make_layer(few, format, 1, "cuda", oai=model == OSS, fp8=fp8)
            for t in tokens:
                most = {max(fl.make_call(shape, *r, "cuda").up_pairs.max_rows for r in [pick])
                        for pick in routings(shape, t)}  # fmt: skip
                c = fl.make_call(few, *routings(few, t)[0], "cuda")
                gates, downs = tiles(t) if t in sweep else ([None], [None])
                for m in sorted(most):
                    up, dn = c.up_pairs._replace(max_rows=m), c.down_pairs._replace(max_rows=m)
                    own = fl.Call(c.x, c.ids, c.weights, up, dn, c.hidden, c.y)
                    for tile in [None, *gates]:
                        fl.gated(own, w, tile)
                    for tile in [None, *downs]:
                        fl.down(own, w, tile)
                    fl.gated(own, w, early="launch")
                    fl.down(own, w, early="weights")
    finally:
        backend.launch = launch


def measure(cell: str, tokens: list[int], sweep: list[int], roof: float, budget: float) -> Iterator[dict[str, Any]]:
    """Rows of one cell. A wrong result gives one row with its error and no time."""
    format, fp8, model = parse(cell)
    shape = SHAPES[model]
    w = fl.make_layer(shape, format, 1, "cuda", oai=model == OSS, fp8=fp8)
    each = fl.bytes_a_weight(format)
    for t in tokens:
        nmse, wrong = fl.check(shape, w, t, time.time_ns() % 100_000, "cuda")
        head = {"model": model, "T": t, "format": cell.split(":")[0], "nmse": f"{nmse:.2e}"}
        if wrong or not nmse <= tol("gemv/fp8 rows" if fp8 else "store/bf16"):
            yield {"what": f"WRONG: {', '.join(wrong) or 'nmse'}", **head}
            if wrong:
                continue
        picks = routings(shape, t)
        calls, hit = [fl.make_call(shape, *pick, "cuda") for pick in picks], experts_hit(picks)
        whole, part = layer_bytes(shape, t, hit, each, each), hit * shape.d_model * shape.d_expert * each
        jobs = [
            ("layer", None, whole, [lambda c=c: fl.run(c, w) for c in calls]),
            ("layer early", None, whole, [lambda c=c: fl.run(c, w, early=True) for c in calls]),
        ]
        if t in sweep:
            gates, downs = tiles(t)
            jobs += [("gated", g, 2 * part, [lambda c=c, g=g: fl.gated(c, w, g) for c in calls]) for g in gates]
            jobs += [("down", g, part, [lambda c=c, g=g: fl.down(c, w, g) for c in calls]) for g in downs]
            jobs += [("sum", None, 2.0 * calls[0].y.numel(), [lambda c=c: fl.weighted_sum(c) for c in calls])]
        for what, tile, moved, todo in jobs:
            try:
                timed = time_calls(todo, budget)
            except Exception as e:  # a tile that does not compile is a result too
                yield {
                    "what": what,
                    **head,
                    "tile": describe(tile) if tile else "",
                    "method": f"{type(e).__name__}: {e}"[:90],
                }
                continue
            floor = moved / roof / 1e3
            row = {f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)}
            row |= {"bytes": int(moved), "gb_per_s": f"{moved / timed.us_p50 / 1e3:.0f}", "floor_us": f"{floor:.2f}"}
            row |= {"ratio_to_floor": f"{timed.us_p50 / floor:.2f}", "n": timed.n, "method": timed.method}
            if what.startswith("layer"):
                limit = max(14.0, 2 * floor) if t == 1 else 2 * floor + 6
                row |= {"target_us": f"{limit:.1f}", "ok": "ok" if timed.us_p50 <= limit else "slow"}
            yield {"what": what, **head, "tile": describe(tile) if tile else "", **row}


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of decode layers on the float GEMV; writes a CSV.")
    parser.add_argument("--out", type=Path, required=True, help="folder for float_decode_timings.csv")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--sweep", default="", help="T at which single launches are timed in several tiles")
    parser.add_argument("--budget-ms", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile beforehand")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("float_decode_timings needs a CUDA GPU; torch sees none.")
    cells, tokens = args.cells.split(","), [int(t) for t in args.tokens.split(",")]
    sweep = [int(t) for t in args.sweep.split(",") if t]
    if args.compile_only:
        compile_cells(cells, tokens, sweep)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if args.jobs:
        own = [sys.executable, __file__, "--out", str(args.out), "--sweep", args.sweep, "--compile-only"]
        shares = [(cell, t) for cell in cells for t in tokens]
        running = [subprocess.Popen([*own, "--cells", cell, "--tokens", str(t)]) for cell, t in shares[: args.jobs]]
        for cell, t in shares[args.jobs :]:
            running.pop(0).wait()
            running.append(subprocess.Popen([*own, "--cells", cell, "--tokens", str(t)]))
        for process in running:
            process.wait()
        print(f"compiled in {time.perf_counter() - begin:.0f} s")
    where, roofs, wrong = measured_on(), bandwidth_gb_per_s(), 0
    with (args.out / "float_decode_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for name, value in roofs.items():
            print(f"{where['device']}: {name} {value:.0f} GB/s")
            table.writerow({"what": f"bandwidth {name}", "gb_per_s": f"{value:.0f}", "method": "4 GiB", **where})
        for cell in cells:
            for row in measure(cell, tokens, sweep, max(roofs.values()), args.budget_ms):
                wrong += row["what"].startswith("WRONG")
                table.writerow({**row, **where})
                f.flush()
                shown = [row.get(k, "") for k in ("what", "format", "model", "T", "tile", "us_p50", "floor_us",
                                                  "ratio_to_floor", "target_us", "ok", "nmse")]  # fmt: skip
                print(
                    " ".join(map(str, shown)),
                    row["method"] if "us_p50" not in row and "method" in row else "",
                    flush=True,
                )
    print(f"{wrong} wrong, {time.perf_counter() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
