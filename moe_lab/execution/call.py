"""One call of a layer, step by step. What the steps mean and in which order they come is the layer's."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ARMS, batched_schedule, per_token_schedule
from moe_lab.arms.fused import with_everyone
from moe_lab.arms.guard import is_own
from moe_lab.block import routed_rows
from moe_lab.execution.device_experts import run_on_device
from moe_lab.execution.device_routing import DeviceCall
from moe_lab.execution.experts import run_plan, run_schedule
from moe_lab.execution.outputs import branch, combined
from moe_lab.execution.parts import takes_plan
from moe_lab.execution.shared_lane import SIDE
from moe_lab.execution.state import CallState
from moe_lab.routing import Routing, plan, route_plan
from moe_lab.stream.provider import StreamedExperts
from moe_lab.timing import Timing


class Execution(CallState):
    """The steps of a call on its state."""

    def __enter__(self) -> "Execution":
        super().__enter__()
        return self

    def fork(self) -> None:
        """What is queued so far is what the shared expert may read beside the router."""
        if self.lane is not None:
            self.lane.fork()

    def start_beside(self) -> None:
        """Queue the shared expert on the side."""
        if self.lane is not None:
            with self.phase("compute"), self.lane.running():
                self.beside = branch(self, self.open_scratch("shared expert", SIDE))

    def route(self, given: Routing | None, logits: Tensor | None, vectors: Mapping[str, Any]) -> Routing:
        """The picks of the router's logits, or the given ones with its width, and what work they make: their plan, or
        on the device a launch table."""
        spec, experts = self.layer.spec, self.layer.experts
        if given is not None and given.width != spec.router.width:
            given = replace(given, width=spec.router.width)
        if self.options.routing == "device" and not takes_plan(self.arm, self.tokens):
            table = experts.device_table() if isinstance(experts, StreamedExperts) else experts.table
            self.device_call = DeviceCall(spec, table, self.ctx.chunk_rows, self.fused, self.backend)
            if given is None:
                assert logits is not None
                return self.device_call.route(logits, vectors)
            self.device_call.take(given)
            return given
        if given is not None:
            self.plan = plan(given, spec.num_experts)
            return given
        assert logits is not None
        picked, self.plan = route_plan(logits, spec.router, **vectors)
        return picked

    def plan_work(self, routing: Routing) -> None:
        """Settle who computes what: groups on the host, which reads the plan back, or what stands ready on the device,
        of which a header is sent back."""
        if self.device_call is not None:
            if not self.capturing:
                self.device_call.send()
            return
        assert self.plan is not None
        if self.options.routing == "host":
            self.clock.drain()
            per_token = getattr(self.arm, "per_token", False)
            schedule = (per_token_schedule if per_token else batched_schedule)(self.plan)
            self.schedule = with_everyone(schedule, self.tokens, routing.top_k) if self.fused else schedule

    def enter(self, routing: Routing) -> None:
        """The rows the experts read, and the buffer of their down rows; zero-computation slots hold the row itself."""
        layer, spec = self.layer, self.layer.spec
        with self.phase("compute"):
            self.rows = routed_rows(self.x, spec, layer.latent, layer.norms, self.ctx.store).contiguous()
            shape = (self.tokens, routing.top_k + self.fused, spec.d_routed)
            self.y = self.scratch.take("y", shape, self.ctx.store_dtype)
            if not is_own(self.arm, ARMS):
                self.y.zero_()  # ours write every pair's row, and the sum reads no other
            if spec.router.zero_experts:
                zero = ((routing.ids >= spec.num_experts) & (routing.ids < spec.router.width)).unsqueeze(-1)
                routed = self.y[:, : routing.top_k]
                torch.where(zero, self.ctx.store(self.rows).unsqueeze(1), routed, out=routed)

    def experts(self) -> None:
        """Fetch and compute every step, in waves of at most as many experts as fit."""
        if self.device_call is not None:
            run_on_device(self, self.device_call)
        elif self.schedule is not None:
            run_schedule(self, self.schedule)
        else:
            assert self.plan is not None
            run_plan(self, self.plan)

    def shared(self) -> Tensor | None:
        """The shared branch's rows [T, D], or None: what stands ready beside, or computed now."""
        if self.shared_arm is None or self.tokens == 0:
            return None
        if self.fused:
            return self.y[:, -1]
        if self.lane is not None:
            self.lane.join()
            return self.beside
        return branch(self, self.open_scratch("shared expert"))

    def combine(self, routing: Routing, shared: Tensor | None) -> Tensor:
        """Weighted sum over slots in fp32, then what the spec puts behind it, then one rounding to x's dtype."""
        return combined(self, routing, shared)

    def finish(self) -> Timing:
        """Stop the clock and write the record."""
        self.clock.stop()
        return Timing(
            clock=self.clock, layer=self.layer.number, arm=self.arm.name,
            shared_arm=self.shared_arm.name if self.shared_arm else None, backend=self.backend, tokens=self.x.shape[0],
            hits=self.hits, misses=self.misses, bytes_read=self.bytes_read, weight_bytes=self.work.weight_bytes,
            submissions=self.work.submissions, launches=self.kernels.launches + self.work.products,
            io_mode=getattr(self.layer.experts, "io_mode", None), predicted=self.lookahead.predicted,
            prefetched=self.lookahead.prefetched, no_prefetch=self.lookahead.reason,
            layout=self.layer.experts.layout, kernels=self.kernels,
        )  # fmt: skip
