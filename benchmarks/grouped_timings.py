"""Timings of the grouped GEMM on a CUDA GPU: whole routed layers from given picks on, beside recorded peers and floors.

    PYTHONPATH=.:kernels python benchmarks/grouped_timings.py --out DIR [--formats bf16,q2_k+q3_k] [--shapes ..]
        [--tokens ..] [--sweep]

A layer is plan, work list, gate + up + activation, down, weighted sum: five launches (seven from 2,049 pairs on).
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
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moe_lab.bench.runner import bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.tolerances import tol
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows import combine
from moe_lab_kernels.storage.blocks import BLOCKS

DEVICE = "cuda"
MODELS = ("qwen3-30b-a3b", "gemma4-26b-a4b-like", "gpt-oss-120b-like", "mixtral-8x7b", "deepseek-v3-like", "v4.1-like")
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
# us at T = 1, 8, 32, 128, 512, 2048, 8192, uniform routing: the best full-layer bf16 peer, vLLM's Triton kernel
PEERS = {
    "qwen3-30b-a3b": ((29.7, 133, 257, 302, 334, 508, 1211), (29.7, 133, 257, 302, 334, 508, 1435)),
    "mixtral-8x7b": ((179, 555, 658, 677, 976, 2582, 8216), (179, 555, 658, 677, 1035, 2746, 10371)),
    "deepseek-v3-like": ((177, 1236, 3139, 4925, 5231, 5953, 12690), (177, 1236, 3139, 4925, 5231, 5953, 14132)),
    "gpt-oss-120b-like": ((59.0, 371, 894, 1450, 1526, 1744, 3429), (59.0, 371, 894, 1450, 1526, 1744, 3812)),
    "gemma4-26b-a4b-like": ((35.5, 163, 317, 384, 415, 649, 1526), (35.5, 163, 317, 384, 415, 649, 1885)),
}
TIMED = ("us_p20", "us_p50", "us_p80", "floor_us", "ratio_to_floor", "best_peer_us", "ratio_to_best", "vllm_us",
         "ratio_to_vllm", "n", "method")  # fmt: skip
COLUMNS = ["what", "shape", "format", "T", "tokens", "tile", "ok", "nmse", *TIMED, "read_gb_per_s", "bf16_tflops",
           "device", "driver", "torch", "triton", "commit"]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """gate, up [E, F, D] and down [E, D, F]."""

    gate: go.Weight
    up: go.Weight
    down: go.Weight


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of x a tile, and the tiles of the two products; None: the package's choice."""

    tokens: int | None = None
    gate_up: gt.Tile | None = None
    down: gt.Tile | None = None


def one_weight(format: str, experts: int, rows: int, columns: int, draw: torch.Generator) -> go.Weight:
    """Random bf16, or 128 Student-t rows quantised and dealt at random to the rows of every expert."""
    if format == "bf16":
        data = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=DEVICE)
        for e in range(experts):
            data[e] = torch.randn(rows, columns, generator=draw, device=DEVICE) / columns**0.5
        return go.Weight(data, format, columns)
    normal = torch.randn(128, columns, generator=draw, device=DEVICE)
    chi_squared = torch.randn(5, 128, columns, generator=draw, device=DEVICE).square().sum(0)
    book = quantize(normal * (5.0 / chi_squared).sqrt() / columns**0.5, format)
    if format not in BLOCKS:  # scales of their own: whole matrices, as rows may share a scale
        full = quantize(torch.randn(rows, columns, generator=draw, device=DEVICE) / columns**0.5, format)
        parts = (full.data, full.scales, full.biases if full.biases is not None else full.global_scale)
        data, scales, second = (None if p is None else p.expand(experts, *p.shape).contiguous() for p in parts)
        assert data is not None
        return go.Weight(data, format, columns, scales, second)
    pick = torch.randint(128, (experts, rows), generator=draw, device=DEVICE)
    data = torch.empty(experts, rows, book.data.shape[1], dtype=torch.uint8, device=DEVICE)
    for e in range(experts):
        data[e] = book.data[pick[e]]
    return go.Weight(data, format, columns)


def make_weights(shape: LayerShape, format: str) -> Weights:
    """`format` is one name, or that of gate and up, a plus, that of down."""
    gate_up, down = format.split("+") if "+" in format else (format, format)
    draw = torch.Generator(DEVICE).manual_seed(5)
    e, d, f = shape.experts, shape.d_model, shape.d_expert
    return Weights(one_weight(gate_up, e, f, d, draw), one_weight(gate_up, e, f, d, draw),
                   one_weight(down, e, d, f, draw))  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One input, and every buffer a product writes."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor


def make_call(shape: LayerShape, ids: torch.Tensor, weights: torch.Tensor) -> Call:
    """Fresh Gaussian rows, poisoned buffers."""
    t, k = ids.shape
    nan = {"dtype": torch.bfloat16, "device": DEVICE, "fill_value": float("nan")}
    x = torch.randn(t, shape.d_model, device=DEVICE).bfloat16()
    return Call(x, ids.to(DEVICE), weights.to(DEVICE), torch.full((t * k, shape.d_expert), **nan),
                torch.full((t * k, shape.d_model), **nan))  # fmt: skip


def planned(c: Call, experts: int, cut: Cut) -> tuple[plan.Plan, gt.WorkList]:
    """The plan and its tiles."""
    p = plan.plan(c.ids, c.weights, experts)
    pairs = c.ids.numel()
    return p, gt.work_list(p.counts, p.offsets, pairs, cut.tokens or gt.tokens_for(pairs, experts))


def gate_up(c: Call, w: Weights, p: plan.Plan, work: gt.WorkList, cut: Cut) -> None:
    """c.h from c.x."""
    gg.grouped_gate_up(c.x, p.token, w.gate, w.up, work, c.h, tile=cut.gate_up)


def down(c: Call, w: Weights, p: plan.Plan, work: gt.WorkList, cut: Cut) -> None:
    """c.y from c.h."""
    gg.grouped_product(c.h, None, w.down, work, c.y, to=go.Scatter(p.token, p.slot, c.ids.shape[1]), tile=cut.down)


def layer(c: Call, w: Weights, cut: Cut) -> torch.Tensor:
    """The routed layer [T, D], bf16."""
    p, work = planned(c, len(w.gate.data), cut)
    gate_up(c, w, p, work, cut)
    down(c, w, p, work, cut)
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights)


def exact(c: Call, w: Weights) -> torch.Tensor:
    """The same mathematics in fp32 on the decoded weights, without store points."""
    out = torch.zeros(c.x.shape, device=DEVICE)
    for e in c.ids.unique().tolist():
        token, slot = (c.ids == e).nonzero(as_tuple=True)
        x = c.x[token].float()
        g, u, d = (go.values_ref(m, e, torch.float32) for m in (w.gate, w.up, w.down))
        h = torch.nn.functional.silu(x @ g.T) * (x @ u.T)
        out.index_add_(0, token, c.weights[token, slot, None] * (h @ d.T))
    return out


def check(shape: LayerShape, w: Weights, tokens: int, cut: Cut) -> tuple[float, str]:
    """The NMSE of up to 64 rows against `exact`, and "yes" or what is wrong."""
    c = make_call(shape, *routings(shape, tokens, seed=77)[0])
    got = layer(c, w, cut)
    some = torch.randperm(tokens, device=DEVICE)[:64]
    part = replace(c, x=c.x[some], ids=c.ids[some].contiguous(), weights=c.weights[some].contiguous())
    want = exact(part, w).double()
    nmse = float((got[some].double() - want).square().sum() / want.square().sum())
    if not nmse <= tol("store/bf16"):
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
        return sum(p.numel() * p.element_size() for p in parts) / (len(m.data) * m.data.shape[1] * m.kd)

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
    at = TOKENS.index(tokens) if tokens in TOKENS else None
    best, vllm = (PEERS[shape.name][i][at] if at is not None and shape.name in PEERS else None for i in (0, 1))

    def row(what: str, cut: Cut, t: Any, ok: str = "yes", nmse: str = "") -> dict[str, Any]:
        tile = str(tuple(cut.gate_up or cut.down or ()))
        out = {**head, "what": what, "tokens": cut.tokens or gt.tokens_for(pairs, e), "tile": tile, "nmse": nmse}
        out["ok"] = t if isinstance(t, str) else ok
        if t is None or isinstance(t, str):
            return out
        out |= {f"us_p{p}": f"{getattr(t, f'us_p{p}'):.1f}" for p in (20, 50, 80)} | {"n": t.n, "method": t.method}
        if what == "layer":
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
    yield row("layer", Cut(), timed(lambda c, cut: layer(c, w, cut), calls, Cut(), args.budget_ms), ok, f"{nmse:.2e}")
    ready: dict[int | None, list[Any]] = {}

    def part(op: Callable[..., None], cut: Cut) -> Any:
        if cut.tokens not in ready:
            ready[cut.tokens] = [planned(c, e, cut) for c in calls]
        paired = dict(zip(map(id, calls), ready[cut.tokens], strict=True))
        return timed(lambda c, cut: op(c, w, *paired[id(c)], cut), calls, cut, args.budget_ms)

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


def main() -> int:
    parser = argparse.ArgumentParser(description="Timings of the grouped GEMM; writes grouped_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for grouped_timings.csv")
    parser.add_argument("--formats", default="bf16,q2_k+q3_k")
    parser.add_argument("--shapes", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--budget-ms", type=float, default=30.0)
    parser.add_argument("--sweep", action="store_true", help="time gate + up and down for other tiles too")
    parser.add_argument("--anyway", action="store_true", help="time wrong results too, for looking into them")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("grouped_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, where, failed = time.perf_counter(), measured_on(), 0
    read, tflops = bandwidth_gb_per_s()["read"], matrix_tflops()
    torch.backends.cuda.matmul.allow_tf32 = False
    with (args.out / "grouped_timings.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        table.writeheader()
        for name, format in itertools.product(args.shapes.split(","), args.formats.split(",")):
            shape = SHAPES[name]
            first, *rest = format.split("+")
            widths = ((first, shape.d_model), (rest[0] if rest else first, shape.d_expert))
            if any(f in BLOCKS and width % BLOCKS[f].values for f, width in widths):
                continue
            w = make_weights(shape, format)
            for tokens in map(int, args.tokens.split(",")):
                for row in rows_of(shape, format, w, tokens, args, read, tflops):
                    table.writerow({**row, **where})
                    file.flush()
                    failed += row["ok"].startswith("WRONG")
                    cells = (
                        row.get(c, "")
                        for c in ("us_p50", "floor_us", "ratio_to_floor", "ratio_to_best", "ratio_to_vllm")
                    )
                    said = f"{row['what']:8} {row['tokens']:4} {row['tile']:24} {row['ok']:4} {row['nmse']:9}"
                    print(f"{name:20} {format:10} T={tokens:<5} {said}", *(f"{c:>8}" for c in cells), flush=True)
            del w
            torch.cuda.empty_cache()
    print(f"{where['device']}, read {read:.0f} GB/s, bf16 {tflops:.0f} TFLOP/s; {time.perf_counter() - begin:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
