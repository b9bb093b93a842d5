"""Ctrl-C while the command still loads: one line, as later, instead of a traceback through the import of torch.

A KeyboardInterrupt raised inside an import cannot be caught by the command: the package's own `import torch` comes
before any line of it, and some C extensions turn the exception into another. So the process ends in the handler.
Whoever imports the package as a library keeps the handler that was there.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

STOPPED = "stopped."


def arm() -> None:
    """Take Ctrl-C over, where this process was started as the command and nobody else has taken it."""
    if _is_command() and _is_ours_to_set() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def disarm() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt again."""
    if _is_ours_to_set() and signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_ours_to_set() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_command() -> bool:
    """`moe-lab ...` or `python -m moe_lab ...`; while the package loads, sys.argv[0] of the latter is only "-m"."""
    given = sys.orig_argv
    at = given.index("-m") if "-m" in given else len(given)
    return given[at + 1 : at + 2] == ["moe_lab"] or Path(sys.argv[0] if sys.argv else "").stem == "moe-lab"


def _stop(*_: Any) -> None:
    os.write(2, f"moe-lab: {STOPPED}\n".encode())
    os._exit(2)
