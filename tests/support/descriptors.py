"""How many files this process has open."""

import gc
import os


def open_descriptors() -> int:
    """Open descriptors, after what only a garbage cycle (an exception's traceback) still holds has been given back."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))
