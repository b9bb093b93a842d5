"""Recorded launches compiled in other processes, for a GPU that need not be there.

A launch's tensors stay behind: what a compiler asks of one is its dtype and whether its address is a multiple of 16.
What comes out lies in Triton's cache on disk, where a later launch of the same variant finds it.
"""

import importlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from moe_lab_kernels.backend import Launch

HOPPER = 90


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a compiler needs to know of a tensor. (No tuple: Triton would take it apart.)"""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        """An address of that alignment."""
        return 0 if self.aligned else 8

    @staticmethod
    def ptr_range() -> int:
        """As for a tensor that does not fit 32-bit offsets."""
        return 1 << 40


class Job(NamedTuple):
    """A launch that can be sent to another process: the kernel by name, tensors as pointers."""

    module: str
    kernel: str
    args: tuple[Any, ...]
    meta: tuple[tuple[str, Any], ...]

    def function(self) -> Any:
        """The kernel."""
        return getattr(importlib.import_module(self.module), self.kernel)


def job_of(launch: Launch) -> Job:
    """A recorded launch as a job."""
    args = tuple(
        Pointer(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else getattr(a, "value", a)
        for a in launch.args
    )
    return Job(launch.kernel.__module__, launch.kernel.__name__, args, tuple(sorted(launch.meta.items())))


class Driver:
    """What the compiler asks of a driver."""

    def __init__(self, capability: int = HOPPER) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def aim(capability: int = HOPPER) -> None:
    """From here on this process compiles for GPUs of that compute capability, without looking for one."""
    from triton.runtime import driver

    driver.set_active(Driver(capability))  # pyright: ignore[reportArgumentType]


def compile_job(job: Job) -> Any:
    """Triton's compiled kernel."""
    return job.function().warmup(*job.args, grid=(1,), **dict(job.meta))


def prepare(jobs: Iterable[Job]) -> list[str]:
    """Compile for later launches; what stood in the way of one, or nothing, for each."""
    return [_why_not(job) for job in jobs]


def _why_not(job: Job) -> str:
    try:
        compile_job(job)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


@contextmanager
def pool(processes: int | None = None, capability: int = HOPPER) -> Iterator[Executor]:
    """Processes (None: one a core) that compile for `capability`. They run without Triton's interpreter, whatever this
    process does, and look for no GPU. What has not begun when the block ends never does."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    count = processes or len(os.sched_getaffinity(0))
    try:
        with ProcessPoolExecutor(count, get_context("spawn"), _begin, (capability,)) as made:
            yield made
            made.shutdown(cancel_futures=True)
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def _begin(capability: int) -> None:
    torch.set_num_threads(1)
    aim(capability)
