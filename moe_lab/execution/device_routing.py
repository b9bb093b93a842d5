"""Routing without the host: picks, plan, slot lookup and launch table stay on the device; one small header comes back.

T <= 8 tokens, K picks, P = T * K pairs. The header holds what the host may want to know (is an expert missing, which
were picked, with which weight bits, in which slots); it is copied behind the table's launch and nobody waits for it
before somebody reads it. `verify` computes everything again on the host and compares bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import DeviceWork
from moe_lab.errors import LabError
from moe_lab.routing import ExpertPlan, Routing, route
from moe_lab.spec import MoESpec
from moe_lab.stream.device_table import DeviceTable, absent
from moe_lab_kernels.route import plan as plan_kernel
from moe_lab_kernels.slots import slot_table as kernel

MOST_TOKENS = 8


def check_tokens(tokens: int) -> None:
    """LabError past the most that device routing serves."""
    if tokens > MOST_TOKENS:
        raise LabError(
            f"routing on the device serves T <= {MOST_TOKENS} tokens, x has T={tokens}: take routing='host'."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What came back: counts of pairs that could not be served (`missing`, `outside`, `stale`), of impossible ids
    (`invalid`), of rows with NaN or +inf (`affected`), chunks in the table; and [T, K] on the host: ids, weights, arena
    slots, states (`moe_lab_kernels.slots.slot_table`)."""

    missing: int
    outside: int
    stale: int
    invalid: int
    affected: int
    chunks: int
    ids: Tensor
    weights: Tensor
    slots: Tensor
    states: Tensor

    @classmethod
    def parse(cls, flat: Tensor, tokens: int, k: int) -> "Header":
        """From the kernel's int32 vector, on the host."""
        counts = dict(zip(kernel.FIELDS, flat.tolist(), strict=False))
        ids, bits, slots, states = flat[len(kernel.FIELDS) :].view(4, tokens, k)
        return cls(ids=ids, weights=bits.view(torch.float32), slots=slots, states=states, **counts)

    @property
    def whole(self) -> bool:
        """Whether every pick of an expert was found."""
        return not (self.missing or self.outside or self.stale)

    def wanted(self) -> list[int]:
        """Experts that were picked and not found, ascending."""
        lost = (self.states != kernel.FINE) & (self.states != kernel.SKIPPED)
        return sorted({int(e) for e in self.ids[lost]})

    def found(self) -> list[int]:
        """Experts that were picked and found, ascending."""
        return sorted({int(e) for e in self.ids[self.states == kernel.FINE]})

    def refuse(self, table: DeviceTable) -> None:
        """LabError naming the first pick that cannot be served, by token and slot of its K."""
        lost = ((self.states != kernel.FINE) & (self.states != kernel.SKIPPED)).nonzero()
        if len(lost):
            t, k = (int(v) for v in lost[0])
            where = f" (token {t}, slot {k})"
            raise LabError(absent(int(self.ids[t, k]), where, int(self.slots[t, k]), table))


class DeviceCall:
    """One call's routing on the device: its table, the header on its way to the host."""

    def __init__(
        self, routing: Routing, plan: ExpertPlan, table: DeviceTable, chunk_rows: int, everyone: bool, backend: str
    ) -> None:
        self.routing, self.plan, self.table = routing, plan, table
        self._how: dict[str, Any] = {"chunk_rows": chunk_rows, "everyone": everyone}
        self._op = kernel.slot_table_ref if backend == "torch" else kernel.slot_table
        self._copied: Any = None
        self.look_up()

    def look_up(self) -> None:
        """Make the launch table from the slot table as it stands."""
        affected = self.routing.affected_rows
        assert affected is not None
        ends = (self.table.slot_of, self.table.owner)
        self.made = self._op(self.routing.ids, self.routing.weights, self.plan, affected, *ends, **self._how)

    @property
    def work(self) -> DeviceWork:
        """For an arm's `experts_on_device`."""
        rows = min(self.routing.tokens, self._how["chunk_rows"])
        return DeviceWork(self.made.token, self.made.weight, self.made.row, self.made.chunks, rows)

    def send(self) -> None:
        """Start the header on its way to the host, behind what is queued."""
        header = self.made.header
        if not header.is_cuda:
            self._host = header
            return
        self._host = torch.empty(header.shape, dtype=header.dtype, pin_memory=True)
        self._host.copy_(header, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> Header:
        """Wait for the header (and for nothing queued after it) and take it apart."""
        if self._copied is not None:
            self._copied.synchronize()
        return Header.parse(self._host, self.routing.tokens, self.routing.top_k)

    def verify(self, logits: Tensor | None, spec: MoESpec, vectors: Mapping[str, Any]) -> None:
        """Picks from the same logits, plan and table once more on the host: LabError naming the first token and slot
        whose bits differ. Without logits (picks were given) plan and table alone. Waits for the device."""
        picked = Routing(self.routing.ids.cpu(), self.routing.weights.cpu())
        if logits is not None:
            on_host = {name: None if t is None else t.cpu() for name, t in vectors.items()}
            again = route(logits.cpu(), spec.router, backend="torch", **on_host)  # pyright: ignore[reportArgumentType]
            _same_picks("expert id", picked.ids, again.ids)
            _same_picks("weight", picked.weights.view(torch.int32), again.weights.view(torch.int32))
        width = max(spec.num_experts, self.routing.width or spec.num_experts)
        want = plan_kernel.plan_ref(picked.ids, picked.weights, spec.num_experts, width)
        planned = int(want.offsets[-1])
        for name in ("counts", "offsets"):
            _same_row(f"plan.{name}", getattr(self.plan, name), getattr(want, name), "expert")
        for name in ("token", "slot", "weight"):
            _same_pair(f"plan.{name}", getattr(self.plan, name)[:planned], getattr(want, name)[:planned], want)
        affected = torch.zeros((), dtype=torch.int32)
        ends = (self.table.slot_of.cpu(), self.table.owner.cpu())
        table = kernel.slot_table_ref(picked.ids, picked.weights, want, affected, *ends, **self._how)
        _same_row("launch table", self.made.chunks, table.chunks, "chunk")
        for name in ("token", "weight", "row"):
            _same_pair(f"launch table's {name}", getattr(self.made, name), getattr(table, name), want)


def _bits(t: Tensor) -> Tensor:
    t = t.cpu()
    return t.view(torch.int32) if t.is_floating_point() else t


def _same_picks(what: str, device: Tensor, host: Tensor) -> None:
    wrong = (device != host).nonzero()
    if len(wrong):
        t, k = (int(v) for v in wrong[0])
        raise LabError(
            f"device routing: {what} of token {t}, slot {k} is {int(device[t, k])} on the device and {int(host[t, k])} "
            f"on the host ({len(wrong)} of {host.numel()} differ)."
        )


def _same_row(what: str, device: Tensor, host: Tensor, axis: str) -> None:
    wrong = (_bits(device) != _bits(host)).nonzero()
    if len(wrong):
        i = int(wrong[0, 0])
        raise LabError(
            f"device routing: {what} differs at {axis} {i}: {device[i].tolist()} on the device, {host[i].tolist()} on "
            "the host."
        )


def _same_pair(what: str, device: Tensor, host: Tensor, plan: plan_kernel.Plan) -> None:
    wrong = (_bits(device) != _bits(host)).nonzero()
    if len(wrong):
        p = int(wrong[0, 0])
        inside = p < int(plan.offsets[-1])
        whose = f"token {int(plan.token[p])}, slot {int(plan.slot[p])}" if inside else "the shared expert"
        raise LabError(
            f"device routing: {what} of pair {p} ({whose}) is {device[p].item()} on the device and {host[p].item()} on "
            "the host."
        )
