"""Arrays of an npz, pickles refused."""

import zipfile
from pathlib import Path

import numpy as np

from moe_lab.errors import LabError


def read_npz(file: str | Path, what: str) -> dict[str, np.ndarray]:
    """All arrays by name. LabError naming the file and `what` was wanted for anything that is no such npz."""
    if not Path(file).is_file():
        seen = "is not a regular file" if Path(file).exists() else "does not exist"
        raise LabError(f"{file} {seen}; wanted an npz of {what}.")
    try:
        with zipfile.ZipFile(file):
            pass  # np.load also takes bare arrays and pickles
        with np.load(file, allow_pickle=False) as data:
            return {name: data[name] for name in data.files}
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, zipfile.BadZipFile, EOFError) as e:
        raise LabError(f"{file} is not a readable npz of {what}: {' '.join(str(e).split())}") from e


def optional_array(arrays: dict[str, np.ndarray], file: str | Path, name: str, shape: tuple[int, ...], kinds: str):
    """The array called `name`, or None. LabError for another shape or dtype kind (numpy's letters)."""
    array = arrays.get(name)
    if array is not None and (array.shape != shape or array.dtype.kind not in kinds):
        raise LabError(f"{file}: {name} is {array.dtype} of shape {array.shape}; wanted {_words(kinds)} {list(shape)}.")
    return array


def _words(kinds: str) -> str:
    return {"iu": "whole numbers", "f": "floating point", "U": "text"}[kinds]
