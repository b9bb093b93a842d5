"""What a layer holds beside its routed experts, and the checks that it fits the layer's spec.

The router's tensors, the shared expert, latent projections, the norms of a whole feed-forward half. Each knows its
shapes; nothing here computes. What the spec asks for and what is given must agree both ways: a missing correction bias
would route wrongly without a sign of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, TypeVar

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ExpertBiases, ExpertStack
from moe_lab.checks import wants, wants_tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import QuantTensor, Repacked
from moe_lab.formats.layouts import RAW, Laid, refusal, repacked
from moe_lab.spec import MoESpec

Record = TypeVar("Record")
BIASES = ("router", "correction", "gate", "up", "down")


def expect_tensor(what: str, t: Tensor | Laid | None, shape: tuple[int, ...] | None) -> None:
    """LabError unless `t` has `shape`; `shape` None means the spec has no such thing."""
    if (t is None) != (shape is None):
        wants = "has no" if shape is None else f"wants a {what} {list(shape)}"
        raise LabError(
            f"the spec {wants}{f' {what}' if shape is None else ''}, but one was {'not ' * (t is None)}given."
        )
    if t is not None and shape is not None and tuple(t.shape) != shape:
        raise LabError(f"the {what} has shape {tuple(t.shape)}; wanted {list(shape)}.")


def on_device(record: Record, device: torch.device | str) -> Record:
    """A record of tensors with each of them on `device`. LabError for one on "meta", which has no values to move."""
    held = {f.name: getattr(record, f.name) for f in fields(record)}  # type: ignore[arg-type]
    for name, t in held.items():
        if t is not None and t.device.type == "meta" != torch.device(device).type:
            raise LabError(f"{type(record).__name__}.{name} is on meta, without values, and the layer on {device}.")
    moved = {name: t.to(device) for name, t in held.items() if t is not None}
    return replace(record, **moved)  # type: ignore[type-var]


class RoutingTensors(TypedDict):
    """Arguments of `moe_lab.route`."""

    correction_bias: Tensor | None
    hash_table: Tensor | None
    per_expert_scale: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class RouterWeights:
    """weight [R, D]; bias [R] added to the logits; correction_bias [R] for the choice alone; hash_table int [V, K];
    per_expert_scale [E]; input_scale [D] of a normed router input.
    """

    weight: Tensor
    bias: Tensor | None = None
    correction_bias: Tensor | None = None
    hash_table: Tensor | None = None
    per_expert_scale: Tensor | None = None
    input_scale: Tensor | None = None

    def for_routing(self) -> "RoutingTensors":
        """What `moe_lab.route` takes beside the logits, by argument."""
        return {
            "correction_bias": self.correction_bias,
            "hash_table": self.hash_table,
            "per_expert_scale": self.per_expert_scale,
        }

    def check(self, spec: MoESpec) -> None:
        """LabError where these tensors and the spec disagree."""
        wants("the router", self.weight, Tensor, "a torch tensor [R, D]")
        width, shape = spec.router.width, tuple(self.weight.shape)
        if shape != (width, spec.d_model):
            raise LabError(f"the router has shape {shape}; wanted [R, D] = [{width}, {spec.d_model}].")
        hashed = spec.router.hash_routing
        table = None if not hashed or self.hash_table is None else (self.hash_table.shape[0], spec.top_k)
        for what, tensor, wanted, wide in (
            ("router bias", self.bias, spec.router_bias, width),
            ("correction bias", self.correction_bias, spec.correction_bias, width),
            ("per-expert scale", self.per_expert_scale, spec.per_expert_scale, spec.num_experts),
            ("router input scale", self.input_scale, spec.router_input == "normed", spec.d_model),
        ):
            expect_tensor(what, tensor, (wide,) if wanted else None)
        if hashed and self.hash_table is None:
            raise LabError("the spec wants a hash table [V, K], but one was not given.")
        expect_tensor("hash table", self.hash_table, table)


@dataclass(frozen=True, slots=True, eq=False)
class SharedWeights:
    """The expert every token visits: gate, up [Fs, D], down [D, Fs], and the gate vector [D] or None. `gate` is None in
    layers whose experts have none.
    """

    gate: Laid | None
    up: Laid
    down: Laid
    gate_vector: Tensor | None = None

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats of gate (where there is one), up and down."""
        return tuple(q.format for q in (self.gate, self.up, self.down) if q is not None)

    def stack(self) -> ExpertStack:
        """As a stack of one slot."""
        gate = None if self.gate is None else self.gate.stacked()
        return ExpertStack(gate, self.up.stacked(), self.down.stacked(), {0: 0})

    def repacked(self, layout: str) -> "SharedWeights":
        """Kept in a layout (`formats.layouts`) if all parts have it, raw otherwise."""
        parts = {name: q for name in ("gate", "up", "down") if (q := getattr(self, name)) is not None}
        served = all(refusal(layout, q.format, *q.shape[-2:]) is None for q in parts.values())
        return replace(self, **{name: repacked(q, layout if served else RAW) for name, q in parts.items()})

    def check(self, spec: MoESpec) -> None:
        """LabError where shapes, gates and the spec disagree."""
        assert spec.shared is not None
        f, d = spec.shared.d_expert, spec.d_model
        for what, q, shape in (
            ("shared gate", self.gate, (f, d) if spec.gated else None),
            ("shared up", self.up, (f, d)),
            ("shared down", self.down, (d, f)),
        ):
            expect_tensor(what, q, shape)
        expect_tensor("shared expert's gate vector", self.gate_vector, (d,) if spec.shared.gated else None)


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """Projections around the routed experts: enter [L, D] before them, leave [D, L] after their weighted sum."""

    enter: Tensor
    leave: Tensor

    def check(self, spec: MoESpec) -> None:
        """LabError for other shapes."""
        assert spec.latent is not None
        expect_tensor("latent entry", self.enter, (spec.latent, spec.d_model))
        expect_tensor("latent exit", self.leave, (spec.d_model, spec.latent))


@dataclass(frozen=True, slots=True, eq=False)
class ResidualNorms:
    """Norm weights [D] of a whole feed-forward half: before and after either branch, after their sum; and the scalar
    [1] that the layer's output is multiplied by.
    """

    shared_in: Tensor
    routed_in: Tensor
    shared_out: Tensor
    routed_out: Tensor
    out: Tensor
    layer_scalar: Tensor

    def check(self, spec: MoESpec) -> None:
        """LabError for other shapes."""
        for f in fields(self):
            shape = (1,) if f.name == "layer_scalar" else (spec.d_model,)
            expect_tensor(f"norm {f.name}", getattr(self, f.name), shape)


def split_biases(
    router: Tensor | RouterWeights, biases: Mapping[str, Tensor] | None
) -> tuple[RouterWeights, ExpertBiases | None]:
    """Router tensors and expert biases from `biases` by name (BIASES). LabError for other names or one given twice."""
    own = router if isinstance(router, RouterWeights) else RouterWeights(router)
    if biases is not None:
        wants("biases", biases, Mapping, f"a mapping from a name ({', '.join(BIASES)}) to its tensor")
    given = dict(biases or {})
    unknown = sorted(map(str, set(given) - set(BIASES)))
    if unknown:
        raise LabError(f"biases names {', '.join(unknown)}; possible: {', '.join(BIASES)}.")
    for name, bias in given.items():
        wants_tensor(f"biases[{name!r}]", bias)
    for name, attribute in (("router", "bias"), ("correction", "correction_bias")):
        if name in given:
            if getattr(own, attribute) is not None:
                raise LabError(f"biases[{name!r}] was given, but the router's own {attribute} too.")
            own = replace(own, **{attribute: given.pop(name)})
    if not given:
        return own, None
    missing = [name for name in ("up", "down") if name not in given]
    if missing:
        raise LabError(f"expert biases lack {', '.join(missing)}; wanted up, down and, for gated experts, gate.")
    return own, ExpertBiases(**given)


def check_biases(biases: ExpertBiases | None, spec: MoESpec) -> None:
    """LabError where expert biases and the spec disagree."""
    wanted, e = spec.expert_bias, spec.num_experts
    shapes: dict[str, Any] = {"gate": spec.d_expert if spec.gated else None, "up": spec.d_expert, "down": spec.d_routed}
    for part, width in shapes.items():
        given = None if biases is None else getattr(biases, part)
        expect_tensor(f"{part} bias", given, (e, width) if wanted and width is not None else None)


def as_quant(w: "Tensor | Laid", name: str, shape: tuple[int, ...]) -> Laid:
    """Weights as a QuantTensor of the wanted logical shape; floats are wrapped, not converted, and what lies in another
    layout stays so."""
    if isinstance(w, Tensor):
        names = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
        if w.dtype not in names:
            raise LabTypeError(f"{name} is {w.dtype}; wanted float32, float16, bfloat16 or a QuantTensor.")
        w = QuantTensor.from_bytes(w.contiguous().view(torch.uint8), names[w.dtype], tuple(w.shape))
    wants(name, w, (QuantTensor, Repacked), "a float tensor or a QuantTensor")
    if tuple(w.shape) != shape:
        raise LabError(f"{name} has shape {tuple(w.shape)}; the spec wants {shape}.")
    return w
