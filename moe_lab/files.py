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
        raise LabError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)
    return path
