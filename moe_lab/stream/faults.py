"""A disk with faults: what stands in for `os.preadv` to see what a cache does when reads go wrong.

    source = ckpt.expert_source.reading_through(FaultyReads(short=4096, errors={3: errno.EIO}))

Counts calls from 1 over all files and threads. Everything else about the read is the system's own.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moe_lab.errors import LabError


@dataclass(slots=True)
class FaultyReads:
    """Faults of `os.preadv`; several may be set at once, and changed while reads go on.

    short: at most so many bytes a call. errors: {number of the call: errno}, raised instead of reading (EINTR as the
    InterruptedError that Python makes of it). delay_s: before every call. ends_at: the file seems to end there.
    flipped: {byte of the file: bits to flip in what is read}. `calls` and `bytes_read` count what came through.
    """

    short: int | None = None
    errors: Mapping[int, int] = field(default_factory=dict)
    delay_s: float = 0.0
    ends_at: int | None = None
    flipped: Mapping[int, int] = field(default_factory=dict)
    calls: int = 0
    bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        if self.short is not None and self.short < 1:
            raise LabError(f"short={self.short}: a read of no bytes is the file's end; wanted 1 or more, or ends_at.")

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            self.calls += 1
            code = self.errors.get(self.calls)
        if self.delay_s:
            time.sleep(self.delay_s)
        if code is not None:
            raise OSError(code, os.strerror(code))
        room = min((sum(b.nbytes for b in buffers), self.short or 1 << 62, self._before_end(offset)))
        got = os.preadv(fd, _first(buffers, room), offset) if room > 0 else 0
        self._flip(buffers, offset, got)
        with self._lock:
            self.bytes_read += got
        return got

    def _before_end(self, offset: int) -> int:
        return 1 << 62 if self.ends_at is None else max(0, self.ends_at - offset)

    def _flip(self, buffers: Sequence[memoryview], offset: int, got: int) -> None:
        for place, bits in self.flipped.items():
            at = place - offset
            if not 0 <= at < got:
                continue
            for buffer in buffers:
                if at < buffer.nbytes:
                    buffer[at] ^= bits
                    break
                at -= buffer.nbytes


def _first(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """The first `count` bytes of `buffers`."""
    taken = []
    for buffer in buffers:
        if count <= 0:
            break
        taken.append(buffer[:count])
        count -= taken[-1].nbytes
    return taken
