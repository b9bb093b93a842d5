"""The shared expert as one more slot behind the routed experts' slots, so that one launch serves both.

Its matrices lie in allocations of their own: kernels get a table of addresses instead of an arena. Nothing is copied.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_lab.arms.grouped import weight_of
from moe_lab.arms.schedule import Group, Schedule
from moe_lab.arms.stack import ExpertStack, by_slot
from moe_lab.formats import QuantTensor
from moe_lab.spec import MoESpec
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.slots.pointer_table import PointerTable, Weights

EVERYONE = -2
"""The shared expert's number among experts (-1 is a skipped slot)."""


class FusedStack(ExpertStack):
    """The slots of `routed`, and behind them slot S, expert `everyone`: the one slot of `shared`."""

    def __init__(self, routed: ExpertStack, shared: ExpertStack, everyone: int = EVERYONE) -> None:
        slots = {**routed.slot_of, everyone: len(routed.up)}
        super().__init__(routed.parts.get("gate"), routed.up, routed.down, slots, routed.biases)
        self.routed, self.everyone = routed, everyone
        self._shared = shared
        self._tables: dict[str, PointerTable] = {}
        self._by_address: dict[str, Weight] = {}

    def weights(self, part: str) -> Weights:
        """Addresses of all slots; made once, as the stack's tensors stay where they are."""
        if part not in self._tables:
            both = (by_slot(stack.part(part)) for stack in (self.routed, self._shared))
            self._tables[part] = PointerTable.of([*both])
        return self._tables[part]

    def by_address(self, part: str) -> Weight:
        """A part as the float kernels take it, made once: addresses of whatever has rows; global scales, a number a
        slot, are copied side by side."""
        if part not in self._by_address:
            own, beside = (weight_of(stack.part(part)) for stack in (self.routed, self._shared))
            made = {}
            for name in ("data", "scales", "second"):
                a, b = getattr(own, name), getattr(beside, name)
                made[name] = a if a is None else torch.cat([a, b]) if a.ndim == 1 else PointerTable.of([a, b])
            self._by_address[part] = own._replace(**made)
        return self._by_address[part]

    def matrix(self, part: str, expert: int) -> QuantTensor:
        """See `ExpertStack.matrix`."""
        return self._shared.matrix(part, 0) if expert == self.everyone else self.routed.matrix(part, expert)

    def _remember(self, kind: str, part: str, expert: int, decode: Callable[[QuantTensor], Any]) -> Any:
        if expert == self.everyone:
            return self._shared._remember(kind, part, 0, decode)
        return self.routed._remember(kind, part, expert, decode)


def with_everyone(schedule: Schedule, tokens: int, k: int) -> Schedule:
    """The schedule with one more group behind the pairs of its one step: all tokens, expert `EVERYONE`, slot k of y."""
    first, every = len(schedule.token), torch.arange(tokens, device=schedule.token.device)
    groups = schedule.steps[0] if schedule.steps else ()
    return Schedule(
        torch.cat([schedule.token, every]),
        torch.cat([schedule.slot, torch.full_like(every, k)]),
        torch.cat([schedule.weight, torch.ones_like(every, dtype=schedule.weight.dtype)]),
        ((*groups, Group(EVERYONE, first, tokens)),),
    )


def cannot_fuse(spec: MoESpec, routed: ExpertStack, shared: ExpertStack) -> str | None:
    """Why one launch cannot serve the routed experts and the shared one; None where it can, with the same bits."""
    assert spec.shared is not None
    if spec.latent is not None or spec.feed_forward == "normed_residual":
        return "the shared expert reads other rows than the routed ones"
    if spec.shared.limit != spec.limit:
        return f"the shared expert clamps at {spec.shared.limit}, the routed ones at {spec.limit}"
    if spec.expert_bias:
        return "the routed experts have biases, the shared one has none"
    if spec.weight_place != "output":
        return f"the routing weight stands on the {spec.weight_place}"
    if routed.layout != shared.layout:
        return f"the routed experts lie in layout {routed.layout!r}, the shared one in {shared.layout!r}"
    for part, q in routed.parts.items():
        own = shared.part(part)
        if q.format != own.format:
            return f"the routed experts' {part} is {q.format}, the shared expert's {own.format}"
        if q.shape[1:] != own.shape[1:] or q.data.stride()[1:] != own.data.stride()[1:]:
            return f"the routed experts' {part} is {list(q.shape[1:])}, the shared expert's {list(own.shape[1:])}"
        for name in ("scales", "biases", "global_scale"):
            a, b = (_laid_out(t.tensors.get(name)) for t in (q, own))
            if a != b:
                return f"the routed experts' {part} has {name} {a}, the shared expert's {b}"
    return None


def _laid_out(t: torch.Tensor | None) -> tuple | None:
    """What all slots of a tensor share: dtype, shape and strides of one."""
    return None if t is None else (t.dtype, list(t.shape[1:]), t.stride()[1:])
