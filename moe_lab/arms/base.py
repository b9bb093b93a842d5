"""What an arm is: one way of executing the experts' mathematics.

An arm gets rows, the experts' weights (`stack`: some slots hold them) and a schedule, and writes each (token, slot)
pair's down row. Routing, fetching and combining happen elsewhere and are the same for every arm.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from moe_lab._types import Tensor
from moe_lab.arms.schedule import DeviceWork, Group, PlannedWork, Schedule
from moe_lab.arms.stack import ExpertStack
from moe_lab.errors import LabError
from moe_lab.spec import MoESpec
from moe_lab.workspace import Scratch


@dataclass(slots=True)
class Work:
    """What a call did, counted as it happens. `products`: matrix products of the torch paths (kernels count
    themselves). `weight_bytes`: an arm adds the bytes of every weight read to it; one that does not makes it NaN.
    """

    submissions: int = 0
    products: int = 0
    weight_bytes: int | float = 0


@dataclass(frozen=True, slots=True)
class ArmContext:
    """What an arm may know besides rows and weights."""

    spec: MoESpec
    backend: Literal["cuda", "interpreter", "torch"]
    store_dtype: torch.dtype
    chunk_rows: int = 8
    work: Work = field(default_factory=Work)
    scratch: Scratch | None = None
    activation: str | None = None  # what the decode arms' activations become (None: as the weight's format asks)

    def store(self, t: Tensor) -> Tensor:
        """Pass `t` through the stored dtype: one rounding, none when it has it already."""
        return t.to(self.store_dtype)

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised scratch from the call's workspace, live until the layer is done with what the arm wrote (fresh
        memory where there is no workspace). LabError while `name` is in use."""
        if self.scratch is None:
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return self.scratch.take(name, shape, dtype)

    @contextmanager
    def phase(self, name: str) -> "Iterator[ArmContext]":
        """A context whose scratch is given back at the end of the block."""
        if self.scratch is None:
            yield self
            return
        with self.scratch.phase(name) as inner:
            yield replace(self, scratch=inner)


@runtime_checkable
class Arm(Protocol):
    """A user's own arm has these members and may be passed wherever a name is taken; `ArmExtras` are optional."""

    name: str

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """None when the arm serves these formats on this backend ("cuda", "interpreter" or "torch"), else why not."""
        ...

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """Write y[token, slot] (y is [T, K, D]) for every pair of `groups` from rows x [T, D], and nothing else."""
        ...


class ArmExtras(Protocol):
    """What an arm may have besides."""

    per_token: bool
    """True: the schedule has a step for each token, instead of one for all."""

    most_tokens: int
    """More rows a call are refused."""

    def lacks(self, spec: MoESpec) -> str | None:
        """None when the arm computes this layer's expert formula (activation, clamp, biases, place of the weight), else
        what it lacks. An arm without this method vouches for itself."""
        ...

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert (slot 0 of `stack`) over all rows x [T, D]: [T, D] of `ctx.store_dtype`. Without it the
        reference arm computes the shared expert."""
        ...

    def reads(self, layout: str, activation: str | None) -> str | None:
        """None when the arm takes experts kept in `layout` (`ExpertStack.layout`, `formats.layouts`) with activations
        of this kind (None: its own), else why not. Without it raw alone."""
        ...

    def fuses(self, formats: Sequence[str]) -> str | None:
        """None when the arm takes a stack whose slots of these formats are found by address (`ExpertStack.weights`),
        and so the shared expert as one more group; else why not. Without it the arm is refused for shared="fused"."""
        ...

    def experts_on_device(self, x: Tensor, stack: ExpertStack, work: DeviceWork, y: Tensor, ctx: ArmContext) -> None:
        """`experts` for groups that the host does not know: nothing is read back, so the call may be captured in a CUDA
        graph. Of at most 8 tokens. Without it and `experts_of_plan` the arm is refused for routing="device" and
        `MoELayer.capture`."""
        ...

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: PlannedWork, y: Tensor, ctx: ArmContext) -> None:
        """The same for any number of tokens and resident experts, from the plan itself."""
        ...


def activate(gate: Tensor, up: Tensor, ctx: ArmContext) -> Tensor:
    """h = act(gate) * up in fp32 with one rounding to gate's dtype; the spec's clamp applied. [P, F]."""
    from moe_lab_kernels.rows import activation

    compiled = ctx.backend != "torch"
    spec = ctx.spec
    reason = lacks_kernel(spec)
    if reason is not None:
        raise LabError(f"no activation kernel computes {reason}.")
    if spec.activation == "silu":
        op = activation.swiglu if compiled else activation.swiglu_ref
    else:
        op = activation.geglu if compiled else activation.geglu_ref
    return op(gate, up, limit=spec.limit)


def reads_only(layouts: Sequence[str], layout: str) -> str:
    """Why an arm that reads `layouts` does not read another one."""
    return f"it reads experts in layout {', '.join(layouts)}, and these lie in {layout!r}; arm 'reference' reads all"


def lacks_kernel(spec: MoESpec) -> str | None:
    """None when `activate` computes the spec's hidden rows, else the part of the formula that it does not."""
    if not spec.gated:
        return "experts without a gate"
    if spec.activation not in ("silu", "gelu_tanh"):
        return f"activation {spec.activation!r}"
    if spec.limit_mode == "oai" or (spec.limit is not None and spec.limit_mode != "before"):
        return f"limit_mode {spec.limit_mode!r}"
    return None
