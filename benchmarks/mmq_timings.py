"""Timings of the int8 grouped product on a CUDA GPU: single products for many tiles, and whole routed layers.

    PYTHONPATH=.:kernels python benchmarks/mmq_timings.py --out DIR [--layers | --sweep] [--kinds q2_k:d2s6,q2_k:q8_k]
        [--formats q2_k+q3_k,..] [--shapes ..] [--cells shape:format:arithmetic:T,T ..] [--workers 12]

A kind is a weight format and the layout of the activations (q8_k: the folded form). Before anything is timed, a small
case of every kind and tile goes through kernel and reference, bit for bit, with poisoned outputs, in `--workers`
processes (which also fills the compiler's cache; those of layers do nothing else); layers are compared with fp32
mathematics and, bit for bit, with their own rows in batches of 1 and 64. A wrong result has no time. `tile` says which
products open their weights first. A call is one pass of a CUDA graph over a rotation of routings. `ggml_us`: the layer
of ggml-cuda on another H200, recorded; `floor_us`: bytes over the read bandwidth measured in the same run, or
operations over 918 int8 TOP/s, whichever takes longer.
"""

import argparse
import csv
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from grouped_layers import Call, exact, make_call, make_weights, one_weight
from grouped_timings import floor_us

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, routings
from moe_lab.errors import LabError
from moe_lab.formats import quantize_activations
from moe_lab.tolerances import tol
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq import operands as mo
from moe_lab_kernels.mmq.wide import WideTile
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows import combine

DEVICE, INT8_TOPS = "cuda", 918.0
TOKENS = (32, 128, 512, 2048, 8192)
KINDS = ("q2_k:d2s6", "q3_k:d4", "q4_k:ds4", "q5_k:ds4", "q6_k:d4", "q8_0:d4", "q4_0:ds4", "mxfp4:d4", "nvfp4:d4",
         "q2_k:q8_k", "q3_k:q8_k", "q4_k:q8_k", "q6_k:q8_k")  # fmt: skip
# (rows of the list's tiles, Tile of a program)
TILES = (
    *((16, gt.Tile(64, 4, 2, 1, r)) for r in (None, 128)),
    *((64, gt.Tile(64, 4, 2, 8, r)) for r in (None, 168)),
    *((128, WideTile(r, t, 4, 2)) for r, t in ((64, 64), (64, 128), (128, 64))),
    (128, WideTile(64, 64, 2, 3, 2)),
    (128, WideTile(128, 128, 8, 2)),
    *((128, WideTile(r, t, w, 2, by_warp=False)) for r, t, w in ((64, 64, 4), (64, 128, 4), (128, 128, 8))),
)
LISTS = {16: 8, 32: 20, 64: 40, 128: 80, "wide": 300}  # rows an expert that lead to each kind of list
# us at T = 32, 128, 512, 2048, 8192, uniform routing
GGML = {
    ("qwen3-30b-a3b", "q2_k+q3_k"): (522, 1357, 1619, 2986, 10146),
    ("qwen3-30b-a3b", "q4_k+q6_k"): (437, 1036, 1233, 2486, 8734),
    ("qwen3-30b-a3b", "q8_0"): (405, 875, 1069, 2356, 8106),
    ("mixtral-8x7b", "q2_k+q3_k"): (1272, 2920, 4502, 13833, 50430),
    ("mixtral-8x7b", "q4_k+q6_k"): (1040, 2173, 3355, 10153, 37744),
    ("mixtral-8x7b", "mxfp4"): (1047, 1838, 2927, 8654, 32099),
    ("deepseek-v3-like", "q2_k+q3_k"): (6383, 22095, 24526, 27713, 74291),
    ("deepseek-v3-like", "q4_k+q6_k"): (5077, 16205, 17677, 21364, 59850),
    ("deepseek-v3-like", "mxfp4"): (5203, 13703, 14939, 18517, 52400),
}
COLUMNS = ["what", "shape", "format", "arithmetic", "T", "tokens", "tile", "ok", "nmse", "us_p20", "us_p50", "us_p80",
           "tops", "floor_us", "ratio_to_floor", "ggml_us", "times_ggml", "n", "method", "device", "driver", "torch",
           "triton", "commit"]  # fmt: skip


def rows_of(x: torch.Tensor, layout: str) -> mo.MmqRows:
    """Quantised by the kernel."""
    q = quantize_activations(x, layout)
    return mo.MmqRows(q.codes, q.scale, q.total, layout)


def small_case(kind: str, tokens: int, tile: gt.Tile | WideTile, n: int = 256, kd: int = 1024) -> str:
    """ "yes", or what differs from the reference."""
    format, layout = kind.split(":")
    draw = torch.Generator(DEVICE).manual_seed(3)
    w = one_weight(format, 2, n, kd, draw)
    x = torch.randn(tokens + 9, kd, device=DEVICE, generator=draw) * 3
    rows, row_of = rows_of(x.bfloat16(), layout), torch.randperm(len(x), device=DEVICE, generator=draw).int()
    tiles = [[0, 0, min(5, tokens)], [1, 5, tokens], [-1, 0, 0]]
    work = gt.WorkList(torch.tensor(tiles, dtype=torch.int32, device=DEVICE), tokens)
    got, want = (torch.full((len(x), n), float("inf"), device=DEVICE) for _ in range(2))
    try:
        mmq.mmq_product(rows, row_of, w, work, got, tile=tile)
        torch.cuda.synchronize()
    except Exception as e:
        return f"{type(e).__name__}: {str(e)[:80]}"
    mmq.mmq_product_ref(rows, row_of, w, work, want)
    short = mmq.mmq_product(rows, row_of, w, work, torch.full_like(got, float("inf"), dtype=torch.bfloat16), tile=tile)
    if not torch.equal(short.view(torch.int16), want.bfloat16().view(torch.int16)):
        return "WRONG: bf16 rows differ"
    same = torch.equal(got.view(torch.int32), want.view(torch.int32))
    return "yes" if same else f"WRONG: {int((got.view(torch.int32) != want.view(torch.int32)).sum())} of {got.numel()}"


def shared_out(option: str, cases: list[str], workers: int) -> str:
    """What processes of this script print that get a share of the cases each."""
    parts = [";".join(cases[i::workers]) for i in range(workers)]
    command = [sys.executable, __file__, "--out", ".", option]
    running = [subprocess.Popen([*command, p], stdout=subprocess.PIPE, text=True) for p in parts if p]
    return "".join(p.communicate()[0] for p in running)


def checked(kinds: list[str], workers: int) -> dict[tuple[str, int, str], str]:
    """(kind, tokens, tile) -> what `small_case` says, from several processes."""
    cases = [f"{k}/{t}" for k, t in itertools.product(kinds, range(len(TILES)))]
    said = shared_out("--cases", cases, workers)
    lines = (line.split("\t") for line in said.splitlines() if line.count("\t") == 2)
    return {(kind, TILES[int(at)][0], str(tuple(TILES[int(at)][1]))): ok for kind, at, ok in lines}


def compile_layer(case: str) -> None:
    """One call of a layer with K experts, each with so many rows that the kernels of `case`'s list run."""
    name, format, form, rows = case.split(":")
    s = SHAPES[name]
    few = LayerShape(s.name, s.d_model, s.d_expert, s.top_k, s.top_k)
    layer(make_call(few, *routings(few, int(rows))[0]), make_weights(few, format), form == "folded")
    torch.cuda.synchronize()


def sweep(kinds: list[str], ok: dict, budget_ms: float) -> Iterator[dict[str, Any]]:
    """One product, [24, 2048, 7168] weights, 8, 128 and 256 rows an expert."""
    experts, n, kd = 24, 2048, 7168
    for kind in kinds:
        format, layout = kind.split(":")
        w = one_weight(format, experts, n, kd, torch.Generator(DEVICE).manual_seed(1))
        for each in (8, 64, 256):
            x = torch.randn(experts * each, kd, device=DEVICE).bfloat16()
            rows, row_of = rows_of(x, layout), torch.randperm(len(x), device=DEVICE).int()
            out = torch.empty(len(x), n, dtype=torch.bfloat16, device=DEVICE)
            counts = torch.full((experts,), each, dtype=torch.int32, device=DEVICE)
            offsets = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
            for tokens, tile in TILES:
                if each != {16: 8, 64: 64, 128: 256}[tokens]:
                    continue
                said = ok.get((kind, tokens, str(tuple(tile))), "not run")
                row = {"what": f"product-{each}", "format": format, "arithmetic": layout, "T": len(x),
                       "tokens": tokens, "tile": str(tuple(tile)), "ok": said}  # fmt: skip
                if said == "yes":
                    work = gt.work_list(counts, offsets, len(x), tokens)
                    args = (rows, row_of, w, work, out)
                    t = time_calls([lambda args=args, tile=tile: mmq.mmq_product(*args, tile=tile)], budget_ms)
                    row |= times(t) | {"tops": f"{2 * len(x) * n * kd / t.us_p50 / 1e6:.0f}"}
                yield row


def times(t: Any) -> dict[str, str]:
    """A row's clock columns."""
    return {f"us_p{p}": f"{getattr(t, f'us_p{p}'):.1f}" for p in (20, 50, 80)} | {"n": t.n, "method": t.method}


def layer(c: Call, w: Any, folded: bool) -> torch.Tensor:
    """The routed layer [T, D], bf16: quantise, gate, up, activation, quantise, down, weighted sum."""
    p = plan.plan(c.ids, c.weights, len(w.gate.data))
    pairs = c.ids.numel()
    work = gt.work_list(p.counts, p.offsets, pairs, gt.tokens_for(pairs, len(w.gate.data)))
    named = mo.folded_layout if folded else mo.layout_for
    x = rows_of(c.x, named(w.gate.format))
    room = max(mmq.scratch_for(work, named(m.format) == "q8_k", m) for m in (w.gate, w.down))
    scratch = torch.empty(room, dtype=torch.uint8, device=c.x.device) if room else None
    hidden = mmq.mmq_hidden(x, p.token, w.gate, w.up, work, torch.bfloat16, scratch=scratch)
    to = go.Scatter(p.token, p.slot, c.ids.shape[1])
    down = rows_of(hidden, named(w.down.format))
    mmq.mmq_product(down, None, w.down, work, c.y, to=to, scratch=scratch)
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights)


def check(shape: LayerShape, w: Any, tokens: int, folded: bool) -> tuple[float, str]:
    """The NMSE of up to 64 rows against fp32 mathematics, and "yes" or what is wrong."""
    c = make_call(shape, *routings(shape, tokens, seed=77)[0])
    got = layer(c, w, folded)
    some = torch.randperm(tokens, device=DEVICE)[:64]
    part = Call(c.x[some], c.ids[some].contiguous(), c.weights[some].contiguous(), c.h, c.y)
    want = exact(part, w).double()
    nmse = float((got[some].double() - want).square().sum() / want.square().sum())
    if not nmse <= tol("mmq/layer"):
        return nmse, "WRONG: far from fp32"
    for n in (1, len(some)):
        few = make_call(shape, part.ids[:n].contiguous(), part.weights[:n].contiguous())
        alone = layer(Call(part.x[:n].contiguous(), few.ids, few.weights, few.h, few.y), w, folded)
        if not torch.equal(alone, got[some[:n]]):
            return nmse, f"WRONG: bits differ in a batch of {n}: {int((alone != got[some[:n]]).sum())}"
    return nmse, "yes"


def way(shape: LayerShape, w: Any, tokens: int, folded: bool) -> str:
    """ "list of 64 rows", and which of gate and down open their weights."""
    pairs, experts = tokens * shape.top_k, shape.experts
    n = gt.tokens_for(pairs, experts)
    work = gt.WorkList(torch.empty(gt.most_tiles(pairs, experts, n), 3, dtype=torch.int32), n)
    wide = [name for name in ("gate", "down") if mmq.goes_wide(getattr(w, name), work, folded)]
    return f"list of {n} rows" + (f", opened: {' '.join(wide)}" if wide else "")


def cells_of(args: argparse.Namespace) -> list[tuple[str, str, str, list[int]]]:
    """(shape, format, arithmetic, tokens) of every layer that has such an arithmetic."""
    if args.cells:
        parts = (cell.split(":") for cell in args.cells)
        return [(shape, format, form, [int(t) for t in tokens.split(",")]) for shape, format, form, tokens in parts]
    named = itertools.product(args.shapes.split(","), args.formats.split(","), args.arithmetics.split(","))
    tokens = [int(t) for t in args.tokens.split(",")]
    return [(s, f, a, tokens) for s, f, a in named if a == "ggml" or set(f.split("+")) & set(mo.FOLDED)]


def compiled(cells: list[tuple[str, str, str, list[int]]], workers: int) -> None:
    """Every kernel of the cells, compiled by several processes."""
    cases: dict[str, None] = {}
    for name, format, form, tokens in cells:
        s = SHAPES[name]
        for t in tokens:
            pairs = t * s.top_k
            n = gt.tokens_for(pairs, s.experts)
            many = n == 128 and gt.most_tiles(pairs, s.experts, n) >= mmq.WIDE_TILES * s.experts
            cases[f"{name}:{format}:{form}:{LISTS['wide' if many else n]}"] = None
    shared_out("--compile", list(cases), workers)


def layers(args: argparse.Namespace, read: float) -> Iterator[dict[str, Any]]:
    """Whole layers, ggml's arithmetic and the folded form."""
    held = None
    for name, format, form, many in cells_of(args):
        shape = SHAPES[name]
        if held != (name, format):
            w, held = None, (name, format)
            torch.cuda.empty_cache()
            w = make_weights(shape, format)
        for tokens in many:
            nmse, ok = check(shape, w, tokens, form == "folded")
            row = {"what": "layer", "shape": name, "format": format, "arithmetic": form, "T": tokens, "ok": ok,
                   "nmse": f"{nmse:.2e}", "tile": way(shape, w, tokens, form == "folded")}  # fmt: skip
            if ok == "yes":
                picks = routings(shape, tokens)
                calls = [make_call(shape, *p) for p in picks]
                t = time_calls([lambda c=c, w=w, f=form: layer(c, w, f == "folded") for c in calls], args.budget_ms)
                floor = floor_us(shape, w, tokens, experts_hit(picks), read, INT8_TOPS)
                row |= times(t) | {"floor_us": f"{floor:.1f}", "ratio_to_floor": f"{t.us_p50 / floor:.2f}"}
                peer = GGML.get((name, format))
                if peer and tokens in TOKENS:
                    us = peer[TOKENS.index(tokens)]
                    row |= {"ggml_us": us, "times_ggml": f"{us / t.us_p50:.2f}"}
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the int8 grouped product; writes mmq_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for mmq_timings.csv")
    parser.add_argument("--sweep", action="store_true", help="single products for many tiles")
    parser.add_argument("--layers", action="store_true", help="whole layers (default when nothing else is asked for)")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--formats", default="q2_k+q3_k,q4_k+q6_k,q8_0,mxfp4")
    parser.add_argument("--shapes", default="qwen3-30b-a3b,mixtral-8x7b,deepseek-v3-like")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--arithmetics", default="ggml,folded")
    parser.add_argument("--budget-ms", type=float, default=25.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--cells", nargs="*", help="layers as shape:format:arithmetic:T,T in place of the product")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("mmq_timings needs a CUDA GPU; torch sees none.")
    if args.cases:
        for kind, at in (case.split("/") for case in args.cases.split(";")):
            print(kind, at, small_case(kind, *TILES[int(at)]), sep="\t", flush=True)
        return 0
    if args.compile:
        for case in args.compile.split(";"):
            compile_layer(case)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, failed = time.perf_counter(), measured_on(), 0
    torch.backends.cuda.matmul.allow_tf32 = False
    read = bandwidth_gb_per_s()["read"]
    kinds = args.kinds.split(",")
    ok = checked(kinds, args.workers) if args.sweep else {}
    if args.layers or not args.sweep:
        compiled(cells_of(args), args.workers)
    print(f"checked {len(ok)} tiles, compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    with (args.out / "mmq_timings.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        rows = itertools.chain(
            sweep(kinds, ok, args.budget_ms) if args.sweep else (),
            layers(args, read) if args.layers or not args.sweep else (),
        )
        for row in rows:
            table.writerow({**row, **where})
            file.flush()
            failed += row["ok"].startswith("WRONG")
            shown = ("what", "shape", "format", "arithmetic", "T", "tokens", "tile", "us_p50", "tops", "floor_us",
                     "ratio_to_floor", "ggml_us", "times_ggml", "nmse", "ok")  # fmt: skip
            print(*(str(row.get(c, "-")) for c in shown), flush=True)
    print(f"{where['device']}, read {read:.0f} GB/s; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
