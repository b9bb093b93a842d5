"""Timings of the int8 grouped product on a CUDA GPU: single products for many tiles, and whole routed layers.

    PYTHONPATH=.:kernels python benchmarks/mmq_timings.py --out DIR [--sweep --kinds q2_k:d2s6,q2_k:q8_k --rows 2,64]
        [--cells SHAPE:FORMAT:ARITHMETIC:T,T ..] [--routings uniform,zipf] [--seconds 100] [--workers 12]

ARITHMETIC is "ggml", "folded" or "ggml@planar"; a kind is a weight format and the layout of the activations (q8_k: the
folded form). Before a layer is timed, rows of it go through fp32 mathematics, a batch of one and, bit for bit, a batch
of as many tokens as are timed; every tile of a sweep has the bits of the one that ships, which tests hold to the
reference's. A wrong result has no time. `--workers` processes compile meanwhile, in the order of
the cells; cells that `--seconds` do not reach are left out. `tile` says which products open their weights first. A call
is one pass of a CUDA graph over a rotation of routings. `ggml_us`: the layer of ggml-cuda on another H200, recorded;
`floor_us`: bytes over the read bandwidth measured in the same run, or operations over 918 int8 TOP/s, whichever takes
longer.
"""

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mmq_layers as ml
import torch
from grouped_layers import make_weights, one_weight
from grouped_timings import floor_us

from moe_lab.bench.peers import FORMATS, recorded
from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, Popularity, experts_hit, routings
from moe_lab.errors import LabError
from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.launch.ahead import job_of, pool
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import MmqRows
from moe_lab_kernels.mmq.wide import WideTile

DEVICE, INT8_TOPS = "cuda", 918.0
KINDS = ("q2_k:d2s6", "q3_k:d4", "q4_k:ds4", "q5_k:ds4", "q6_k:d4", "q8_0:d4", "q4_0:ds4", "mxfp4:d4", "nvfp4:d4",
         "q2_k:q8_k", "q3_k:q8_k", "q4_k:q8_k", "q6_k:q8_k")  # fmt: skip
EXPERTS = 24  # of a sweep
# rows an expert -> (rows of the list's tiles, Tile of a program) beside the one that ships
TILES: dict[int, list[tuple[int, Any]]] = {
    2: [(16, gt.Tile(*t)) for t in ((32, 2, 1, 1), (32, 2, 2, 1), (16, 1, 1, 1), (64, 4, 1, 1))],
    20: [(32, gt.Tile(*t)) for t in ((64, 4, 1, 1), (64, 4, 2, 1))],
    64: [(64, gt.Tile(*t)) for t in ((64, 4, 1), (64, 4, 2), (64, 4, 2, 8, 168), (128, 8, 2))],
    256: [(128, WideTile(*t[:4], t[4])) for t in ((64, 64, 2, 3, 2), (64, 64, 4, 3, 1), (128, 64, 4, 3, 2))],
}
COLUMNS = ["what", "shape", "format", "arithmetic", "layout", "routing", "T", "tokens", "tile", "ok", "nmse", "us_p20",
           "us_p50", "us_p80", "tops", "floor_us", "ratio_to_floor", "ggml_us", "times_ggml", "n", "method", "device",
           "driver", "torch", "triton", "commit"]  # fmt: skip
SHOWN = ("what", "shape", "format", "arithmetic", "layout", "routing", "T", "tokens", "tile", "us_p50", "tops",
         "ratio_to_floor", "ggml_us", "times_ggml", "nmse", "ok")  # fmt: skip
Cell = tuple[str, str, str, str, int]  # shape, format, arithmetic, layout, tokens


def ggml_us(shape: str, format: str, routing: str, tokens: int) -> float | None:
    """The recorded layer, whole, of the same model, format, picks' popularity and tokens."""
    wanted = ("ggml-cuda", shape, format, routing, str(tokens))
    for row in recorded():
        if (row["peer"], row["model"], FORMATS.get(row["dtype"], row["dtype"]), row["routing"], row["m"]) == wanted:
            return float(row["us"])
    return None


def product_of(kind: str, each: int, device: str) -> tuple[MmqRows, torch.Tensor, Weight]:
    """Arguments of a product of [24, 2048, 7168] weights with `each` rows an expert; on the host, empty ones."""
    format, layout = kind.split(":")
    experts, n, kd = EXPERTS, 2048, 7168
    if device == "cpu":
        w = ml.empty_weights(LayerShape("sweep", kd, n, experts, 1), format, "raw").gate
    else:
        w = one_weight(format, experts, n, kd, torch.Generator(DEVICE).manual_seed(1))
    x = torch.randn(experts * each, kd, device=device).bfloat16()
    return ml.rows_of(x, layout), torch.randperm(len(x), device=device).int(), w


def sweep(kinds: list[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One product in every tile, whose bits must be those of the tile that ships."""
    cases = [(kind, int(each)) for kind in kinds for each in args.rows.split(",")]
    with pool(args.workers) as compilers:
        ahead, waits = ml.Ahead(compilers), {}
        for kind, each in cases:
            with record_launches() as made:
                rows, row_of, w = product_of(kind, each, "cpu")
                out = torch.empty(EXPERTS * each, 2048, dtype=torch.bfloat16)
                for tokens, tile in tiles_for(kind, each):
                    tiles = gt.most_tiles(EXPERTS * each, EXPERTS, tokens)
                    work = gt.WorkList(torch.empty(tiles, 3, dtype=torch.int32), tokens)
                    mmq.mmq_product(rows, row_of, w, work, out, tile=tile)
            waits[kind, each] = ahead.ask([job_of(launch) for launch in made])
        for kind, each in cases:
            said = [f.result()[0] for f in waits[kind, each]]
            print(*(why[:150] for why in said if why), flush=True)
            yield from swept(kind, each, args.budget_ms)


def tiles_for(kind: str, each: int) -> list[tuple[int, Any]]:
    """(rows of the list's tiles, tile of a program), the one that ships first."""
    format, layout = kind.split(":")
    tokens = TILES[each][0][0]
    first = mmq.mmq_tile(format, layout == "q8_k", tokens, DEVICE)
    return [(tokens, first), *(t for t in TILES[each] if t[1] != first)]


def swept(kind: str, each: int, budget_ms: float) -> Iterator[dict[str, Any]]:
    """The tiles of one kind and as many rows an expert."""
    rows, row_of, w = product_of(kind, each, DEVICE)
    counts = torch.full((EXPERTS,), each, dtype=torch.int32, device=DEVICE)
    offsets = torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))
    want = None
    for tokens, tile in tiles_for(kind, each):
        format, layout = kind.split(":")
        row = {"what": f"product-{each}", "format": format, "arithmetic": layout, "layout": "raw",
               "T": len(row_of), "tokens": tokens, "tile": str(tuple(tile)), "ok": "yes"}  # fmt: skip
        out = torch.full((len(row_of), 2048), float("inf"), dtype=torch.bfloat16, device=DEVICE)
        call = (rows, row_of, w, gt.work_list(counts, offsets, len(row_of), tokens), out)
        try:
            mmq.mmq_product(*call, tile=tile)
            want = out.clone() if want is None else want
            bad = int((out != want).sum())
            row["ok"] = f"WRONG: {bad} values differ" if bad else "yes"
        except Exception as e:
            row["ok"] = f"{type(e).__name__}: {str(e)[:80]}"
        if row["ok"] == "yes":
            t = time_calls([lambda call=call, tile=tile: mmq.mmq_product(*call, tile=tile)], budget_ms)
            row |= times(t) | {"tops": f"{2 * len(row_of) * w.data.shape[1] * w.kd / t.us_p50 / 1e6:.0f}"}
        yield row


def times(t: Any) -> dict[str, str]:
    """A row's clock columns."""
    return {f"us_p{p}": f"{getattr(t, f'us_p{p}'):.1f}" for p in (20, 50, 80)} | {"n": t.n, "method": t.method}


def cells_of(named: list[str]) -> list[Cell]:
    """Of shape:format:arithmetic:T,T, with "@planar" behind the arithmetic for planes."""
    cells = []
    for cell in named:
        shape, format, form, tokens = cell.split(":")
        arithmetic, _, layout = form.partition("@")
        cells += [(shape, format, arithmetic, layout or "raw", int(t)) for t in tokens.split(",")]
    return cells


def timed_layer(cell: Cell, w: ml.Weights, known: ml.Known, popularity: str, read: float,
                budget_ms: float) -> dict[str, Any]:  # fmt: skip
    """A row of the table."""
    name, format, arithmetic, layout, tokens = cell
    shape, folded = SHAPES[name], arithmetic == "folded"
    row = {"what": "layer", "shape": name, "format": format, "arithmetic": arithmetic, "layout": layout,
           "routing": popularity, "T": tokens, "ok": known.among(tokens), "nmse": f"{known.nmse:.2e}",
           "tile": ml.way(shape, w, tokens, folded)}  # fmt: skip
    if row["ok"] == "yes":
        picks = routings(shape, tokens, cast(Popularity, popularity))
        calls = [ml.make_call(shape, *p) for p in picks]
        t = time_calls([lambda c=c: ml.layer(c, w, folded) for c in calls], budget_ms, most=20)
        floor, peer = floor_us(shape, w, tokens, experts_hit(picks), read, INT8_TOPS), None
        row |= times(t) | {"floor_us": f"{floor:.1f}", "ratio_to_floor": f"{t.us_p50 / floor:.2f}"}
        peer = ggml_us(name, format, popularity, tokens)
        row |= {"ggml_us": f"{peer:.1f}", "times_ggml": f"{peer / t.us_p50:.2f}"} if peer else {}
    return row


def layers(args: argparse.Namespace, read: float, begin: float) -> Iterator[dict[str, Any]]:
    """Whole layers, one set of weights at a time."""
    with pool(args.workers) as compilers:
        ahead, cells = ml.Ahead(compilers), cells_of(args.cells)
        waits = {c: ahead.ask(list(ml.jobs_of(SHAPES[c[0]], c[1], c[3], c[2] == "folded", c[4]))) for c in cells}
        for held, group in itertools.groupby(cells, key=lambda c: c[:4]):
            name, format, arithmetic, layout = held
            if time.perf_counter() - begin > args.seconds:
                print("no time left from", *held, flush=True)
                return
            w = raw = known = None
            torch.cuda.empty_cache()
            raw = make_weights(SHAPES[name], format)
            w = ml.in_layout(raw, layout)
            for cell in group:
                for why in (f.result()[0] for f in waits[cell]):
                    if why:
                        print(*cell, "does not compile:", why[:150], flush=True)
                known = known or ml.Known(SHAPES[name], w, arithmetic == "folded", raw)
                for popularity in args.routings.split(","):
                    yield timed_layer(cell, w, known, popularity, read, args.budget_ms)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Timings of the int8 grouped product; writes mmq_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for mmq_timings.csv")
    parser.add_argument("--sweep", action="store_true", help="single products for many tiles")
    parser.add_argument("--rows", default=",".join(map(str, TILES)), help="rows an expert of a sweep")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--cells", nargs="*", default=[], help="layers: SHAPE:FORMAT:ARITHMETIC[@planar]:T,T")
    parser.add_argument("--routings", default="uniform", help="uniform, zipf or both")
    parser.add_argument("--budget-ms", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="no new weights are made after so long")
    parser.add_argument("--workers", type=int, default=12)
    return parser.parse_args()


def main() -> int:
    args, begin, failed = parsed(), time.perf_counter(), 0
    if not torch.cuda.is_available():
        raise LabError("mmq_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    where, kinds = measured_on(), args.kinds.split(",")
    torch.backends.cuda.matmul.allow_tf32 = False
    read = bandwidth_gb_per_s()["read"]
    rows = itertools.chain(sweep(kinds, args) if args.sweep else (), layers(args, read, begin))
    with (args.out / "mmq_timings.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for row in rows:
            table.writerow({**row, **where})
            file.flush()
            failed += row["ok"].startswith("WRONG")
            print(*(str(row.get(c, "-")) for c in SHOWN), f"{time.perf_counter() - begin:.0f}s", flush=True)
    print(f"{where['device']}, read {read:.0f} GB/s; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
