"""One call of a layer: the state that lives from routing to the record.

Knows a layer by its parts alone; what the steps mean and in which order they come is the layer's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import (
    ARMS,
    Arm,
    ArmContext,
    ExpertStack,
    Schedule,
    Work,
    batched_schedule,
    per_token_schedule,
    waves,
)
from moe_lab.arms.fused import EVERYONE, with_everyone
from moe_lab.arms.guard import blaming, counting, expect_nothing, expect_shared
from moe_lab.block import branch_rows, is_plain, leave, routed_rows, shared_rows
from moe_lab.execution.device_routing import DeviceCall
from moe_lab.execution.options import Options
from moe_lab.execution.parts import LayerParts, settle
from moe_lab.execution.shared_lane import MAIN, SIDE, side_lane
from moe_lab.routing import ExpertPlan, Routing
from moe_lab.stream.provider import StreamedExperts
from moe_lab.stream.table_experts import TableExperts
from moe_lab.timing import Phase, PhaseClock, Timing, Unclocked
from moe_lab.workspace import Scratch, borrowed
from moe_lab_kernels.backend import backend_of, count_launches
from moe_lab_kernels.rows import combine


class Execution:
    """The state of one call: arms, clock, counters, scratch, and the [T, K, D] buffer of down rows.

    A context: leaving it joins the shared expert's stream and gives scratch back, whatever happened inside.
    """

    def __init__(self, layer: LayerParts, x: Tensor, arm: str | Arm, options: Options) -> None:
        self.layer, self.x, self.options = layer, x.contiguous(), options
        self.backend = backend_of(x)
        who = settle(layer, arm, options, self.backend, len(x))
        self.arm, self.shared_arm, self.shared_spec, self.fused = who.arm, who.shared_arm, who.shared_spec, who.fused
        self.work = Work()
        dtype = x.dtype if options.stores == "input" else torch.float32
        self.ctx = ArmContext(
            layer.spec, self.backend, dtype, options.chunk_rows, self.work, activation=options.activation
        )
        self.rows, self.y = self.x, x.new_empty(0)
        self.hits = self.misses = self.bytes_read = 0
        self.capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self.clock = Unclocked() if self.capturing else PhaseClock(x.device)
        self.lane = side_lane(x.device) if options.shared == "side" else None
        self._beside: Tensor | None = None
        self._schedule: Schedule | None = None
        self._device: DeviceCall | None = None
        self._held = ExitStack()

    def __enter__(self) -> "Execution":
        self.workspace = self._held.enter_context(borrowed(self.x.device))
        self.kernels = self._held.enter_context(count_launches())
        self._open("call")
        return self

    def __exit__(self, *error: Any) -> None:
        if self.lane is not None:
            self.lane.join()  # before anything that its work reads can go away
        self._held.__exit__(*error)

    def _open(self, user: str, lane: str = MAIN) -> Scratch:
        """Scratch until the call ends."""
        scratch = self.workspace.open(user, lane)
        self._held.callback(scratch.close)
        if user == "call":
            self.scratch = scratch
        return scratch

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """A clock phase; with `sync_timing` it ends only when the device is idle."""
        with self.clock.phase(name):
            yield
            if self.options.sync_timing:
                self.clock.synchronize()

    @contextmanager
    def leased(self, experts: Sequence[int]) -> Iterator[ExpertStack]:
        """The weights of `experts`, held while the block runs; getting them is the fetch phase."""
        with ExitStack() as held:
            with self.phase("fetch"):
                fetched = held.enter_context(self.layer.experts.lease(experts))
            self.hits, self.misses = self.hits + fetched.hits, self.misses + fetched.misses
            self.bytes_read += fetched.bytes_read
            yield fetched.stack

    def fork(self) -> None:
        """What is queued so far is what the shared expert may read beside the router."""
        if self.lane is not None:
            self.lane.fork()

    def start_beside(self) -> None:
        """Queue the shared expert on the side."""
        if self.lane is not None:
            with self.phase("compute"), self.lane.running():
                self._beside = self._branch(self._open("shared expert", SIDE))

    def plan_work(self, routing: Routing, plan: ExpertPlan) -> None:
        """Settle who computes what: groups on the host, which reads the plan back, or a launch table on the device."""
        if self.options.routing == "host":
            per_token = getattr(self.arm, "per_token", False)
            schedule = (per_token_schedule if per_token else batched_schedule)(plan)
            self._schedule = with_everyone(schedule, len(self.x), routing.top_k) if self.fused else schedule
            return
        experts = self.layer.experts
        assert not isinstance(experts, StreamedExperts)
        self._device = DeviceCall(routing, plan, experts.table, self.ctx.chunk_rows, self.fused, self.backend)
        if not self.capturing:
            self._device.send()

    def verify(self, logits: Tensor | None, vectors: Mapping[str, Any]) -> None:
        """Compare device routing with the host's, if asked for."""
        if self.options.verify_routing and self._device is not None:
            self._device.verify(logits, self.layer.spec, vectors)

    def enter(self, routing: Routing) -> None:
        """The rows the experts read, and the buffer of their down rows; zero-computation slots hold the row itself."""
        layer, spec = self.layer, self.layer.spec
        with self.phase("compute"):
            self.rows = routed_rows(self.x, spec, layer.latent, layer.norms, self.ctx.store).contiguous()
            shape = (len(self.x), routing.top_k + self.fused, spec.d_routed)
            self.y = self.scratch.take("y", shape, self.ctx.store_dtype).zero_()
            if spec.router.zero_experts:
                zero = ((routing.ids >= spec.num_experts) & (routing.ids < spec.router.width)).unsqueeze(-1)
                routed = self.y[:, : routing.top_k]
                torch.where(zero, self.ctx.store(self.rows).unsqueeze(1), routed, out=routed)

    def experts(self) -> None:
        """Fetch and compute every step, in waves of at most as many experts as fit."""
        if self._device is not None:
            self._experts_on_device(self._device)
            return
        assert self._schedule is not None
        for step in self._schedule.steps:
            everyone = [g for g in step if g.expert == EVERYONE]
            cut = [*waves(step[: len(step) - len(everyone)], self.layer.experts.slots)] or [()]
            cut[-1] = (*cut[-1], *everyone)
            for wave in cut:
                with self.leased([g.expert for g in wave if g.expert != EVERYONE]) as stack, self._arm() as ctx:
                    stack = self.layer.fused_stack(stack, EVERYONE) if self.fused else stack
                    with counting(self.work), blaming(self.arm, "experts", ARMS):
                        given = self.arm.experts(self.rows, stack, self._schedule, wave, self.y, ctx)
                    expect_nothing(self.arm, given, self.y)

    def _experts_on_device(self, call: DeviceCall) -> None:
        experts = self.layer.experts
        assert not isinstance(experts, StreamedExperts)
        if not len(self.x):
            return
        if not experts.complete:
            self._bring(call)
        stack = experts.by_slot
        stack = self.layer.fused_stack(stack, experts.slots) if self.fused else stack
        with self._arm() as ctx, blaming(self.arm, "experts_on_device", ARMS):
            self.arm.experts_on_device(self.rows, stack, call.work, self.y, ctx)  # type: ignore[attr-defined]
        if not self.capturing:
            more = len(call.made.chunks) - self.y.shape[0] * (self.y.shape[1] - self.fused)
            self.work.weight_bytes += (call.read().chunks + more) * stack.expert_bytes

    def _bring(self, call: DeviceCall) -> None:
        """Wait for the header and fetch what it misses. LabError naming a pick that is still not to be had."""
        experts = self.layer.experts
        assert isinstance(experts, TableExperts)
        with self.phase("fetch"):
            header = call.read()
            self.hits = len(header.found())
            if not header.whole and experts.fetch is not None:
                wanted = header.wanted()
                self.misses, self.bytes_read = len(wanted), experts.fetch(wanted)
                call.look_up()
                call.send()
                header = call.read()
            header.refuse(experts.table)

    @contextmanager
    def _arm(self) -> Iterator[ArmContext]:
        """One submission to the routed arm: its phase of the clock, its scratch."""
        scratch = self.workspace.open("experts")
        try:
            with self.phase("compute"):
                yield replace(self.ctx, scratch=scratch)
                self.work.submissions += 1
        finally:
            scratch.close()

    def shared(self) -> Tensor | None:
        """The shared branch's rows [T, D], or None: what stands ready beside, or computed now."""
        if self.shared_arm is None or self.x.shape[0] == 0:
            return None
        if self.fused:
            return self.y[:, -1]
        if self.lane is not None:
            self.lane.join()
            return self._beside
        return self._branch(self._open("shared expert"))

    def _branch(self, scratch: Scratch) -> Tensor | None:
        """The shared expert between its norms, if it has any."""
        layer, spec, arm = self.layer, self.layer.spec, self.shared_arm
        if arm is None or self.x.shape[0] == 0:
            return None
        rows = shared_rows(self.x, spec, layer.norms, self.ctx.store)
        context = replace(self.ctx, spec=self.shared_spec, scratch=scratch)
        with counting(self.work), blaming(arm, "shared", ARMS):
            given = arm.shared(rows, layer.shared_stack, context)  # type: ignore[attr-defined]
        made = expect_shared(arm, given, tuple(rows.shape), self.ctx.store_dtype)
        if layer.norms is None:
            return made
        gate = self._gate()
        made = made if gate is None else made.float() * gate[:, None]
        return branch_rows(made, spec, layer.norms, self.ctx.store)

    def _gate(self) -> Tensor | None:
        """The shared expert's gate fp32 [T], or None."""
        vector = self.layer.shared.gate_vector if self.layer.shared is not None else None
        return torch.sigmoid(self.x.double() @ vector.double()).float() if vector is not None else None

    def combine(self, routing: Routing, shared: Tensor | None) -> Tensor:
        """Weighted sum over slots in fp32, then what the spec puts behind it, then one rounding to x's dtype."""
        if self.x.shape[0] == 0:
            return torch.empty_like(self.x)
        layer, spec, ids = self.layer, self.layer.spec, routing.ids
        gate = self._gate() if layer.norms is None else None  # a normed branch is gated before its norm
        y = self.y[:, : routing.top_k]
        op = combine.combine_ref if self.backend == "torch" else combine.combine
        by_expert = self.options.combine_order == "expert"
        about = {"ids": ids, "order": torch.sort(ids, stable=True).indices.to(torch.int32) if by_expert else None}
        weights = routing.weights
        if spec.weight_place != "output":  # the arm has weighed its rows already
            weights = torch.where(ids < spec.num_experts, torch.ones_like(weights), weights)
        if is_plain(spec):
            return op(y, weights, shared, gate, out_dtype=self.x.dtype, **about)
        routed = op(y, weights, out_dtype=torch.float32, **about)
        shared = shared.float() * gate[:, None] if gate is not None and shared is not None else shared
        return leave(routed, shared, self.x, spec, layer.latent, layer.norms, self.ctx.store).to(self.x.dtype)

    def finish(self) -> Timing:
        """Stop the clock and write the record."""
        self.clock.stop()
        return Timing(
            clock=self.clock, layer=self.layer.number, arm=self.arm.name,
            shared_arm=self.shared_arm.name if self.shared_arm else None, backend=self.backend, tokens=self.x.shape[0],
            hits=self.hits, misses=self.misses, bytes_read=self.bytes_read, weight_bytes=self.work.weight_bytes,
            submissions=self.work.submissions, launches=self.kernels.launches + self.work.products,
            io_mode=getattr(self.layer.experts, "io_mode", None),
        )  # fmt: skip
