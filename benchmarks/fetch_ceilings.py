"""Ceilings for fetch timings: what the disk and the memory give to programs that do nothing else."""

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from benchmarks.fetch_files import drop
from moe_lab.stream.calibrate import read_trial
from moe_lab.stream.memory import host_block

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


def fio(path: Path, args: argparse.Namespace, engine: str, jobs: int, depth: int, *, busy: bool = False) -> Trial:
    """One of fio's direct runs: random requests of the same size over the same file; `busy`: this process computes."""

    def trial(number: int) -> tuple[float, float]:
        drop(path)
        total = args.trial_mib << 20
        command = [
            "fio", "--name=x", f"--filename={path}", "--rw=randread", f"--bs={args.request_kib}k", "--direct=1",
            f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={depth}", "--thread", "--group_reporting",
            f"--size={path.stat().st_size // 4096 * 4096}", f"--io_size={total // jobs}", f"--randseed={number + 1}",
            "--output-format=json", "--norandommap",
        ]  # fmt: skip
        with Spinner() if busy else nullcontext():
            told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        job = json.loads(told[told.index("{") :])["jobs"][0]
        read, seconds = job["read"], job["read"]["runtime"] / 1e3
        cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds * jobs
        return read["io_bytes"] / seconds / 1e9, cpu / (read["io_bytes"] / 1e9)

    return trial


def plain(path: Path, args: argparse.Namespace) -> Trial:
    """As many threads that do nothing but preadv requests of that size, past the page cache."""

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
