"""What a family's row holds. Code reads the row; nothing branches on a name.

A row says how the router scores and weighs, how an expert computes, what stands beside the routed experts, and what a
file calls these things. The user's own `Family` is accepted wherever a name is. Sizes come from the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from moe_lab.errors import LabError
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec

Shared = Literal["none", "plain", "gated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensors:
    """Names of a layer's tensors in a GGUF, `{layer}` standing for the layer's number. Shapes in numpy order.

    router [R, D]; gate, up [E, F, D]; down [E, D, F]; shared_gate, shared_up [Fs, D]; shared_down [D, Fs];
    shared_router [D] or [1, D].
    """

    router: str = "blk.{layer}.ffn_gate_inp.weight"
    gate: str = "blk.{layer}.ffn_gate_exps.weight"
    up: str = "blk.{layer}.ffn_up_exps.weight"
    down: str = "blk.{layer}.ffn_down_exps.weight"
    shared_gate: str = "blk.{layer}.ffn_gate_shexp.weight"
    shared_up: str = "blk.{layer}.ffn_up_shexp.weight"
    shared_down: str = "blk.{layer}.ffn_down_shexp.weight"
    shared_router: str = "blk.{layer}.ffn_gate_inp_shexp.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufKeys:
    """Metadata keys of a GGUF, `{arch}` standing for its architecture. The expert widths may be absent: shapes tell."""

    num_experts: str = "{arch}.expert_count"
    top_k: str = "{arch}.expert_used_count"
    d_model: str = "{arch}.embedding_length"
    d_expert: str = "{arch}.expert_feed_forward_length"
    d_shared: str = "{arch}.expert_shared_feed_forward_length"


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A RouterSpec field that a file may set by a metadata key.

    `codes` maps stored numbers to the field's values (None: the value itself, of type `kind`); a stored value equal to
    `unset` counts as absent.
    """

    field: str
    key: str
    kind: type
    codes: Mapping[int, Any] | None = None
    unset: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSetting:
    """A spec field that a transformers module sets: `field` is "router.x", "layer.x" or "shared.x".

    `path`: the attribute inside the module, dots for nesting; a sub-module or function counts as its name. `codes` maps
    what stands there to the field's values (None: the value itself). `when`: (path, value); it holds only then.
    """

    field: str
    path: str
    codes: Mapping[Any, Any] | None = None
    when: tuple[str, Any] | None = None


# transformers' activations by the name of their class or function.
MODULE_ACTIVATIONS = {
    "silu": "silu",
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "ReLUSquaredActivation": "relu2",
}
ACT_FN = ModuleSetting(field="layer.activation", path="experts.act_fn", codes=MODULE_ACTIVATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """Where transformers keeps a family's MoE layer: class names and attribute paths inside the module.

    Roles are paths of tensors: router [R, D], router_bias, correction_bias [R], hash_table [V, K], per_expert_scale
    [E], input_scale [D]; gate_up [E, 2F, D] (None: `up` [E, F, D] alone), down [E, D, F] and their biases.
    `transposed`: the last two axes are swapped. `interleaved`: gate and up alternate, instead of one after the other.
    `shared`: path of the shared expert, `shared_parts` its projections, `shared_gate` the gate's [1, D]. `latent`:
    paths of the two projections. `norms`: ResidualNorms field -> path. `optional`: roles that a module may lack or
    hold None. `unread`: paths whose tensors belong to other parts of the layer.
    """

    classes: tuple[str, ...]
    router: str = "gate.weight"
    top_k: str = "gate.top_k"
    router_bias: str | None = None
    correction_bias: str | None = None
    hash_table: str | None = None
    per_expert_scale: str | None = None
    input_scale: str | None = None
    gate_up: str | None = "experts.gate_up_proj"
    up: str | None = None
    down: str = "experts.down_proj"
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    interleaved: bool = False
    shared: str | None = None
    shared_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: str | None = None
    latent: tuple[str, str] | None = None
    norms: Mapping[str, str] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    unread: tuple[str, ...] = ()
    settings: tuple[ModuleSetting, ...] = (ACT_FN,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. `router`, `layer` and `shared_layer` hold the RouterSpec, MoESpec and SharedSpec fields that differ from
    the defaults. `gguf_arch` None: no GGUF architecture is read as this family; `module` None: no transformers module.
    """

    name: str
    gguf_arch: str | None = None
    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    shared: Shared = "none"
    shared_layer: Mapping[str, Any] = field(default_factory=dict)
    module: ModuleNames | None = None
    file_settings: tuple[FileSetting, ...] = ()
    tensors: GgufTensors = field(default_factory=GgufTensors)
    keys: GgufKeys = field(default_factory=GgufKeys)

    def __post_init__(self) -> None:
        _known("router", self.router, RouterSpec, {"num_experts", "top_k"})
        _known("layer", self.layer, MoESpec, {"router", "d_model", "d_expert", "shared", "family"})
        _known("shared_layer", self.shared_layer, SharedSpec, {"d_expert", "gated"})
        _known("file_settings", {s.field: s for s in self.file_settings}, RouterSpec, {"num_experts", "top_k"})
        if self.shared not in ("none", "plain", "gated"):
            raise LabError(f"Family.shared is {self.shared!r}; it must be none, plain or gated.")

    def spec(
        self,
        *,
        num_experts: int,
        top_k: int,
        d_model: int,
        d_expert: int,
        d_shared: int | None = None,
        settings: Mapping[str, Any] | None = None,
        layer_settings: Mapping[str, Any] | None = None,
        shared_settings: Mapping[str, Any] | None = None,
    ) -> MoESpec:
        """A layer of this family in the given sizes. The settings are RouterSpec, MoESpec and SharedSpec fields that
        the file or module sets itself. LabError when `d_shared` is given without a shared expert, or the other way
        round.
        """
        if (d_shared is None) != (self.shared == "none"):
            raise LabError(f"family {self.name} has shared expert {self.shared!r}, but its width is {d_shared}.")
        router = RouterSpec(num_experts, top_k, **{**self.router, **(settings or {})})
        shared = None
        if d_shared is not None:
            more = {**self.shared_layer, **(shared_settings or {})}
            shared = SharedSpec(d_shared, gated=self.shared == "gated", **more)
        layer = {**self.layer, **(layer_settings or {})}
        return MoESpec(router, d_model, d_expert, shared=shared, family=self.name, **layer)


def _known(what: str, settings: Mapping[str, Any], target: type, reserved: set[str]) -> None:
    allowed = {f.name for f in fields(target)} - reserved
    wrong = sorted(set(settings) - allowed)
    if wrong:
        raise LabError(
            f"Family.{what} names {', '.join(wrong)}, which a row cannot set; possible: {', '.join(sorted(allowed))}."
        )
