"""How fast experts come in: from the disk, from the page cache, from page-locked memory, each against its own ceiling.

    PYTHONPATH=.:kernels python benchmarks/fetch_timings.py --out DIR [--parts disk,memory,device] [--folder DIR]
        [--expert-mib 4] [--request-kib 1024] [--threads 4] [--file-gib 2] [--trial-mib 256] [--rounds 7]

Every way is checked first: the bytes of every expert it brings in against what was written. Then all ways of a part run
in shuffled order, round after round, cold where a disk is meant; the medians of the rounds are what is compared.
  disk    experts out of a packed file (direct), a model file in place (direct; through the page cache and out), the
          packed file with the main thread busy in Python; the ceiling is the best of fio's direct runs, or of plain
          preadv loops where there is no fio. Wanted: 0.95 of it, and at most 0.06 processor seconds a GB, packed.
  memory  the same file out of the page cache; the ceiling is as many threads copying as much memory. Wanted: 0.7.
  device  page-locked host memory to a GPU: throughput against one large copy (0.95), and one expert that is asked for,
          from the call until it is there, against its copy alone (1.2).
"""

import argparse
import csv
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.fetch_files import check, drop, write_model
from moe_lab.environment import environment
from moe_lab.errors import LabError
from moe_lab.stream.access import serves_direct
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.memory import LockedBlock, host_block
from moe_lab.stream.memory_source import MemorySource
from moe_lab.stream.pack import pack
from moe_lab.stream.packed import PackedSource
from moe_lab.stream.source import ExpertSource

COLUMNS = ["part", "what", "gb_per_s_p20", "gb_per_s", "gb_per_s_p80", "ratio", "wanted", "ok", "cpu_s_per_gb", "us",
           "n", "expert_mib", "request_kib", "threads", "io_mode", "device", "commit"]  # fmt: skip
SMALLEST_COPY_BYTES = 256 << 20
Trial = Callable[[int], tuple[float, float]]  # round -> (GB/s, processor seconds a GB)


class Spinner:
    """A main thread's worth of pure Python beside the readers."""

    def __enter__(self) -> "Spinner":
        self.stop = False
        self.thread = threading.Thread(target=self._spin, daemon=True)
        self.thread.start()
        return self

    def _spin(self) -> None:
        n = 0
        while not self.stop:
            n += 1

    def __exit__(self, *_: object) -> None:
        self.stop = True
        self.thread.join()


def fetches(
    source: ExpertSource, args: argparse.Namespace, io: str, *, busy: bool = False, warm: bool = False
) -> Trial:
    """Lease experts in groups of 8 at random; every one is a miss."""
    per_trial = max(8, (args.trial_mib << 20) // source.expert_nbytes(0) // 8 * 8)

    def trial(number: int) -> tuple[float, float]:
        draw = random.Random(number)
        picks = [draw.sample(range(source.num_experts(0)), 8) for _ in range(per_trial // 8)]
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


def fio(path: Path, args: argparse.Namespace, engine: str, jobs: int, depth: int) -> Trial:
    """One of fio's direct runs: random requests of the same size over the same file."""

    def trial(number: int) -> tuple[float, float]:
        drop(path)
        total = args.trial_mib << 20
        command = [
            "fio", "--name=x", f"--filename={path}", "--rw=randread", f"--bs={args.request_kib}k", "--direct=1",
            f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={depth}", "--thread", "--group_reporting",
            f"--size={path.stat().st_size // 4096 * 4096}", f"--io_size={total // jobs}", f"--randseed={number + 1}",
            "--output-format=json", "--norandommap",
        ]  # fmt: skip
        told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        job = json.loads(told[told.index("{") :])["jobs"][0]
        read, seconds = job["read"], job["read"]["runtime"] / 1e3
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds * jobs
        return read["io_bytes"] / seconds / 1e9, cpu / (read["io_bytes"] / 1e9)

    return trial


def plain(path: Path, args: argparse.Namespace) -> Trial:
    """As many threads that do nothing but preadv requests of that size, past the page cache."""
    from moe_lab.stream.calibrate import read_trial

    def trial(number: int) -> tuple[float, float]:
        total = args.trial_mib << 20
        seconds, used = read_trial(path, (args.threads, args.request_kib << 10, "direct"), total, number)
        return total / seconds / 1e9, used / (total / 1e9)

    return trial


def copies(args: argparse.Namespace) -> Trial:
    """As many threads copying requests between two buffers far larger than the caches."""
    size = max(SMALLEST_COPY_BYTES, args.trial_mib << 20)
    request = args.request_kib << 10
    source, to = (host_block(size).numpy() for _ in range(2))
    source[:] = 1
    to[:] = 2

    def trial(number: int) -> tuple[float, float]:
        order = np.random.default_rng(number).permutation(size // request)

        def work(mine: np.ndarray) -> None:
            for i in mine.tolist():
                np.copyto(to[i * request : (i + 1) * request], source[i * request : (i + 1) * request])

        threads = [threading.Thread(target=work, args=(order[n :: args.threads],)) for n in range(args.threads)]
        begin, used = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gb = len(order) * request / 1e9
        return gb / (time.perf_counter() - begin), (time.process_time() - used) / gb

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


def rows(part: str, found: dict[str, Any], ceilings: tuple[str, ...], wants: dict[str, float]) -> Iterator[dict]:
    """A row for each way: medians, and the ratio to the best ceiling's median."""
    top = max(statistics.median(v for v, _ in found[name]) for name in ceilings)
    for name, values in found.items():
        speeds = sorted(v for v, _ in values)
        p20, p50, p80 = (float(np.percentile(speeds, p)) for p in (20, 50, 80))
        cpu = statistics.median(c for _, c in values)
        want = wants.get(name)
        yield {
            "part": part, "what": name, "gb_per_s_p20": p20, "gb_per_s": p50, "gb_per_s_p80": p80, "ratio": p50 / top,
            "wanted": want, "ok": "" if want is None else p50 / top >= want, "cpu_s_per_gb": cpu, "n": len(values),
        }  # fmt: skip


def disk_part(model: ExpertSource, packed: PackedSource, args: argparse.Namespace) -> Iterator[dict]:
    """Every way to read from the disk."""
    trials: dict[str, Trial] = {
        "packed, direct": fetches(packed, args, "direct"),
        "packed, direct, main busy": fetches(packed, args, "direct", busy=True),
        "in place, direct": fetches(model, args, "direct"),
        "packed, dropped": fetches(packed, args, "dropped"),
        f"preadv x{args.threads}": plain(packed.path, args),
    }
    ceilings = [f"preadv x{args.threads}"]
    if shutil.which("fio"):
        for engine, jobs, depth in (("psync", args.threads, 1), ("libaio", 1, 8)):
            name = f"fio {engine} jobs {jobs} depth {depth}"
            trials[name] = fio(packed.path, args, engine, jobs, depth)
        ceilings = [name for name in trials if name.startswith("fio")]
    wants = {"packed, direct": 0.95, "packed, direct, main busy": 0.95}
    yield from rows("disk", measured(trials, args.rounds), tuple(ceilings), wants)


def memory_part(packed: PackedSource, args: argparse.Namespace) -> Iterator[dict]:
    """Out of the page cache."""
    for expert in range(packed.num_experts(0)):  # all of it into the page cache
        with open(packed.path, "rb") as file:
            (segment,) = packed.segments(0, expert)
            os.pread(file.fileno(), segment.nbytes, segment.file_offset)
    trials = {
        "packed, page cache": fetches(packed, args, "buffered", warm=True),
        "packed, page cache, main busy": fetches(packed, args, "buffered", warm=True, busy=True),
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
    fair = statistics.median(events)
    for name, times in (("one expert asked for", ask[20:]), ("its copy, host clock", copy[20:]), ("its copy", events)):
        us = statistics.median(times)
        want = 1.2 if name == "one expert asked for" else None
        slow, fast = (nbytes / float(np.percentile(times, p)) / 1e3 for p in (80, 20))
        yield {
            "part": "device", "what": name, "us": us, "gb_per_s": nbytes / us / 1e3, "gb_per_s_p20": slow,
            "gb_per_s_p80": fast, "ratio": us / fair, "wanted": want, "ok": "" if want is None else us / fair <= want,
            "n": len(times),
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
    set_request(args.request_kib << 10)
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
    parts, env = args.parts.split(","), environment()
    direct = serves_direct(model.path)
    ios = ("direct", "dropped", "buffered") if direct else ("dropped", "buffered")
    ways = [(source, {"io": io}) for source in (model, packed) for io in ios]
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
            yield {**row, **about, "device": env["device"], "commit": env["commit"]}


def set_request(nbytes: int) -> None:
    """Readers take this request size whatever this machine's calibration says."""
    from moe_lab.stream import cache
    from moe_lab.stream.calibration import Reading

    cache.reading_for = lambda path: Reading(4, nbytes)  # type: ignore[assignment]


def line(row: dict[str, Any]) -> str:
    """One row for people."""
    speed = f"{row['gb_per_s']:7.2f} GB/s ({row['gb_per_s_p20']:.2f}..{row['gb_per_s_p80']:.2f})"
    us = f" {row['us']:8.1f} us" if row.get("us") else ""
    cpu = f" {row['cpu_s_per_gb']:.3f} cpu-s/GB" if row.get("cpu_s_per_gb") else ""
    want = "" if row.get("wanted") is None else f" wanted {row['wanted']}: {'yes' if row['ok'] else 'NO'}"
    return f"{row['part']:7} {row['what']:32}{speed}{us}  ratio {row['ratio']:.3f}{cpu}{want}"


if __name__ == "__main__":
    sys.exit(main())
