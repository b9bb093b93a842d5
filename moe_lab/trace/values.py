"""The arrays of a trace as it keeps them: each converted where nothing is lost, refused where something would be."""

from pathlib import Path
from typing import Any

import numpy as np

from moe_lab.checks import came, wants, wants_whole, wants_wholes
from moe_lab.errors import LabError, LabTypeError

NO_PICK = np.uint16(65535)  # a skipped slot (-1) on disk
MOST_EXPERTS = int(NO_PICK)
"""R at most: ids are 16-bit, and the last one is NO_PICK."""
NO_NUMBER, MOST_LAYER = -1, 32767
"""Layer numbers are int16 on disk; -1 is a layer that was given none."""


def as_array(what: str, given: object) -> np.ndarray:
    """LabTypeError for anything but a numpy array."""
    wants(what, given, np.ndarray, "a numpy array")
    assert isinstance(given, np.ndarray)
    return given


def as_ids(ids: object, where: str) -> np.ndarray:
    """Whole numbers as uint16, -1 as NO_PICK. LabError for what does not fit: nothing wraps around silently."""
    ids = as_array(where, ids)
    if ids.dtype.kind not in "iu":
        raise LabTypeError(f"{where}: expert ids are whole numbers, got {ids.dtype}.")
    if ids.dtype == np.uint16:
        return ids
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) > NO_PICK):
        raise LabError(
            f"{where}: expert ids run from {int(ids.min())} to {int(ids.max())}; wanted 0..{NO_PICK - 1}, or -1 for a "
            f"skipped slot."
        )
    return np.where(ids == -1, NO_PICK, ids).astype(np.uint16)


def as_weights(weights: object, where: str = "weights") -> np.ndarray:
    """Weights as float16; what lies beyond it becomes an infinity, which a trace refuses."""
    weights = as_array(where, weights)
    if weights.dtype.kind != "f":
        raise LabTypeError(f"{where}: weights are floating point, got {weights.dtype}.")
    with np.errstate(over="ignore"):
        return weights.astype(np.float16, copy=False)


def as_token_ids(token_ids: object) -> np.ndarray:
    """Token ids as int32. LabError for those beyond it."""
    token_ids = as_array("token_ids", token_ids)
    if token_ids.dtype.kind not in "iu":
        raise LabTypeError(f"token_ids are whole numbers, got {token_ids.dtype}.")
    if token_ids.size and not -(2**31) <= int(token_ids.min()) <= int(token_ids.max()) < 2**31:
        raise LabError(f"token_ids run from {token_ids.min()} to {token_ids.max()}; wanted 32-bit whole numbers.")
    return token_ids.astype(np.int32, copy=False)


def as_margin(margin: object) -> np.ndarray:
    """Margins as float32."""
    margin = as_array("margin", margin)
    if margin.dtype.kind != "f":
        raise LabTypeError(f"margins are floating point, got {margin.dtype}.")
    with np.errstate(over="ignore"):
        return margin.astype(np.float32, copy=False)


def as_layers(layers: object) -> tuple[int, ...]:
    """Layer numbers as a tuple. LabError for one that stands twice or does not fit the file's int16."""
    numbers = tuple(wants_wholes("layers", layers))
    for number in numbers:
        if not NO_NUMBER <= number <= MOST_LAYER:
            raise LabError(f"layers holds the number {number}; wanted 0..{MOST_LAYER}, or -1 for a layer without one.")
    if len(set(numbers)) < len(numbers):
        twice = next(n for n in numbers if numbers.count(n) > 1)
        raise LabError(f"layers holds the number {twice} twice; each layer of a trace has its own.")
    return numbers


def most_id(ids: np.ndarray) -> int:
    """The largest id picked; 0 where every slot is skipped."""
    return int(ids[ids != NO_PICK].max(initial=0))


def asked_experts(num_experts: object) -> int | None:
    """E as a caller says it, None where it does not. LabError below 1 and beyond 16-bit ids."""
    return None if num_experts is None else wants_whole("num_experts", num_experts, 1, MOST_EXPERTS)


def experts_of(path: str | Path, told: int | None, asked: int | None, ids: np.ndarray) -> int:
    """E: what the file says, else what the caller does, else the largest id + 1. LabError where the two disagree."""
    if told is not None and asked is not None and told != asked:
        raise LabError(f"{path} says that there are {told} experts, but num_experts={asked} was asked.")
    return told if told is not None else asked if asked is not None else most_id(ids) + 1


def token_span(tokens: Any) -> tuple[int, int] | None:
    """(start, stop) of a slice or pair of non-negative numbers. LabError for steps, negatives and reversed pairs."""
    if tokens is None:
        return None
    if isinstance(tokens, slice):
        if tokens.step not in (None, 1):
            raise LabError(f"tokens has step {tokens.step}; a trace is read in one piece.")
        pair = (0 if tokens.start is None else tokens.start, 2**62 if tokens.stop is None else tokens.stop)
    else:
        pair = tuple(tokens) if isinstance(tokens, tuple | list) else ()
        if len(pair) != 2:
            raise LabTypeError(f"tokens is {came(tokens)}; wanted a pair (start, stop) or a slice.")
    start, stop = (wants_whole(f"the {end} of tokens", n) for end, n in zip(("start", "stop"), pair, strict=True))
    if not 0 <= start <= stop:
        shown = tokens if isinstance(tokens, slice) else f"{start}..{stop}"
        raise LabError(f"tokens {shown}: wanted 0 <= start <= stop (a file is not counted from its end).")
    return start, stop
