"""Who serves a tensor, and how a kernel is launched.

A CUDA tensor is served by the compiled kernel. A CPU tensor is served by Triton's interpreter where the user has set
TRITON_INTERPRET=1 before the kernels were imported, and by nothing otherwise: the launcher then names its reference.
Importing works without Triton and without a GPU; only a launch needs them.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from moe_lab.errors import LabError

try:
    import triton
    import triton.language as tl
    from triton import jit
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime.jit import JITFunction
except ImportError:

    class _Absent:
        """Stands for Triton in annotations and decorators, so that the references stay importable without it."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self

        def __getitem__(self, key: Any) -> Any:
            return self

    triton, JITFunction = None, object  # nothing counts as interpreted
    tl = jit = gdc_launch_dependents = gdc_wait = _Absent()

Backend = Literal["cuda", "interpreter"]


@jit
def _probe(x):
    """Tells how @jit treated this process's kernels; never launched."""
    tl.store(x, 0)


# What counts is how the decorator saw the variable, not what the variable says now.
INTERPRETED = not isinstance(_probe, JITFunction)


def serve(op: str, reference: str | None = None, /, **tensors: torch.Tensor | None) -> Backend:
    """The backend that runs `op` on these tensors (None is skipped).

    LabError when they lie on different devices, when Triton is missing, or when they are CPU tensors outside the
    interpreter; the message names `reference` (`<op>_ref` by default), which runs everywhere.
    """
    reference = reference or f"{op}_ref"
    given = {name: t for name, t in tensors.items() if t is not None}
    (first, head), *rest = given.items()
    if _RECORDED.get() is not None:
        return "cuda"
    for name, t in rest:
        if t.device != head.device:
            raise LabError(
                f"{op}: {first} is on {head.device} but {name} is on {t.device}; all tensors must share one device."
            )
    if triton is None:
        raise LabError(
            f"{op} needs Triton, which is not installed (pip install triton, Linux only); {reference} runs without it."
        )
    if INTERPRETED and head.device.type in ("cpu", "cuda"):
        return "interpreter"
    if head.device.type == "cuda":
        return "cuda"
    count = torch.cuda.device_count()
    found = f"{count} found here" if count else "no GPU was found here"
    late = "; it is set now, but was not when the kernels were imported" if _wants_interpreter() else ""
    raise LabError(
        f"{op} is a GPU kernel, but {first} is on {head.device}. Move it to a CUDA device ({found}), call {reference}, "
        f"or start Python with TRITON_INTERPRET=1 to run the kernel in Triton's interpreter{late}."
    )


def _wants_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def backend_of(tensor: torch.Tensor) -> Literal["cuda", "interpreter", "torch"]:
    """What `lab.*` runs for this tensor: the kernels where they can serve it, the torch references elsewhere."""
    if _RECORDED.get() is not None:
        return "cuda"
    if INTERPRETED and tensor.device.type in ("cpu", "cuda"):
        return "interpreter"
    return "cuda" if tensor.device.type == "cuda" else "torch"


def has_dp4a(backend: Backend) -> bool:
    """Whether the byte dot products of NVIDIA's instruction set may be used; plain twins serve every other target."""
    return backend == "cuda" and torch.version.hip is None


# A kernel's constants that say how its work is cut: of weight rows, of tokens, of both together, and what a program
# keeps at hand.
CUT = (
    "FORMAT", "ROWS", "TOKENS", "TOGETHER", "SHARED", "SUMS", "STAGED", "RESIDENT", "R", "B", "P", "DOWN_SHARED",
    "DOWN_ROWS", "DOWN_SUMS", "NEXT_B", "NEXT_P", "BLOCK", "BLOCK_D", "TILE",
)  # fmt: skip
OF_LAUNCH = ("num_warps", "num_stages", "maxnreg")
_PLACES: dict[str, tuple[tuple[str, int], ...]] = {}


def _places(kernel: Any) -> tuple[tuple[str, int], ...]:
    """Which of its positional arguments a kernel's constants of `CUT` are."""
    own = f"{kernel.__module__}.{kernel.__name__}"
    if own not in _PLACES:
        names = getattr(kernel, "arg_names", ())
        _PLACES[own] = tuple((name, names.index(name)) for name in CUT if name in names)
    return _PLACES[own]


@dataclass
class LaunchCount:
    """Kernels started inside a `count_launches()` block; replays of a captured graph start none from here. `cuts`: each
    way in which one was cut, once, as (kernel, values of its constants in `CUT`, values of `OF_LAUNCH`)."""

    by_kernel: Counter[str] = field(default_factory=Counter)
    cuts: dict[tuple[str, tuple[Any, ...], tuple[Any, ...]], tuple[str, ...]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """All of them."""
        return sum(self.by_kernel.values())

    def note(self, kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
        """One more, and how it was cut."""
        self.by_kernel[kernel.__name__] += 1
        places = _places(kernel)
        found = tuple(args[at] for _, at in places if at < len(args))
        self.cuts[kernel.__name__, found, tuple(map(meta.get, OF_LAUNCH))] = tuple(name for name, _ in places)

    @property
    def tiles(self) -> str:
        """Each kernel by name with the launch parameters that it ran with, in the order of first use."""
        return "; ".join(
            " ".join([kernel.strip("_"), *_said(names, values), *_said(OF_LAUNCH, launched)])
            for (kernel, values, launched), names in self.cuts.items()
        )


def _said(names: tuple[str, ...], values: tuple[Any, ...]) -> list[str]:
    plain = [(name.lower(), getattr(value, "value", value)) for name, value in zip(names, values, strict=False)]
    return [f"{name}={value}" for name, value in plain if value is not None]


_COUNTS: ContextVar[tuple[LaunchCount, ...]] = ContextVar("moe_lab_launches", default=())


@contextmanager
def count_launches() -> Iterator[LaunchCount]:
    """Count the kernels started inside the block (blocks may nest)."""
    count = LaunchCount()
    token = _COUNTS.set((*_COUNTS.get(), count))
    try:
        yield count
    finally:
        _COUNTS.reset(token)


class Launch(NamedTuple):
    """A launch that was recorded: what `kernel[grid](*args, **meta)` takes."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_RECORDED: ContextVar[list[Launch] | None] = ContextVar("moe_lab_recorded", default=None)


@contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Write launches down instead of starting them, as a Hopper GPU would get them: what compiles kernels ahead, or
    on a machine without a GPU, runs launchers and arms inside the block.

    Tensors may lie anywhere; outputs keep what they held, so nothing may be read back.
    """
    made: list[Launch] = []
    token = _RECORDED.set(made)
    try:
        yield made
    finally:
        _RECORDED.reset(token)


@cache
def _only_device() -> bool:
    """Whether there is one device, which is then the current one: asking torch takes 4 us a launch."""
    return torch.cuda.device_count() == 1


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, not on the tensor's: make them agree for the block, then restore."""
    if device.type != "cuda" or _only_device() or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
    """Start `kernel` on `device` over `grid`; an empty grid starts nothing.

    Multiply-add fusion is off for every kernel by name: the default differs between Triton versions, and a fused
    product would round differently from the references.
    """
    if 0 in grid:
        return
    recorded = _RECORDED.get()
    if recorded is not None:
        recorded.append(Launch(kernel, grid, args, {"enable_fp_fusion": False, **meta}))
        return
    for count in _COUNTS.get():
        count.note(kernel, args, meta)
    with on_device(device):
        kernel[grid](*args, enable_fp_fusion=False, **meta)


def early_start(wanted: bool, backend: Backend) -> dict[str, bool]:
    """Launch options with which a kernel that waits by itself may start while the one before still runs (programmatic
    dependent launch, from compute capability 9.0 on). None in the interpreter, and where it was not asked for."""
    return {"launch_pdl": True} if wanted and backend == "cuda" else {}


def has_early_start(device: torch.device) -> bool:
    """Whether kernels on `device` can start early; the others run one after another."""
    return _RECORDED.get() is not None or _starts_early(device)


@cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's where there is none, to compile for it."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= max(n, 1); Triton's ranges must have such lengths."""
    return 1 << max(0, n - 1).bit_length()
