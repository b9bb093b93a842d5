"""One call of a layer: the state that lives from routing to the record.

Knows a layer by its parts alone; what the steps mean and in which order they come is the layer's.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import (
    ARMS,
    Arm,
    ArmContext,
    ExpertStack,
    Group,
    PlannedWork,
    Schedule,
    Work,
    batched_schedule,
    per_token_schedule,
    waves,
)
from moe_lab.arms.fused import EVERYONE, with_everyone
from moe_lab.arms.guard import blaming, counting, expect_nothing, expect_shared, is_own
from moe_lab.block import branch_rows, is_plain, leave, routed_rows, shared_rows
from moe_lab.execution.device_routing import DeviceCall, verify_plan
from moe_lab.execution.lookahead import Lookahead
from moe_lab.execution.options import Options
from moe_lab.execution.parts import LayerParts, settle, takes_plan
from moe_lab.execution.shared_lane import MAIN, SIDE, side_lane
from moe_lab.execution.two_phase import phases, worth_two
from moe_lab.routing import ExpertPlan, Routing, plan, route_plan
from moe_lab.stream.provider import Fetched, ResidentExperts, StreamedExperts
from moe_lab.stream.slots import split_waves
from moe_lab.stream.table_experts import TableExperts
from moe_lab.timing import LEVEL, Phase, PhaseClock, Timing, Unclocked
from moe_lab.workspace import Scratch, borrowed
from moe_lab_kernels.backend import backend_of, count_launches
from moe_lab_kernels.rows import combine, shared_gate


class Execution:
    """The state of one call: arms, clock, counters, scratch, and the [T, K, D] buffer of down rows.

    A context: leaving it joins the shared expert's stream and gives scratch back, whatever happened inside.
    """

    def __init__(self, layer: LayerParts, x: Tensor, arm: str | Arm, options: Options) -> None:
        self.layer, self.x, self.options = layer, x.contiguous(), options
        self.tokens = x.shape[0]
        self.backend = backend_of(x)
        who = settle(layer, arm, options, self.backend, self.tokens)
        self.arm, self.shared_arm, self.shared_spec, self.fused = who.arm, who.shared_arm, who.shared_spec, who.fused
        self.work = Work()
        dtype = x.dtype if options.stores == "input" else torch.float32
        self.ctx = ArmContext(
            layer.spec, self.backend, dtype, options.chunk_rows, self.work, activation=options.activation
        )
        self.rows, self.y = self.x, x.new_empty(0)
        self.hits = self.misses = self.bytes_read = 0
        self.capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
        self.clock = Unclocked() if self.capturing or LEVEL.get() == 0 else PhaseClock(x.device)
        self.lane = side_lane(x.device) if options.shared == "side" else None
        self.lookahead = Lookahead(layer.experts, layer.successor, options)
        self._beside: Tensor | None = None
        self._schedule: Schedule | None = None
        self._device: DeviceCall | None = None
        self._plan: ExpertPlan | None = None
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

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """A clock phase; with `sync_timing` it ends only when the device is idle."""
        return self._waited(name) if self.options.sync_timing else self.clock.phase(name)

    @contextmanager
    def _waited(self, name: Phase) -> Iterator[None]:
        with self.clock.phase(name):
            yield
            self.clock.synchronize()

    @contextmanager
    def begun(self, experts: Sequence[int], last: bool) -> Iterator[Fetched]:
        """The weights of `experts`, held while the block runs; what has to be read may be on its way still. Getting
        them is the fetch phase. Behind the `last` ones of a call, what was guessed of the next layer begins."""
        with ExitStack() as held:
            with self.phase("fetch"):
                fetched = held.enter_context(self.layer.experts.lease(experts, wait=False))
            self.hits, self.misses = self.hits + fetched.hits, self.misses + fetched.misses
            self.bytes_read += fetched.bytes_read
            if last:
                self.lookahead.begin()
            yield fetched

    def landed(self, fetched: Fetched) -> None:
        """Wait for what is still on its way."""
        with self.phase("fetch"):
            fetched.wait()

    @contextmanager
    def leased(self, experts: Sequence[int], last: bool = True) -> Iterator[ExpertStack]:
        """The weights of `experts`, all of them in place, held while the block runs."""
        with self.begun(experts, last) as fetched:
            if fetched.awaited:
                self.landed(fetched)
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

    def route(self, given: Routing | None, logits: Tensor | None, vectors: Mapping[str, Any]) -> Routing:
        """The picks of the router's logits, or the given ones with its width, and what work they make: their plan, or
        on the device a launch table."""
        spec, experts = self.layer.spec, self.layer.experts
        if given is not None and given.width != spec.router.width:
            given = replace(given, width=spec.router.width)
        if self.options.routing == "device" and not takes_plan(self.arm, self.tokens):
            table = experts.device_table() if isinstance(experts, StreamedExperts) else experts.table
            self._device = DeviceCall(spec, table, self.ctx.chunk_rows, self.fused, self.backend)
            if given is None:
                assert logits is not None
                return self._device.route(logits, vectors)
            self._device.take(given)
            return given
        if given is not None:
            self._plan = plan(given, spec.num_experts)
            return given
        assert logits is not None
        picked, self._plan = route_plan(logits, spec.router, **vectors)
        return picked

    def plan_work(self, routing: Routing) -> None:
        """Settle who computes what: groups on the host, which reads the plan back, or what stands ready on the device,
        of which a header is sent back."""
        if self._device is not None:
            if not self.capturing:
                self._device.send()
            return
        assert self._plan is not None
        if self.options.routing == "host":
            self.clock.drain()
            per_token = getattr(self.arm, "per_token", False)
            schedule = (per_token_schedule if per_token else batched_schedule)(self._plan)
            self._schedule = with_everyone(schedule, self.tokens, routing.top_k) if self.fused else schedule

    def verify(self, routing: Routing, logits: Tensor | None, vectors: Mapping[str, Any]) -> None:
        """Compare device routing with the host's, if asked for; a live cache's slot table too."""
        if not self.options.verify_routing:
            return
        if self._plan is not None:
            verify_plan(routing, self._plan, logits, self.layer.spec, vectors)
        if self._device is not None:
            self._device.verify(logits, vectors)
            if isinstance(self.layer.experts, StreamedExperts):
                self.layer.experts.check_table()

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
        if self._device is not None:
            self._experts_on_device(self._device)
            return
        if self._schedule is None:
            assert self._plan is not None
            self._experts_of_plan(self._plan)
            return
        self._settle({g.expert for step in self._schedule.steps for g in step})
        for number, step in enumerate(self._schedule.steps, 1):
            everyone = [g for g in step if g.expert == EVERYONE]
            cut = [*waves(step[: len(step) - len(everyone)], self.layer.experts.slots)] or [()]
            cut[-1] = (*cut[-1], *everyone)
            for wave in cut:
                last = number == len(self._schedule.steps) and wave is cut[-1]
                with self.begun([g.expert for g in wave if g.expert != EVERYONE], last) as fetched:
                    self._compute(self._schedule, wave, fetched)

    def _settle(self, picked: Iterable[int]) -> None:
        """The picks are known: what was guessed besides is not read any more."""
        if isinstance(self.layer.experts, StreamedExperts):
            self.layer.experts.settle(picked)

    def _compute(self, schedule: Schedule, wave: Sequence[Group], fetched: Fetched) -> None:
        """The wave's groups whose weights are at hand, then, once they have landed, the others."""
        stack = self.layer.fused_stack(fetched.stack, EVERYONE) if self.fused else fetched.stack
        awaited = fetched.awaited
        if awaited and not worth_two(fetched.blocked, self.tokens):
            self.landed(fetched)
            awaited = frozenset()
        for part, groups, late in phases(schedule, wave, awaited):
            if late:
                self.landed(fetched)
            with self._arm() as ctx:
                with counting(self.work), blaming(self.arm, "experts", ARMS):
                    given = self.arm.experts(self.rows, stack, part, groups, self.y, ctx)
                expect_nothing(self.arm, given, self.y)

    def _experts_of_plan(self, plan: ExpertPlan) -> None:
        if not self.tokens:
            return
        experts = self.layer.experts
        assert isinstance(experts, ResidentExperts)
        planned = PlannedWork(plan.token, plan.slot, plan.weight, plan.counts, plan.offsets)
        with self._arm() as ctx, counting(self.work), blaming(self.arm, "experts_of_plan", ARMS):
            self.arm.experts_of_plan(self.rows, experts.stack, planned, self.y, ctx)  # type: ignore[attr-defined]

    def _experts_on_device(self, call: DeviceCall) -> None:
        experts = self.layer.experts
        if not self.tokens:
            return
        if isinstance(experts, StreamedExperts):
            self._leased_on_device(call, experts)
            return
        if not experts.complete:
            self._bring(call)
        stack = experts.by_slot
        stack = self.layer.fused_stack(stack, experts.slots) if self.fused else stack
        self._submit_on_device(call, stack)
        if not self.capturing:
            more = call.made.chunks.shape[0] - self.y.shape[0] * (self.y.shape[1] - self.fused)
            self.work.weight_bytes += (call.chunks() + more) * stack.expert_bytes

    def _submit_on_device(self, call: DeviceCall, stack: ExpertStack) -> None:
        with self._arm() as ctx, blaming(self.arm, "experts_on_device", ARMS):
            self.arm.experts_on_device(self.rows, stack, call.work, self.y, ctx)  # type: ignore[attr-defined]

    def _leased_on_device(self, call: DeviceCall, experts: StreamedExperts) -> None:
        """Lease what the header says was picked, as host routing would; where the cache has it elsewhere than the
        device looked, or in several waves, look again."""
        with self.phase("route"):
            self.clock.drain()
            header = call.read()
        chunks = header.chunks_for(self.ctx.chunk_rows)
        if experts.biases is not None:
            call.whose = header.whose(self.ctx.chunk_rows, len(call.made.chunks), self.x.device)
        cut = split_waves(header.picked(), experts.slots)
        self._settle(header.picked())
        for wave in cut:
            with self.leased(wave, last=wave is cut[-1]) as stack:
                if len(cut) > 1 or not header.agrees(stack.slot_of):
                    with self.phase("fetch"):
                        call.look_up(experts.device_table(stack.slot_of if len(cut) > 1 else None))
                    self.verify(call.routing, None, {})
                self._submit_on_device(call, stack)
                self.work.weight_bytes += sum(chunks[e] for e in wave) * stack.expert_bytes

    def _bring(self, call: DeviceCall) -> None:
        """Wait for the header and fetch what it misses. LabError naming a pick that is still not to be had."""
        experts = self.layer.experts
        assert isinstance(experts, TableExperts)
        with self.phase("fetch"):
            self.clock.drain()
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
        if self.shared_arm is None or self.tokens == 0:
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
        if arm is None or self.tokens == 0:
            return None
        rows = shared_rows(self.x, spec, layer.norms, self.ctx.store)
        context = replace(self.ctx, spec=self.shared_spec, scratch=scratch)
        with self.clock.part("shared"), counting(self.work), blaming(arm, "shared", ARMS):
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
        if vector is None:
            return None
        return (shared_gate.shared_gate_ref if self.backend == "torch" else shared_gate.shared_gate)(self.x, vector)

    def combine(self, routing: Routing, shared: Tensor | None) -> Tensor:
        """Weighted sum over slots in fp32, then what the spec puts behind it, then one rounding to x's dtype."""
        if self.tokens == 0:
            return torch.empty_like(self.x)
        layer, spec, ids = self.layer, self.layer.spec, routing.ids
        gate = self._gate() if layer.norms is None else None  # a normed branch is gated before its norm
        y = self.y[:, : routing.top_k]
        op = combine.combine_ref if self.backend == "torch" else combine.combine
        by_expert = self.options.combine_order == "expert"
        order = torch.sort(ids, stable=True).indices.to(torch.int32) if by_expert else None
        about = {"ids": ids, "width": spec.router.width, "order": order}
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
            io_mode=getattr(self.layer.experts, "io_mode", None), predicted=self.lookahead.predicted,
            prefetched=self.lookahead.prefetched, no_prefetch=self.lookahead.reason,
        )  # fmt: skip
