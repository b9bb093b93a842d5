"""One MoE layer: route, plan, fetch, compute, combine. The only room that ties them together.

x [T, D] -> MoEOutput.out [T, D] in x's dtype. Weights are resident (`from_tensors`) or streamed from a file through an
expert cache (`streamed`); the arithmetic and its bits are the same either way.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from moe_lab._types import Float, Int, Tensor
from moe_lab.arms import (
    Arm,
    ArmContext,
    ExpertStack,
    Schedule,
    Work,
    batched_schedule,
    get_arm,
    per_token_schedule,
    waves,
)
from moe_lab.devices import resolve_device
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import QuantTensor
from moe_lab.routing import Routing, plan, route
from moe_lab.spec import MoESpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.provider import ResidentExperts, StreamedExperts
from moe_lab.stream.source import ExpertSource
from moe_lab.threads import threads_for
from moe_lab.timing import Phase, PhaseClock, Timing, emit
from moe_lab_kernels import combine
from moe_lab_kernels.backend import LaunchCount, backend_of, count_launches

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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


@dataclass(frozen=True, slots=True, eq=False)
class SharedWeights:
    """The expert every token visits: gate, up [Fs, D], down [D, Fs], and the gate vector [D] or None."""

    gate: QuantTensor
    up: QuantTensor
    down: QuantTensor
    gate_vector: Tensor | None = None

    def stack(self) -> ExpertStack:
        """As a stack of one slot."""
        parts = (self.gate, self.up, self.down)
        gate, up, down = (QuantTensor(q.data.unsqueeze(0), q.format, (1, *q.shape), q.codec) for q in parts)
        return ExpertStack(gate, up, down, {0: 0})


@dataclass(frozen=True, slots=True, eq=False)
class MoEOutput:
    """`out` [T, D] in x's dtype, the picks, the timing record, and the arm that ran."""

    out: Tensor
    routing: Routing
    timing: Timing
    arm: str


def as_quant(w: "Tensor | QuantTensor", name: str, shape: tuple[int, ...]) -> QuantTensor:
    """Weights as a QuantTensor of the wanted logical shape; floats are wrapped, not converted."""
    if isinstance(w, Tensor):
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        if w.dtype not in names:
            raise LabTypeError(f"{name} is {w.dtype}; wanted float32, float16, bfloat16 or a QuantTensor.")
        w = QuantTensor.from_bytes(w.contiguous().view(torch.uint8), names[w.dtype], tuple(w.shape))
    if tuple(w.shape) != shape:
        raise LabError(f"{name} has shape {tuple(w.shape)}; the spec wants {shape}.")
    return w


class MoELayer:
    """A callable MoE layer. Build it with `from_tensors`, `streamed`, or `Checkpoint.layer`."""

    def __init__(
        self,
        spec: MoESpec,
        router: Tensor,
        experts: "ResidentExperts | StreamedExperts",
        shared: SharedWeights | None,
        number: int | None = None,
        model_hash: str = "",
    ) -> None:
        if tuple(router.shape) != (spec.router.width, spec.d_model):
            raise LabError(
                f"the router has shape {tuple(router.shape)}; wanted [R, D] = [{spec.router.width}, {spec.d_model}]."
            )
        if spec.weight_place != "output":
            raise LabError(f"weight_place={spec.weight_place!r}: only 'output' is served.")
        if (spec.shared is None) != (shared is None):
            raise LabError(
                f"the spec {'has no' if spec.shared is None else 'wants a'} shared expert, "
                f"but one was {'given' if shared else 'not given'}."
            )
        self.spec, self.experts, self.number, self.model_hash = spec, experts, number, model_hash
        self.router = router.to(experts.device)
        self.shared = shared
        self._shared_stack = shared.stack() if shared is not None else None

    @classmethod
    def from_tensors(
        cls,
        spec: MoESpec,
        *,
        router: Float[Tensor, "R D"],
        gate: "Tensor | QuantTensor",
        up: "Tensor | QuantTensor",
        down: "Tensor | QuantTensor",
        biases: None = None,
        shared: SharedWeights | None = None,
        number: int | None = None,
        model_hash: str = "",
    ) -> "MoELayer":
        """A resident layer from gate, up [E, F, D] and down [E, D, F]. Runs where the weights live."""
        if biases is not None:
            raise LabError("expert biases are not served by any arm of this version.")
        e, f, d = spec.num_experts, spec.d_expert, spec.d_model
        stacks = (as_quant(gate, "gate", (e, f, d)), as_quant(up, "up", (e, f, d)), as_quant(down, "down", (e, d, f)))
        devices = {q.device for q in stacks}
        if len(devices) != 1:
            raise LabError(f"gate, up and down live on different devices: {', '.join(sorted(map(str, devices)))}.")
        return cls(spec, router, ResidentExperts.of(*stacks), shared, number, model_hash)

    @classmethod
    def streamed(
        cls,
        spec: MoESpec,
        *,
        router: Float[Tensor, "R D"],
        source: ExpertSource,
        layer: int,
        cache: ExpertCache,
        shared: SharedWeights | None = None,
        device: "torch.device | str" = "cpu",
        model_hash: str = "",
    ) -> "MoELayer":
        """A layer whose experts are read from `source` into the slots of `cache` as picks ask for them."""
        where = resolve_device(device)
        cache.bind(source, where)
        return cls(spec, router, StreamedExperts(source, layer, cache, where), shared, layer, model_hash)

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return self.experts.device

    def route(self, x: Float[Tensor, "T D"], token_ids: Int[Tensor, " T"] | None = None) -> Routing:
        """Picks for rows x. The product runs in float64 and is rounded once to fp32 logits."""
        logits = (x.double() @ self.router.double().T).float()
        return route(logits, self.spec.router, token_ids=token_ids)

    def __call__(
        self,
        x: Float[Tensor, "T D"],
        arm: str | Arm = "auto",
        *,
        routing: Routing | None = None,
        options: Options | None = None,
        token_ids: Int[Tensor, " T"] | None = None,
    ) -> MoEOutput:
        """Run the layer on x [T, D]; `routing` skips the router. Raises LabError before any work when inputs
        disagree.
        """
        options = options or Options()
        self._check_input(x, routing)
        run = _Run(self, x, arm, options)
        with threads_for(self._macs(x)) if run.backend == "torch" else nullcontext():
            out, routing = self._execute(run, routing, token_ids)
        timing = run.finish()
        about = {"num_experts": self.spec.num_experts, "width": self.spec.router.width, "model_hash": self.model_hash}
        emit(timing, self.number, routing, about)
        return MoEOutput(out, routing, timing, run.arm.name)

    def _execute(self, run: "_Run", routing: Routing | None, token_ids: Tensor | None) -> tuple[Tensor, Routing]:
        with run.phase("route"):
            routing = self.route(run.x, token_ids) if routing is None else routing
            expert_plan = plan(routing, self.spec.num_experts)
            schedule = (per_token_schedule if getattr(run.arm, "per_token", False) else batched_schedule)(expert_plan)
        run.experts(schedule)
        with run.phase("compute"):
            return run.combine(routing, run.shared()), routing

    def _macs(self, x: Tensor) -> int:
        """Multiply-adds of one expert's product with the rows it gets on average."""
        rows = max(1, x.shape[0] * self.spec.top_k // self.spec.num_experts)
        return rows * self.spec.d_model * self.spec.d_expert

    def _check_input(self, x: Tensor, routing: Routing | None) -> None:
        if x.ndim != 2 or x.shape[1] != self.spec.d_model:
            raise LabError(f"x has shape {tuple(x.shape)}; wanted [T, D] with D={self.spec.d_model}.")
        if x.dtype not in DTYPES:
            raise LabTypeError(f"x is {x.dtype}; wanted float32, float16 or bfloat16.")
        if x.device != self.device:
            raise LabError(f"x lives on {x.device} but the layer on {self.device}: move one of them.")
        if routing is not None and (routing.tokens != x.shape[0] or routing.ids.device != x.device):
            raise LabError(
                f"routing holds T={routing.tokens} tokens on {routing.ids.device}, x has T={x.shape[0]} on {x.device}."
            )

    def __repr__(self) -> str:
        s, kind = self.spec, "streamed" if isinstance(self.experts, StreamedExperts) else "resident"
        formats = "/".join(self.experts.formats)
        sizes = f"D={s.d_model} F={s.d_expert} E={s.num_experts} K={s.top_k}"
        return f"MoELayer({s.family} layer {self.number}: {sizes}, {formats}, {kind} on {self.device})"


class _Run:
    """The state of one call: arms, clock, counters and the [T, K, D] buffer of down rows."""

    def __init__(self, layer: MoELayer, x: Tensor, arm: str | Arm, options: Options) -> None:
        self.layer, self.x, self.options = layer, x.contiguous(), options
        self.backend = backend_of(x)
        self.arm = get_arm(arm, layer.experts.formats, self.backend)
        self.shared_arm = self._pick_shared_arm()
        self.work = Work()
        dtype = x.dtype if options.stores == "input" else torch.float32
        self.ctx = ArmContext(layer.spec, self.backend, dtype, options.chunk_rows, self.work)
        self.y = torch.zeros(x.shape[0], layer.spec.top_k, layer.spec.d_model, dtype=dtype, device=x.device)
        self.hits = self.misses = self.bytes_read = 0
        self.kernels = LaunchCount()
        self.clock = PhaseClock(x.device)

    def _pick_shared_arm(self) -> Arm | None:
        shared, asked = self.layer.shared, self.options.shared_arm
        if shared is None:
            return None
        formats = [q.format for q in (shared.gate, shared.up, shared.down)]
        if asked is not None:
            return get_arm(asked, formats, self.backend)
        serves = hasattr(self.arm, "shared") and self.arm.supports(formats, self.backend) is None
        return self.arm if serves else get_arm("reference", formats, self.backend)

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

    def experts(self, schedule: Schedule) -> None:
        """Fetch and compute every step, in waves of at most as many experts as fit."""
        if self.layer.spec.router.zero_experts:
            raise LabError("zero-computation experts are not served by any arm of this version.")
        for step in schedule.steps:
            for wave in waves(step, self.layer.experts.slots):
                with self.leased([g.expert for g in wave]) as stack, self.phase("compute"):
                    self.arm.experts(self.x, stack, schedule, wave, self.y, self.ctx)
                    self.work.submissions += 1

    def shared(self) -> Tensor | None:
        """The shared expert's rows [T, D], or None."""
        if self.shared_arm is None or self.x.shape[0] == 0:
            return None
        return self.shared_arm.shared(self.x, self.layer._shared_stack, self.ctx)  # type: ignore[attr-defined]

    def combine(self, routing: Routing, shared: Tensor | None) -> Tensor:
        """Weighted sum over slots in fp32, then the shared expert, then one rounding to x's dtype."""
        if self.x.shape[0] == 0:
            return torch.empty_like(self.x)
        vector = self.layer.shared.gate_vector if self.layer.shared is not None else None
        gate = torch.sigmoid(self.x.double() @ vector.double()).float() if vector is not None else None
        op = combine.combine_ref if self.backend == "torch" else combine.combine
        by_expert = self.options.combine_order == "expert"
        order = torch.sort(routing.ids, stable=True).indices.to(torch.int32) if by_expert else None
        return op(self.y, routing.weights, shared, gate, out_dtype=self.x.dtype, ids=routing.ids, order=order)

    def finish(self) -> Timing:
        """Stop the clock and write the record."""
        self.clock.stop()
        return Timing(
            clock=self.clock, layer=self.layer.number, arm=self.arm.name,
            shared_arm=self.shared_arm.name if self.shared_arm else None, backend=self.backend, tokens=self.x.shape[0],
            hits=self.hits, misses=self.misses, bytes_read=self.bytes_read, weight_bytes=self.work.weight_bytes,
            submissions=self.work.submissions, launches=self.kernels.launches + self.work.products,
        )  # fmt: skip
