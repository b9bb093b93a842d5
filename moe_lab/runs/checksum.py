"""A run's checksum: over what its records and its metadata say, not over how Parquet packs them.

So it stays true when another Parquet library or version writes the same values, and finds a bit that flipped in one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from moe_lab.runs.columns import COLUMNS, NUMBERS


def checksum(columns: Mapping[str, Sequence[Any]], about: dict[str, Any]) -> str:
    """SHA-256 of COLUMNS (those that there are), `samples` and the metadata; None, NaN and an empty list count as
    different values."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in (name for name in COLUMNS if name in columns):
        if name in NUMBERS:
            _add_numbers(digest, [value is None for value in columns[name]], columns[name])
        else:
            digest.update(json.dumps([name, *columns[name]]).encode())
    samples = columns["samples"]
    counts = [-1 if one is None else len(one) for one in samples]
    _add_numbers(digest, counts, list(chain.from_iterable(one or () for one in samples)))
    return digest.hexdigest()


def _add_numbers(digest: Any, held: Sequence[int], values: Sequence[float | None]) -> None:
    numbers = np.array(values, dtype="<f8")
    numbers[np.isnan(numbers)] = np.nan  # one NaN: which bits it has is no part of the value
    digest.update(np.array(held, dtype="<i8").tobytes() + numbers.tobytes())
