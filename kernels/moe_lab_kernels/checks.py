"""What launchers check on the host before anything starts: dtype, shape, strides, alignment."""

from collections.abc import Sequence
from typing import Any

import torch

from moe_lab.errors import LabError, LabTypeError

MOST_ALIGNED = 16  # bytes; no alignment asked for is a larger power of two
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.uint8: "uint8",
}


def signature(t: Any) -> tuple[Any, ...]:
    """All that the checks here can tell of a tensor: two of one signature are right or wrong together."""
    return type(t), t.dtype, t.shape, t.stride(), t.data_ptr() % MOST_ALIGNED


def expect(op: str, name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> None:
    """`shape` holds lengths, and letters for axes of any length. LabTypeError for the dtype, LabError for the shape."""
    # A decode step asks some forty times: a loop that leaves early takes a third of the time of generators.
    if t.dtype not in dtypes:
        raise LabTypeError(f"{op}: {name} must be {' or '.join(SHORT[d] for d in dtypes)}, got {t.dtype}.")
    given = t.shape
    fits = len(given) == len(shape)
    for wanted, n in zip(shape, given, strict=False):
        if wanted != n and not isinstance(wanted, str):
            fits = False
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise LabError(f"{op}: {name} must have shape [{wanted}], got {list(given)}.")


def expect_rows(op: str, name: str, t: torch.Tensor, alignment: int = 1) -> None:
    """The last axis is contiguous and every row starts at a multiple of `alignment` bytes; other strides are free."""
    shape, strides = t.shape, t.stride()
    if 0 in shape:
        return
    if shape[-1] > 1 and strides[-1] != 1:
        raise LabError(
            f"{op}: {name}'s last axis must be contiguous, got strides {strides} for shape {list(shape)}; "
            "call .contiguous()."
        )
    if alignment == 1:
        return
    size, at = t.element_size(), t.data_ptr()
    odd = at % alignment != 0
    for step, n in zip(strides[:-1], shape[:-1], strict=True):
        odd |= n > 1 and step * size % alignment != 0
    if odd:
        raise LabError(
            f"{op}: {name}'s rows must start at multiples of {alignment} bytes, got strides {strides} from address "
            f"{at:#x}."
        )


def expect_contiguous(op: str, name: str, t: torch.Tensor) -> None:
    """No strides at all."""
    if not t.is_contiguous():
        raise LabError(f"{op}: {name} must be contiguous, got strides {t.stride()}; call .contiguous().")
