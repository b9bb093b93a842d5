"""What a call needs of a layer, and which arms serve it: settled, or refused by name, before anything runs."""

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from moe_lab.arms import ARMS, Arm, ExpertStack, get_arm, refusal
from moe_lab.arms.fused import FusedStack, cannot_fuse
from moe_lab.errors import LabError
from moe_lab.execution.device_routing import MOST_TOKENS, check_sizes
from moe_lab.execution.options import Options, check_activation
from moe_lab.spec import MoESpec
from moe_lab.stream.prediction import Successor
from moe_lab.stream.provider import ResidentExperts, StreamedExperts
from moe_lab.stream.table_experts import TableExperts
from moe_lab.weights import Latent, ResidualNorms, SharedWeights

MOST_SETTLED = 64
Experts = ResidentExperts | StreamedExperts | TableExperts


@runtime_checkable
class LayerParts(Protocol):
    """What a call needs of a layer."""

    spec: MoESpec
    number: int | None
    experts: Experts
    shared: SharedWeights | None
    shared_stack: ExpertStack | None
    latent: Latent | None
    norms: ResidualNorms | None
    settled: dict[Any, Any]
    successor: Successor | None

    def fused_stack(self, stack: ExpertStack, everyone: int) -> FusedStack:
        """`stack` with the shared expert behind it, as expert `everyone`."""
        ...


def shared_formula(spec: MoESpec) -> MoESpec:
    """The spec as the shared expert computes it: the layer's formula, its own clamp, no biases, no routing weight."""
    limit = spec.shared.limit if spec.shared is not None else None
    return replace(spec, limit=limit, expert_bias=False, weight_place="output")


@dataclass(frozen=True, slots=True)
class Settled:
    """Who runs a call: the routed arm, the shared expert's with its formula, and whether one launch serves both."""

    arm: Arm
    shared_arm: Arm | None
    shared_spec: MoESpec
    fused: bool


def settle(layer: LayerParts, arm: str | Arm, options: Options, backend: str, tokens: int) -> Settled:
    """The arms of a call. LabError for what cannot be. What names of the lab's arms come to is remembered for a layer's
    parts as they are: a decode step asks the same each time."""
    named = all(isinstance(a, str) and a != "auto" for a in (arm, options.shared_arm or ""))
    key, parts = (arm, options, backend, tokens), (layer.spec, layer.experts, layer.shared)
    if named and key in layer.settled:
        known, made = layer.settled[key]
        if all(a is b for a, b in zip(known, parts, strict=True)):
            return made
    own = get_arm(arm, layer.experts.formats, backend, layer.spec, tokens, layer.experts.layout)
    fused, spec = fuses(layer, options, tokens), shared_formula(layer.spec)
    made = Settled(own, pick_shared_arm(layer, own, options, backend, tokens), spec, fused)
    if options.routing == "device":
        check_on_device(layer, own, options, tokens)
    check_activation(own, layer.experts.formats, options, layer.experts.layout)
    if named and (len(layer.settled) < MOST_SETTLED or key in layer.settled):
        layer.settled[key] = (parts, made)
    return made


def fuses(layer: LayerParts, options: Options, tokens: int) -> bool:
    """Whether the shared expert is to be a group of the routed launches."""
    return options.shared == "fused" and layer.shared is not None and tokens > 0


def pick_shared_arm(layer: LayerParts, arm: Arm, options: Options, backend: str, tokens: int) -> Arm | None:
    """The shared expert's arm: the one asked for, else the routed one where it serves, else the reference; None where
    there is no shared expert. LabError for one that cannot."""
    shared, asked = layer.shared, options.shared_arm
    if shared is None:
        return None
    spec = shared_formula(layer.spec)
    if fuses(layer, options, tokens):
        why = _cannot_fuse(layer, arm, options)
        if why is not None:
            raise LabError(f"Options.shared='fused' cannot be: {why}. Take 'main' or 'side'.")
        return arm
    if asked is not None:
        own = get_arm(asked, shared.formats, backend, spec, tokens)
        if not hasattr(own, "shared"):
            raise LabError(f"arm {own.name!r} has no shared(x, stack, ctx): it cannot run the shared expert.")
        return own
    serves = hasattr(arm, "shared") and refusal(arm, shared.formats, backend, spec) is None
    return arm if serves else get_arm("reference", shared.formats, backend, spec)


def _cannot_fuse(layer: LayerParts, arm: Arm, options: Options) -> str | None:
    """Why the shared expert cannot be a group of the routed arm's launches."""
    experts, asked, takes = layer.experts, options.shared_arm, getattr(arm, "fuses", None)
    if asked is not None and asked not in (arm, arm.name):
        return f"shared_arm asks for {getattr(asked, 'name', asked)!r}, and the routed arm is {arm.name!r}"
    if takes is None:
        return f"arm {arm.name!r} does not take a further group; {_able('fuses')} would"
    if isinstance(experts, StreamedExperts):
        return "streamed experts come in waves"
    assert layer.shared_stack is not None
    return takes(experts.formats) or cannot_fuse(layer.spec, experts.by_slot, layer.shared_stack)


def takes_plan(arm: Arm, tokens: int) -> bool:
    """Whether a call on the device goes by the plan itself, and not by a slot table."""
    by_table = getattr(arm, "experts_on_device", None) is not None and tokens <= MOST_TOKENS
    return not by_table and getattr(arm, "experts_of_plan", None) is not None


def check_on_device(layer: LayerParts, arm: Arm, options: Options, tokens: int) -> None:
    """LabError where the arm needs the host to know the picks, or takes fewer tokens, or experts that all lie ready."""
    if takes_plan(arm, tokens):
        asks = f"arm {arm.name!r} with Options.routing='device' and T={tokens}"
        other = f"Take routing='host', or for T <= {MOST_TOKENS} tokens {_able('experts_on_device')}."
        if not isinstance(layer.experts, ResidentExperts):
            raise LabError(f"{asks} wants every expert in memory; this layer fetches experts. {other}")
        if fuses(layer, options, tokens):
            raise LabError(f"{asks} goes by the plan, which has no group for shared='fused'. {other}")
        return
    if getattr(arm, "experts_on_device", None) is None:
        raise LabError(
            f"arm {arm.name!r} wants its groups from the host; for Options.routing='device' take "
            f"{_able('experts_on_device')}, or for any number of tokens {_able('experts_of_plan')}."
        )
    check_sizes(tokens, layer.spec.top_k, _able("experts_of_plan"))


def _able(member: str) -> str:
    return ", ".join(repr(name) for name, arm in ARMS.items() if getattr(arm, member, None) is not None)
