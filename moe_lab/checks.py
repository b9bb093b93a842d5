"""What arguments must be before anything is done with them: asked at the public entrances, once and in one voice.

Each names the argument, what came and what was wanted. Knows no object of the lab; a room hands over its own types.
"""

import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from moe_lab._types import Tensor
from moe_lab.errors import LabError, LabTypeError

Kind = TypeVar("Kind")
_LONGEST = 40


def came(given: object) -> str:
    """An argument as messages show it: None, 'text' or 3 as written, a container by its type and shape."""
    if given is None or isinstance(given, bool):
        return repr(given)
    kind = f"{type(given).__module__.split('.')[0]}.{type(given).__qualname__}".removeprefix("builtins.")
    if isinstance(given, str | int | float | os.PathLike):
        shown = repr(given)
        return f"{shown if len(shown) <= _LONGEST else shown[:_LONGEST] + '..'} ({kind})"
    shape = getattr(given, "shape", None)
    return f"a {kind}{f' of shape {list(shape)}' if isinstance(shape, tuple) else ''}"


def wants(what: str, given: object, kind: type[Kind] | tuple[type, ...], wanted: str) -> None:
    """LabTypeError unless `given` is a `kind`; `wanted` says what that is in words."""
    if not isinstance(given, kind):
        raise LabTypeError(f"{what} is {came(given)}; wanted {wanted}.")


def wants_tensor(what: str, given: object) -> None:
    """LabTypeError for anything but a torch tensor that holds values."""
    if not isinstance(given, Tensor):
        fix = ": torch.as_tensor makes one" if hasattr(given, "__array__") or isinstance(given, list | tuple) else ""
        raise LabTypeError(f"{what} is {came(given)}; wanted a torch tensor{fix}.")
    if given.is_meta:
        raise LabTypeError(f"{what} is on the meta device and holds no values; wanted a tensor on the CPU or a GPU.")


def wants_whole(what: str, given: object, low: int | None = None, high: int | None = None) -> int:
    """`given` as an int. LabTypeError for what is no whole number (True is none), LabError outside low..high."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise LabTypeError(f"{what} is {came(given)}; wanted a whole number.")
    number = int(given)
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"{low} or more" if high is None else f"at most {high}" if low is None else f"{low}..{high}"
        raise LabError(f"{what} is {number}; wanted {bounds}.")
    return number


def wants_wholes(what: str, given: object, low: int | None = None) -> list[int]:
    """Several whole numbers as a list. LabTypeError for a single one, text, or an entry that is none."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise LabTypeError(f"{what} is {came(given)}; wanted several whole numbers, such as [0, 1].")
    return [wants_whole(f"{what}[{i}]", one, low) for i, one in enumerate(given)]


def wants_number(what: str, given: object) -> None:
    """LabTypeError for what is no real number (True is none)."""
    if isinstance(given, bool) or not isinstance(given, Real):
        raise LabTypeError(f"{what} is {came(given)}; wanted a number.")


def wants_path(what: str, given: object) -> Path:
    """`given` as a path, "~/" expanded. LabTypeError for what is no path, LabError for an empty one or an address."""
    if not isinstance(given, str | os.PathLike):
        raise LabTypeError(f"{what} is {came(given)}; wanted a path, as text or a pathlib.Path.")
    text: Any = os.fspath(given)
    if not isinstance(text, str):
        raise LabTypeError(f"{what} is {text[:_LONGEST]!r} (bytes); wanted a path as text: os.fsdecode makes one.")
    if not text:
        raise LabError(f"{what} is empty; wanted the path of a file.")
    if "://" in text:
        raise LabError(f"{what} is {text!r}, an address; files of this machine are read. Download it first.")
    return Path(text).expanduser() if text.startswith("~/") else Path(text)
