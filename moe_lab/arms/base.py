"""What an arm is: one way of executing the experts' mathematics.

An arm gets rows, the experts' weights (some slots hold them) and a schedule, and writes each (token, slot) pair's
down row. Routing, fetching and combining happen elsewhere and are the same for every arm.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor
from moe_lab.formats.layouts import Laid, layout_of
from moe_lab.routing import ExpertPlan
from moe_lab.spec import MoESpec
from moe_lab.workspace import Scratch
from moe_lab_kernels.grouped.tiles import WorkList, tokens_for, work_list
from moe_lab_kernels.slots.pointer_table import Weights


class Group(NamedTuple):
    """One expert's pairs within a step: pairs `first` .. `first + rows - 1` of the schedule."""

    expert: int
    first: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """The order of work. token, slot int64 [P]: pair p is slot `slot[p]` of token `token[p]`; weight fp32 [P] is the
    router's, for formulas that need it before the combine.

    `steps`: each a list of groups handed over together (one submission); a group's pairs are contiguous.
    """

    token: Tensor
    slot: Tensor
    weight: Tensor
    steps: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertBiases:
    """Biases of all E experts, whichever of them are at hand: gate, up [E, F], down [E, D]. No gate, no gate bias."""

    up: Tensor
    down: Tensor
    gate: Tensor | None = None


class ExpertStack:
    """Expert weights at hand: gate and up [S, F, D], down [S, D, F], and which slot holds which expert. `gate` is None
    where experts have none. All parts lie in one layout (`formats.layouts`); LabError where they do not.

    Remembers what the CPU paths decode from a slot (fp32 values, integer forms) for as long as it lives: for ever when
    the layer is resident, one wave of experts when streamed.
    """

    def __init__(
        self,
        gate: Laid | None,
        up: Laid,
        down: Laid,
        slot_of: dict[int, int],
        biases: ExpertBiases | None = None,
    ) -> None:
        self.up, self.down, self.slot_of, self.biases = up, down, slot_of, biases
        self._gate = gate
        self._decoded: dict[tuple[str, str, int], Any] = {}
        self.layout = layout_of(self.parts)

    @property
    def gate(self) -> Laid:
        """The gate projections. LabError where experts have none."""
        if self._gate is None:
            raise LabError("these experts have no gate projection.")
        return self._gate

    @cached_property
    def parts(self) -> dict[str, Laid]:
        """What there is of gate, up and down; not to be changed."""
        named = {"gate": self._gate, "up": self.up, "down": self.down}
        return {name: q for name, q in named.items() if q is not None}

    def bias(self, part: str, expert: int) -> Tensor | None:
        """One expert's bias [N], or None."""
        bias = None if self.biases is None else getattr(self.biases, part)
        return None if bias is None else bias[expert]

    def part(self, name: str) -> Laid:
        """ "gate", "up" or "down", stacked over slots."""
        return getattr(self, name)

    def weights(self, part: str) -> Weights:
        """A part's bytes of all slots as the kernels for its layout take them: raw rows [S, N, row_bytes], tiles
        [S, N / 16, tile_bytes], planes [S, 1, bytes]."""
        return by_slot(self.part(part))

    def matrix(self, part: str, expert: int) -> QuantTensor:
        """One expert's matrix as raw bytes, whatever the layout."""
        return self.part(part)[self.slot_of[expert]].to_raw()

    def values(self, part: str, expert: int) -> Tensor:
        """One expert's matrix in fp32 [N, Kd]."""
        return self._remember("values", part, expert, QuantTensor.dequantize)

    def integers(self, part: str, expert: int) -> Any:
        """One expert's matrix as an IntegerForm."""
        return self._remember("integers", part, expert, QuantTensor.integer_form)

    def _remember(self, kind: str, part: str, expert: int, decode: Callable[[QuantTensor], Any]) -> Any:
        key = (kind, part, self.slot_of[expert])
        if key not in self._decoded:
            self._decoded[key] = decode(self.matrix(part, expert))
        return self._decoded[key]

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of one expert's matrices."""
        return sum(q.nbytes // max(1, len(q)) for q in self.parts.values())


def by_slot(weight: Laid) -> Tensor:
    """Bytes of a stack of matrices, three axes in every layout: planes are one row a slot."""
    return weight.data if weight.data.ndim == 3 else weight.data.unsqueeze(1)


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

    def experts_on_device(self, x: Tensor, stack: ExpertStack, work: "DeviceWork", y: Tensor, ctx: ArmContext) -> None:
        """`experts` for groups that the host does not know: nothing is read back, so the call may be captured in a CUDA
        graph. Of at most 8 tokens. Without it and `experts_of_plan` the arm is refused for routing="device" and
        `MoELayer.capture`."""
        ...

    def experts_of_plan(self, x: Tensor, stack: ExpertStack, plan: "PlannedWork", y: Tensor, ctx: ArmContext) -> None:
        """The same for any number of tokens and resident experts, from the plan itself."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork:
    """Work whose groups only the device knows. In the plan's order, 0 for pairs in no chunk: token int32, weight fp32
    and row int32 [P], the row of y as [T * K, D] that a pair writes. `chunks` int32 [C, 3] (slot of the stack, first
    pair, rows), padded with entries that mean nothing. `most_rows` bounds a chunk's rows, as the host knows. `expert`
    int32 [C]: each chunk's expert, for what belongs to an expert and not to a slot (None: slots are experts)."""

    token: Tensor
    weight: Tensor
    row: Tensor
    chunks: Tensor
    most_rows: int
    expert: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A plan as it lies on the device, experts in the slots of their own numbers: token, slot int32 and weight fp32
    [P], pairs by expert; offsets int32 [E + 1]; counts int32 [E], 0 where an expert's pairs are another arm's. Entries
    past offsets[E] mean nothing."""

    token: Tensor
    slot: Tensor
    weight: Tensor
    counts: Tensor
    offsets: Tensor

    def tiles(self, rows: int | None = None) -> WorkList:
        """Tiles of at most `rows` pairs (None: of about as many as an expert has on average), made on the device."""
        pairs, experts = len(self.token), len(self.counts)
        return work_list(self.counts, self.offsets, pairs, rows or tokens_for(pairs, min(pairs, experts)))

    def known(self) -> Schedule:
        """The same on the host, for the torch paths: one step at most, of the experts that have pairs, ascending."""
        pairs: list[int] = []
        groups: list[Group] = []
        for e, (first, n) in enumerate(zip(self.offsets.tolist(), self.counts.tolist(), strict=False)):
            groups += [Group(e, len(pairs), n)] * (n > 0)
            pairs += range(first, first + n)
        token, slot, weight = (t[pairs] for t in (self.token.long(), self.slot.long(), self.weight))
        return Schedule(token, slot, weight, (tuple(groups),) if groups else ())


def batched_schedule(plan: ExpertPlan) -> Schedule:
    """All groups in one step, experts ascending. Reads the plan back to the host, if any token is there."""
    counts = plan.counts.tolist() if len(plan.token) else []
    groups, first = [], 0
    for expert, rows in enumerate(counts):
        if rows:
            groups.append(Group(expert, first, rows))
            first += rows
    steps = (tuple(groups),) if groups else ()
    return Schedule(plan.token[:first].long(), plan.slot[:first].long(), plan.weight[:first], steps)


def per_token_schedule(plan: ExpertPlan) -> Schedule:
    """One step a token, experts ascending within it; tokens without picks have no step."""
    batched = batched_schedule(plan)
    order = torch.sort(batched.token, stable=True).indices
    expert_of = torch.repeat_interleave(torch.arange(len(plan.counts), device=plan.counts.device), plan.counts.long())
    token, slot, expert = batched.token[order], batched.slot[order], expert_of[order]
    steps: dict[int, list[Group]] = {}
    for p, (t, e) in enumerate(zip(token.tolist(), expert.tolist(), strict=True)):
        groups = steps.setdefault(t, [])
        if groups and groups[-1].expert == e:
            groups[-1] = Group(e, groups[-1].first, groups[-1].rows + 1)
        else:
            groups.append(Group(e, p, 1))
    return Schedule(token, slot, batched.weight[order], tuple(tuple(g) for g in steps.values()))


def waves(groups: Sequence[Group], slots: int) -> Iterable[tuple[Group, ...]]:
    """Cut a step on expert boundaries into runs of at most `slots` experts."""
    if slots < 1:
        raise LabError(f"a cache of {slots} slots holds no expert; wanted at least 1.")
    for i in range(0, len(groups), slots):
        yield tuple(groups[i : i + slots])


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
