"""A user's arm at the lab's door and at work: checked when it comes in, named when it fails.

The lab's own arms pass untouched. Running out of memory keeps its exception, because harnesses handle it by its type.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import Arm, ArmExtras, Work
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats.layouts import RAW
from moe_lab.protocols import check_new_name, check_object

OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def is_own(arm: object, own: Mapping[str, Arm]) -> bool:
    """Whether `arm` is one of the lab's: the object in its table, or another of the same class."""
    named = own.get(getattr(arm, "name", ""))  # type: ignore[arg-type]
    return named is not None and type(named) is type(arm)


def check_arm(arm: object, own: Mapping[str, Arm]) -> None:
    """LabTypeError for what lacks a member of `Arm`, LabError for a name that one of the lab's arms has."""
    if is_own(arm, own):
        return
    check_object(arm, Arm, "arm", ("auto", *own), optional=ArmExtras)
    check_new_name(arm.name, "arm", ("auto", *own))  # type: ignore[attr-defined]


@contextmanager
def blaming(arm: Arm, where: str, own: Mapping[str, Arm]) -> Iterator[None]:
    """Inside, what a user's arm raises becomes a LabError with the arm's name; the original is its cause."""
    try:
        yield
    except OUT_OF_MEMORY as error:
        error.add_note(f"It was raised in arm {arm.name!r}, {where}.")
        raise
    except Exception as error:
        if is_own(arm, own):
            raise
        raise LabError(f"arm {arm.name!r} raised {type(error).__name__} in {where}: {error}") from error


def unread(arm: Arm, layout: str, activation: str | None = None) -> str | None:
    """Why the arm does not read experts in this layout, with activations of this kind; None when it does."""
    if layout == RAW:
        return None
    reads = getattr(arm, "reads", None)
    if reads is None:
        return f"it reads raw blocks, and these experts lie in layout {layout!r}: layer.repacked('raw') has raw ones"
    return expect_reason(arm, reads(layout, activation), "reads")


@contextmanager
def counting(work: Work) -> Iterator[None]:
    """Inside, an arm that adds nothing to `work.weight_bytes` makes it NaN: nobody knows what it read."""
    before = work.weight_bytes
    yield
    if work.weight_bytes == before:
        work.weight_bytes = math.nan


def expect_reason(arm: Arm, given: Any, member: str) -> str | None:
    """`given` if it is None or a text, as `supports` and `lacks` answer. LabTypeError for True, False and the rest."""
    if given is None or isinstance(given, str):
        return given
    raise LabTypeError(f"arm {arm.name!r}: {member} gave {given!r}; wanted None where it serves, else the reason.")


def expect_nothing(arm: Arm, given: object, y: Tensor) -> None:
    """LabTypeError for an arm that returns its rows instead of writing them into y."""
    if given is not None and given is not y:
        raise LabTypeError(
            f"arm {arm.name!r}: experts returned a {type(given).__name__}; it writes rows into y[token, slot] and "
            "returns nothing."
        )


def expect_shared(arm: Arm, given: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The shared expert's rows. LabTypeError for anything but a tensor [T, D] of the stored dtype."""
    if isinstance(given, Tensor) and tuple(given.shape) == shape and given.dtype == dtype:
        return given
    came = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
    raise LabTypeError(f"arm {arm.name!r}: shared gave {came}; wanted {dtype} {shape}.")
