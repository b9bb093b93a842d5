"""Decode timings on a CUDA GPU: whole routed layers at T = 1, 4, 8, every shape and pair of formats, against targets.

    PYTHONPATH=.:kernels python benchmarks/decode_layer_timings.py --out DIR [--models a,b] [--pairs q2_k+q3_k,..]
        [--tokens 1,4,8] [--budget-ms 15] [--parts] [--sweep]

Every shape and pair is checked first: kernels against their torch references bit for bit, the layer's forms against
each other, the layer against fp32 mathematics on the dequantised weights; fresh inputs, poisoned outputs; a wrong
result has no time. Layers are timed by graph replay over rotating routings (moe_lab.bench.runner) in each form of
`moe_lab.bench.gemv_layer`. The floor is the bytes that must move over the larger of the two bandwidths measured in the
same run; the target is max(14 us, 2 floors) at T = 1 and 2 floors + 6 us above. `--parts` also times single kernels,
`--sweep` also other tiles of them.
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
from moe_lab_kernels.gemv import lane_rows
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.rows import activation

MODELS = ("qwen3-30b-a3b", "deepseek-v3-like", "mixtral-8x7b", "v4.1-like", "gpt-oss-120b-like", "gemma4-26b-a4b-like")
PAIRS = ("q2_k+q3_k", "q4_k+q6_k", "q2_k+q8_0", "q8_0+q8_0", "mxfp4+mxfp4", "nvfp4+nvfp4")
COLUMNS = ["what", "model", "T", "format", "tile", "us_p20", "us_p50", "us_p80", "bytes", "gb_per_s", "floor_us",
           "ratio_to_floor", "target_us", "ok", "nmse", "n", "method", "device", "driver", "torch", "triton",
           "commit"]  # fmt: skip
Job = tuple[str, str, float, list[Callable[[], Any]]]


def target_us(tokens: int, floor: float) -> float:
    """What a whole layer may take."""
    return max(14.0, 2.0 * floor) if tokens == 1 else 2.0 * floor + 6.0


def layers(calls: list[gl.Call], w: gl.Weights, moved: float) -> Iterator[Job]:
    """Every form of the whole layer."""
    for name, form in gl.LAYERS.items():
        yield f"layer {name}", "", moved, [lambda c=c, form=form: form(c, w) for c in calls]


def parts(shape: LayerShape, calls: list[gl.Call], w: gl.Weights, hit: float, sweep: bool) -> Iterator[Job]:
    """Single kernels, and with `sweep` other tiles of them."""
    d, f, pairs = shape.d_model, shape.d_expert, calls[0].ids.numel()
    up, dn = gl.bytes_a_weight(w.gate_up_format), gl.bytes_a_weight(w.down_format)
    up_bytes, down_bytes = hit * 2 * d * f * up, hit * d * f * dn
    rows = [gl.quantised(c, w) for c in calls]
    for c, r in zip(calls, rows, strict=True):
        gl.gate_up(c, w, r)
    hidden = [lane_rows.quantize_lanes(activation.swiglu(c.gate, c.up), w.down_format) for c in calls]
    into_up, into_down = list(zip(calls, rows, strict=True)), list(zip(calls, hidden, strict=True))
    yield "quantize_x", "", 3.1 * calls[0].x.numel(), [lambda c=c: gl.quantised(c, w) for c in calls]
    yield "weighted_sum", "", 2.0 * pairs * d, [lambda c=c: gl.weighted_sum(c) for c in calls]
    yield "experts", "", up_bytes + down_bytes, [lambda c=c: gl.experts(c, w) for c in calls]
    for tile in tiles(calls[0].max_rows) if sweep else (None,):
        yield "gate_up", str(tile), up_bytes, [lambda c=c, r=r, t=tile: gl.gate_up(c, w, r, t) for c, r in into_up]
        yield "down", str(tile), down_bytes, [lambda c=c, r=r, t=tile: gl.down(c, w, r, t) for c, r in into_down]


def tiles(most: int) -> list[Tile | None]:
    """Tiles worth a try: None is the one that ships."""
    if most == 1:
        cut = [(8, 1, 16, 128), (4, 1, 16, 80), (8, 4, 8, 64), (16, 4, 16, 80), (16, 8, 16, 64)]
        return [None, *(Tile(rows, warps, sums, cap) for rows, warps, sums, cap in cut)]
    cut = [(8, 1, 8, 128, 4), (8, 1, 4, 128, 2), (8, 1, 4, 96, 2), (16, 1, 4, 96, 2), (8, 1, 4, 96, 1)]
    return [None, *(Tile(rows, warps, sums, cap, shared=shared) for rows, warps, sums, cap, shared in cut)]


def columns(timed: Timed, moved: float, roof: float) -> dict[str, Any]:
    """The measured columns; times to a hundredth of a microsecond, the floor (what was predicted) beside them."""
    floor = moved / roof / 1e3
    return {
        **{f"us_p{p}": f"{getattr(timed, f'us_p{p}'):.2f}" for p in (20, 50, 80)},
        "bytes": int(moved),
        "gb_per_s": f"{moved / timed.us_p50 / 1e3:.0f}",
        "floor_us": f"{floor:.2f}",
        "ratio_to_floor": f"{timed.us_p50 / floor:.2f}",
        "n": timed.n,
        "method": timed.method,
    }


def measure(name: str, pair: str, tokens: list[int], roof: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of one shape and pair of formats. A wrong result gives one row with its error and no time."""
    shape, (gate_up, down) = SHAPES[name], pair.split("+")
    if not gl.fits(shape, gate_up, down):
        return
    w = gl.make_weights(shape, 1, "cuda", gate_up, down)
    for t in tokens:
        nmse, wrong = gl.check(shape, w, t, seed=time.time_ns() % 100_000, device="cuda")
        head = {"model": name, "T": t, "format": pair, "nmse": f"{nmse:.2e}"}
        if wrong or not nmse <= tol("gemv/layer"):
            yield {"what": f"WRONG: {', '.join(wrong) or 'nmse'}", **head}
            continue
        picks = routings(shape, t)
        calls, hit = [gl.make_call(shape, ids, weights, "cuda") for ids, weights in picks], experts_hit(picks)
        whole = layer_bytes(shape, t, hit, gl.bytes_a_weight(gate_up), gl.bytes_a_weight(down))
        jobs = [*layers(calls, w, whole)]
        for what, tile, moved, todo in [*jobs, *(parts(shape, calls, w, hit, args.sweep) if args.parts else [])]:
            try:
                row = columns(time_calls(todo, args.budget_ms), moved, roof)
            except Exception as e:  # a tile that does not compile is a result too
                yield {"what": what, **head, "tile": tile, "method": f"{type(e).__name__}: {str(e)[:60]}"}
                continue
            if what.startswith("layer"):
                limit = target_us(t, float(row["floor_us"]))
                row |= {"target_us": f"{limit:.1f}", "ok": "ok" if float(row["us_p50"]) <= limit else "slow"}
            yield {"what": what, **head, "tile": tile.replace("None", "-"), **row}


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of whole decode layers; writes decode_layer_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_layer_timings.csv")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", default=",".join(PAIRS), help="gate and up's format + down's")
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--budget-ms", type=float, default=15.0)
    parser.add_argument("--parts", action="store_true", help="also time single kernels")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles (implies --parts)")
    args = parser.parse_args()
    args.parts |= args.sweep
    if not torch.cuda.is_available():
        raise LabError("decode_layer_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, roofs, wrong = time.perf_counter(), measured_on(), bandwidth_gb_per_s(), 0
    tokens = [int(t) for t in args.tokens.split(",")]
    with (args.out / "decode_layer_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for name, value in roofs.items():
            print(f"{where['device']}: {name} {value:.0f} GB/s")
            table.writerow({"what": f"bandwidth {name}", "gb_per_s": f"{value:.0f}", "method": "4 GiB", **where})
        for name in args.models.split(","):
            for pair in args.pairs.split(","):
                for row in measure(name, pair, tokens, max(roofs.values()), args):
                    table.writerow({**row, **where})
                    f.flush()
                    wrong += row["what"].startswith("WRONG")
                    head = f"{name:20} {pair:11} T={row['T']} {row['what']:16} {row.get('tile', ''):60}"
                    shown = ("us_p50", "floor_us", "ratio_to_floor", "target_us", "ok", "nmse")
                    print(head, *(f"{row.get(c, ''):>8}" for c in shown), flush=True)
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
