"""Checksums of experts as they come in: whether what the disk gave is what was packed.

A packed file has a CRC-32 for each row; model files have none. Checking runs in the reader thread that ends an expert's
last read, before anybody is told that it is there. It costs one pass over the bytes: `ms` says how long, together.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from moe_lab.errors import CheckpointError, LabError
from moe_lab.stream.policy import Key
from moe_lab.stream.source import ExpertSource

Verify = Literal["off", "sampled", "strict"]
VERIFY_MODES: tuple[Verify, ...] = get_args(Verify)
SAMPLE = 16  # sampled: one expert in so many


def check_verify(mode: str) -> None:
    """LabError for a name that is no way to check."""
    if mode not in VERIFY_MODES:
        raise LabError(f"verify={mode!r}; wanted {', '.join(VERIFY_MODES)}.")


class Verifier:
    """Which experts of one source are checked, and what that cost. After one mismatch all of them are.

    `checked`: experts; `wrong`: those refused; `ms`: time spent, over all threads. LabError where the source has no
    checksums.
    """

    def __init__(self, source: ExpertSource, mode: Verify) -> None:
        check_verify(mode)
        if mode != "off" and source.checksum(source.layers[0], 0) is None:
            raise LabError(f"{source.path} holds no checksums to verify={mode!r} against. Pack it: moe-lab pack.")
        self._source, self._mode = source, mode
        self._lock = threading.Lock()
        self._seen = 0
        self.checked = self.wrong = 0
        self.ms = 0.0

    def wants(self, key: Key) -> bool:
        """Whether this expert is one to check; counts it as seen."""
        with self._lock:
            self._seen += 1
            every = self._mode == "strict" or self.wrong > 0
            return self._mode != "off" and (every or self._seen % SAMPLE == 1)

    def check(self, key: Key, data: memoryview) -> CheckpointError | None:
        """The error to raise when these bytes are not the expert's."""
        begin = time.perf_counter_ns()
        found, wanted = zlib.crc32(data), self._source.checksum(*key)
        with self._lock:
            self.checked += 1
            self.wrong += found != wanted
            self.ms += (time.perf_counter_ns() - begin) / 1e6
        if found == wanted:
            return None
        what = f"its bytes have the checksum {found:08x}, {wanted:08x} was written. Pack the model again."
        return CheckpointError(self._source.path, "checksum", what, seen=f"{found:08x}", wanted=f"{wanted:08x}")


class LastRead:
    """Takes `steps` (checking, packing) when the last of an expert's `jobs` has ended, in whichever thread that is; the
    first that returns or raises an error is the last."""

    def __init__(self, jobs: int, steps: Sequence[Callable[[], Exception | None]]) -> None:
        self._steps, self._left, self._lock = steps, jobs, threading.Lock()
        self._whole = True

    def after(self, error: Exception | None) -> Exception | None:
        """What to report for a job that ended with `error`."""
        with self._lock:
            self._left -= 1
            last = self._left == 0
            self._whole = (
                self._whole and error is None
            )  # bytes that another job failed to bring, or gave up, are no news
        if error is not None or not last or not self._whole:
            return error
        try:
            return next((wrong for step in self._steps if (wrong := step()) is not None), None)
        except Exception as failed:
            return failed
