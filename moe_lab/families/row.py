"""What a family's row holds. Code reads the row; nothing branches on a name.

A row says how the router scores and weighs, how an expert computes, what stands beside the routed experts, and what a
file calls these things. The user's own `Family` is accepted wherever a name is. Sizes come from the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from moe_lab.errors import LabError
from moe_lab.families.files import FUSED, FileRow, TensorNames
from moe_lab.protocols import check_object
from moe_lab.spec import MoESpec, RouterSpec, SharedSpec

Shared = Literal["none", "plain", "gated"]
# The fields of moe_lab.weights.ResidualNorms: the norms of a whole feed-forward half.
NORMS = ("shared_in", "routed_in", "shared_out", "routed_out", "out", "layer_scalar")


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
    the defaults. `gguf`, `hf`: what files call its parts (None: no such file is read as this family); `module` None: no
    transformers module.
    """

    name: str
    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    shared: Shared = "none"
    shared_layer: Mapping[str, Any] = field(default_factory=dict)
    module: ModuleNames | None = None
    gguf: FileRow | None = None
    hf: FileRow | None = None

    def __post_init__(self) -> None:
        check_object(self, Family, "family", ())
        _known("router", self.router, "router")
        _known("layer", self.layer, "layer")
        _known("shared_layer", self.shared_layer, "shared")
        if self.shared not in ("none", "plain", "gated"):
            raise LabError(f"Family.shared is {self.shared!r}; it must be none, plain or gated.")
        for kind, row in (("gguf", self.gguf), ("hf", self.hf)):
            if row is not None:
                self._check_file(kind, row)

    def _check_file(self, kind: str, row: FileRow) -> None:
        for record, own in (("router", row.router), ("layer", row.layer), ("shared", row.shared)):
            _known(f"{kind}.{record}", own, record)
        for setting in row.settings:
            record, _, name = setting.field.partition(".")
            _known(f"{kind}.settings", {name: None}, record)
        for names in row.names:
            missing = [role for role in self.roles() if names.pattern(role) is None and not _fused(names, role)]
            if missing:
                raise LabError(f"Family.{kind} names no tensor for {', '.join(missing)}, which {self.name} needs.")

    def roles(self) -> tuple[str, ...]:
        """The roles of TensorNames that a layer of this family has, unless its file's row calls them optional."""
        layer = {f.name: f.default for f in fields(MoESpec)} | dict(self.layer)
        roles = ["router", *(("gate",) if layer["gated"] else ()), "up", "down"]
        for role in ("router_bias", "correction_bias", "per_expert_scale"):
            roles += [role] if layer[role] else []
        roles += ["input_scale"] if layer["router_input"] == "normed" else []
        roles += ["hash_table"] if self.router.get("hash_routing") else []
        if layer["expert_bias"]:
            roles += [*(("gate_bias",) if layer["gated"] else ()), "up_bias", "down_bias"]
        if self.shared != "none":
            roles += [*(("shared_gate",) if layer["gated"] else ()), "shared_up", "shared_down"]
        roles += ["shared_router"] if self.shared == "gated" else []
        roles += [f"norm.{name}" for name in NORMS] if layer["feed_forward"] == "normed_residual" else []
        return tuple(roles)

    def without_shared(self) -> "Family":
        """This row for a layer that has no shared expert."""
        if self.shared == "none":
            return self
        return replace(self, shared="none", shared_layer={})

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


# The fields of each record that a row or a file cannot set: sizes, and what the row says elsewhere.
_RECORDS = {
    "router": (RouterSpec, {"num_experts", "top_k"}),
    "layer": (MoESpec, {"router", "d_model", "d_expert", "shared", "family"}),
    "shared": (SharedSpec, {"d_expert", "gated"}),
}


def _known(what: str, settings: Mapping[str, Any], record: str) -> None:
    if record not in _RECORDS:
        raise LabError(f"Family.{what} names a field of {record!r}; wanted router.x, layer.x or shared.x.")
    target, reserved = _RECORDS[record]
    allowed = {f.name for f in fields(target)} - reserved
    wrong = sorted(set(settings) - allowed)
    if wrong:
        raise LabError(
            f"Family.{what} names {', '.join(wrong)}, which a row cannot set; possible: {', '.join(sorted(allowed))}."
        )


def _fused(names: TensorNames, role: str) -> bool:
    return any(names.pattern(both) is not None for both, parts in FUSED.items() if role in parts)
