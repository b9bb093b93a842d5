"""What launchers check on the host before anything starts: dtype, shape, strides, alignment."""

from collections.abc import Sequence

import torch

from moe_lab.errors import LabError, LabTypeError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.int32: "int32",
    torch.uint8: "uint8",
}


def expect(op: str, name: str, t: torch.Tensor, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> None:
    """`shape` holds lengths, and letters for axes of any length. LabTypeError for the dtype, LabError for the shape."""
    if t.dtype not in dtypes:
        raise LabTypeError(f"{op}: {name} must be {' or '.join(SHORT[d] for d in dtypes)}, got {t.dtype}.")
    fits = t.ndim == len(shape) and all(isinstance(w, str) or w == n for w, n in zip(shape, t.shape, strict=True))
    if not fits:
        wanted = ", ".join(map(str, shape))
        raise LabError(f"{op}: {name} must have shape [{wanted}], got {list(t.shape)}.")


def expect_rows(op: str, name: str, t: torch.Tensor, alignment: int = 1) -> None:
    """The last axis is contiguous and every row starts at a multiple of `alignment` bytes; other strides are free."""
    if not t.numel():
        return
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise LabError(
            f"{op}: {name}'s last axis must be contiguous, got strides {t.stride()} for shape {list(t.shape)}; "
            "call .contiguous()."
        )
    steps = [s * t.element_size() for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
    if any(s % alignment for s in (t.data_ptr(), *steps)):
        raise LabError(
            f"{op}: {name}'s rows must start at multiples of {alignment} bytes, got strides {t.stride()} from address "
            f"{t.data_ptr():#x}."
        )


def expect_contiguous(op: str, name: str, t: torch.Tensor) -> None:
    """No strides at all."""
    if not t.is_contiguous():
        raise LabError(f"{op}: {name} must be contiguous, got strides {t.stride()}; call .contiguous().")
