"""How soon Python's interpreter lock changes hands while experts are read.

A thread that comes back from a read needs the lock to go on. While the main thread runs Python code it gets it after
the switch interval, 5 ms by default: two reader threads then fell from 1.19 to 0.78 GB/s on a disk, and from 23 to 2.7
out of the page cache. Four threads with requests of 1 MiB beside such a thread on two cores: 0.77 GB/s at 0.5 ms, 1.02
at 0.2, 1.16 at 0.1, 1.05 at 0.05.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 1e-4
_HALF_TICK_S = 5e-7  # Python keeps whole microseconds, cut off: setting 100 us to what was read of it would make it 99

_lock = threading.Lock()
_depth = 0
_before = 0.0
_set = 0.0


@contextmanager
def short_switches() -> Iterator[None]:
    """Inside the block the interval is at most INTERVAL_S. Overlapping blocks share it; the last one restores what was
    there, unless somebody else set it meanwhile.
    """
    global _depth, _before, _set
    with _lock:
        if _depth == 0:
            _before = sys.getswitchinterval()
            if _before > INTERVAL_S:
                sys.setswitchinterval(INTERVAL_S)
            _set = sys.getswitchinterval()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and sys.getswitchinterval() == _set:
                sys.setswitchinterval(_before + _HALF_TICK_S)
