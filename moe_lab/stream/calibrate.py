"""Measuring a disk and copies to a GPU as the readers use them, for `calibration` to keep.

A disk is read through the very classes that experts are read through: threads x request size x way of reading, random
places, every trial cold (past the page cache, or emptied from it before), trials of all settings shuffled together and
repeated, so that a burst credit or a busy neighbour falls on all alike. What is kept is the median with its spread.
"""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import torch

from moe_lab.checkpoint.rawfile import RawFile
from moe_lab.errors import LabError
from moe_lab.stream.access import IoMode, open_files, serves_direct
from moe_lab.stream.calibration import CopyPoint, DiskCell, DiskSurface, file_system_of, mount_of
from moe_lab.stream.interval import short_switches
from moe_lab.stream.memory import HUGE_PAGE_BYTES, LockedBlock, host_block
from moe_lab.system.files import why

THREADS = (1, 2, 4, 8)
REQUEST_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
TRIAL_BYTES = 64 << 20
SCRATCH_FILE_BYTES = 1 << 30
ROUNDS = 5
LEAST_FILE_BYTES = 64 << 20  # in a smaller one random places are the same places again
COPY_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 12 << 20, 48 << 20)
Told = Callable[[int, int], None]
Setting = tuple[int, int, IoMode]


def calibrate_disk(
    path: str | os.PathLike[str],
    *,
    threads: Sequence[int] = THREADS,
    request_bytes: Sequence[int] = REQUEST_BYTES,
    rounds: int = ROUNDS,
    trial_bytes: int = TRIAL_BYTES,
    file_bytes: int = SCRATCH_FILE_BYTES,
    told: Told | None = None,
) -> DiskSurface:
    """The surface of the disk under `path`: a file is read itself, in a folder a file of `file_bytes` is written and
    removed. LabError for a file under 64 MiB, a disk without room, or a path that is not there.
    """
    where = Path(path)
    with _scratch_file(where, file_bytes) if where.is_dir() else _given_file(where) as file:
        ways: tuple[IoMode, ...] = ("direct", "dropped") if serves_direct(file) else ("dropped",)
        settings: list[Setting] = [(t, r, io) for t in threads for r in request_bytes for io in ways]
        trials = _trials(file, settings, rounds, trial_bytes, told)
        date = time.strftime("%Y-%m-%d", time.gmtime())
        mount = mount_of(file)
        cells = tuple(_cell(setting, trials[setting], trial_bytes) for setting in settings)
        return DiskSurface(mount, file_system_of(mount), date, cells)


def _trials(
    file: Path, settings: Sequence[Setting], rounds: int, trial_bytes: int, told: Told | None
) -> dict[Setting, list[tuple[float, float]]]:
    """(seconds, processor seconds) of every round of every setting, in shuffled order."""
    found: dict[Setting, list[tuple[float, float]]] = {setting: [] for setting in settings}
    draw = random.Random(0)
    for number in range(rounds):
        for place, setting in enumerate(draw.sample(settings, len(settings)), start=1):
            found[setting].append(read_trial(file, setting, trial_bytes, seed=number))
            if told is not None:
                told(number * len(settings) + place, rounds * len(settings))
    return found


def read_trial(file: Path, setting: Setting, trial_bytes: int, seed: int) -> tuple[float, float]:
    """(seconds, processor seconds of the reading threads) for `trial_bytes` at random places, cold."""
    threads, request, io = setting
    probe = RawFile(file)
    try:
        size = probe.size
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(probe.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        probe.close()
    count = max(threads, trial_bytes // request)
    places = np.random.default_rng(seed).integers(0, max(1, (size - request) // 4096), count) * 4096
    spent = [(0.0, 0.0, 0.0)] * threads  # (begun, ended, processor time)
    start = threading.Barrier(threads)
    failed: list[BaseException] = []

    def read(number: int) -> None:
        try:
            reader = open_files({probe.path: probe.identity}, io)
            # In huge pages, as a cache's slots are: in ordinary ones the reads cost three times the processor time.
            into = host_block(max(request, 4 * HUGE_PAGE_BYTES)).numpy().data[:request]
            into[:] = bytes(request)  # the memory is there before the clock runs
            start.wait()
            begun, used = time.perf_counter(), time.thread_time()
            for at in places[number::threads].tolist():
                reader.read_into(at, into)
            spent[number] = begun, time.perf_counter(), time.thread_time() - used
            reader.close()
        except BaseException as error:
            failed.append(error)
            start.abort()

    workers = [threading.Thread(target=read, args=(n,), daemon=True) for n in range(threads)]
    with short_switches():
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    begun, ended, used = zip(*spent, strict=True)
    share = trial_bytes / (count * request)
    return (max(ended) - min(begun)) * share, sum(used) * share


def _cell(setting: Setting, trials: Sequence[tuple[float, float]], trial_bytes: int) -> DiskCell:
    threads, request, io = setting
    p20, p50, p80 = spread([trial_bytes / seconds / 1e9 for seconds, _ in trials])
    cpu = spread([used / (trial_bytes / 1e9) for _, used in trials])[1]
    return DiskCell(threads, request, io, p50, p20, p80, cpu, len(trials))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """20th, 50th, 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


@contextmanager
def _scratch_file(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file of random bytes (a disk may compress), on the disk and not in the page cache."""
    file = folder / f".moe-lab-calibrate-{os.getpid()}.tmp"
    block = memoryview(np.random.default_rng(0).bytes(8 << 20))
    try:
        with open(file, "wb", buffering=0) as out:
            for done in range(0, nbytes, len(block)):
                piece = block[: min(len(block), nbytes - done)]
                if out.write(piece) != len(piece):
                    raise LabError(
                        f"{folder} has no room for a file of {nbytes:,} bytes. Give another folder or a file."
                    )
            os.fsync(out.fileno())
        yield file
    except OSError as error:
        raise LabError(f"cannot calibrate on {folder}: {why(error)}. Give another folder or a file.") from error
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def _given_file(path: Path) -> Iterator[Path]:
    file = RawFile(path)  # its errors say what is wrong with the path
    file.close()
    if file.size < LEAST_FILE_BYTES:
        raise LabError(
            f"{path} has {file.size:,} bytes; a disk is measured on {LEAST_FILE_BYTES:,} or more. Give its folder: a "
            "file is written there and removed."
        )
    yield path


def calibrate_copies(
    device: torch.device, *, sizes: Sequence[int] = COPY_BYTES, rounds: int = 20, cuda: Any = torch.cuda
) -> tuple[CopyPoint, ...]:
    """Copies of each size from host memory to `device`, page-locked and not, each timed by events on its stream."""
    largest = max(sizes)
    locked = LockedBlock(largest, cuda)
    plain = host_block(largest)
    there = torch.empty(largest, dtype=torch.uint8, device=device)
    points = []
    try:
        for pinned, source in ((True, locked.tensor), (False, plain)):
            if pinned and not locked.locked:
                continue  # the warning is out already, and a pageable time under this name would be a lie
            source.fill_(1)
            for nbytes in sizes:
                times = [_copy_ms(there[:nbytes], source[:nbytes], cuda) for _ in range(rounds + 2)][2:]
                p20, p50, p80 = spread(times)
                points.append(CopyPoint(nbytes, pinned, p50, p20, p80, len(times)))
        cuda.synchronize(device)
    finally:
        del there
        locked.close()
    return tuple(points)


def _copy_ms(to: torch.Tensor, source: torch.Tensor, cuda: Any) -> float:
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    to.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
