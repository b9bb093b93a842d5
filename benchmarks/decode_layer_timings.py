"""Decode timings on a CUDA GPU: whole routed layers at T = 1, 4, 8, every shape and pair of formats, against targets.

    PYTHONPATH=.:kernels python benchmarks/decode_layer_timings.py --out DIR [--models a,b] [--pairs q2_k+q3_k,..]
        [--tokens 1,4,8] [--forms together,planar,tiled] [--budget-ms 4] [--workers 12] [--cuts 1.4.96.1-4,..]
        [--cells-alone] [--parts] [--sweep]

First, in processes of their own: every pair of formats on a small shape, kernels against their torch references bit for
bit, raw blocks and tiles, and the layer against fp32 mathematics (fresh inputs, poisoned outputs); beside them
`--workers` processes compile what will be timed. Then in every cell: each token's bits against those of a call of its
own, and at T = 1 fp32 mathematics again. A wrong result has no time. Layers are timed by graph replay over rotating
routings (moe_lab.bench.runner) in the forms of `moe_lab.bench.gemv_layer`: together (raw blocks), planar and tiled;
chunks are made before the clock starts, in column us_planned inside it, by a launch on the device. The floor
is the bytes that must move over the larger of the two bandwidths measured in the same run; the target is max(14 us, 2
floors) at T = 1 and 2 floors + 6 us above. `--cuts` also times the tiled form cut otherwise (tiles, warps, registers,
shared rows, then down's tiles), `--parts` single kernels, `--sweep` other tiles of them.
"""

import argparse
import csv
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.runner import Timed, bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels.backend import Launch, record_launches
from moe_lab_kernels.gemv import lane_rows
from moe_lab_kernels.gemv.tiled.tiles import TileCut
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.launch.ahead import Job as Launched
from moe_lab_kernels.launch.ahead import Pointer, job_of, pool, prepare
from moe_lab_kernels.rows import activation

MODELS = ("qwen3-30b-a3b", "deepseek-v3-like", "mixtral-8x7b", "v4.1-like", "gpt-oss-120b-like", "gemma4-26b-a4b-like")
PAIRS = ("q2_k+q3_k", "q4_k+q6_k", "q2_k+q8_0", "q8_0+q8_0", "mxfp4+mxfp4", "nvfp4+nvfp4", "q5_k+q5_k", "q4_0+q4_0")
COLUMNS = ["what", "model", "T", "format", "tile", "us_p20", "us_p50", "us_p80", "us_planned", "bytes", "gb_per_s",
           "floor_us", "ratio_to_floor", "target_us", "ok", "nmse", "n", "method", "device", "driver", "torch",
           "triton", "commit"]  # fmt: skip
SMALL = LayerShape("check", 2048, 768, 16, 6)
RARE = ("q5_k+q5_k", "q4_0+q4_0")  # timed on the first model alone
Job = tuple[str, str, float, list[Callable[[], Any]]]


def target_us(tokens: int, floor: float) -> float:
    """What a whole layer may take."""
    return max(14.0, 2.0 * floor) if tokens == 1 else 2.0 * floor + 6.0


def cut_of(text: str) -> dict[str, Any]:
    """Options of the tiled form from what `--cuts` says."""
    cut, down = text.split("-")
    tiles, warps, registers, shared = map(int, cut.split("."))
    return {"cut": TileCut(tiles, warps, registers, shared), "down_tiles": int(down)}


def bound(pair: str) -> float:
    """Of the layer's NMSE."""
    return tol("gemv/q4_0 layer" if "q4_0" in pair else "gemv/layer")


def in_layouts(w: gl.Weights, shape: LayerShape, empty: bool = False) -> gl.Weights:
    """The weights in every layout that they have."""
    return gl.with_tiles(gl.with_planes(w, shape, empty), shape, empty)


def small_case(pair: str) -> str:
    """ "ok", or what is wrong, of one pair of formats on a small shape."""
    gate_up, down = pair.split("+")
    try:
        w = in_layouts(gl.make_weights(SMALL, 1, "cuda", gate_up, down), SMALL)
        seed = time.time_ns() % 100_000
        nmse, wrong = gl.check(SMALL, w, 8, seed, "cuda")
        for form in w.forms[1:]:
            wrong += gl.check_form(form, SMALL, w, 8, seed, "cuda")
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:80]}"
    return ", ".join([*wrong, *([f"nmse {nmse:.1e}"] if not nmse <= bound(pair) else [])]) or "ok"


def asked(w: gl.Weights, forms: str) -> tuple[str, ...]:
    """Those of the weights' forms that `--forms` lists."""
    return tuple(form for form in w.forms if form in forms.split(","))


def launched(cell: tuple[str, str, int], cuts: list[str], forms: str) -> Iterator[Launch]:
    """What a cell's forms launch, written down on the host."""
    name, pair, tokens = cell
    shape, (gate_up, down) = replace(SHAPES[name], experts=SHAPES[name].top_k), pair.split("+")
    w = in_layouts(gl.make_weights(shape, 1, "cpu", gate_up, down, empty=True), shape, empty=True)
    call = replace(gl.make_call(shape, *routings(shape, 1)[0], "cpu"), max_rows=1 if tokens == 1 else 8)
    with record_launches() as made:
        for form in asked(w, forms):
            gl.LAYERS[form](call, w)
        for cut in cuts if w.tiles is not None else ():
            gl.layer_tiled(call, w, **cut_of(cut))
    yield from made


def variant_of(job: Launched) -> tuple[Any, ...]:
    """What the compiler tells launches apart by."""

    def told(p: Any, arg: Any) -> Any:
        if p.is_constexpr:
            return repr(arg)
        if isinstance(arg, Pointer):
            return arg
        return None if p.do_not_specialize or not isinstance(arg, int) else (arg == 1, arg % 16 == 0)

    args = zip(job.function().params, job.args, strict=True)
    return job.module, job.kernel, *(told(p, arg) for p, arg in args), job.meta


def prepared(todo: list[tuple[str, str]], tokens: list[int], args: argparse.Namespace) -> dict[str, str]:
    """pair -> "ok", or what `small_case` says ("unchecked" where nobody asked); on return the compiler has made what
    `todo` needs."""
    command = [sys.executable, __file__, "--out", ".", "--case"]
    pairs = sorted({pair for _, pair in todo})
    running = {
        pair: subprocess.Popen([*command, pair], stdout=subprocess.PIPE, text=True)
        for pair in ([] if args.cells_alone else pairs)
    }
    cells = [(name, pair, t) for name, pair in todo for t in sorted({min(t, 2) for t in tokens})]
    jobs = [job_of(launch) for cell in cells for launch in launched(cell, cuts_of(args), args.forms)]
    jobs = list({variant_of(job): job for job in jobs}.values())
    with pool(args.workers) as compilers:
        for why in compilers.map(prepare, [[job] for job in jobs]):
            if why[0]:
                print("does not compile:", why[0][:120], flush=True)
    said = {pair: (p.communicate()[0].strip().splitlines() or ["did not run"])[-1] for pair, p in running.items()}
    return {pair: "unchecked" for pair in pairs} | said


def cuts_of(args: argparse.Namespace) -> list[str]:
    """What `--cuts` lists."""
    return args.cuts.split(",") if args.cuts else []


def layers(calls: list[gl.Call], w: gl.Weights, moved: float, names: tuple[str, ...]) -> Iterator[Job]:
    """Forms of the whole layer."""
    for name in names:
        yield f"layer {name}", "", moved, [lambda c=c, form=gl.LAYERS[name]: form(c, w) for c in calls]


def planned(calls: list[gl.Call], w: gl.Weights, form: Callable[..., Any]) -> list[Callable[[], Any]]:
    """A form with its chunks made on the device, inside the clock."""
    ends = gl.all_resident(w)
    return [lambda c=c: gl.planned(c, w, ends, form) for c in calls]


def other_cuts(calls: list[gl.Call], w: gl.Weights, moved: float, cuts: list[str]) -> Iterator[Job]:
    """The tiled form, cut otherwise."""
    for cut in cuts:
        how = cut_of(cut)
        yield "layer tiled", cut, moved, [lambda c=c, how=how: gl.layer_tiled(c, w, **how) for c in calls]


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
    yield from layers(calls, w, up_bytes + down_bytes, ("apart",))
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
    w = in_layouts(gl.make_weights(shape, 1, "cuda", gate_up, down), shape)
    for t in tokens:
        picks = routings(shape, t)
        calls, hit = [gl.make_call(shape, ids, weights, "cuda") for ids, weights in picks], experts_hit(picks)
        calls = [replace(c, max_rows=1 if t == 1 else 8) for c in calls]  # one kernel for all that share rows
        whole = layer_bytes(shape, t, hit, gl.bytes_a_weight(gate_up), gl.bytes_a_weight(down))
        for what, tile, moved, todo in [
            *layers(calls, w, whole, asked(w, args.forms)),
            *other_cuts(calls, w, whole, cuts_of(args) if w.tiles is not None else []),
            *(parts(shape, calls, w, hit, args.sweep) if args.parts else []),
        ]:
            head = {"what": what, "model": name, "T": t, "format": pair, "tile": tile}
            form = gl.LAYERS.get(what.removeprefix("layer "))
            try:
                nmse = gl.nmse(calls[0], w, form) if form and t == 1 else 0.0
                if form and not (nmse <= bound(pair) and gl.alone(calls[-1], w, form, shape)):
                    yield {**head, "what": f"WRONG {what}", "nmse": f"{nmse:.2e}"}
                    continue
                row = columns(time_calls(todo, args.budget_ms), moved, roof)
            except Exception as e:  # a tile that does not compile is a result too
                yield {**head, "method": f"{type(e).__name__}: {str(e)[:60]}"}
                continue
            if form:
                if not tile:
                    inside = time_calls(planned(calls, w, form), args.budget_ms)
                    row["us_planned"] = f"{inside.us_p50:.2f}"
                limit = target_us(t, float(row["floor_us"]))
                row |= {"target_us": f"{limit:.1f}", "ok": "ok" if float(row["us_p50"]) <= limit else "slow"}
                row |= {"nmse": f"{nmse:.2e}"} if t == 1 else {}
            yield {**head, "tile": tile.replace("None", "-"), **row}


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Shape and pair of formats, where both widths are whole blocks; q2_k + q8_0 where q2_k + q3_k cannot be."""
    for name in args.models.split(","):
        for pair in args.pairs.split(","):
            shape = SHAPES[name]
            other = pair == "q2_k+q8_0" and gl.fits(shape, "q2_k", "q3_k")
            if (
                gl.fits(shape, *pair.split("+"))
                and not other
                and (pair not in RARE or name == args.models.split(",")[0])
            ):
                yield name, pair


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of whole decode layers; writes decode_layer_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_layer_timings.csv")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pairs", default=",".join(PAIRS), help="gate and up's format + down's")
    parser.add_argument("--tokens", default="1,4,8")
    parser.add_argument("--forms", default="together,planar,tiled", help="raw blocks, planes, tiles")
    parser.add_argument("--budget-ms", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--cuts", default="", help="other cuts of the tiled form")
    parser.add_argument("--cells-alone", action="store_true", help="without the check of every pair on a small shape")
    parser.add_argument("--parts", action="store_true", help="also time single kernels")
    parser.add_argument("--sweep", action="store_true", help="also time other tiles (implies --parts)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts |= args.sweep
    if not torch.cuda.is_available():
        raise LabError("decode_layer_timings needs a CUDA GPU; torch sees none.")
    if args.case:
        print(small_case(args.case), flush=True)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin, tokens, todo = time.perf_counter(), [int(t) for t in args.tokens.split(",")], list(cells(args))
    ok = prepared(todo, tokens, args)
    print(f"{time.perf_counter() - begin:.0f} s:", *(f"{pair} {said};" for pair, said in ok.items()), flush=True)
    where, roofs, wrong = measured_on(), bandwidth_gb_per_s(), 0
    with (args.out / "decode_layer_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for name, value in roofs.items():
            print(f"{where['device']}: {name} {value:.0f} GB/s")
            table.writerow({"what": f"bandwidth {name}", "gb_per_s": f"{value:.0f}", "method": "4 GiB", **where})
        for name, pair in todo:
            if ok[pair] not in ("ok", "unchecked"):
                rows = iter([{"what": f"WRONG: {ok[pair]}", "model": name, "T": 0, "format": pair}])
            else:
                rows = measure(name, pair, tokens, max(roofs.values()), args)
            for row in rows:
                table.writerow({**row, **where})
                f.flush()
                wrong += row["what"].startswith("WRONG")
                head = f"{name:20} {pair:11} T={row['T']} {row['what']:16} {row.get('tile', ''):60}".rstrip()
                shown = ("us_p50", "us_planned", "floor_us", "ratio_to_floor", "target_us", "ok", "nmse")
                print(head, *(f"{row.get(c, ''):>8}" for c in shown), row.get("method", "")[:30], flush=True)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
