"""First timings of the decode arm's kernels on a CUDA GPU: q2_k gate + up, q3_k down, and the whole routed layer.

    PYTHONPATH=.:kernels python benchmarks/first_timings.py --out DIR [--models a,b] [--budget-ms 15] [--no-variants]

Before anything is timed, each shape's kernels are compared with their torch references bit for bit, and the layer with
fp32 mathematics on the dequantised weights, on fresh inputs and into poisoned outputs; a wrong result has no time.
Calls are timed by graph replay over rotating routings (moe_lab.bench.runner). The floor is the bytes that must move
over the larger of the two bandwidths measured in the same run. `nmse` is the layer's, on every row of that shape and T.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.runner import Timed, bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels import activation, quantize_rows
from moe_lab_kernels.gemv import Tile

MODELS = ("qwen3-30b-a3b", "deepseek-v3-like", "mixtral-8x7b", "v4.1-like", "lab-42m")
TOKENS = (1, 4, 8)
TIMED = ("us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "floor_us", "ratio_to_floor", "nmse", "n", "method")
COLUMNS = ["what", "model", "T", "format", *TIMED, "device", "driver", "torch", "triton", "commit"]
# Other tiles, each at the token counts where it could matter; a new tile is a new compilation.
VARIANTS: dict[str, tuple[Tile, tuple[int, ...]]] = {
    "uncapped": (Tile(8), (1,)),
    "sums16-regs128": (Tile(8, registers=128), (8,)),
    "rows4-sums8-regs128": (Tile(4, sums=8, registers=128), (1, 4, 8)),
}
Job = tuple[str, str, float, list[Callable[[], Any]]]


def jobs(shape: LayerShape, w: gl.Weights, t: int, variants: bool) -> Iterator[Job]:
    """(what, format, fewest bytes, one call for each input of the rotation)."""
    picks = routings(shape, t)
    calls = [gl.make_call(shape, ids, weights, "cuda") for ids, weights in picks]
    d, f, hit, pairs = shape.d_model, shape.d_expert, experts_hit(picks), t * shape.top_k
    x_rows = [quantize_rows.quantize_q8_1(c.x) for c in calls]
    for c, rows in zip(calls, x_rows, strict=True):
        gl.gate_up(c, w, rows)
    h_rows = [quantize_rows.quantize_q8_1(activation.swiglu(c.gate, c.up)) for c in calls]
    up, dn = gl.bytes_a_weight(gl.GATE_UP), gl.bytes_a_weight(gl.DOWN)
    up_bytes = hit * 2 * d * f * up + t * d * 36 / 32 + 4 * pairs * f
    down_bytes = hit * d * f * dn + pairs * f * 36 / 32 + 2 * pairs * d

    def products(tile: Tile | None, name: str) -> Iterator[Job]:
        each = list(zip(calls, x_rows, h_rows, strict=True))
        yield f"gate_up{name}", gl.GATE_UP, up_bytes, [lambda c=c, x=x: gl.gate_up(c, w, x, tile) for c, x, _ in each]
        yield f"down{name}", gl.DOWN, down_bytes, [lambda c=c, h=h: gl.down(c, w, h, tile) for c, _, h in each]

    yield from products(None, "")
    yield "quantize_x", "q8_1", t * d * (2 + 36 / 32), [lambda c=c: quantize_rows.quantize_q8_1(c.x) for c in calls]
    yield "swiglu", "bf16", 6 * pairs * f, [lambda c=c: activation.swiglu(c.gate, c.up) for c in calls]
    yield "combine", "bf16", 2 * (pairs + t) * d, [lambda c=c: gl.weighted_sum(c) for c in calls]
    whole = layer_bytes(shape, t, hit, up, dn)
    yield "layer", f"{gl.GATE_UP}+{gl.DOWN}", whole, [lambda c=c: gl.layer(c, w) for c in calls]
    for name, (tile, at) in VARIANTS.items():
        if variants and t in at:
            yield from products(tile, f" {name}")


def row_of(timed: Timed, moved: float, roof: float) -> dict[str, Any]:
    """The measured columns; times to a hundredth of a microsecond, the floor (what was predicted) beside them."""
    floor = moved / roof / 1e3
    times = {f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)}
    return {
        **times,
        "bytes": int(moved),
        "gb_per_s": f"{moved / timed.us_p50 / 1e3:.0f}",
        "floor_us": f"{floor:.2f}",
        "ratio_to_floor": f"{timed.us_p50 / floor:.2f}",
        "n": timed.n,
        "method": timed.method,
    }


def measure(name: str, roof: float, budget_ms: float, variants: bool) -> Iterator[dict[str, Any]]:
    """Rows of one shape. A wrong result gives one row with its error and no time."""
    shape = SHAPES[name]
    w = gl.make_weights(shape, seed=1, device="cuda")
    for t in TOKENS:
        nmse, wrong = gl.check(shape, w, t, seed=time.time_ns() % 100_000, device="cuda")
        head = {"model": name, "T": t, "nmse": f"{nmse:.2e}"}
        if wrong or not nmse <= tol("gemv/layer"):
            yield {"what": f"WRONG: {', '.join(wrong) or 'nmse'}", **head}
            continue
        for what, format, moved, calls in jobs(shape, w, t, variants):
            yield {"what": what, **head, "format": format, **row_of(time_calls(calls, budget_ms), moved, roof)}


def main() -> int:
    parser = argparse.ArgumentParser(description="First timings of the decode kernels; writes first_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for first_timings.csv")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--budget-ms", type=float, default=15.0)
    parser.add_argument("--variants", action=argparse.BooleanOptionalAction, default=True, help="also time other tiles")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("first_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, roofs, wrong = time.perf_counter(), measured_on(), bandwidth_gb_per_s(), 0
    with (args.out / "first_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for name, value in roofs.items():
            print(f"{where['device']}: {name} {value:.0f} GB/s")
            table.writerow({"what": f"bandwidth {name}", "gb_per_s": f"{value:.0f}", "method": "4 GiB", **where})
        for name in args.models.split(","):
            for row in measure(name, max(roofs.values()), args.budget_ms, args.variants):
                table.writerow({**row, **where})
                f.flush()
                wrong += row["what"].startswith("WRONG")
                cells = (row.get(c, "") for c in ("us_p50", "floor_us", "ratio_to_floor", "gb_per_s", "nmse"))
                print(f"{name:17} T={row['T']} {row['what']:23}", *(f"{c:>9}" for c in cells), flush=True)
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
