"""Model families: one row each, all settings of one pipeline. Code reads the row; nothing branches on a name.

A row says how the router scores and weighs, how an expert computes, what stands beside the routed experts, and what a
file calls these things. The user's own `Family` is accepted wherever a name is. Sizes come from the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from moe_lab.errors import LabError, LabTypeError
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
class Family:
    """One row. `router` and `layer` hold the RouterSpec and MoESpec fields that differ from the defaults."""

    name: str
    gguf_arch: str
    router: Mapping[str, Any] = field(default_factory=dict)
    layer: Mapping[str, Any] = field(default_factory=dict)
    shared: Shared = "none"
    file_settings: tuple[FileSetting, ...] = ()
    tensors: GgufTensors = field(default_factory=GgufTensors)
    keys: GgufKeys = field(default_factory=GgufKeys)

    def __post_init__(self) -> None:
        _known("router", self.router, RouterSpec, {"num_experts", "top_k"})
        _known("layer", self.layer, MoESpec, {"router", "d_model", "d_expert", "shared", "family"})
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
    ) -> MoESpec:
        """A layer of this family in the given sizes; `settings` are RouterSpec fields that the file sets itself."""
        if (d_shared is None) != (self.shared == "none"):
            raise LabError(f"family {self.name} has shared expert {self.shared!r}, but its width is {d_shared}.")
        router = RouterSpec(num_experts, top_k, **{**self.router, **(settings or {})})
        shared = None if d_shared is None else SharedSpec(d_shared, gated=self.shared == "gated")
        return MoESpec(router, d_model, d_expert, shared=shared, family=self.name, **self.layer)


def _known(what: str, settings: Mapping[str, Any], target: type, reserved: set[str]) -> None:
    allowed = {f.name for f in fields(target)} - reserved
    wrong = sorted(set(settings) - allowed)
    if wrong:
        raise LabError(
            f"Family.{what} names {', '.join(wrong)}, which a row cannot set; possible: {', '.join(sorted(allowed))}."
        )


# Sources: the router and shared-expert formulas of each family's reference implementation, its GGUF metadata as the
# format's converters write it.
_ROWS = (
    # Softmax over all experts; the K weights are used as they are, sum below 1, unless the file says otherwise.
    Family(
        name="qwen2_moe",
        gguf_arch="qwen2moe",
        shared="gated",
        file_settings=(
            FileSetting("normalize", "{arch}.expert_weights_norm", bool),
            FileSetting("scale", "{arch}.expert_weights_scale", float, unset=0.0),
            FileSetting("score", "{arch}.expert_gating_func", int, codes={1: "softmax"}),
        ),
    ),
)

FAMILIES: dict[str, Family] = {row.name: row for row in _ROWS}


def get_family(family: "str | Family") -> Family:
    """A family by name, or the user's own object unchanged. LabError for an unknown name."""
    if isinstance(family, Family):
        return family
    if not isinstance(family, str):
        raise LabTypeError(f"a family is a name or a Family, got {type(family).__name__}.")
    if family not in FAMILIES:
        raise LabError(
            f"no family is called {family!r}; known: {', '.join(FAMILIES)}. Pass a Family of your own for another one."
        )
    return FAMILIES[family]


def family_of_arch(arch: object) -> Family | None:
    """The family of a GGUF architecture, None for one without a row."""
    return next((row for row in FAMILIES.values() if row.gguf_arch == arch), None)
