"""Routing without the host: picks, slot lookup and launch table stay on the device; one small header comes back.

T <= 8 tokens, K picks, P = T * K pairs. The header holds what the host may want to know (is an expert missing, which
were picked, with which weight bits, in which slots); it is copied behind the table's launch and nobody waits for it
before somebody reads it. `verify` computes everything again on the host and compares bits.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import DeviceWork
from moe_lab.errors import LabError
from moe_lab.routing import ExpertPlan, Routing, check_picks, flagged_picks, route
from moe_lab.routing.checks import check_route
from moe_lab.spec import MoESpec
from moe_lab.stream.device_table import DeviceTable, absent
from moe_lab.system.devices import current_stream
from moe_lab_kernels.checks import FLOATS
from moe_lab_kernels.route import plan as plan_kernel
from moe_lab_kernels.route.route_plan import unserved as route_unserved
from moe_lab_kernels.slots import route_table
from moe_lab_kernels.slots import slot_table as kernel

MOST_TOKENS, MOST_PICKS = kernel.MOST_TOKENS, kernel.MOST_PICKS


def check_sizes(tokens: int, picks: int, others: str) -> None:
    """LabError past the most tokens, and picks a token, that a slot table serves; `others`: arms that go without one
    for more tokens than that."""
    serves = "routing on the device through a slot table serves"
    if tokens > MOST_TOKENS:
        raise LabError(
            f"{serves} T <= {MOST_TOKENS} tokens, x has T={tokens}: take routing='host', or one of the arms {others}."
        )
    if picks > MOST_PICKS:
        raise LabError(f"{serves} K <= {MOST_PICKS} picks a token, this router makes K={picks}: take routing='host'.")


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

    def picked(self) -> list[int]:
        """Experts that were picked, found or not, ascending."""
        return sorted(set(self.ids[self.states != kernel.SKIPPED].tolist()))

    def agrees(self, slot_of: Mapping[int, int]) -> bool:
        """Whether every pick was looked up in the slot that `slot_of` names."""
        real = self.states != kernel.SKIPPED
        looked_up = zip(self.ids[real].tolist(), self.slots[real].tolist(), self.states[real].tolist(), strict=True)
        return all(state == kernel.FINE and slot_of.get(expert) == slot for expert, slot, state in looked_up)

    def whose(self, chunk_rows: int, chunks: int, device: torch.device) -> Tensor:
        """int32 [chunks] on `device`: the expert of each chunk of a launch table, 0 past its last one."""
        experts = [e for e, n in sorted(self.chunks_for(chunk_rows).items()) for _ in range(n)]
        row = torch.zeros(chunks, dtype=torch.int32, pin_memory=device.type == "cuda")
        row[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
        return row.to(device, non_blocking=True)

    def chunks_for(self, chunk_rows: int) -> dict[int, int]:
        """Chunks of each picked expert."""
        rows = Counter(self.ids[self.states != kernel.SKIPPED].tolist())
        return {expert: -(-n // chunk_rows) for expert, n in rows.items()}

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
    """One call's routing on the device: picks, launch table, the header on its way to the host."""

    routing: Routing
    made: kernel.SlotTable

    def __init__(self, spec: MoESpec, table: DeviceTable, chunk_rows: int, everyone: bool, backend: str) -> None:
        self._spec, self.table = spec, table
        self._how: dict[str, Any] = {"chunk_rows": chunk_rows, "everyone": everyone}
        self._in_torch = backend == "torch"
        self._copied: Any = None
        self.whose: Tensor | None = None

    def route(self, logits: Tensor, vectors: Mapping[str, Any]) -> Routing:
        """Pick from logits [T, R], and look the picks up: in one launch where a kernel serves the router."""
        spec = self._spec.router
        own = {name: vectors.get(name) for name in ("correction_bias", "per_expert_scale")}
        dtypes = all(v is None or v.dtype in FLOATS for v in (logits, *own.values()))
        if self._in_torch or route_unserved(logits, spec) or not dtypes:
            ids, weights, affected = flagged_picks(logits, spec, **vectors)
            self._look_up(ids, weights, affected)
        else:
            others = (vectors.get("hash_table"), vectors.get("token_ids"))
            check_route(logits, spec, own["correction_bias"], *others, own["per_expert_scale"])
            ends = (self.table.slot_of, self.table.owner)
            given = {**self._how, **own, "base": self.table.base}
            ids, weights, self.made = route_table.route_table(logits, spec, *ends, **given)
        affected = self.made.header[kernel.AFFECTED]
        self.routing = Routing(ids, weights, affected, spec.width, spec.num_experts)
        return self.routing

    def take(self, routing: Routing) -> None:
        """Picks that the caller brought. LabError as `moe_lab.plan` for those of another router."""
        check_picks(routing, self._spec.num_experts)
        self.routing = routing
        self.look_up()

    def look_up(self, table: DeviceTable | None = None) -> None:
        """Make the launch table from the slot table as it stands, or from another one."""
        self.table = table or self.table
        assert self.routing.affected_rows is not None
        self._look_up(self.routing.ids, self.routing.weights, self.routing.affected_rows)

    def _look_up(self, ids: Tensor, weights: Tensor, affected: Tensor) -> None:
        op = kernel.slot_table_ref if self._in_torch else kernel.slot_table
        ends = (self.table.slot_of, self.table.owner)
        given = {**self._how, "width": self._spec.router.width, "base": self.table.base}
        self.made = op(ids, weights, affected, *ends, **given)

    @property
    def work(self) -> DeviceWork:
        """For an arm's `experts_on_device`."""
        rows = min(self.routing.tokens, self._how["chunk_rows"])
        return DeviceWork(self.made.token, self.made.weight, self.made.row, self.made.chunks, rows, self.whose)

    def send(self) -> None:
        """Start the header on its way to the host, behind what is queued."""
        header = self.made.header
        if not header.is_cuda:
            self._host = header
            return
        self._host = torch.empty(header.shape, dtype=header.dtype, pin_memory=True)
        self._host.copy_(header, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(current_stream(header.device))  # not of the current GPU, which may be another

    def read(self) -> Header:
        """Wait for the header (and for nothing queued after it) and take it apart."""
        return Header.parse(self._arrived(), self.routing.tokens, self.routing.top_k)

    def chunks(self) -> int:
        """Chunks in the table: the header's count alone."""
        return int(self._arrived()[kernel.CHUNKS])

    def _arrived(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def verify(self, logits: Tensor | None, vectors: Mapping[str, Any]) -> None:
        """Picks from the same logits, and the launch table of the picks, once more on the host: LabError naming the
        first token and slot whose bits differ. Without logits (picks were given) the table alone. Waits for the device.
        """
        picked = verify_picks(self.routing, logits, self._spec, vectors)
        plan = plan_kernel.plan_ref(picked.ids, picked.weights, self._spec.num_experts, self._spec.router.width)
        affected = torch.zeros((), dtype=torch.int32)
        ends = (self.table.slot_of.cpu(), self.table.owner.cpu())
        given = {**self._how, "width": self._spec.router.width, "base": self.table.base}
        want = kernel.slot_table_ref(picked.ids, picked.weights, affected, *ends, **given)
        _same_row("launch table", self.made.chunks, want.chunks, "chunk")
        for name in ("token", "weight", "row"):
            _same_pair(f"launch table's {name}", getattr(self.made, name), getattr(want, name), plan)


def verify_picks(routing: Routing, logits: Tensor | None, spec: MoESpec, vectors: Mapping[str, Any]) -> Routing:
    """The picks on the host. LabError naming the first whose bits are not those of `route` there; without logits they
    are taken as they are. Waits for the device."""
    picked = Routing(routing.ids.cpu(), routing.weights.cpu())
    if logits is not None:
        on_host = {name: None if t is None else t.cpu() for name, t in vectors.items()}
        again = route(logits.cpu(), spec.router, backend="torch", **on_host)  # pyright: ignore[reportArgumentType]
        _same_picks("expert id", picked.ids, again.ids)
        _same_picks("weight", picked.weights.view(torch.int32), again.weights.view(torch.int32))
    return picked


def verify_plan(
    routing: Routing, plan: ExpertPlan, logits: Tensor | None, spec: MoESpec, vectors: Mapping[str, Any]
) -> None:
    """As `verify_picks`, and their plan."""
    picked = verify_picks(routing, logits, spec, vectors)
    width = max(spec.num_experts, routing.width or spec.num_experts)
    want = plan_kernel.plan_ref(picked.ids, picked.weights, spec.num_experts, width)
    planned = int(want.offsets[-1])
    for name in ("counts", "offsets"):
        _same_row(f"plan.{name}", getattr(plan, name), getattr(want, name), "expert")
    for name in ("token", "slot", "weight"):
        _same_pair(f"plan.{name}", getattr(plan, name)[:planned], getattr(want, name)[:planned], want)


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
