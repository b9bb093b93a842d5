"""The state of one call of a layer: what lives from routing to the record, and how weights and scratch are held.

Knows a layer by its parts alone. What is done with them is in `experts`, `device_experts` and `outputs`; which steps a
call has, in `call`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms import Arm, ArmContext, ExpertStack, Schedule, Work
from moe_lab.execution.device_routing import DeviceCall, verify_plan
from moe_lab.execution.lookahead import Lookahead
from moe_lab.execution.options import Options
from moe_lab.execution.parts import LayerParts, settle
from moe_lab.execution.shared_lane import MAIN, side_lane
from moe_lab.routing import ExpertPlan, Routing
from moe_lab.stream.provider import Fetched, StreamedExperts
from moe_lab.timing import LEVEL, Phase, PhaseClock, Unclocked
from moe_lab.workspace import Scratch, borrowed
from moe_lab_kernels.backend import backend_of, count_launches


class CallState:
    """Arms, clock, counters, scratch, and the [T, K, D] buffer of down rows.

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
        self.beside: Tensor | None = None
        self.schedule: Schedule | None = None
        self.device_call: DeviceCall | None = None
        self.plan: ExpertPlan | None = None
        self._held = ExitStack()

    def __enter__(self) -> "CallState":
        self.workspace = self._held.enter_context(borrowed(self.x.device))
        self.kernels = self._held.enter_context(count_launches())
        self.open_scratch("call")
        return self

    def __exit__(self, *error: Any) -> None:
        if self.lane is not None:
            self.lane.join()  # before anything that its work reads can go away
        self._held.__exit__(*error)

    def open_scratch(self, user: str, lane: str = MAIN) -> Scratch:
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

    @contextmanager
    def submission(self) -> Iterator[ArmContext]:
        """One submission to the routed arm: its phase of the clock, its scratch."""
        scratch = self.workspace.open("experts")
        try:
            with self.phase("compute"):
                yield replace(self.ctx, scratch=scratch)
                self.work.submissions += 1
        finally:
            scratch.close()

    def settle_picks(self, picked: Iterable[int]) -> None:
        """The picks are known: what was guessed besides is not read any more."""
        if isinstance(self.layer.experts, StreamedExperts):
            self.layer.experts.settle(picked)

    def verify(self, routing: Routing, logits: Tensor | None, vectors: Mapping[str, Any]) -> None:
        """Compare device routing with the host's, if asked for; a live cache's slot table too."""
        if not self.options.verify_routing:
            return
        if self.plan is not None:
            verify_plan(routing, self.plan, logits, self.layer.spec, vectors)
        if self.device_call is not None:
            self.device_call.verify(logits, vectors)
            if isinstance(self.layer.experts, StreamedExperts):
                self.layer.experts.check_table()
