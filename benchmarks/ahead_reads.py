"""Reading ahead from a disk, without a GPU: what the readers have under way while a request waits, and what that costs.

    PYTHONPATH=.:kernels python benchmarks/ahead_reads.py --out DIR [--residency 0.5,0.25] [--modes demand,perfect]
        [--piece-kib 256,1024] [--experts 96] [--compute-ms 2] [--threads 8] [--steps 12] [--rounds 4]

`streamed_model`'s file (four layers, experts of 12 MiB) and picks, through leases and prefetches of a cache in host
memory; a layer's computing is a sleep of `--compute-ms`, so that two cores do: 40 % of it before the picks are known,
60 % behind the wait. Modes as there; `predicted` names 6 experts, 67.6 % of the picks among them. `--piece-kib`: what
is read in the background at once (`jobs.AHEAD_BYTES`). Cells are in a new random order each round, rows are medians
over the rounds. `ratio` is to the larger of computing and of the bytes over the disk's speed, measured around each
cell.
"""

import argparse
import csv
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import moe_lab as lab
from benchmarks.streamed_bench import Bench, tier_speed
from benchmarks.streamed_cells import LOOK_AHEAD, recent, settled
from benchmarks.streamed_file import V41, distinct_blocks, write_file
from benchmarks.streamed_inputs import predicted, wide_trace
from moe_lab.bench.runner import measured_on
from moe_lab.stream import jobs, reader

DEFAULT_KIB = jobs.AHEAD_BYTES >> 10
KNOWN = 0.4  # of a layer's computing comes before its picks are known
COLUMNS = ["residency", "mode", "piece_kib", "step_ms", "step_ms_low", "step_ms_high", "fetch_ms", "ratio", "wait_ms",
           "reads_a_step", "kib_a_read", "mib_under_way", "readers_at_work", "misses_a_step", "ahead_a_step",
           "dropped_mb_a_step", "disk_gb_per_s", "compute_ms", "experts", "threads", "steps", "rounds", "device",
           "torch", "commit"]  # fmt: skip


@contextmanager
def noted_reads() -> Iterator[list[tuple[int, int, int]]]:
    """(begin ns, end ns, bytes) of each read by a pool's threads meanwhile."""
    noted: list[tuple[int, int, int]] = []
    read = reader.read_piece

    def reads(file: Any, piece: jobs.Piece) -> None:
        begin = time.perf_counter_ns()
        try:
            read(file, piece)
        finally:
            noted.append((begin, time.perf_counter_ns(), piece.into.nbytes))

    reader.read_piece = reads
    try:
        yield noted
    finally:
        reader.read_piece = read


def cell(bench: Bench, named: np.ndarray, residency: float, mode: str, piece_kib: int) -> dict[str, float]:
    """One pass over the segment, from the state that LRU has before it."""
    slots, source = round(residency * bench.shape.layers * bench.shape.experts), bench.ckpt.expert_source
    if piece_kib != DEFAULT_KIB:
        jobs.AHEAD_BYTES = piece_kib << 10
    try:
        with lab.ExpertCache(slots=slots, policy="lru", threads=bench.args.threads) as cache, noted_reads() as reads:
            cache.bind(source, "cpu")
            for layer, experts in recent(bench, slots)[1]:
                cache.lease(source, layer, experts).release()
            speeds, before = [tier_speed(bench, "disk")], counts(cache)
            reads.clear()
            times, waits = steps(bench, named, cache, mode)
            settled(cache)
            spent, done = (counts(cache) - before) / len(times), list(reads)
            speeds.append(tier_speed(bench, "disk"))
    finally:
        jobs.AHEAD_BYTES = DEFAULT_KIB << 10
    misses, ahead, read, dropped = spent.tolist()
    speed = statistics.mean(speeds)
    under_way, at_work = while_waiting(done, waits)
    fetch, step = (read + dropped) / 1e6 / speed, statistics.mean(times)
    return {
        "step_ms": step, "fetch_ms": fetch, "ratio": step / max(fetch, bench.shape.layers * bench.args.compute_ms),
        "wait_ms": sum(end - begin for begin, end in waits) / 1e6 / len(times), "reads_a_step": len(done) / len(times),
        "kib_a_read": statistics.mean(size for *_, size in done) / 1024, "mib_under_way": under_way / 2**20,
        "readers_at_work": at_work, "misses_a_step": misses, "ahead_a_step": ahead, "dropped_mb_a_step": dropped / 1e6,
        "disk_gb_per_s": speed,
    }  # fmt: skip


def steps(
    bench: Bench, named: np.ndarray, cache: lab.ExpertCache, mode: str
) -> tuple[list[float], list[tuple[int, int]]]:
    """(Milliseconds of each step, begin and end ns of each request's wait)."""
    source, layers, compute_s = bench.ckpt.expert_source, bench.shape.layers, bench.args.compute_ms / 1e3
    places = [(t, n) for t in bench.segment for n in range(layers)]
    times, waits, begin, asked = [], [], 0, 1
    for at, (t, n) in enumerate(places):
        begin = time.perf_counter_ns() if n == 0 else begin
        for following in places[asked : at + 1 + LOOK_AHEAD] if mode == "perfect" else ():
            cache.prefetch(source, following[1], bench.picks(*following))
            asked += 1
        time.sleep(KNOWN * compute_s)
        cache.settle(n, bench.picks(t, n))
        since = time.perf_counter_ns()
        with cache.lease(source, n, bench.picks(t, n), wait=False) as lease:
            if mode == "predicted" and n + 1 < layers:
                cache.prefetch(source, n + 1, named[t, n + 1, : bench.shape.top_k].tolist())
            lease.wait()
            waits.append((since, time.perf_counter_ns()))
            time.sleep((1 - KNOWN) * compute_s)
        if n == layers - 1:
            times.append((time.perf_counter_ns() - begin) / 1e6)
    return times, waits


def while_waiting(reads: list[tuple[int, int, int]], waits: list[tuple[int, int]]) -> tuple[float, float]:
    """(Bytes under way, readers at work) on average over the time in which a request waited."""
    total, sizes, count = sum(end - begin for begin, end in waits), 0.0, 0.0
    begins, ends = (np.array(side) for side in zip(*waits, strict=True))
    for begin, end, size in reads:
        shared = float(np.maximum(np.minimum(ends, end) - np.maximum(begins, begin), 0).sum())
        sizes, count = sizes + size * shared, count + shared
    return sizes / total, count / total


def counts(cache: lab.ExpertCache) -> np.ndarray:
    """Misses, experts read ahead, bytes read, bytes dropped."""
    return np.array([cache.misses, cache.read_ahead, cache.bytes_read, cache.bytes_dropped], np.float64)


def prepare(args: argparse.Namespace, folder: Path) -> tuple[Bench, np.ndarray]:
    """The file on the disk and what is asked of it; what a predictor names, [T, L, 2 K]."""
    shape, path = replace(V41, experts=args.experts), folder / f"ahead_{args.experts}.gguf"
    if not path.exists():
        write_file(path, shape, distinct_blocks(shape, 8, "cpu"))
    recorded = lab.RoutingTrace.load(Path(__file__).parents[1] / "data/trace.parquet")
    trace = wide_trace(recorded, shape, args.history + args.steps)
    segment = range(args.history, trace.tokens)
    return Bench(args, shape, lab.open(path), trace, [], segment, {}, []), predicted(trace)


def main() -> None:
    """Write ahead_reads.csv after each round and print its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where the model is written and kept; default: nowhere, it goes")
    parser.add_argument("--residency", default="0.5,0.25", type=lambda text: [float(v) for v in text.split(",")])
    parser.add_argument("--modes", default="demand,predicted,perfect", type=lambda text: text.split(","))
    parser.add_argument("--piece-kib", default=[DEFAULT_KIB], type=lambda text: [int(v) for v in text.split(",")])
    parser.add_argument("--compute-ms", type=float, default=2.0)
    for name, value in (("experts", 96), ("threads", 8), ("steps", 12), ("history", 400), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cells = [
        (residency, mode, kib)
        for residency in args.residency for mode in args.modes
        for kib in (args.piece_kib if mode != "demand" else [DEFAULT_KIB])
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        bench, named = prepare(args, args.folder or Path(folder))
        found: dict[tuple[float, str, int], list[dict[str, float]]] = {key: [] for key in cells}
        for number in range(args.rounds):
            for place in np.random.default_rng(number).permutation(len(cells)):
                found[cells[place]].append(cell(bench, named, *cells[place]))
            write(args, found)


def write(args: argparse.Namespace, found: dict[tuple[float, str, int], list[dict[str, float]]]) -> None:
    """The table so far."""
    about = {name: getattr(args, name) for name in ("compute_ms", "experts", "threads", "steps")} | measured_on()
    with open(args.out / "ahead_reads.csv", "w", newline="") as out:
        table = csv.DictWriter(out, COLUMNS, extrasaction="ignore")
        table.writeheader()
        for (residency, mode, kib), trials in found.items():
            middle = {name: statistics.median(trial[name] for trial in trials) for name in trials[0]}
            times = [trial["step_ms"] for trial in trials]
            row = {"residency": residency, "mode": mode, "piece_kib": kib, "rounds": len(trials), **middle}
            table.writerow(row | {"step_ms_low": min(times), "step_ms_high": max(times)} | about)
            print(f"{residency:.0%} {mode} {kib} KiB:", *(f"{k} {v:.2f}" for k, v in middle.items()), flush=True)


if __name__ == "__main__":
    main()
