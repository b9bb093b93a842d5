"""Kernel or torch: who routes."""

from typing import Literal

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.backend import backend_of
from moe_lab_kernels.checks import FLOATS

BackendChoice = Literal["auto", "torch", "triton"]


def takes_kernel(backend: BackendChoice, unserved: str | None, *tensors: Tensor, **optional: Tensor | None) -> bool:
    """Whether the kernel runs: always by name (it then says itself what it refuses), by "auto" where it serves."""
    if backend not in ("auto", "torch", "triton"):
        raise LabError(f"backend is {backend!r}; it must be 'auto', 'torch' or 'triton'.")
    if backend != "auto":
        return backend == "triton"
    given = [*tensors, *(t for t in optional.values() if t is not None)]
    return unserved is None and backend_of(given[0]) != "torch" and all(t.dtype in FLOATS for t in given)
