"""Decoding a model whose experts do not fit: steps of all layers at several residencies, against their bounds.

    PYTHONPATH=.:kernels python benchmarks/streamed_model.py --out DIR [--scale v4.1|small] [--gib N] [--device cuda]
        [--tiers disk,host] [--residency 1,0.5,0.25] [--modes demand,predicted,perfect] [--steps 100] [--threads 8]
        [--policy lru] [--rounds 1] [--budget-s 140]

Writes the model file (`streamed_file`), replays a trace's tokens one a step (`streamed_inputs`), and checks before it
believes a time: the routers pick what the trace says, the first layer's outputs have the bits of the resident one, and
all outputs of a segment are bit-equal over residencies, tiers and modes.
  demand     experts are read when they are picked
  predicted  Options.prefetch: the next layer's router on this layer's input
  perfect    the picks of the next layers are known: they are asked for ahead
Each round runs every cell once, so that a slow spell of the machine meets all of them; a row is over all rounds.
Bounds of a step: compute = the same steps with every expert at hand; fetch = the bytes that were read over the tier's
own speed, measured in this run; belady = the bytes that the best eviction would read. Wanted, perfect: 1.15 of the
larger of compute and fetch. `ratio` is of the means, `ratio_p50` of the medians, `ratio_quiet` of the medians of the
steps that met no slow spell of the host (`quiet` of them; see `streamed_cells`, for host_* as well).
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.streamed_bench import DISTINCT, Bench, check, prepare
from benchmarks.streamed_cells import HOST, Held, held, quick_pace, trial
from moe_lab.bench.runner import measured_on

COLUMNS = ["tier", "residency", "slots", "mode", "policy", "steps", "step_ms_p20", "step_ms_p50", "step_ms_p80",
           "step_ms", "compute_ms", "fetch_ms", "ratio", "wanted", "ok", "belady_ms", "ratio_to_belady",
           "misses_a_step", "ahead_a_step", "belady_misses_a_step", "gb_a_step", "dropped_gb_a_step",
           "tier_gb_per_s", "io_mode", "wait_ms", "outputs", "scale", "gib", "threads", "device", "driver",
           "torch", "triton", "commit", "rounds", "compute_ms_p50", "ratio_p50",
           "quiet", "quiet_ms", "compute_quiet_ms", "ratio_quiet",
           *(f"host_{name}_ms" for name in HOST)]  # fmt: skip


def row(bench: Bench, tier: str, one: Held, mode: str) -> dict[str, Any]:
    """All trials of a cell as one row."""
    found = one.trials[mode]
    times = [ms for trial in found for ms in trial.times]

    def mean(name: str) -> float:
        return statistics.mean(getattr(trial, name) for trial in found)

    gb, speed = mean("gb"), mean("speed")
    fetch = gb / speed * 1e3
    compute, compute_p50 = middle([ms for one in bench.full for ms in one.times])
    limit = quick_pace([*bench.full, *found])
    quiet = [ms for one in found for ms in one.quiet(limit)]
    quiet_ms, compute_quiet = middle(quiet)[1], middle([ms for one in bench.full for ms in one.quiet(limit)])[1]
    best = max(compute, one.belady_misses * bench.shape.expert_bytes / 1e6 / speed)
    p20, p50, p80 = (float(np.percentile(times, p)) for p in (20, 50, 80))
    ratio = statistics.mean(times) / max(compute, fetch)
    outputs = {trial.digest for trial in found}
    same = outputs == {bench.digests.setdefault("all", found[0].digest)}
    return {
        "tier": tier, "residency": one.residency, "slots": one.slots, "mode": mode, "policy": bench.args.policy,
        "steps": len(found[0].times), "rounds": len(found), "step_ms_p20": p20, "step_ms_p50": p50, "step_ms_p80": p80,
        "step_ms": statistics.mean(times), "compute_ms": compute, "compute_ms_p50": compute_p50, "fetch_ms": fetch,
        "ratio": ratio, "ratio_p50": p50 / max(compute_p50, fetch), "quiet": len(quiet) / len(times),
        "quiet_ms": quiet_ms, "compute_quiet_ms": compute_quiet, "ratio_quiet": quiet_ms / max(compute_quiet, fetch),
        "wanted": 1.15 if mode == "perfect" else "", "ok": ratio <= 1.15 if mode == "perfect" else "",
        "belady_ms": best, "ratio_to_belady": statistics.mean(times) / best, "misses_a_step": mean("misses"),
        "ahead_a_step": mean("ahead"), "belady_misses_a_step": one.belady_misses, "gb_a_step": gb,
        "dropped_gb_a_step": mean("dropped_gb"), "tier_gb_per_s": speed, "io_mode": one.cache.io_mode,
        "wait_ms": mean("wait_ms"), "outputs": outputs.pop() if same else f"DIFFER {' '.join(sorted(outputs))}",
        **{f"host_{name}_ms": statistics.mean(trial.host[name] for trial in found) for name in HOST},
    }  # fmt: skip


def middle(times: list[float]) -> tuple[float, float]:
    """(mean, median); NaN of nothing."""
    return (statistics.mean(times), statistics.median(times)) if times else (float("nan"), float("nan"))


def measure(bench: Bench, tier: str, keep: Callable[[list[dict[str, Any]]], None], late: Callable[[str], bool]) -> None:
    """Every cell of a tier once a round; `keep` gets the rows after each round, `late` says whether to stop."""
    cells: list[tuple[Held, str]] = []
    opened: list[Held] = []
    try:
        for residency in sorted(bench.args.residency, reverse=True):  # all at hand comes first: it is what others have
            opened.append(held(bench, tier, residency))
            cells += [(opened[-1], mode) for mode in (bench.args.modes if residency < 1 else ["demand"])]
        for number in range(bench.args.rounds):
            for one, mode in cells:
                if late(f"round {number + 1}: {tier}, {one.residency:.0%}, {mode}"):
                    continue
                trial(bench, tier, one, mode)
                if one.residency >= 1:
                    bench.full = one.trials[mode]
                keep([row(bench, tier, *cell) for cell in cells if cell[1] in cell[0].trials])
    finally:
        for one in opened:
            one.close()


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
    for name, default in (("steps", 100), ("threads", 8), ("width", 6), ("history", 1500), ("rounds", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget-s", type=float, default=140.0)
    return parser.parse_args()


def main() -> int:
    """Write streamed_model.csv and print it; exit code 1 when something is wrong or below what is wanted."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    begin, done = time.perf_counter(), {}
    path = (args.folder or args.out) / "streamed_model.gguf"

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {text}", flush=True)

    def late(what: str) -> bool:
        over = time.perf_counter() - begin > args.budget_s
        if over:
            say(f"left out for want of time: {what}")
        return over

    about: dict[str, Any] = {"scale": args.scale, "threads": args.threads, **measured_on()}
    try:
        bench = prepare(args, path, say)
        about["gib"] = f"{bench.ckpt.size / 2**30:.1f}"
        for tier in args.tiers:
            check(bench, tier, say)

            def keep(rows: list[dict[str, Any]], tier: str = tier) -> None:
                done[tier] = rows
                write(args.out / "streamed_model.csv", [r | about for rows in done.values() for r in rows])

            measure(bench, tier, keep, late)
            for r in done.get(tier, []):
                say(line(r))
    finally:
        path.unlink(missing_ok=True)
    rows = [r for rows in done.values() for r in rows]
    return int(any(r["ok"] is False or r["outputs"].startswith("DIFFER") for r in rows))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The table, whole, in place of what was there."""
    with open(path, "w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    r = {name: f"{value:.2f}" if isinstance(value, float) else value for name, value in row.items()}
    judged = {"": "", True: "ok", False: "NO"}[row["ok"]]
    host = " ".join(f"{name} {row[f'host_{name}_ms']:.2f}" for name in HOST)
    return (
        f"{r['tier']} {row['residency']:.0%} {r['mode']}: {r['step_ms']} ms a step (p20 {r['step_ms_p20']} p50 "
        f"{r['step_ms_p50']} p80 {r['step_ms_p80']}), compute {r['compute_ms']} fetch {r['fetch_ms']} ratio "
        f"{row['ratio']:.3f} p50 {row['ratio_p50']:.3f} quiet {row['ratio_quiet']:.3f} ({r['quiet_ms']} of "
        f"{r['compute_quiet_ms']}, {row['quiet']:.0%} of the steps) {judged}, belady {r['belady_ms']} ratio "
        f"{r['ratio_to_belady']}, tier {r['tier_gb_per_s']} GB/s, misses {r['misses_a_step']} ahead "
        f"{r['ahead_a_step']} (belady {r['belady_misses_a_step']}), read {row['gb_a_step']:.3f} GB, "
        f"{row['dropped_gb_a_step']:.3f} of it for nothing, waited {r['wait_ms']} ms, host {host}, {r['outputs']}"
    )


if __name__ == "__main__":
    sys.exit(main())
