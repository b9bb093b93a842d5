"""What an exception means for a record: out of memory, or any other error. Nothing else stops a benchmark."""

import gc
from contextlib import suppress

import torch

from moe_lab.errors import LabError
from moe_lab.runs import Status
from moe_lab.workspace import release_idle

_NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")
MOST_TEXT = 300


def status_of(error: Exception) -> tuple[Status, str]:
    """(OOM or ERROR, the exception's name and text on one line); of what an arm raised, the arm's own exception."""
    if isinstance(error, LabError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = " ".join(str(error).split())
    short = text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."
    oom = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in text.lower() for words in _NO_MEMORY)
    )
    return (Status.OOM if oom else Status.ERROR), f"{type(error).__name__}: {short}" if short else type(error).__name__


def give_back() -> None:
    """Free what a failed arm left behind, scratch that calls keep for the next one too, as far as the device still
    answers."""
    release_idle()
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
