"""A whole layer call as one CUDA graph: what `MoELayer.capture` gives.

T tokens, D model width. Routing, plan and launch table stay on the device, so one graph serves every input of its
shape; each call copies its rows into the graph's own and replays. The bits are those of an eager call.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from moe_lab._types import Tensor
from moe_lab.arms import Arm
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.execution.parts import Experts
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec
from moe_lab.stream.provider import ResidentExperts
from moe_lab.timing import PhaseClock, Timing, emit
from moe_lab_kernels.backend import count_launches

WARM_CALLS = 2  # the first compiles kernels and sets up cuBLAS, the second finds everything in place


@runtime_checkable
class Capturable(Protocol):
    """What is captured of a layer."""

    spec: MoESpec
    number: int | None
    model_hash: str
    experts: Experts

    @property
    def device(self) -> torch.device: ...

    def __call__(
        self,
        x: Tensor,
        arm: "str | Arm" = ...,
        *,
        routing: Routing | None = ...,
        options: Options | None = ...,
        token_ids: Tensor | None = ...,
    ) -> Any: ...


OF_PICKS = ("ids", "weights", "affected_rows")  # the tensors of a `Routing`


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a replay reads: rows, and picks or token ids where the capture was given some."""

    x: Tensor
    routing: Routing | None
    token_ids: Tensor | None


class CapturedLayer:
    """Call it with rows [T, D] of the captured dtype. `.replay()` runs the graph on `.inputs` as they stand, and the
    result is `.output`, overwritten by the next replay; a call copies in and out.

    With picks given at the capture, `routing` may bring others of that shape. Timing: `compute_ms` is the whole graph,
    `launches` the kernels in it; what a graph cannot count (bytes of weights) is 0.
    """

    def __init__(self, layer: Capturable, inputs: Inputs, arm: "str | Arm", options: Options) -> None:
        self.inputs, self._layer = inputs, layer
        how: dict[str, Any] = {"options": replace(options, routing="device")}
        how |= {"routing": inputs.routing, "token_ids": inputs.token_ids}
        device = layer.device
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside), torch.no_grad():
            for _ in range(WARM_CALLS):
                layer(inputs.x, arm, **how)
        torch.cuda.current_stream(device).wait_stream(beside)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        # on `beside`, not on torch's own stream for captures, which is one for all GPUs and lies on the first
        graph = torch.cuda.graph(self.graph, stream=beside)
        with torch.no_grad(), count_launches() as counted, torch.cuda.device(device), graph:
            self.output = layer(inputs.x, arm, **how)
        self._launches = counted.launches

    def replay(self) -> None:
        """Run the graph on the current stream."""
        self.graph.replay()

    def __call__(self, x: Tensor, *, routing: Routing | None = None, token_ids: Tensor | None = None) -> Any:
        """As calling the layer. LabError when shape, dtype or device are not the captured ones, or when picks or token
        ids come that the graph does not read."""
        self._check(x, routing, token_ids)
        clock = PhaseClock(x.device)
        with clock.phase("compute"):
            self.inputs.x.copy_(x)
            if routing is not None and self.inputs.routing is not None:
                for name in OF_PICKS:
                    getattr(self.inputs.routing, name).copy_(getattr(routing, name))
            if token_ids is not None and self.inputs.token_ids is not None:
                self.inputs.token_ids.copy_(token_ids)
            self.graph.replay()
            made, kept = self.output, self.output.routing
            fresh = {name: getattr(kept, name).clone() for name in OF_PICKS}
            out = made.out.clone()
        clock.stop()
        t, picks = made.timing, replace(kept, **fresh)
        timing = Timing(
            clock=clock, layer=t.layer, arm=t.arm, shared_arm=t.shared_arm, backend=t.backend, tokens=t.tokens,
            submissions=1, launches=self._launches, layout=t.layout, kernels=t.kernels,
        )  # fmt: skip
        about = {"num_experts": self._layer.spec.num_experts, "width": self._layer.spec.router.width}
        emit(timing, self._layer.number, picks, {**about, "model_hash": self._layer.model_hash})
        return replace(made, out=out, routing=picks, timing=timing)

    def _check(self, x: Tensor, routing: Routing | None, token_ids: Tensor | None) -> None:
        own = self.inputs.x
        if x.shape != own.shape:
            raise LabError(f"captured for x {list(own.shape)}, got {list(x.shape)}: capture another graph for it.")
        if x.dtype != own.dtype or x.device != own.device:
            raise LabError(f"captured for {own.dtype} on {own.device}, got {x.dtype} on {x.device}.")
        for name, given, captured in (
            ("routing", routing, self.inputs.routing),
            ("token_ids", token_ids, self.inputs.token_ids),
        ):
            if given is not None and captured is None:
                raise LabError(f"{name} was given, but the graph was captured without: capture(T, {name}=...).")
        if routing is not None and self.inputs.routing is not None:
            was, now = self.inputs.routing.ids, routing.ids
            if now.shape != was.shape or now.device != was.device:
                raise LabError(
                    f"captured for picks {list(was.shape)} on {was.device}, got {list(now.shape)} on {now.device}."
                )


def check_capture(layer: Capturable, tokens: int, options: Options, routing: Routing | None) -> None:
    """LabError for what cannot be one graph."""
    if layer.device.type != "cuda":
        raise LabError(f"capture makes a CUDA graph, but this layer lives on {layer.device}: move it to a GPU.")
    if not isinstance(layer.experts, ResidentExperts):
        raise LabError(
            "capture wants every expert in memory, where a replay finds it; this layer fetches experts while it runs. "
            "Open it without a cache."
        )
    if tokens < 1:
        raise LabError(f"capture(T={tokens}): wanted at least one token.")
    for name in ("verify_routing", "sync_timing"):
        if getattr(options, name):
            raise LabError(f"Options.{name} waits for the device inside a call, which a captured one cannot.")
    if routing is not None and (routing.tokens != tokens or routing.ids.device != layer.device):
        raise LabError(
            f"capture(T={tokens}) on {layer.device}, but routing holds T={routing.tokens} tokens on "
            f"{routing.ids.device}."
        )
