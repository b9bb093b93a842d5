"""One MoE layer: route, plan, fetch, compute, combine. The only room that ties them together.

x [T, D] -> MoEOutput.out [T, D] in x's dtype. Weights are resident (`from_tensors`) or streamed from a file through an
expert cache (`streamed`); the arithmetic and its bits are the same either way.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from moe_lab._types import Float, Float32, Int, Tensor
from moe_lab.arms import Arm, ExpertBiases, ExpertStack
from moe_lab.arms.fused import FusedStack
from moe_lab.block import router_logits
from moe_lab.card import card
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError, LabTypeError
from moe_lab.execution.call import Execution
from moe_lab.execution.capture import CapturedLayer, Inputs, check_capture
from moe_lab.execution.inputs import check_branch, check_given_picks, check_rows
from moe_lab.execution.options import Options
from moe_lab.execution.parts import settle
from moe_lab.execution.result import MoEOutput
from moe_lab.formats.layouts import Laid, check_layout, repacked
from moe_lab.routing import Routing, choice_margin, route
from moe_lab.spec import MoESpec
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.prediction import Successor
from moe_lab.stream.provider import ResidentExperts, StreamedExperts
from moe_lab.stream.source import ExpertSource
from moe_lab.stream.table_experts import TableExperts
from moe_lab.system.devices import resolve_device
from moe_lab.system.threads import threads_for
from moe_lab.timing import emit
from moe_lab.weights import (
    Latent,
    ResidualNorms,
    RouterWeights,
    SharedWeights,
    as_quant,
    check_biases,
    on_device,
    split_biases,
)
from moe_lab_kernels.backend import backend_of


class MoELayer:
    """A callable MoE layer. Build it with `from_tensors`, `streamed`, or `Checkpoint.layer`."""

    def __init__(
        self,
        spec: MoESpec,
        router: RouterWeights,
        experts: "ResidentExperts | StreamedExperts | TableExperts",
        shared: SharedWeights | None,
        *,
        latent: Latent | None = None,
        norms: ResidualNorms | None = None,
        number: int | None = None,
        model_hash: str = "",
    ) -> None:
        check_biases(_biases_of(experts), spec)
        router.check(spec)
        for what, wanted, given in (
            ("shared expert", spec.shared is not None, shared),
            ("latent projections", spec.latent is not None, latent),
            ("residual norms", spec.feed_forward == "normed_residual", norms),
        ):
            if wanted != (given is not None):
                raise LabError(
                    f"the spec {'wants' if wanted else 'has no'} {what}, "
                    f"but {'none was given' if given is None else 'one was given'}."
                )
            if given is not None:
                given.check(spec)
        self.spec, self.experts, self.number, self.model_hash = spec, experts, number, model_hash
        self.router_weights = on_device(router, experts.device)
        self.shared = None if shared is None else on_device(shared, experts.device)
        self.latent = None if latent is None else on_device(latent, experts.device)
        self.norms = None if norms is None else on_device(norms, experts.device)
        self.shared_stack = None if self.shared is None else self.shared.stack()
        self._fused: FusedStack | None = None
        self.settled: dict[Any, Any] = {}
        self.successor: Successor | None = None  # the next MoE layer, for `Options.prefetch`

    @classmethod
    def from_tensors(
        cls,
        spec: MoESpec,
        *,
        router: Tensor | RouterWeights,
        gate: "Tensor | Laid | None",
        up: "Tensor | Laid",
        down: "Tensor | Laid",
        biases: Mapping[str, Tensor] | None = None,
        shared: SharedWeights | None = None,
        latent: Latent | None = None,
        norms: ResidualNorms | None = None,
        number: int | None = None,
        model_hash: str = "",
    ) -> "MoELayer":
        """A resident layer from gate, up [E, F, D] and down [E, D, F] (D: the latent width where the spec has one).

        `router`: its weight [R, D], or RouterWeights. `gate` is None where spec.gated is False. `biases` by name: gate,
        up [E, F], down [E, D], router [R] (added to the logits), correction [R] (for the choice alone). Runs where the
        weights live. LabError where tensors and spec disagree, either way.
        """
        e, f, d = spec.num_experts, spec.d_expert, spec.d_routed
        if (gate is None) == spec.gated:
            raise LabError(f"spec.gated is {spec.gated}, but a gate was {'not ' * (gate is None)}given.")
        own_router, own_biases = split_biases(router, biases)
        gates = None if gate is None else as_quant(gate, "gate", (e, f, d))
        ups, downs = as_quant(up, "up", (e, f, d)), as_quant(down, "down", (e, d, f))
        devices = {q.device for q in (gates, ups, downs) if q is not None}
        if len(devices) != 1:
            raise LabError(f"gate, up and down live on different devices: {', '.join(sorted(map(str, devices)))}.")
        own_biases = None if own_biases is None else on_device(own_biases, ups.device)
        experts = ResidentExperts.of(gates, ups, downs, own_biases)
        about = {"number": number, "model_hash": model_hash}
        return cls(spec, own_router, experts, shared, latent=latent, norms=norms, **about)

    @classmethod
    def streamed(
        cls,
        spec: MoESpec,
        *,
        router: Tensor | RouterWeights,
        source: ExpertSource,
        layer: int,
        cache: ExpertCache,
        biases: Mapping[str, Tensor] | None = None,
        shared: SharedWeights | None = None,
        device: "torch.device | str" = "cpu",
        model_hash: str = "",
    ) -> "MoELayer":
        """A layer whose experts are read from `source` into the slots of `cache` as picks ask for them."""
        if not spec.gated or spec.latent or spec.feed_forward != "experts":
            raise LabError("only gated experts of the layer's own width are streamed; build this layer from tensors.")
        where = resolve_device(device)
        own_router, own_biases = split_biases(router, biases)
        own_biases = None if own_biases is None else on_device(own_biases, where)
        cache.bind(source, where)
        experts = StreamedExperts(source, layer, cache, where, own_biases)
        return cls(spec, own_router, experts, shared, number=layer, model_hash=model_hash)

    def repacked(self, layout: str) -> "MoELayer":
        """The layer with its experts kept in `layout`, "raw", "planar" or "tiles", instead: itself where they are.

        Resident ones, repacked on their device a projection at a time; the shared expert with them where its formats
        have that layout. Nothing of the old bytes is kept here: let the old layer go. LabError naming a projection that
        has no such layout, and for experts that are fetched (`lab.open(..., layout=)` decides how slots keep those).
        """
        check_layout(layout)
        held = self.experts
        if held.layout == layout:
            return self
        if not isinstance(held, ResidentExperts):
            raise LabError(
                f"the experts of this layer are fetched, and kept in layout {held.layout!r} as they come: open the "
                f"model with lab.open(..., layout={layout!r})."
            )
        made = {name: repacked(part, layout, self._named(name)) for name, part in held.stack.parts.items()}
        experts = ResidentExperts.of(made.get("gate"), made["up"], made["down"], held.stack.biases)
        shared = None if self.shared is None else self.shared.repacked(layout)
        about = {"number": self.number, "model_hash": self.model_hash}
        return MoELayer(self.spec, self.router_weights, experts, shared, latent=self.latent, norms=self.norms, **about)

    def _named(self, part: str) -> str:
        return part if self.number is None else f"layer {self.number}: {part}"

    @property
    def device(self) -> torch.device:
        """Where the layer computes."""
        return self.experts.device

    @property
    def router(self) -> Tensor:
        """The router's weight [R, D]."""
        return self.router_weights.weight

    def route(self, x: Float[Tensor, "T D"], token_ids: Int[Tensor, " T"] | None = None) -> Routing:
        """Picks for rows x [T, D], on the layer's device."""
        own = self.router_weights
        return route(router_logits(x, own, self.spec), self.spec.router, token_ids=token_ids, **own.for_routing())

    def margin(self, x: Float[Tensor, "T D"]) -> Float32[Tensor, " T"]:
        """How close each row came to other picks: see `moe_lab.routing.choice_margin`."""
        own = self.router_weights
        logits = router_logits(x, own, self.spec)
        return choice_margin(logits, self.spec.router, correction_bias=own.correction_bias)

    def fused_stack(self, stack: ExpertStack, everyone: int) -> FusedStack:
        """`stack` with the shared expert behind it, as expert `everyone`; the last one made is kept."""
        kept = self._fused
        if kept is None or kept.routed is not stack or kept.everyone != everyone:
            assert self.shared_stack is not None
            kept = self._fused = FusedStack(stack, self.shared_stack, everyone)
        return kept

    def __call__(
        self,
        x: Float[Tensor, "T D"],
        arm: str | Arm = "auto",
        *,
        routing: Routing | None = None,
        options: Options | None = None,
        token_ids: Int[Tensor, " T"] | None = None,
        branch: Float[Tensor, "T D"] | None = None,
    ) -> MoEOutput:
        """Run the layer on x [T, D]; `routing` skips the router, `branch` (rows from `dense_branch`) the shared expert.
        Raises LabError before any work when inputs disagree.
        """
        options = options or Options()
        check_rows(x, self.spec.d_model, self.device)
        check_given_picks(routing, x)
        check_branch(branch, x, self.shared is not None)
        if not isinstance(options, Options):
            raise LabTypeError(f"options is a {type(options).__name__}; wanted moe_lab.Options.")
        if branch is not None:
            options = replace(options, shared="main")  # nothing is left to run beside or with the routed experts
        routed = routing is None
        with Execution(self, x.detach(), arm, options) as run:
            with threads_for(self._macs(x)) if run.backend == "torch" else nullcontext():
                out, routing = self._execute(run, routing, token_ids, branch)
            timing = run.finish()
        if not run.capturing:
            sizes = {"num_experts": self.spec.num_experts, "width": self.spec.router.width}
            about = {**sizes, "model_hash": self.model_hash}
            emit(timing, self.number, routing, about, (lambda: self.margin(run.x)) if routed else None)
        return MoEOutput(out, routing, timing, run.arm.name)

    def dense_branch(
        self, x: Float[Tensor, "T D"], arm: str | Arm = "auto", options: Options | None = None
    ) -> Float[Tensor, "T D"]:
        """What the shared expert's branch alone gives for rows x: normed on the way in and out where the layer does so,
        gated only if it is normed. LabError for a layer without a shared expert."""
        check_rows(x, self.spec.d_model, self.device)
        if self.shared is None:
            raise LabError("this layer has no shared expert.")
        with Execution(self, x.detach(), arm, replace(options or Options(), shared="main")) as run:
            rows = run.shared()
            return torch.empty_like(x) if rows is None else rows.clone()

    def _execute(
        self, run: Execution, routing: Routing | None, token_ids: Tensor | None, branch: Tensor | None
    ) -> tuple[Tensor, Routing]:
        vectors = {**self.router_weights.for_routing(), "token_ids": token_ids}
        run.fork()
        with run.phase("route"):
            logits = router_logits(run.x, self.router_weights, self.spec) if routing is None else None
            routing = run.route(routing, logits, vectors)
            run.lookahead.guess(run.x)
        if branch is None:
            run.start_beside()
        with run.phase("route"):
            run.plan_work(routing)
            run.verify(routing, logits, vectors)
        run.enter(routing)
        run.experts()
        with run.phase("compute"):
            return run.combine(routing, run.shared() if branch is None else branch), routing

    def capture(
        self,
        tokens: int,
        arm: str | Arm = "auto",
        *,
        dtype: torch.dtype = torch.bfloat16,
        routing: Routing | None = None,
        options: Options | None = None,
        token_ids: Int[Tensor, " T"] | None = None,
    ) -> CapturedLayer:
        """The call for T = `tokens` rows of `dtype` as a CUDA graph: a callable(x) with the bits of an eager call. More
        than 8 tokens want an arm that takes a plan: grouped, mmq, mmq_folded.

        Routing runs on the device inside the graph; with `routing` given, its picks are used (and may be replaced at
        each call). `token_ids` for hash routing. LabError on a CPU, for streamed experts, and for arms that cannot.
        """
        options = options or Options()
        tokens = wants_whole("capture's T", tokens)
        check_capture(self, tokens, options, routing)
        x = torch.zeros(tokens, self.spec.d_model, dtype=dtype, device=self.device)
        check_rows(x, self.spec.d_model, self.device)
        check_given_picks(routing, x)
        settle(self, arm, replace(options, routing="device"), backend_of(x), tokens)
        if routing is not None:
            assert routing.affected_rows is not None
            routing = Routing(routing.ids.clone(), routing.weights.clone(), routing.affected_rows.clone())
        token_ids = None if token_ids is None else token_ids.to(self.device).clone()
        return CapturedLayer(self, Inputs(x, routing, token_ids), arm, options)

    def _macs(self, x: Tensor) -> int:
        """Multiply-adds of one expert's product with the rows it gets on average."""
        rows = max(1, x.shape[0] * self.spec.top_k // self.spec.num_experts)
        return rows * self.spec.d_model * self.spec.d_expert

    def _repr_html_(self) -> str:
        s = self.spec
        facts = {
            "family": s.family,
            "sizes": f"D={s.d_model} F={s.d_expert} E={s.num_experts} K={s.top_k}",
            "formats": "/".join(self.experts.formats),
            "layout": self.experts.layout,
            "experts": f"{'streamed' if isinstance(self.experts, StreamedExperts) else 'resident'} on {self.device}",
            "activation": s.activation,
            "router": f"{s.router.score}, {'normalised' if s.router.normalize else 'not normalised'}",
            "shared expert": f"F={s.shared.d_expert}" if s.shared else None,
        }
        return card(f"MoELayer {'' if self.number is None else self.number}", facts)

    def __repr__(self) -> str:
        s, kind = self.spec, "streamed" if isinstance(self.experts, StreamedExperts) else "resident"
        held = f"{'/'.join(self.experts.formats)} {self.experts.layout}"
        sizes = f"D={s.d_model} F={s.d_expert} E={s.num_experts} K={s.top_k}"
        return f"MoELayer({s.family} layer {self.number}: {sizes}, {held}, {kind} on {self.device})"


def _biases_of(experts: "ResidentExperts | StreamedExperts | TableExperts") -> ExpertBiases | None:
    return experts.biases if isinstance(experts, StreamedExperts) else experts.stack.biases


__all__ = ["MoELayer", "MoEOutput", "Options", "SharedWeights"]
