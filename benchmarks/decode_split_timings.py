"""Where a decode step's microseconds go: whole layers from planes beside what bounds them from below.

    PYTHONPATH=.:kernels python benchmarks/decode_split_timings.py --out DIR [--cells qwen3-30b-a3b:mxfp4+mxfp4:1,..]
        [--cuts 8.16.128.4.1-8.16.128.4.1,..] [--timeline] [--budget-ms 2] [--workers 12]

A cell is a shape, a pair of formats and T. Every row is a graph replayed over rotating inputs, microseconds a layer:
    layer         as the arm runs it: three launches, weights from device memory
    in L2         the same over one input, whose weights stay in the L2 cache where they fit: no bytes from memory
    one expert    K = 1 (T = 1 alone): the chain of dependent steps with an eighth of the bytes and programs
    launches      three kernels that do nothing, of one program each, started early as the layer's are
    programs      the same of as many programs as the layer's have: what starting them costs; "of a warp": as many warps
    experts       quantise and the one grid, without the weighted sum;  quantise  that alone
    kernel NAME   a kernel's own duration in a profiler's timeline of replays, and gap NAME, from the end of the one
                  before to its end (below its duration where it started early); with `--timeline` alone, since a
                  profiler that has looked once slows every later launch of its process
    cut TEXT      the layer with its programs cut otherwise: rows.sums.registers.shared.warps of gate and up, then down
Correct first: each cell's tokens against calls of their own, bit for bit, and fp32 mathematics; every cut likewise.
"""

import argparse
import csv
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from decode_layer_timings import bound, target_us, variant_of

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.runner import Pass, bandwidth_gb_per_s, measured_on, time_calls
from moe_lab.bench.workloads import SHAPES, LayerShape, experts_hit, layer_bytes, routings
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, record_launches, tl
from moe_lab_kernels.gemv import mlp
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.launch.ahead import job_of, pool, prepare
from moe_lab_kernels.primitives import let_the_next_kernel_start, wait_for_the_kernel_before

CELLS = (
    *(f"qwen3-30b-a3b:{pair}:1" for pair in (
        "q2_k+q3_k", "mxfp4+mxfp4", "nvfp4+nvfp4", "q4_k+q6_k", "q8_0+q8_0", "q5_k+q5_k", "q4_0+q4_0")),
    *(f"gpt-oss-120b-like:{f}+{f}:1" for f in ("mxfp4", "nvfp4")),
    *(f"gemma4-26b-a4b-like:{pair}:1" for pair in ("q2_k+q8_0", "mxfp4+mxfp4", "nvfp4+nvfp4")),
)  # fmt: skip
COLUMNS = ["what", "model", "T", "format", "us_p20", "us_p50", "us_p80", "floor_us", "target_us", "n", "method",
           "device", "driver", "torch", "triton", "commit"]  # fmt: skip
REPLAYS = 5  # that the profiler sees
Calls = list[Callable[[], Any]]


@jit
def _nothing(PDL: tl.constexpr):
    """What a launch and its programs cost by themselves."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)


class Cell(NamedTuple):
    """A shape by name, formats of gate and up + down, tokens."""

    model: str
    pair: str
    tokens: int

    @property
    def shape(self) -> LayerShape:
        """Of the layer."""
        return SHAPES[self.model]

    @property
    def formats(self) -> tuple[str, str]:
        """Of gate and up, and of down."""
        gate_up, down = self.pair.split("+")
        return gate_up, down


def cell_of(text: str) -> Cell:
    """What `--cells` lists."""
    model, pair, tokens = text.split(":")
    return Cell(model, pair, int(tokens))


def tiles_of(text: str) -> tuple[Tile, Tile]:
    """What `--cuts` lists."""
    sides = ([int(n) for n in side.split(".")] for side in text.split("-"))
    up, down = (Tile(rows, warps, sums, cap, shared=shared) for rows, sums, cap, shared, warps in sides)
    return up, down


def empty(grid: int, warps: int, device: str) -> None:
    """A launch of `grid` programs that do nothing."""
    pdl = backend.has_early_start(torch.device(device))
    backend.launch(
        _nothing, (grid,), pdl, device=torch.device(device), num_warps=warps, maxnreg=128,
        **backend.early_start(pdl, "cuda"),
    )  # fmt: skip


def grids(cell: Cell) -> list[tuple[int, int]]:
    """Programs, and warps of one, of the three launches of a call, written down by their launchers."""
    w, call = weights(cell, "cpu"), calls_of(cell, "cpu")[0]
    with record_launches() as made:
        gl.layer_planar(call, w)
    return [(int(torch.tensor(launch.grid).prod()), launch.meta["num_warps"]) for launch in made]


def weights(cell: Cell, device: str, experts: int | None = None) -> gl.Weights:
    """In planes; on the CPU as many experts as a token takes, with room for their bytes alone."""
    nothing = device == "cpu"
    shape = replace(cell.shape, experts=cell.shape.top_k) if nothing else cell.shape
    return gl.with_planes(gl.make_weights(shape, 1, device, *cell.formats, empty=nothing), shape, nothing)


def calls_of(cell: Cell, device: str, top_k: int | None = None) -> list[gl.Call]:
    """The rotation's inputs."""
    shape = cell.shape if device != "cpu" else replace(cell.shape, experts=cell.shape.top_k)
    shape = shape if top_k is None else replace(shape, top_k=top_k)
    picks = routings(shape, cell.tokens)
    made = [gl.make_call(shape, ids, w, device) for ids, w in (picks[:1] if device == "cpu" else picks)]
    return [replace(c, max_rows=1 if cell.tokens == 1 else 8) for c in made]


def compile_ahead(cells: list[Cell], cuts: list[str], workers: int) -> None:
    """What the cells launch, in processes of their own."""
    jobs = {}
    for cell in cells:
        w, call = weights(cell, "cpu"), calls_of(cell, "cpu")[0]
        with record_launches() as made:
            gl.layer_planar(call, w)
            for cut in cuts:
                gl.layer_planar(call, w, *tiles_of(cut))
        jobs |= {variant_of(job): job for job in map(job_of, made)}
    with pool(workers) as compilers:
        for why in compilers.map(prepare, [[job] for job in jobs.values()]):
            if why[0]:
                print("does not compile:", why[0][:120], flush=True)


def splits(cell: Cell, w: gl.Weights, calls: list[gl.Call]) -> Iterator[tuple[str, Calls]]:
    """What is timed beside the layer."""
    form = gl.LAYERS["planar"]
    yield "in L2", [lambda c=c: form(c, w) for c in calls[:1] * 8]
    if cell.tokens == 1:
        yield "one expert", [lambda c=c: form(c, w) for c in calls_of(cell, "cuda", 1)]
    sizes = grids(cell)
    yield "launches", [lambda: [empty(1, warps, "cuda") for _, warps in sizes]] * 8
    yield "programs", [lambda: [empty(n, warps, "cuda") for n, warps in sizes]] * 8
    yield "programs of a warp", [lambda: [empty(n * warps, 1, "cuda") for n, warps in sizes]] * 8
    yield "experts", [lambda c=c: experts(c, w) for c in calls]
    yield "quantise", [lambda c=c: gl.quantised(c, w) for c in calls]


def experts(c: gl.Call, w: gl.Weights) -> None:
    """The layer without its weighted sum."""
    assert w.planes is not None
    own = Experts(*w.planes, w.gate_up_format, w.down_format)
    mlp.gemv_mlp(c.x, c.row_of, own, c.chunks, c.y, c.out_row, max_rows=c.max_rows, layout="planar")


def timeline(calls: Calls) -> Iterator[tuple[str, float]]:
    """(what, us) of each kernel of a call, by a profiler: medians over replays."""
    from torch.profiler import ProfilerActivity, profile

    run = Pass(calls)
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            run()
        torch.cuda.synchronize()
    kinetic = seen.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in kinetic if e.name()[0] == "_")
    lasted: dict[str, list[float]] = {}
    for before, this in itertools.pairwise(spans):
        lasted.setdefault(f"kernel {this[2]}", []).append((this[1] - this[0]) / 1e3)
        lasted.setdefault(f"gap {this[2]}", []).append((this[1] - before[1]) / 1e3)
    for name, us in lasted.items():
        yield name, median(us)


def right(cell: Cell, w: gl.Weights, calls: list[gl.Call], form: Callable[..., Any]) -> bool:
    """Bits of each token alone, and fp32 mathematics."""
    fine = gl.nmse(calls[0], w, form) <= bound(cell.pair)
    return fine and gl.alone(calls[-1], w, form, cell.shape)


def measure(cell: Cell, cuts: list[str], roof: float, budget_ms: float) -> Iterator[dict[str, Any]]:
    """Rows of one cell."""
    w, calls = weights(cell, "cuda"), calls_of(cell, "cuda")
    hit = experts_hit([(c.ids, c.weights) for c in calls])
    up, down = (gl.bytes_a_weight(format) for format in cell.formats)
    floor = layer_bytes(cell.shape, cell.tokens, hit, up, down) / roof / 1e3
    about = {"model": cell.model, "T": cell.tokens, "format": cell.pair, "floor_us": f"{floor:.2f}",
             "target_us": f"{target_us(cell.tokens, floor):.1f}"}  # fmt: skip

    def row(what: str, todo: Calls) -> dict[str, Any]:
        t = time_calls(todo, budget_ms)
        spread = {f"us_p{p}": f"{getattr(t, f'us_p{p}'):.2f}" for p in (20, 50, 80)}
        return {"what": what, **about, **spread, "n": t.n, "method": t.method}

    planar = gl.LAYERS["planar"]
    if not right(cell, w, calls, planar):
        yield {"what": "WRONG layer", **about}
        return
    yield row("layer", [lambda c=c: planar(c, w) for c in calls])
    for cut in cuts:
        form = lambda c, w, cut=cut: gl.layer_planar(c, w, *tiles_of(cut))  # noqa: E731
        try:
            fine = right(cell, w, calls, form)
            yield row(f"cut {cut}", [lambda c=c, f=form: f(c, w) for c in calls]) if fine else {"what": f"WRONG {cut}"}
        except Exception as e:  # a cut that does not compile is a result too
            yield {"what": f"cut {cut}", **about, "method": f"{type(e).__name__}: {str(e)[:60]}"}
    if cuts:
        return
    for what, todo in splits(cell, w, calls):
        yield row(what, todo)


def looked_at(cell: Cell) -> Iterator[dict[str, Any]]:
    """A profiler's rows of one cell."""
    w, calls = weights(cell, "cuda"), calls_of(cell, "cuda")
    about = {"model": cell.model, "T": cell.tokens, "format": cell.pair}
    for what, us in timeline([lambda c=c: gl.LAYERS["planar"](c, w) for c in calls]):
        yield {"what": what, **about, "us_p50": f"{us:.2f}", "n": REPLAYS, "method": "profiler, graph-replay"}


def main() -> int:
    parser = argparse.ArgumentParser(description="Where decode's time goes; writes decode_split_timings.csv.")
    parser.add_argument("--out", type=Path, required=True, help="folder for decode_split_timings.csv")
    parser.add_argument("--cells", default=",".join(CELLS), help="model:gate and up's format + down's:T")
    parser.add_argument("--cuts", default="", help="time these cuts instead of the splits")
    parser.add_argument("--timeline", action="store_true", help="a profiler's view instead of the splits")
    parser.add_argument("--budget-ms", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=12)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise LabError("decode_split_timings needs a CUDA GPU; torch sees none.")
    args.out.mkdir(parents=True, exist_ok=True)
    begin, cells = time.perf_counter(), [cell_of(text) for text in args.cells.split(",")]
    cuts = args.cuts.split(",") if args.cuts else []
    compile_ahead(cells, cuts, args.workers)
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    where, roof, wrong = measured_on(), max(bandwidth_gb_per_s().values()), 0
    with (args.out / "decode_split_timings.csv").open("w", newline="") as f:
        table = csv.DictWriter(f, COLUMNS)
        table.writeheader()
        for cell in cells:
            for row in looked_at(cell) if args.timeline else measure(cell, cuts, roof, args.budget_ms):
                table.writerow({**row, **where})
                f.flush()
                wrong += row["what"].startswith("WRONG")
                shown = (row.get(c, "") for c in ("us_p50", "floor_us", "target_us"))
                print(f"{cell.model[:10]:10} {cell.pair:12} T={cell.tokens} {row['what']:40}", *shown, flush=True)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
