"""One call of a layer: its options, and the state that lives from routing to the record.

Knows a layer by its parts alone; what the steps mean and in which order they come is the layer's.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ARMS, Arm, ArmContext, ExpertStack, Schedule, Work, get_arm, refusal, waves
from moe_lab.arms.guard import blaming, expect_nothing, expect_shared
from moe_lab.block import is_plain, leave, routed_rows, shared_rows
from moe_lab.errors import LabError
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec
from moe_lab.stream.provider import ResidentExperts, StreamedExperts
from moe_lab.timing import Phase, PhaseClock, Timing
from moe_lab.weights import Latent, ResidualNorms, SharedWeights
from moe_lab_kernels import combine
from moe_lab_kernels.backend import LaunchCount, backend_of, count_launches


@dataclass(frozen=True, slots=True)
class Options:
    """How a call runs; none of it changes the mathematics, and only `stores`, `combine_order` and the arms change bits.

    `stores`: "input" passes gate, up, h and each down row through x's dtype; "fp32" rounds the output only.
    `combine_order`: "rank" adds a token's slots as the router ranked them, "expert" by ascending expert id.
    `chunk_rows` 1..8: rows that share one weight read in `gemv`. `shared_arm`: the shared expert's arm (None: the
    routed
    one where it serves the shared format, else the reference). `sync_timing`: wait for the device at each phase's end.
    """

    routing: Literal["host"] = "host"
    shared: Literal["main"] = "main"
    shared_arm: str | Arm | None = None
    prefetch: int = 0
    combine_order: Literal["rank", "expert"] = "rank"
    stores: Literal["input", "fp32"] = "input"
    chunk_rows: int = 8
    sync_timing: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("routing", ("host",)), ("shared", ("main",)), ("prefetch", (0,)),
            ("combine_order", ("rank", "expert")), ("stores", ("input", "fp32")), ("chunk_rows", tuple(range(1, 9))),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise LabError(
                    f"Options.{name} is {getattr(self, name)!r}; this version serves {', '.join(map(repr, allowed))}."
                )


@runtime_checkable
class LayerParts(Protocol):
    """What a call needs of a layer."""

    spec: MoESpec
    number: int | None
    experts: ResidentExperts | StreamedExperts
    shared: SharedWeights | None
    shared_stack: ExpertStack | None
    latent: Latent | None
    norms: ResidualNorms | None


def shared_formula(spec: MoESpec) -> MoESpec:
    """The spec as the shared expert computes it: the layer's formula, its own clamp, no biases, no routing weight."""
    limit = spec.shared.limit if spec.shared is not None else None
    return replace(spec, limit=limit, expert_bias=False, weight_place="output")


class Execution:
    """The state of one call: arms, clock, counters and the [T, K, D] buffer of down rows."""

    def __init__(self, layer: LayerParts, x: Tensor, arm: str | Arm, options: Options) -> None:
        self.layer, self.x, self.options = layer, x.contiguous(), options
        self.backend = backend_of(x)
        self.arm = get_arm(arm, layer.experts.formats, self.backend, layer.spec, len(x))
        self.shared_spec = shared_formula(layer.spec)
        self.shared_arm = self._pick_shared_arm()
        self.work = Work()
        dtype = x.dtype if options.stores == "input" else torch.float32
        self.ctx = ArmContext(layer.spec, self.backend, dtype, options.chunk_rows, self.work)
        self.rows, self.y = self.x, x.new_empty(0)
        self.hits = self.misses = self.bytes_read = 0
        self.kernels = LaunchCount()
        self.clock = PhaseClock(x.device)

    def _pick_shared_arm(self) -> Arm | None:
        shared, asked = self.layer.shared, self.options.shared_arm
        if shared is None:
            return None
        if asked is not None:
            arm = get_arm(asked, shared.formats, self.backend, self.shared_spec)
            if not hasattr(arm, "shared"):
                raise LabError(f"arm {arm.name!r} has no shared(x, stack, ctx): it cannot run the shared expert.")
            return arm
        serves = hasattr(self.arm, "shared")
        serves = serves and refusal(self.arm, shared.formats, self.backend, self.shared_spec) is None
        return self.arm if serves else get_arm("reference", shared.formats, self.backend, self.shared_spec)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """A clock phase; with `sync_timing` it ends only when the device is idle."""
        with self.clock.phase(name), count_launches() as counted:
            yield
            self.kernels.by_kernel += counted.by_kernel
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

    def enter(self, routing: Routing) -> None:
        """The rows the experts read, and the buffer of their down rows; zero-computation slots hold the row itself."""
        layer, spec = self.layer, self.layer.spec
        with self.phase("compute"):
            self.rows = routed_rows(self.x, spec, layer.latent, layer.norms, self.ctx.store).contiguous()
            shape = (len(self.x), routing.top_k, spec.d_routed)
            self.y = torch.zeros(shape, dtype=self.ctx.store_dtype, device=self.x.device)
            if spec.router.zero_experts:
                zero = (routing.ids >= spec.num_experts) & (routing.ids < spec.router.width)
                self.y = torch.where(zero.unsqueeze(-1), self.ctx.store(self.rows).unsqueeze(1), self.y)

    def experts(self, schedule: Schedule) -> None:
        """Fetch and compute every step, in waves of at most as many experts as fit."""
        for step in schedule.steps:
            for wave in waves(step, self.layer.experts.slots):
                with self.leased([g.expert for g in wave]) as stack, self.phase("compute"):
                    with blaming(self.arm, "experts", ARMS):
                        given = self.arm.experts(self.rows, stack, schedule, wave, self.y, self.ctx)
                    expect_nothing(self.arm, given, self.y)
                    self.work.submissions += 1

    def shared(self) -> Tensor | None:
        """The shared expert's rows [T, D], or None."""
        if self.shared_arm is None or self.x.shape[0] == 0:
            return None
        rows = shared_rows(self.x, self.layer.spec, self.layer.norms, self.ctx.store)
        context = replace(self.ctx, spec=self.shared_spec)
        with blaming(self.shared_arm, "shared", ARMS):
            given = self.shared_arm.shared(rows, self.layer.shared_stack, context)  # type: ignore[attr-defined]
        return expect_shared(self.shared_arm, given, tuple(rows.shape), self.ctx.store_dtype)

    def combine(self, routing: Routing, shared: Tensor | None) -> Tensor:
        """Weighted sum over slots in fp32, then what the spec puts behind it, then one rounding to x's dtype."""
        if self.x.shape[0] == 0:
            return torch.empty_like(self.x)
        layer, spec, ids = self.layer, self.layer.spec, routing.ids
        vector = layer.shared.gate_vector if layer.shared is not None else None
        gate = torch.sigmoid(self.x.double() @ vector.double()).float() if vector is not None else None
        op = combine.combine_ref if self.backend == "torch" else combine.combine
        by_expert = self.options.combine_order == "expert"
        about = {"ids": ids, "order": torch.sort(ids, stable=True).indices.to(torch.int32) if by_expert else None}
        weights = routing.weights
        if spec.weight_place != "output":  # the arm has weighed its rows already
            weights = torch.where(ids < spec.num_experts, torch.ones_like(weights), weights)
        if is_plain(spec):
            return op(self.y, weights, shared, gate, out_dtype=self.x.dtype, **about)
        routed = op(self.y, weights, out_dtype=torch.float32, **about)
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
        )  # fmt: skip
