"""Timings of the grouped GEMM on a CUDA GPU: whole routed layers from given picks on, beside recorded peers and floors.

    PYTHONPATH=.:kernels python benchmarks/grouped_timings.py --out DIR [--formats bf16,q2_k+q3_k,fp8_block@fp8]
        [--shapes ..] [--tokens ..] [--cells SHAPE/FORMAT/T:T,..] [--sweep] [--workers 12]

A layer is plan, work list, gate + up + activation, down, weighted sum: five launches (seven from 2,049 pairs on). As in
the arm, quantised weights are decoded to scratch memory first where experts have many rows (`what` says "decoded"), and
"@fp8" quantises rows and hidden rows to fp8. `--workers`: processes that compile ahead.
Before a cell is timed, fresh inputs go through it into poisoned outputs: against the same mathematics in fp32 within
the tolerance table, and against the same rows in batches of 1 and 64, bit for bit. A wrong result has no time. Weights
are random bf16, or genuinely quantised rows dealt out to the experts. A call is one pass of a CUDA graph over a
rotation of routings, so weights come from device memory. `floor_us`: the larger of bytes over the read bandwidth and
operations over the bf16 matrix rate, both measured in the same run. Peers: bf16 layers on another H200, recorded
(`best` of all full-layer peers, `vllm` its Triton kernel). `--sweep` times gate + up and down apart for many tiles,
each with the bits of the default tile or called wrong.
"""

import argparse
import csv
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grouped_layers import (
    DEVICE,
    Call,
    Cut,
    Weights,
    down,
    exact,
    gate_up,
    is_decoded,
    layer,
    make_call,
    make_weights,
    planned,
    ready,
)
from grouped_peers import peers_us

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels import backend
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.storage.blocks import BLOCKS

MODELS = ("qwen3-30b-a3b", "gemma4-26b-a4b-like", "gpt-oss-120b-like", "mixtral-8x7b", "deepseek-v3-like", "v4.1-like")
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
TIMED = ("us_p20", "us_p50", "us_p80", "floor_us", "ratio_to_floor", "best_peer_us", "ratio_to_best", "vllm_us",
         "ratio_to_vllm", "n", "method")  # fmt: skip
COLUMNS = ["what", "shape", "format", "T", "tokens", "tile", "ok", "nmse", *TIMED, "read_gb_per_s", "bf16_tflops",
           "device", "driver", "torch", "triton", "commit"]  # fmt: skip


def check(shape: LayerShape, w: Weights, tokens: int, cut: Cut) -> tuple[float, str]:
    """The NMSE of up to 64 rows against `exact`, and "yes" or what is wrong."""
    c = make_call(shape, *routings(shape, tokens, seed=77)[0])
    got = layer(c, w, cut)
    some = torch.randperm(tokens, device=DEVICE)[:64]
    part = replace(c, x=c.x[some], ids=c.ids[some].contiguous(), weights=c.weights[some].contiguous())
    want = exact(part, w).double()
    nmse = float((got[some].double() - want).square().sum() / want.square().sum())
    if not nmse <= tol("gemv/fp8 rows" if w.fp8_rows else "store/bf16"):
        return nmse, "WRONG: far from fp32"
    for n in (1, len(some)):
        few = make_call(shape, part.ids[:n].contiguous(), part.weights[:n].contiguous())
        alone = layer(replace(few, x=part.x[:n].contiguous()), w, Cut())
        if not torch.equal(alone, got[some[:n]]):
            return (
                nmse,
                f"WRONG: bits differ in a batch of {n}: {int((alone != got[some[:n]]).sum())} of {alone.numel()}",
            )
    return nmse, "yes"


def floor_us(shape: LayerShape, w: Weights, tokens: int, hit: float, read: float, tflops: float) -> float:
    """Bytes over bandwidth or operations over the matrix rate, whichever takes longer."""

    def bytes_of(m: go.Weight) -> float:
        parts = [p for p in (m.data, m.scales, m.second) if p is not None]
        return sum(p.numel() * p.element_size() for p in parts) / (len(m.data) * m.rows * m.kd)

    moved = layer_bytes(shape, tokens, hit, bytes_of(w.gate), bytes_of(w.down))
    return max(moved / read / 1e3, 6 * tokens * shape.top_k * shape.d_model * shape.d_expert / tflops / 1e6)


def sweep_cuts(format: str, tokens: int, mean: float) -> Iterator[tuple[str, Cut]]:
    """Tiles worth a try at this many rows an expert."""
    widths = [n for n in gt.TOKENS if min(128, mean / 2) <= n <= max(16, 3 * mean)] or [gt.TOKENS[-1]]
    for n, rows, warps, stages in itertools.product(widths, (64, 128), (4, 8), (3, 4, 5)):
        sums = rows * n // (32 * warps)  # fp32 accumulators a thread, of one product
        if (warps == 8 and rows == 64 and n < 128) or (stages == 5 and (n >= 64 or format != "bf16")):
            continue
        t = gt.Tile(rows, warps, stages, 8 if mean > n else 1)
        if sums <= 64:
            yield "gate_up", Cut(n, t, None)
        if sums <= 128:
            yield "down", Cut(n, None, t)


def fp8_cuts(mean: float) -> Iterator[Cut]:
    """Tiles of the fp8 products worth a try, in `rows` of each matrix."""
    tokens = min(gt.MOST_FP8_TOKENS, max(16, backend.next_power_of_2(int(mean + mean / 4))))
    for both in (((128, 4, 4), (64, 4, 4)), ((128, 8, 3), (128, 8, 3)), ((128, 4, 3), (128, 4, 4))):
        yield Cut(tokens, *(gt.Tile(*t, 8 if mean > tokens else 1) for t in both))


def matrix_tflops() -> float:
    """bf16 8192^3 through torch."""
    a = torch.randn(8192, 8192, device=DEVICE).bfloat16()
    return 2 * 8192**3 / time_calls([lambda: a @ a], 40.0).us_p50 / 1e6


def timed(run: Callable[[Call, Cut], Any], calls: list[Call], cut: Cut, budget_ms: float) -> Any:
    """What the clock says, or the error of a tile that does not fit."""
    try:
        return time_calls([lambda c=c: run(c, cut) for c in calls], budget_ms)
    except Exception as e:  # out of shared memory or registers: a row of the sweep says so
        return f"{type(e).__name__}: {str(e)[:60]}"


def rows_of(shape: LayerShape, format: str, w: Weights, tokens: int, args: Any, read: float,
            tflops: float) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of one cell."""
    picks = routings(shape, tokens)
    calls = [make_call(shape, *p) for p in picks]
    e, pairs = shape.experts, tokens * shape.top_k
    floor = floor_us(shape, w, tokens, experts_hit(picks), read, tflops)
    head = {
        "shape": shape.name,
        "format": format,
        "T": tokens,
        "read_gb_per_s": f"{read:.0f}",
        "bf16_tflops": f"{tflops:.0f}",
    }
    best, vllm = peers_us(shape.name, format, tokens)

    def row(what: str, cut: Cut, t: Any, ok: str = "yes", nmse: str = "") -> dict[str, Any]:
        tile = " ".join(str(tuple(t)) for t in (cut.gate_up, cut.down) if t) or "()"
        wide = cut.tokens or gt.tokens_for(pairs, e, gt.MOST_FP8_TOKENS if w.fp8_rows else gt.TOKENS[-1])
        out = {**head, "what": what, "tokens": wide, "tile": tile, "nmse": nmse}
        out["ok"] = t if isinstance(t, str) else ok
        if t is None or isinstance(t, str):
            return out
        out |= {f"us_p{p}": f"{getattr(t, f'us_p{p}'):.1f}" for p in (20, 50, 80)} | {"n": t.n, "method": t.method}
        if what.endswith("layer"):
            out |= {"floor_us": f"{floor:.1f}", "ratio_to_floor": f"{t.us_p50 / floor:.2f}"}
            for name, short, peer in (("best_peer", "best", best), ("vllm", "vllm", vllm)):
                if peer:
                    out |= {f"{name}_us": peer, f"ratio_to_{short}": f"{t.us_p50 / peer:.3f}"}
        return out

    nmse, ok = check(shape, w, tokens, Cut())
    if ok != "yes":
        yield row("layer", Cut(), None, ok, f"{nmse:.2e}")
        if not args.anyway:
            return
    yield row(layer_name(calls[0], w), Cut(),
              timed(lambda c, cut: layer(c, w, cut), calls, Cut(), args.budget_ms), ok, f"{nmse:.2e}")  # fmt: skip
    if w.fp8_rows:
        for cut in fp8_cuts(pairs / e) if args.sweep else ():
            yield row("layer", cut, timed(lambda c, cut: layer(c, w, cut), calls, cut, args.budget_ms))
        return
    ready: dict[int | None, list[Any]] = {}

    def part(op: Callable[..., None], cut: Cut) -> Any:
        if cut.tokens not in ready:
            ready[cut.tokens] = [planned(c, e, cut) for c in calls]
        paired = dict(zip(map(id, calls), ready[cut.tokens], strict=True))
        return timed(lambda c, cut: op(c, w, *paired[id(c)], cut), calls, cut, args.budget_ms)

    for what, parts in (("decode gate_up", (w.gate, w.up)), ("decode down", (w.down,))):
        if args.decode and decoded.can_decode(parts[0]):
            yield row(
                what, Cut(), timed(lambda c, cut, parts=parts: decode(c, parts), calls[:1], Cut(), args.budget_ms)
            )
    if w.gate.layout != "raw":
        return
    operations = {"gate_up": (gate_up, calls[0].h), "down": (down, calls[0].y)}
    wanted = {}
    for what, (op, written) in operations.items():
        yield row(what, Cut(), part(op, Cut()))
        wanted[what] = written.clone()
    for what, cut in sweep_cuts(format, tokens, pairs / e) if args.sweep else ():
        op, written = operations[what]
        written.fill_(float("nan"))
        t = part(op, cut)
        same = isinstance(t, str) or torch.equal(written, wanted[what])
        written.copy_(wanted[what])
        yield row(what, cut, t if same else "WRONG: bits differ from the default tile's")


def layer_name(c: Call, w: Weights) -> str:
    """ "layer", and which of its products the arm decodes first."""
    if w.fp8_rows:
        return "layer"
    which = is_decoded(c, (w.gate, w.up)), is_decoded(c, (w.down,))
    return {(True, True): "decoded layer", (False, True): "down decoded layer", (True, False): "gate_up decoded layer"
            }.get(which, "layer")  # fmt: skip


def decode(c: Call, parts: Sequence[go.Weight]) -> None:
    """The decoding pass alone."""
    for _ in ready(parts, planned(c, len(parts[0].data), Cut())[1], c, True):
        pass


def compile_ahead(cells: list[tuple[str, str, list[int]]], workers: int) -> None:
    """Fill the compiler's cache from several processes: each format's kernels for the widths of tile that the cells and
    their checks take."""
    wanted: dict[str, None] = {}
    for name, format, counts in cells:
        most = gt.MOST_FP8_TOKENS if format.endswith("@fp8") else gt.TOKENS[-1]
        shape = SHAPES[name]
        widths = {gt.tokens_for(t * shape.top_k, shape.experts, most) for t in (1, 64, *counts)}
        wanted |= {f"{format}/{n}": None for n in sorted(widths)}
    jobs = list(wanted)
    command = [sys.executable, __file__, "--out", ".", "--compile"]
    running = [subprocess.Popen([*command, ",".join(jobs[i::workers])]) for i in range(min(workers, len(jobs)))]
    for process in running:
        process.wait()


def compile_jobs(jobs: str) -> None:
    """A small layer for each job, whose sizes divide as the timed ones do; gpt-oss's formula in its formats."""
    shapes = LayerShape("small", 1024, 512, 4, 2), LayerShape("gpt-oss small", 320, 320, 4, 2)
    for format, tokens in (job.split("/") for job in jobs.split(",")):
        for shape in shapes if format in ("bf16", "mxfp4_oss") else shapes[:1]:
            c = make_call(shape, *routings(shape, 32)[0])
            w = make_weights(shape, format)
            layer(c, w, Cut(int(tokens)))
            if not w.fp8_rows and decoded.can_decode(w.gate):
                p, work = planned(c, shape.experts, Cut(int(tokens)))
                for (gate, up), some in ready((w.gate, w.up), work, c, True):
                    gate_up(c, replace(w, gate=gate, up=up), p, some, Cut())
                for (last,), some in ready((w.down,), work, c, True):
                    down(c, replace(w, down=last), p, some, Cut())
    torch.cuda.synchronize()


def cells_of(args: argparse.Namespace) -> list[tuple[str, str, list[int]]]:
    """(shape, format, token counts) in the order asked for; k-quants where they fill both widths."""
    if args.cells:
        split = (cell.split("/") for cell in args.cells.split(","))
        return [(shape, format, [int(t) for t in counts.split(":")]) for shape, format, counts in split]
    tokens, out = [int(t) for t in args.tokens.split(",")], []
    for name, format in itertools.product(args.shapes.split(","), args.formats.split(",")):
        first, *rest = format.partition("@")[0].split("+")
        widths = ((first, SHAPES[name].d_model), (rest[0] if rest else first, SHAPES[name].d_expert))
        multiple = g8.GROUP if format.endswith("@fp8") else 1
        if not any(width % (BLOCKS[f].values if f in BLOCKS else multiple) for f, width in widths):
            out.append((name, format, tokens))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the grouped GEMM; writes grouped_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for grouped_timings.csv")
    parser.add_argument("--formats", default="bf16,q2_k+q3_k")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--cells", default="", help="SHAPE/FORMAT/T:T,.. instead of formats, shapes and tokens")
    parser.add_argument("--budget-ms", type=float, default=30.0)
    parser.add_argument("--sweep", action="store_true", help="time gate + up and down for other tiles too")
    parser.add_argument("--decode", action="store_true", help="time decoding to scratch memory alone too")
    parser.add_argument("--anyway", action="store_true", help="time wrong results too, for looking into them")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("grouped_timings needs a CUDA GPU; torch sees none.")
    if args.compile:
        compile_jobs(args.compile)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, failed = time.perf_counter(), measured_on(), 0
    cells = cells_of(args)
    if args.workers:
        compile_ahead(cells, args.workers)
    read, tflops = bandwidth_gb_per_s()["read"], matrix_tflops()
    torch.backends.cuda.matmul.allow_tf32 = False
    with (args.out / "grouped_timings.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for name, format, counts in cells:
            w = make_weights(SHAPES[name], format)
            for tokens in counts:
                for row in rows_of(SHAPES[name], format, w, tokens, args, read, tflops):
                    table.writerow({**row, **where})
                    file.flush()
                    failed += row["ok"].startswith("WRONG")
                    print(f"{time.perf_counter() - begin:5.1f}", *told(row), flush=True)
            del w
            torch.cuda.empty_cache()
    print(f"{where['device']}, read {read:.0f} GB/s, bf16 {tflops:.0f} TFLOP/s; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


def told(row: dict[str, Any]) -> list[str]:
    """A row as the terminal has it."""
    said = f"{row['what']:13} {row['tokens']:4} {row['tile']:24} {row['ok']:4} {row['nmse']:9}"
    times = ("us_p50", "floor_us", "ratio_to_floor", "ratio_to_best", "ratio_to_vllm")
    return [f"{row['shape']:20} {row['format']:13} T={row['T']:<5} {said}", *(f"{row.get(c, ''):>8}" for c in times)]


if __name__ == "__main__":
    sys.exit(main())
