"""How fast experts come in: from the disk, from the page cache, from page-locked memory, each against its own ceiling.

    PYTHONPATH=.:kernels python benchmarks/fetch_timings.py --out DIR [--parts disk,memory,device] [--folder DIR]
        [--expert-mib 4] [--request-kib 1024] [--threads 4] [--file-gib 2] [--trial-mib 256] [--rounds 7]

Every way is checked first: the bytes of every expert it brings in against what was written. Then all ways of a part run
in shuffled order, round after round, cold where a disk is meant; the medians of the rounds are what is compared.
  disk    experts out of a packed file (direct; requests of --request-kib, and whole experts), a model file in place
          (direct), the packed file through the page cache and out, and the packed file beside a main thread that is
          busy in Python; the ceiling is the best of fio's direct runs with --request-kib, beside such a thread for
          those that are, or of plain preadv loops where there is no fio. Wanted, packed and direct: 0.95 of it, at most
          0.06 processor seconds a GB.
  memory  the same file out of the page cache; the ceiling is as many threads copying as much memory. Wanted: 0.7.
  device  page-locked host memory to a GPU: throughput against one large copy (0.95), and one expert that is asked for,
          from the call until it is there, against its copy alone, from the call of it until it is there (1.2).
"""

import argparse
import csv
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fetch_ceilings import Spinner, Trial, copies, fio, plain
from benchmarks.fetch_files import check, drop, write_model
from moe_lab.bench.runner import measured_on
from moe_lab.errors import LabError
from moe_lab.stream import calibration
from moe_lab.stream.access import serves_direct
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.memory import LockedBlock
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource
from moe_lab.stream.source import ExpertSource

COLUMNS = ["part", "what", "gb_per_s_p20", "gb_per_s", "gb_per_s_p80", "ratio", "of", "wanted", "ok", "cpu_s_per_gb",
           "cpu_ok", "us", "n", "expert_mib", "request_kib", "threads", "device", "driver", "torch", "triton",
           "commit"]  # fmt: skip
CPU_WANTED = 0.06  # processor seconds a GB
BUSY = ", main busy"


def fetches(
    source: ExpertSource,
    args: argparse.Namespace,
    io: str,
    *,
    busy: bool = False,
    warm: bool = False,
    request_bytes: int | None = None,
) -> Trial:
    """Lease experts in groups of 8 at random; every one is a miss. `request_bytes`: None, as the command line says."""
    per_trial = max(8, (args.trial_mib << 20) // source.expert_nbytes(0) // 8 * 8)

    def trial(number: int) -> tuple[float, float]:
        draw = random.Random(number)
        picks = [draw.sample(range(source.num_experts(0)), 8) for _ in range(per_trial // 8)]
        set_request(source.path, request_bytes or args.request_kib << 10)
        if not warm:
            drop(source.path)
        with ExpertCache(slots=8, threads=args.threads, io=io, policy="lru") as cache:  # type: ignore[arg-type]
            cache.bind(source, "cpu")
            assert cache._arena is not None
            cache._arena.tensor.fill_(0)  # the memory is there before the clock runs
            readers = [time.pthread_getcpuclockid(t.ident) for t in cache._pool.threads]  # type: ignore[union-attr,arg-type]
            before = sum(map(time.clock_gettime, readers)) + time.thread_time()
            with Spinner() if busy else open(os.devnull):
                begin = time.perf_counter()
                for group in picks:
                    cache.lease(source, 0, group).release()
                seconds = time.perf_counter() - begin
            used = sum(map(time.clock_gettime, readers)) + time.thread_time() - before
            gb = cache.bytes_read / 1e9
        return gb / seconds, used / gb

    return trial


def measured(trials: dict[str, Trial], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Rounds of all trials, each round in another order; the first round warms up."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in trials}
    draw = random.Random(1)
    for number in range(rounds + 1):
        for name in draw.sample(list(trials), len(trials)):
            result = trials[name](number)
            if number:
                found[name].append(result)
    return found


def rows(part: str, found: dict[str, Any], ceilings: Sequence[str], wants: Mapping[str, float]) -> Iterator[dict]:
    """A row for each way: medians, and the ratio to the best ceiling's median; for ways beside a busy main thread to
    the best of the ceilings beside one, where there is any.
    """
    speed = {name: statistics.median(v for v, _ in values) for name, values in found.items()}
    for name, values in found.items():
        beside = [c for c in ceilings if c.endswith(BUSY) == name.endswith(BUSY)] or ceilings
        top = max(beside, key=lambda c: speed[c])
        p20, p80 = (float(np.percentile([v for v, _ in values], p)) for p in (20, 80))
        cpu, want, ratio = statistics.median(c for _, c in values), wants.get(name), speed[name] / speed[top]
        yield {
            "part": part, "what": name, "gb_per_s_p20": p20, "gb_per_s": speed[name], "gb_per_s_p80": p80,
            "ratio": ratio, "of": top, "wanted": want, "ok": "" if want is None else ratio >= want,
            "cpu_s_per_gb": cpu, "cpu_ok": cpu <= CPU_WANTED if want is not None and part == "disk" else "",
            "n": len(values),
        }  # fmt: skip


def disk_part(model: ExpertSource, packed: PackedSource, args: argparse.Namespace) -> Iterator[dict]:
    """Every way to read from the disk."""
    direct = {
        f"packed, direct{size}{beside}": fetches(packed, args, "direct", busy=bool(beside), request_bytes=request)
        for size, request in (("", None), (", whole experts", packed.expert_nbytes(0)))
        for beside in ("", BUSY)
    }
    trials: dict[str, Trial] = {
        **direct,
        "in place, direct": fetches(model, args, "direct"),
        "packed, dropped": fetches(packed, args, "dropped"),
        f"preadv x{args.threads}": plain(packed.path, args),
    }
    ceilings = [f"preadv x{args.threads}"]
    if shutil.which("fio"):
        for engine, jobs, depth in (("psync", args.threads, 1), ("libaio", 1, 8)):
            for beside in ("", BUSY):
                name = f"fio {engine} jobs {jobs} depth {depth}{beside}"
                trials[name] = fio(packed.path, args, engine, jobs, depth, busy=bool(beside))
        ceilings = [name for name in trials if name.startswith("fio")]
    yield from rows("disk", measured(trials, args.rounds), ceilings, dict.fromkeys(direct, 0.95))


def memory_part(packed: PackedSource, args: argparse.Namespace) -> Iterator[dict]:
    """Out of the page cache."""
    for expert in range(packed.num_experts(0)):  # all of it into the page cache
        with open(packed.path, "rb") as file:
            (segment,) = packed.segments(0, expert)
            os.pread(file.fileno(), segment.nbytes, segment.file_offset)
    trials = {
        "packed, page cache": fetches(packed, args, "buffered", warm=True),
        f"packed, page cache{BUSY}": fetches(packed, args, "buffered", warm=True, busy=True),
        f"memcpy x{args.threads}": copies(args),
    }
    found = measured(trials, args.rounds)
    yield from rows("memory", found, (f"memcpy x{args.threads}",), {"packed, page cache": 0.7})


def device_part(source: ExpertSource, args: argparse.Namespace) -> Iterator[dict]:
    """Page-locked memory to the GPU."""
    memory = MemorySource(source, locked=True)
    if not memory.locked_bytes:
        raise LabError("the memory could not be page-locked: nothing to measure")
    count, nbytes = source.num_experts(0), source.expert_nbytes(0)
    big = LockedBlock(256 << 20)
    there = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    one = memory.host_row(0, 0)
    assert one is not None

    def ceiling(number: int) -> tuple[float, float]:
        return _timed(lambda: there.copy_(big.tensor, non_blocking=True), there.numel()), 0.0

    with ExpertCache(slots=count) as cache, ExpertCache(slots=1) as single:
        cache.bind(memory, "cuda")
        single.bind(memory, "cuda")

        def stream(number: int) -> tuple[float, float]:
            with ExpertCache(slots=count) as fresh:
                fresh.bind(memory, "cuda")
                torch.cuda.synchronize()
                return _timed(lambda: fresh.lease(memory, 0, range(count)).release(), count * nbytes), 0.0

        trials: dict[str, Trial] = {"one copy of 256 MiB": ceiling, "experts, page-locked": stream}
        yield from rows(
            "device", measured(trials, args.rounds), ("one copy of 256 MiB",), {"experts, page-locked": 0.95}
        )
        ask, copy = [], []
        for number in range(200):
            expert = number % count
            ask.append(_waited_us(lambda e=expert: single.lease(memory, 0, [e]).release()))
            copy.append(_waited_us(lambda: there[:nbytes].copy_(one[:nbytes], non_blocking=True)))
        events = [_event_us(there[:nbytes], one[:nbytes]) for _ in range(100)]
    alone = {"its copy, as the host sees it": copy[20:], "its copy, as the GPU does": events}
    for name, times in {"one expert asked for": ask[20:], **alone}.items():
        us = statistics.median(times)
        want = 1.2 if name == "one expert asked for" else None
        of = next(iter(alone)) if want else list(alone)[-1]
        fair = statistics.median(alone[of])
        slow, fast = (nbytes / float(np.percentile(times, p)) / 1e3 for p in (80, 20))
        yield {
            "part": "device", "what": name, "us": us, "gb_per_s": nbytes / us / 1e3, "gb_per_s_p20": slow,
            "gb_per_s_p80": fast, "ratio": us / fair, "of": of, "wanted": want,
            "ok": "" if want is None else us / fair <= want, "n": len(times),
        }  # fmt: skip


def _timed(work: Callable[[], Any], nbytes: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return nbytes / (time.perf_counter() - begin) / 1e9


def _waited_us(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    work()
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - begin) / 1e3


def _event_us(to: torch.Tensor, source: torch.Tensor) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    to.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default="disk,memory")
    parser.add_argument("--folder", type=Path, help="where the files are written; default: --out")
    for name, default in (("expert-mib", 4), ("request-kib", 1024), ("threads", 4), ("trial-mib", 256), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--file-gib", type=float, default=2.0)
    return parser.parse_args()


def main() -> int:
    """Write fetch.csv and print it; exit code 1 when something is wrong or below what is wanted."""
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    folder, done = args.folder or args.out, []
    count = max(16, int(args.file_gib * 2**30) // (args.expert_mib << 20))
    raw, row_file = folder / "fetch_model.bin", folder / "fetch_model.experts"
    try:
        model = write_model(raw, count, args.expert_mib << 20)
        packed = PackedSource(pack(model, row_file).path)
        for row in all_rows(model, packed, args):
            done.append(row)
            print(line(row), flush=True)
    finally:
        raw.unlink(missing_ok=True)
        row_file.unlink(missing_ok=True)
        with open(args.out / "fetch.csv", "w", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS, restval="")
            writer.writeheader()
            writer.writerows(done)
    return int(any(row["ok"] is False for row in done))


def all_rows(model: ExpertSource, packed: PackedSource, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every part's rows, once every way has shown the right bytes."""
    parts, where = args.parts.split(","), measured_on()
    direct = serves_direct(model.path)
    files = [(packed, "direct"), (packed, "dropped"), (model, "direct")] if direct and "disk" in parts else []
    ways = [(source, {"io": io}) for source, io in [*files, (packed, "buffered")]]
    ways += [(packed, {"io": "buffered", "device": "cuda"})] if "device" in parts else []
    for source, how in ways:
        print(f"right: {source!r} {how} -> {check(source, model.block, **how)}", flush=True)  # type: ignore[attr-defined]
    if not direct and "disk" in parts:
        print("left out: the disk, whose file system serves no direct reads", flush=True)
        parts.remove("disk")
    measure = {
        "disk": lambda: disk_part(model, packed, args), "memory": lambda: memory_part(packed, args),
        "device": lambda: device_part(packed, args),
    }  # fmt: skip
    for part in parts:
        for row in measure[part]():
            about = {"expert_mib": args.expert_mib, "request_kib": args.request_kib, "threads": args.threads}
            yield {**row, **about, **where}


def set_request(path: Path, nbytes: int) -> None:
    """Readers of `path` take this request size whatever this machine's calibration says."""
    calibration._remembered[calibration.calibration_path(), calibration.mount_of(path)] = calibration.Reading(4, nbytes)


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    speed = f"{row['gb_per_s']:7.2f} GB/s ({row['gb_per_s_p20']:.2f}..{row['gb_per_s_p80']:.2f})"
    us = f" {row['us']:8.1f} us" if row.get("us") else ""
    cpu = f" {row['cpu_s_per_gb']:.3f} cpu-s/GB" if row.get("cpu_s_per_gb") else ""
    want = "" if row.get("wanted") is None else f" wanted {row['wanted']}: {'yes' if row['ok'] else 'NO'}"
    told = f"{row['part']:7} {row['what']:41}{speed}{us}  ratio {row['ratio']:.3f}{cpu}{want}"
    return told + (" (cpu too much)" if row.get("cpu_ok") is False else "")


if __name__ == "__main__":
    sys.exit(main())
