"""The same experts stored in another way, by name: "gemv:q4_k" is arm gemv on the layer's experts quantised to q4_k
from the values that they decode to, "gemv:other" the same arm on a second layer, of another file of the same model.

So two formats stand side by side in one report, as two arms and two layouts do ("gemv:q4_k@planar" names all three).
The router's picks, the shared expert and all else stay the layer's own where a format is named; `other` brings its own.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from moe_lab._types import Tensor
from moe_lab.arms import Arm
from moe_lab.bench.laid import laid
from moe_lab.bench.weights import split_format
from moe_lab.checks import wants
from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.formats.layouts import Laid
from moe_lab.layer import MoELayer
from moe_lab.numerics.distance import nmse
from moe_lab.spec import differences
from moe_lab.stream.provider import ResidentExperts

OTHER = "other"
# Power of a difference over that of the values. A format of 2 bits loses 0.1 of it, a single sign 0.4; matrices that
# have nothing to do with each other lie 2 apart.
UNRELATED = 0.7
LOOKED_AT = 4  # experts whose matrices are looked at: enough to tell a layer from another one

_QUANTISED: WeakKeyDictionary[MoELayer, dict[str, MoELayer]] = WeakKeyDictionary()


class Asked(NamedTuple):
    """An arm by name (with its layout) or as an object, and whose weights it gets ("": the layer's own)."""

    arm: str | Arm
    weights: str

    @property
    def name(self) -> str:
        """As a report has it: "gemv:q4_k"."""
        return with_weights(self.arm if isinstance(self.arm, str) else self.arm.name, self.weights)


def split_weights(name: str) -> tuple[str, str]:
    """Arm (with its layout) and weights: "gemv:q4_k@planar" -> ("gemv@planar", "q4_k"); "" where none are named."""
    head, at, layout = name.partition("@")
    arm, _, weights = head.partition(":")
    return arm + at + layout, weights


def with_weights(arm: str, weights: str) -> str:
    """The inverse."""
    head, at, layout = arm.partition("@")
    return f"{head}:{weights}{at}{layout}" if weights else arm


def named(arms: Sequence[str | Arm], other: MoELayer | None) -> list[Asked]:
    """Arms and whose weights each gets. With an `other` that none of them names, every arm runs on both. LabError for
    ":other" without one, and for an arm with an empty word behind its colon."""
    found = []
    for arm in arms:
        plain, weights = split_weights(arm) if isinstance(arm, str) else (arm, "")
        if isinstance(arm, str) and ":" in arm and not weights:
            raise LabError(
                f"arm {arm!r} names no weights: wanted a format behind the arm, such as gemv:q4_k or gemv:q4_k@tiles, "
                f"or gemv:{OTHER}."
            )
        if weights == OTHER and other is None:
            raise LabError(f"arm {arm!r} wants a second layer: give compare other=, or name a format as in gemv:q4_k.")
        found.append(Asked(plain, weights))
    if other is not None and all(one.weights != OTHER for one in found):
        found += [Asked(one.arm, OTHER) for one in found if not one.weights]
    return found


def stored_as(layer: MoELayer, weights: str, other: MoELayer | None = None) -> MoELayer:
    """The layer whose experts a name's `weights` say: itself for "", `other`, or `quantized`."""
    if not weights:
        return layer
    if weights == OTHER:
        assert other is not None
        return other
    return quantized(layer, weights)


def on(layer: MoELayer, arm: str | Arm, other: MoELayer | None = None) -> tuple[MoELayer, str | Arm]:
    """The layer and the arm that a name stands for, as "gemv:q4_k@planar"; objects take the layer as it lies."""
    plain, weights = split_weights(arm) if isinstance(arm, str) else (arm, "")
    return laid(stored_as(layer, weights, other), plain)


def quantized(layer: MoELayer, format: str) -> MoELayer:
    """The layer with its routed experts in `format` ("q4_k", or gate/up's and down's as "q2_k+q3_k"), quantised from
    the values that they decode to; a part that has the format stays as it is, and so does all else. Kept as long as the
    layer is. LabError for fetched experts and rows that are no whole blocks.
    """
    made = _QUANTISED.setdefault(layer, {})
    if format not in made:
        made[format] = _quantized(layer, format)
    return made[format]


def _quantized(layer: MoELayer, format: str) -> MoELayer:
    outer, inner = split_format(format)
    if not isinstance(layer.experts, ResidentExperts):
        raise LabError(f"experts are quantised to {format} in memory: open the layer without a cache.")
    stack, wanted = layer.experts.stack, {"gate": outer, "up": outer, "down": inner}
    parts: dict[str, Laid] = {}
    for name, part in stack.parts.items():
        try:
            own = part.format == wanted[name]
            parts[name] = part if own else quantize(part.to_raw().dequantize(), wanted[name])
        except LabError as error:
            raise LabError(
                f"{name} cannot be quantised to {wanted[name]}: {error}"
            ) from None  # with a cause it would be an arm's error
    experts = ResidentExperts.of(parts.get("gate"), parts["up"], parts["down"], stack.biases)
    about = {"number": layer.number, "model_hash": layer.model_hash}
    return MoELayer(
        layer.spec, layer.router_weights, experts, layer.shared, latent=layer.latent, norms=layer.norms, **about
    )


def check_same(layer: MoELayer, second: object, what: str) -> None:
    """LabError unless `second` holds the same layer's experts: one spec, on one device, and matrices that are the same
    but for their formats. Looks at the router and at some rows of some experts."""
    wants(what, second, MoELayer, "a MoELayer of the same spec")
    assert isinstance(second, MoELayer)
    apart = [d for d in differences(layer.spec, second.spec, rel=1e-6) if d[0] != "layer.family"]
    if apart:
        said = "; ".join(f"{name} = {ours!r} there and {theirs!r} in {what}" for name, ours, theirs in apart)
        raise LabError(f"{what} is a layer of another spec than the one compared: {said}.")
    if layer.device != second.device:
        raise LabError(f"the layer compared is on {layer.device}, {what} on {second.device}: move one of them.")
    for name, ours, theirs in _looked_at(layer, second):
        power = nmse(theirs, ours)
        if not power <= UNRELATED:
            raise LabError(
                f"{what} holds other experts than the layer compared: {name} differs by {power:.2g} of its power, "
                f"another format of the same weights by less than {UNRELATED}. Wanted the same layer of the same model."
            )


def _looked_at(layer: MoELayer, second: MoELayer) -> Iterator[tuple[str, Tensor, Tensor]]:
    yield "the router", layer.router.float(), second.router.float()
    for expert in range(0, layer.spec.num_experts, max(1, layer.spec.num_experts // LOOKED_AT)):
        ours, theirs = (_values(one, expert) for one in (layer, second))
        for part in ours:
            yield f"{part} of expert {expert}", ours[part], theirs[part]


def _values(layer: MoELayer, expert: int) -> dict[str, Tensor]:
    with layer.experts.lease([expert]) as held:
        return {part: held.stack.matrix(part, expert).dequantize() for part in held.stack.parts}


def same_bytes(layer: MoELayer, second: MoELayer) -> bool:
    """Whether both hold equal experts; layers whose experts are fetched are taken to differ unless they are one."""
    if layer is second:
        return True
    both = (layer.experts, second.experts)
    if not all(isinstance(e, ResidentExperts) for e in both):
        return False
    ours, theirs = (e.stack.parts for e in both)  # type: ignore[union-attr]
    return all(
        part.format == theirs[name].format and torch.equal(part.to_raw().data, theirs[name].to_raw().data)
        for name, part in ours.items()
    )


def formats_said(layer: MoELayer) -> str:
    """ "q2_k+q3_k", or one name where all parts have it."""
    return "+".join(dict.fromkeys(layer.experts.formats))
