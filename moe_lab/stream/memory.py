"""Host memory in exact sizes: page-aligned, in huge pages where it is large, page-locked for a GPU where asked.

PyTorch's allocator of page-locked memory rounds every block up to a power of two, which would lock up to twice the
bytes asked for; an anonymous map that is registered with CUDA takes what it takes.
"""

import mmap
import resource
import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from moe_lab._types import Tensor, UInt8

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
SMALL_COPY_BYTES = 16 << 10  # below it the two numpy views cost more than the copy
_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process


def whole_pages(nbytes: int) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def host_block(nbytes: int) -> UInt8[Tensor, " n"]:
    """Zeroed memory of `nbytes`, uint8, its start on a page; given back with the last view of it. MemoryError, OSError.

    Pages are taken at their first touch. Blocks of several huge pages ask for those: filling memory for the first time
    then costs a 500th of the page faults.
    """
    if nbytes <= 0:
        return torch.empty(0, dtype=torch.uint8)
    huge = nbytes >= 4 * HUGE_PAGE_BYTES
    size = whole_pages(nbytes) + (HUGE_PAGE_BYTES if huge else 0)
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared ones get no huge pages
    start = 0
    if huge:
        start = -np.frombuffer(block, np.uint8).ctypes.data % HUGE_PAGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages: ordinary ones do
                block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8, count=nbytes, offset=start)


def copy_bytes(to: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `to` has; large copies let other threads run meanwhile, which slice assignment does not."""
    if to.nbytes < SMALL_COPY_BYTES:
        to[:] = source
    else:
        np.copyto(np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8))


def available_host_bytes() -> int | None:
    """Linux's estimate of memory that can be had without swapping; None where it is not told."""
    try:
        with open("/proc/meminfo") as lines:
            fields = (line.split() for line in lines if line.startswith("MemAvailable:"))
            return next((int(f[1]) * 1024 for f in fields), None)
    except OSError:
        return None


def locked_limit_bytes() -> int | None:
    """What the process may lock by the system's own limit; None without one. A driver may lock more: try it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


class LockedBlock:
    """Page-locked host memory of exactly `nbytes` (whole pages); ordinary memory, with one warning, if locking fails.

    `tensor`: uint8 [nbytes]. `locked`: whether it is; `refused`: why not. `told=False` leaves the warning to the
    caller. `close` unlocks it; nothing may be copying from it by then. MemoryError, OSError without any memory.
    """

    def __init__(self, nbytes: int, cuda: Any = torch.cuda, *, told: bool = True) -> None:
        self.tensor = host_block(nbytes)
        self._cuda = cuda
        self.refused = ""
        self.locked = nbytes > 0 and self._register(nbytes)
        if self.refused and told:
            warnings.warn(f"{self.refused}; copies to the GPU will be slower.", RuntimeWarning, stacklevel=2)

    @property
    def locked_bytes(self) -> int:
        """Bytes that the system may not move or swap out."""
        return whole_pages(self.tensor.numel()) if self.locked else 0

    def close(self) -> None:
        """Unlock the memory and let go of it; a second call does nothing."""
        if self.locked:
            self.locked = False
            self._cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor = self.tensor.new_empty(0)

    def __del__(self) -> None:
        # Memory that goes back to the system while CUDA believes it locked would be locked for its next owner.
        if getattr(self, "locked", False):
            self.close()

    def _register(self, nbytes: int) -> bool:
        try:
            cudart = self._cuda.cudart()
            code = cudart.cudaHostRegister(self.tensor.data_ptr(), whole_pages(nbytes), _REGISTER_PORTABLE)
        except (RuntimeError, AssertionError, AttributeError) as error:  # a torch without CUDA has no runtime
            return self._not_locked(nbytes, str(error).splitlines()[0])
        if int(code) == 0:
            return True
        self._clear_error()
        return self._not_locked(nbytes, f"CUDA error {int(code)}")

    def _clear_error(self) -> None:
        """CUDA keeps a failed call's error for the next launch to report: let that be one nobody waits for."""
        with suppress(RuntimeError, AssertionError):
            torch.empty(1, device="cuda").zero_()

    def _not_locked(self, nbytes: int, reason: str) -> bool:
        limit = locked_limit_bytes()
        told = "" if limit is None or limit >= nbytes else f", where `ulimit -l` allows {limit:,}"
        self.refused = f"page-locking {nbytes:,} bytes failed ({reason}){told}"
        return False
