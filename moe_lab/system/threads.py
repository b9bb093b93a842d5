"""One thread for small work on the CPU.

An expert of a small model is a few million multiply-adds a call, spread over thousands of short torch operations. A
second thread then waits in barriers more than it works: on two busy cores a 512-token layer of lab-42m took 1.4 s with
two threads and 0.25 s with one (CPU time 0.13 s). Large experts keep all threads.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_MACS = 2**25  # multiply-adds of one expert's product below which one thread is used

_lock = threading.Lock()
_depth = 0
_before = 0


@contextmanager
def threads_for(macs: int) -> Iterator[None]:
    """Inside the block torch uses one thread when a product takes fewer than SMALL_MACS multiply-adds.

    The setting is the process's: overlapping blocks share it, and the last one to leave restores what was there.
    """
    global _depth, _before
    if macs >= SMALL_MACS:
        yield
        return
    with _lock:
        if _depth == 0:
            _before = torch.get_num_threads()
            torch.set_num_threads(1)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                torch.set_num_threads(_before)
