"""Which tile is quickest where: measured once, by asking, and kept as the launch table that every launcher reads.

At each place (kernel, format, rows a tile, N, Kd) the built-in tile runs first; another one enters only where it wrote
the same bits and was quicker by more than 3 %, so that noise does not move a table. Candidates are compiled ahead in
processes of their own; what the budget does not wait for is named. What was known of other places stays.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.bench.launches import Job, jobs
from moe_lab.bench.runner import time_calls
from moe_lab.bench.weights import SERVED, unfit
from moe_lab.bench.workloads import SHAPES
from moe_lab.errors import LabError
from moe_lab.system.environment import driver, environment
from moe_lab.system.user_cache import slug
from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.launch import ahead
from moe_lab_kernels.launch.schema import KERNELS
from moe_lab_kernels.launch.table import Entry, own_path, read_table, write_table

EQUAL = 1.03
ABOUT = ("torch", "triton", "commit", "moe_lab")
Clock = Callable[[Sequence[Callable[[], Any]]], float]
"""Microseconds a call."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One tile at one place: its time, or why it has none."""

    tile: Any
    us: float | None
    why: str = ""


def gpu_clock(calls: Sequence[Callable[[], Any]]) -> float:
    """Replays of a CUDA graph."""
    return time_calls(calls, 6.0, 3, 20).us_p50


def tune_launches(
    device: str = "cuda",
    *,
    models: Sequence[str] = (),
    formats: Sequence[str] | None = None,
    kernels: Sequence[str] | None = None,
    folder: str | Path | None = None,
    budget_s: float = 270.0,
    clock: Clock = gpu_clock,
    processes: int | None = None,
) -> tuple[list[Entry], Path]:
    """Measure tiles on the named shapes, formats and kernels of `schema.KERNELS` (none: all of them) and write the
    device's launch table: the user's own, or `<folder>/<device>.json`. Ends within the budget or so, with what is known
    by then.

    LabError off CUDA, where no tile is looked up, for unknown shapes and kernels, and where nothing was timed.
    """
    where = torch.device(device)
    if where.type != "cuda":
        raise LabError(f"launch tiles are of a CUDA device; {device!r} starts no compiled kernel.")
    unknown = [k for k in kernels or () if k not in KERNELS]
    if unknown:
        raise LabError(f"no launch table has a kernel {unknown[0]!r}; known: {', '.join(KERNELS)}.")
    name = torch.cuda.get_device_name(where)
    path = own_path(name) if folder is None else Path(folder) / f"{slug(name)}.json"
    known, begin = {_place(e): e for e in read_table(path)}, time.perf_counter()
    major, minor = torch.cuda.get_device_capability(where)
    made: list[Entry] = []
    try:
        with ahead.pool(processes, 10 * major + minor) as compilers:
            for started in _ahead(asked(models, formats), device, kernels, compilers, begin + budget_s):
                made.extend(measured(started, clock, begin + budget_s))
    finally:  # an interrupted run keeps what it has
        if made:
            found = environment()
            about = {"driver": driver(), **{name: found[name] for name in ABOUT}}
            known |= {_place(e): e for e in made}
            write_table(path, name, sorted(known.values(), key=_place), about)
    if not made:
        raise LabError("no tile was timed within the budget, so no launch table was written.")
    return made, path


def asked(models: Sequence[str], formats: Sequence[str] | None) -> list[tuple[Any, str]]:
    """Shapes and formats that go together. LabError for an unknown shape."""
    unknown = [name for name in models if name not in SHAPES]
    if unknown:
        raise LabError(f"no workload is called {unknown[0]!r}; known: {', '.join(SHAPES)}.")
    shapes = [SHAPES[name] for name in models or SHAPES]
    return [(shape, f) for shape in shapes for f in (formats or SERVED) if unfit(shape, f) is None]


Started = tuple[Job, Mapping[Any, "Future[list[str]]"]]
"""A job, and each of its tiles' kernels on their way; one that cannot be compiled says so when its turn comes."""


def _ahead(pairs: Iterable[tuple[Any, str]], device: str, kernels: Sequence[str] | None, compilers: Executor,
           until: float) -> Iterator[list[Started]]:  # fmt: skip
    """The jobs of a shape and format, those of the next one already being compiled; what begins too late is named."""
    waiting: list[list[Started]] = []
    for shape, format in pairs:
        if time.perf_counter() > until:
            warnings.warn(f"the budget left out tiles of {shape.name} in {format}.", stacklevel=3)
            continue
        waiting.append([(job, started(job, compilers)) for job in jobs(shape, format, device, kernels)])
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def measured(some: Iterable[Started], clock: Clock, until: float) -> Iterator[Entry]:
    """An entry for each job begun before `until`, from the tiles that were compiled by then."""
    for job, futures in some:
        wait(futures.values(), max(0.0, until - time.perf_counter()))
        late = [tile for tile, future in futures.items() if not future.done()]
        if job.default in late or time.perf_counter() >= until:
            warnings.warn(f"the budget left out {job.label}.", stacklevel=3)
            continue
        if late:
            warnings.warn(f"the budget left out {len(late)} tiles of {job.label}.", stacklevel=3)
        yield best(replace(job, others=tuple(t for t in job.others if t not in late)), clock)


def started(job: Job, compilers: Executor | None) -> dict[Any, "Future[list[str]]"]:
    """The kernels of each tile of a job, sent to be compiled; nothing where nobody compiles ahead."""
    if compilers is None:
        return {}
    futures = {}
    for tile in (job.default, *job.others):
        with record_launches() as made:
            job.calls[0](tile)
        futures[tile] = compilers.submit(ahead.prepare, [ahead.job_of(launch) for launch in made])
    return futures


def best(job: Job, clock: Clock) -> Entry:
    """The quickest right tile of a job; the built-in one unless another beats it clearly."""
    want = [call(job.default).clone() for call in job.calls]
    default_us = _timed(job, job.default, clock)
    tried = [_try(job, tile, want, clock) for tile in job.others]
    for one in tried:
        if one.us is None and one.why != "does not fit":
            warnings.warn(f"{job.label}: {one.tile} {one.why}.", stacklevel=4)
    right = [one for one in tried if one.us is not None and one.us * EQUAL < default_us]
    won = min(right, key=lambda one: one.us or 0.0, default=Tried(job.default, default_us))
    built_in = won.tile == job.default  # named by nothing, so that it stays the built-in one whatever becomes of that
    fields = {} if built_in else {name: getattr(won.tile, name) for name in KERNELS[job.kernel]}
    return Entry(
        job.kernel, job.format, job.tokens, job.gated, job.n, job.kd, fields, round(won.us or default_us, 3),
        round(default_us, 3),
    )  # fmt: skip


def _try(job: Job, tile: Any, want: Sequence[Tensor], clock: Clock) -> Tried:
    """Time a tile whose output has the built-in tile's bits on every input."""
    try:
        for call, right in zip(job.calls, want, strict=True):
            call(None).fill_(0)
            if not torch.equal(call(tile), right):
                return Tried(tile, None, "wrote other bits than the built-in tile, and is left out")
        return Tried(tile, _timed(job, tile, clock))
    except Exception as e:  # too much shared memory, or more registers than there are: only a launch can tell
        if not _does_not_fit(e):
            raise
        return Tried(tile, None, "does not fit")


def _does_not_fit(e: Exception) -> bool:
    return type(e).__name__ in ("OutOfResources", "PTXASError", "CompilationError")


def _timed(job: Job, tile: Any, clock: Clock) -> float:
    return clock([partial(call, tile) for call in job.calls])


def _place(e: Entry) -> tuple[Any, ...]:
    return e.kernel, e.format, e.tokens, e.gated, e.n, e.kd
