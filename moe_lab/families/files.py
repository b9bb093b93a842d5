"""How one kind of file describes a family: names of tensors, keys of sizes and settings. Data alone; nothing is read.

A GGUF says it with metadata keys (`{arch}` stands for its architecture), a safetensors model with those of its
config.json. `FileRow.types` are the words by which a file names the family: `general.architecture`, `model_type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A role that one tensor may hold for two: the first half of its rows is the first, unless they are interleaved.
FUSED = {
    "gate_up": ("gate", "up"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "shared_gate_up": ("shared_gate", "shared_up"),
}
# Roles that come together or not at all, by the role that tells; `optional` names the group.
GROUPS = {
    "shared": ("shared_down", ("shared_gate", "shared_up", "shared_down", "shared_router")),
    "latent": ("latent_in", ("latent_in", "latent_out")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names of a layer's tensors; `{layer}` and `{expert}` stand for numbers. Shapes in numpy order.

    router [R, D]; router_bias, correction_bias [R]; hash_table [V, K]; per_expert_scale [E]; input_scale [D];
    gate, up [E, F, D], down [E, D, F], or without the E where `{expert}` makes them a tensor each; gate_up [E, 2F, D];
    their biases [E, F], [E, D]; shared_gate, shared_up [Fs, D], shared_gate_up [2Fs, D], shared_down [D, Fs];
    shared_router [D] or [1, D]; latent_in [L, D], latent_out [D, L]; norms: ResidualNorms field -> name, each [D].

    Gate and up may be named fused and apart: what the file holds counts. `transposed`: the last two axes of plain gate,
    up and down tensors are swapped (packed formats never are). `interleaved`: fused rows alternate gate, up, gate ...
    `optional`: roles, or groups of GROUPS, that a layer may lack. `prefixes`: what may stand before every name; the
    first one that is there counts.
    """

    router: str
    down: str
    gate: str | None = None
    up: str | None = None
    gate_up: str | None = None
    router_bias: str | None = None
    correction_bias: str | None = None
    hash_table: str | None = None
    per_expert_scale: str | None = None
    input_scale: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    gate_up_bias: str | None = None
    down_bias: str | None = None
    shared_gate: str | None = None
    shared_up: str | None = None
    shared_gate_up: str | None = None
    shared_down: str | None = None
    shared_router: str | None = None
    latent_in: str | None = None
    latent_out: str | None = None
    norms: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    interleaved: bool = False
    optional: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ("",)

    def pattern(self, role: str) -> str | None:
        """The name's pattern for a role; "norm.x" is the norm x."""
        return self.norms.get(role[5:]) if role.startswith("norm.") else getattr(self, role)


@dataclass(frozen=True, slots=True)
class FileSetting:
    """A spec field that a file may set: `field` is "router.x", "layer.x" or "shared.x".

    `kind`: the stored value's type (a whole number serves for a float). `codes` maps stored values to the field's
    (None: the value itself). A value equal to `unset` counts as absent, one equal to `off` sets None. `when`: (key,
    value); it holds only then. A list holds a value for each layer.
    """

    field: str
    key: str
    kind: type
    codes: Mapping[Any, Any] | None = None
    unset: Any = None
    off: Any = None
    when: tuple[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeKeys:
    """Keys of a layer's sizes, the first that is there counts. The widths may be absent: shapes tell them."""

    num_experts: tuple[str, ...]
    top_k: tuple[str, ...]
    d_model: tuple[str, ...]
    d_expert: tuple[str, ...] = ()
    d_shared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class When:
    """A condition that tells two families of one type apart: `key` has one of `values` (None: it is absent); with no
    values named, it is there.
    """

    key: str
    values: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WhichLayers:
    """Keys by which a file says which of its layers have experts; all do, but for what these say.

    `count`: layers in all. `first`: the first MoE layer; with `lead` a file without that key may begin with dense ones.
    `last`: the last one, negative for no limit. `step` s: only layers n with (n + 1) % s = 0. `dense`: a list of layers
    without experts. `listed`: a list (or text with commas) of those with; `kinds`: a word for each layer, MoE where it
    is one of `moe_kinds`; either stands for all the rest. `spare`: how many layers that predict further tokens may
    follow, counted in `count` or not (`spare_counted`). `anywhere`: nothing is promised where the file has no list.
    """

    count: tuple[str, ...] = ("num_hidden_layers",)
    first: str | None = None
    lead: bool = False
    last: str | None = None
    step: str | None = None
    dense: str | None = None
    listed: str | None = None
    kinds: tuple[str, ...] = ()
    moe_kinds: tuple[str, ...] = ()
    spare: str | None = None
    spare_counted: bool = False
    anywhere: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRow:
    """One kind of file of one family. `names`: the layouts it comes in, tried in order. `router`, `layer`, `shared`:
    what such a file means where it says nothing, if that is not what the family's row says. `layers`: which layers have
    experts (None: the row does not know, then only a hole between two of them is refused).
    """

    types: tuple[str, ...]
    names: tuple[TensorNames, ...]
    sizes: SizeKeys
    settings: tuple[FileSetting, ...] = ()
    when: tuple[When, ...] = ()
    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[str, Any] = field(default_factory=dict)
    layers: WhichLayers | None = None
