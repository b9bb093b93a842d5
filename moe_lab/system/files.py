"""Writing a file so that a full disk costs nothing that was there before."""

import os
from collections.abc import Callable
from pathlib import Path

from moe_lab.errors import LabError


def replace_file(path: str | Path, write: Callable[[Path], object]) -> Path:
    """Let `write` fill a file beside `path`, then put it in path's place in one step.

    LabError naming the file when either fails; what stood at `path` is then untouched and the part is removed.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise LabError(f"cannot write {path}: it is not a regular file.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    except OSError as error:
        raise LabError(f"cannot write {path}: {why(error)}.") from error
    finally:
        part.unlink(missing_ok=True)
    return path


def why(error: OSError) -> str:
    """What the system says. numpy reports a write that a full disk cut short without the system's number."""
    cut_short = error.errno is None and "requested and" in str(error)
    return "No space left on device" if cut_short else error.strerror or str(error)
