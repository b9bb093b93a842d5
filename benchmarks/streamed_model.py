"""Decoding a model whose experts do not fit: steps of all layers at several residencies, against their bounds.

    PYTHONPATH=.:kernels python benchmarks/streamed_model.py --out DIR [--scale v4.1|small] [--gib N] [--device cuda]
        [--tiers disk,host] [--residency 1,0.5,0.25] [--modes demand,predicted,perfect] [--steps 100] [--threads 8]
        [--policy lru] [--budget-s 140]

Writes the model file (`streamed_file`), replays a trace's tokens one a step (`streamed_inputs`), and checks before it
believes a time: the routers pick what the trace says, the first layer's outputs have the bits of the resident one, and
all outputs of a segment are bit-equal over residencies, tiers and modes.
  demand     experts are read when they are picked
  predicted  Options.prefetch: the next layer's router on this layer's input
  perfect    the picks of the next layers are known: they are asked for ahead
Bounds of a step: compute = the same steps with every expert at hand; fetch = the bytes that were read over the tier's
own speed, measured in this run; belady = the bytes that the best eviction would read. Wanted, perfect: 1.15 of the
larger of compute and fetch.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

import moe_lab as lab
from benchmarks.streamed_bench import DISTINCT, Bench, check, prepare, tier_speed
from moe_lab.bench.runner import measured_on
from moe_lab.simulate import steps as simulated
from moe_lab.stream.source import ExpertSource

COLUMNS = ["tier", "residency", "slots", "mode", "policy", "steps", "step_ms_p20", "step_ms_p50", "step_ms_p80",
           "step_ms", "compute_ms", "fetch_ms", "ratio", "wanted", "ok", "belady_ms", "ratio_to_belady",
           "misses_a_step", "ahead_a_step", "belady_misses_a_step", "gb_a_step", "dropped_gb_a_step",
           "tier_gb_per_s", "io_mode", "wait_ms", "outputs", "scale", "gib", "threads", "device", "driver",
           "torch", "triton", "commit"]  # fmt: skip
LOOK_AHEAD = 3  # layers whose picks are asked for ahead in perfect prediction


def recent(bench: Bench, slots: int) -> tuple[range, list[tuple[int, list[int]]]]:
    """(Tokens before the segment that name `slots` experts, as far as there are any; those experts by layer and token,
    the longest unused first).
    """
    last: dict[tuple[int, int], int] = {}
    token = bench.segment.start
    while len(last) < slots and token > 0:
        token -= 1
        for layer in range(bench.shape.layers):
            for expert in bench.picks(token, layer):
                last.setdefault((layer, expert), token)
    groups: dict[tuple[int, int], list[int]] = {}
    for (layer, expert), at in last.items():
        groups.setdefault((at, layer), []).append(expert)
    return range(token, bench.segment.start), [(layer, groups[at, layer]) for at, layer in sorted(groups)]


def rewind(cache: lab.ExpertCache, source: ExpertSource, groups: list[tuple[int, list[int]]]) -> None:
    """The cache as LRU has it before the segment: each expert once, in the order of their last uses."""
    for layer, experts in groups:
        cache.lease(source, layer, experts).release()


def steps(
    bench: Bench, tokens: range, layers: list[lab.MoELayer], cache: lab.ExpertCache, source: ExpertSource, mode: str
) -> tuple[list[float], float, str]:
    """(ms of each step, ms the host waited for experts, digest of all outputs)."""
    options = lab.Options(prefetch=bench.args.width) if mode == "predicted" else lab.Options()
    places = [(t, n) for t in tokens for n in range(len(layers))]
    times, outs, waited, asked = [], [], 0.0, 0
    sync = torch.cuda.synchronize if bench.args.device == "cuda" else lambda: None
    sync()
    begin = time.perf_counter()
    for at, (token, number) in enumerate(places):
        while mode == "perfect" and asked < min(len(places), at + 1 + LOOK_AHEAD):
            if asked > at:
                cache.prefetch(source, places[asked][1], bench.picks(*places[asked]))
            asked += 1
        y = layers[number](bench.rows[number][token : token + 1], bench.args.arm, options=options)
        outs.append(y.out)
        waited += y.timing.fetch_ms
        if number == len(layers) - 1:
            sync()
            now = time.perf_counter()
            times.append((now - begin) * 1e3)
            begin = now
    digest = sha256(torch.cat(outs).view(torch.int16).cpu().numpy().tobytes()).hexdigest()[:16]
    return times, waited / len(times), digest


def cell(bench: Bench, tier: str, residency: float, modes: list[str]) -> Iterator[dict[str, Any]]:
    """A row for each mode at one residency; the cache is put back into the same state before each."""
    args, shape = bench.args, bench.shape
    slots = max(shape.top_k, round(residency * shape.layers * shape.experts))
    source = bench.source(tier)
    before, groups = recent(bench, slots)
    if residency >= 1:
        groups = [(n, bench.picks(t, n)) for t in bench.segment for n in range(shape.layers)]
    belady = belady_misses(bench, before, slots) if residency < 1 else 0.0
    with lab.ExpertCache(slots=slots, policy=args.policy, threads=args.threads) as cache:
        layers = bench.layers(source, cache)
        for mode in modes if residency < 1 else ["demand"]:
            steps(bench, bench.segment[:2], layers, cache, source, mode)  # kernels and whatever else is made once
            settled(cache)
            rewind(cache, source, groups)
            speeds = [tier_speed(bench, tier)]
            misses, ahead, read, dropped = cache.misses, cache.read_ahead, cache.bytes_read, cache.bytes_dropped
            times, waited, digest = steps(bench, bench.segment, layers, cache, source, mode)
            settled(cache)
            count = len(times)
            if residency >= 1:
                bench.compute_ms = statistics.mean(times)
            lost = (cache.bytes_dropped - dropped) / count / 1e9
            gb = (cache.bytes_read - read) / count / 1e9 + lost
            speed = statistics.mean([*speeds, tier_speed(bench, tier)])  # just before and just after: disks drift
            fetch = gb / speed * 1e3
            best = max(bench.compute_ms, belady * shape.expert_bytes / 1e6 / speed)
            ratio = statistics.mean(times) / max(bench.compute_ms, fetch)
            p20, p50, p80 = (float(np.percentile(times, p)) for p in (20, 50, 80))
            same = bench.digests.setdefault("all", digest) == digest
            yield {
                "tier": tier, "residency": residency, "slots": slots, "mode": mode, "policy": args.policy,
                "steps": count, "step_ms_p20": p20, "step_ms_p50": p50, "step_ms_p80": p80,
                "step_ms": statistics.mean(times), "compute_ms": bench.compute_ms, "fetch_ms": fetch, "ratio": ratio,
                "wanted": 1.15 if mode == "perfect" else "", "ok": ratio <= 1.15 if mode == "perfect" else "",
                "belady_ms": best, "ratio_to_belady": statistics.mean(times) / best,
                "misses_a_step": (cache.misses - misses) / count, "ahead_a_step": (cache.read_ahead - ahead) / count,
                "belady_misses_a_step": belady, "gb_a_step": gb, "dropped_gb_a_step": lost,
                "tier_gb_per_s": speed, "io_mode": cache.io_mode,
                "wait_ms": waited, "outputs": digest if same else f"DIFFER {digest}",
            }  # fmt: skip


def settled(cache: lab.ExpertCache) -> None:
    """Nothing is read for nobody any more: what was read ahead is counted or taken back."""
    cache.cancel_prefetches()
    count = -1
    while count != cache.read_ahead:
        count = cache.read_ahead
        time.sleep(0.05)


def belady_misses(bench: Bench, before: range, slots: int) -> float:
    """Misses a step over the segment under the best eviction, the tokens `before` served the same way."""
    part = slice(before.start, bench.segment.stop)
    told = simulated(bench.trace.ids[part], slots, "belady")
    return float(told[told.step >= len(before)].misses.sum()) / len(bench.segment)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where the model is written; default: --out")
    parser.add_argument("--scale", choices=sorted(DISTINCT), default="small")
    parser.add_argument("--gib", type=float, help="fewer experts a layer: a file of about this size")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiers", default="disk", type=lambda text: text.split(","))
    parser.add_argument("--residency", default="1,0.5,0.25", type=lambda text: [float(v) for v in text.split(",")])
    parser.add_argument("--modes", default="demand,predicted,perfect", type=lambda text: text.split(","))
    parser.add_argument("--arm", default="table")
    parser.add_argument("--policy", default="lru")
    for name, default in (("steps", 100), ("threads", 8), ("width", 6), ("history", 1500)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget-s", type=float, default=140.0)
    return parser.parse_args()


def main() -> int:
    """Write streamed_model.csv and print it; exit code 1 when something is wrong or below what is wanted."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    begin, done = time.perf_counter(), []
    path = (args.folder or args.out) / "streamed_model.gguf"

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

    about: dict[str, Any] = {"scale": args.scale, "threads": args.threads, **measured_on()}
    try:
        bench = prepare(args, path, say)
        about["gib"] = f"{bench.ckpt.size / 2**30:.1f}"
        with open(args.out / "streamed_model.csv", "w", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS, restval="")
            writer.writeheader()
            for tier in args.tiers:
                check(bench, tier, say)
                for residency in args.residency:
                    if time.perf_counter() - begin > args.budget_s:
                        say(f"left out for want of time: {tier}, {residency:.0%}")
                        continue
                    for row in cell(bench, tier, residency, args.modes):
                        writer.writerow({**row, **about})
                        out.flush()
                        done.append(row)
                        say(line(row))
    finally:
        path.unlink(missing_ok=True)
    return int(any(row["ok"] is False or row["outputs"].startswith("DIFFER") for row in done))


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    r = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in row.items()}
    judged = {"": "", True: "ok", False: "NO"}[row["ok"]]
    return (
        f"{r['tier']} {row['residency']:.0%} {r['mode']}: {r['step_ms']} ms a step (p50 {r['step_ms_p50']}), compute "
        f"{r['compute_ms']} fetch {r['fetch_ms']} ratio {row['ratio']:.3f} {judged}, belady {r['belady_ms']} ratio "
        f"{r['ratio_to_belady']}, tier {r['tier_gb_per_s']} GB/s, misses {r['misses_a_step']} ahead "
        f"{r['ahead_a_step']} (belady {r['belady_misses_a_step']}), "
        f"read {row['gb_a_step']:.3f} GB, {row['dropped_gb_a_step']:.3f} of it for nothing, waited {r['wait_ms']} ms, "
        f"{r['outputs']}"
    )


if __name__ == "__main__":
    sys.exit(main())
