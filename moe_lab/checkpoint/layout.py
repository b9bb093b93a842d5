"""From a file's metadata and tensor table to a MoESpec for each MoE layer, with every shape checked against it.

What a layer lacks, or holds in another shape than the metadata says, is refused here, before a tensor is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lab.checkpoint.names import Stored, extra_experts, find_names, layer_tensors, prefixed
from moe_lab.checkpoint.promised import check_layers
from moe_lab.checkpoint.settings import Facts, text_config
from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import Family, FileRow, TensorNames, family_of_config, family_of_gguf
from moe_lab.spec import MoESpec

# Traces hold 16-bit ids; and a hostile count must not become as many names to look for.
MOST_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One MoE layer of a file: its spec and the tensors by role (fused roles where the file holds those)."""

    spec: MoESpec
    tensors: Mapping[str, Stored]


@dataclass(frozen=True, slots=True)
class MoELayout:
    """The MoE part of a file: the family, the names it uses, and its MoE layers by number, ascending."""

    family: Family
    names: TensorNames
    layers: Mapping[int, LayerLayout]

    @property
    def spec(self) -> MoESpec:
        """The first MoE layer's spec; others may differ where a setting is a layer's own."""
        return next(iter(self.layers.values())).spec


def family_of_file(file: TensorFile) -> Family | None:
    """The family by what the file says of itself, None for one without a row."""
    if file.kind == "gguf":
        return family_of_gguf(file.metadata)
    return family_of_config(text_config(file.config)) or family_of_config(file.config)


def read_layout(file: TensorFile, family: Family) -> MoELayout | None:
    """The file's MoE layers as `family` lays them out; None when it has none and promises none. CheckpointError for
    what does not fit, or a promised layer that is not there."""
    row = family.gguf if file.kind == "gguf" else family.hf
    if row is None:
        known = "gguf=gguf_file(architecture)" if file.kind == "gguf" else "hf=hf_file(model_types, names)"
        raise LabError(f"family {family.name} does not say what a {file.kind} file calls its tensors: give it {known}.")
    found = find_names(row, file)
    if found is None:
        if family_of_file(file) is family:  # another one was asked for by name, of which the file promises nothing
            check_layers(file, family, row, prefixed(row.names[0], row.names[0].prefixes[0]), [])
        return None
    names, numbers = found
    check_layers(file, family, row, names, numbers)
    return MoELayout(family, names, {n: _layer(file, family, row, names, n) for n in numbers})


def _layer(file: TensorFile, family: Family, row: FileRow, names: TensorNames, layer: int) -> LayerLayout:
    facts = Facts(file, family, row, layer)
    num_experts = facts.needed(row.sizes.num_experts)
    if num_experts > MOST_EXPERTS:
        raise facts.wrong(row.sizes.num_experts[0], num_experts, f"at most {MOST_EXPERTS} experts")
    tensors = layer_tensors(file, family, names, layer, num_experts)
    if {"correction_bias", "hash_table"} <= names.optional and not {"correction_bias", "hash_table"} & set(tensors):
        what = f"layer {layer} has neither a correction bias nor a hash table, and routes by one of them."
        raise CheckpointError(file.path, "missing tensor", what, tensor=names.correction_bias)
    spec = _spec(facts, names, tensors, num_experts)
    extra = extra_experts(file, tensors, num_experts)
    # A file may hold tensors for zero-computation experts too; they compute nothing.
    if extra is not None and not spec.router.zero_experts:
        what = f"is an expert beyond the {num_experts} that the metadata counts."
        raise CheckpointError(file.path, "model shape", what, tensor=extra, wanted=f"{num_experts} experts")
    for role, stored in tensors.items():
        _check_shape(file, spec, names, role, stored)
    return LayerLayout(spec, tensors)


def _spec(facts: Facts, names: TensorNames, tensors: Mapping[str, Stored], num_experts: int) -> MoESpec:
    sizes, file = facts.row.sizes, facts.file
    found = facts.settings()
    if "correction_bias" in names.optional:
        found["layer"]["correction_bias"] = "correction_bias" in tensors
    if "hash_table" in names.optional:
        found["router"]["hash_routing"] = "hash_table" in tensors
    if "latent_in" in tensors:
        found["layer"]["latent"] = tensors["latent_in"].shape[0]
    family = facts.family
    d_shared = None
    if "shared_down" in tensors:
        d_shared = facts.size(sizes.d_shared) or _axis(file, tensors["shared_down"], -1)
    else:
        family = family.without_shared()
    down = tensors["down"]
    inner = -2 if names.transposed and not down.scaled else -1
    try:
        return family.spec(
            num_experts=num_experts,
            top_k=facts.needed(sizes.top_k),
            d_model=facts.needed(sizes.d_model),
            d_expert=facts.size(sizes.d_expert) or _axis(file, down, inner),
            d_shared=d_shared,
            settings=found["router"],
            layer_settings=found["layer"],
            shared_settings=found["shared"],
        )
    except CheckpointError:
        raise
    except LabError as error:
        raise CheckpointError(
            file.path, "model shape", f"the metadata does not describe a {family.name} layer: {error}"
        ) from error


def _axis(file: TensorFile, stored: Stored, axis: int) -> int:
    if len(stored.shape) < 2:
        raise _surprise(file, stored, "[.., N, Kd]")
    return stored.shape[axis]


def _check_shape(file: TensorFile, spec: MoESpec, names: TensorNames, role: str, stored: Stored) -> None:
    axes, *accepted = _wanted_shape(spec, role)
    if names.transposed and not stored.scaled and role in ("gate", "up", "gate_up", "down"):
        axes, accepted = f"{axes} with its last axes swapped", [(e, n, k) for e, k, n in accepted]
    first = stored.infos[0].shape
    same = all(info.shape == first for info in stored.infos)
    shape = stored.shape
    # A table has a row for each token of a vocabulary that no other tensor of the layer tells.
    fits = shape[1:] == accepted[0][1:] if role == "hash_table" else shape in accepted
    if not (same and fits):
        odd = next((info for info in stored.infos if info.shape != first), stored.infos[0])
        raise _surprise(file, stored, f"{axes} = {list(accepted[0])}", name=None if same else odd.name)


def _wanted_shape(spec: MoESpec, role: str) -> tuple[Any, ...]:
    """(axes, the shapes that may stand for the role)."""
    e, d, f, r = spec.num_experts, spec.d_model, spec.d_expert, spec.router.width
    inner, shared = spec.d_routed, spec.shared.d_expert if spec.shared else 0
    wide = spec.latent or 0
    if role.startswith("norm."):
        return ("[1]", (1,)) if role == "norm.layer_scalar" else ("[D]", (d,))
    return {
        "router": ("[R, D]", (r, d)),
        "router_bias": ("[R]", (r,)),
        # A row of its own in some checkpoints.
        "correction_bias": ("[R]", (r,), (1, r)),
        "hash_table": ("[V, K]", (-1, spec.top_k)),
        "per_expert_scale": ("[E]", (e,)),
        "input_scale": ("[D]", (d,)),
        "gate": ("[E, F, D]", (e, f, inner)),
        "up": ("[E, F, D]", (e, f, inner)),
        "gate_up": ("[E, 2F, D]", (e, 2 * f, inner)),
        "down": ("[E, D, F]", (e, inner, f)),
        "gate_bias": ("[E, F]", (e, f)),
        "up_bias": ("[E, F]", (e, f)),
        "gate_up_bias": ("[E, 2F]", (e, 2 * f)),
        "down_bias": ("[E, D]", (e, inner)),
        "shared_gate": ("[F shared, D]", (shared, d)),
        "shared_up": ("[F shared, D]", (shared, d)),
        "shared_gate_up": ("[2 F shared, D]", (2 * shared, d)),
        "shared_down": ("[D, F shared]", (d, shared)),
        # One row: some converters store it as a vector, some as a matrix.
        "shared_router": ("[D]", (d,), (1, d)),
        "latent_in": ("[L, D]", (wide, d)),
        "latent_out": ("[D, L]", (d, wide)),
    }[role]


def _surprise(file: TensorFile, stored: Stored, wanted: str, name: str | None = None) -> CheckpointError:
    seen = list(stored.shape)
    message = f"has shape {seen}, but the metadata and the other tensors want {wanted}."
    if name is not None:
        message = f"has another shape than the experts before it; the metadata and the other tensors want {wanted}."
    return CheckpointError(
        file.path, "model shape", message, tensor=name or stored.infos[0].name, seen=seen, wanted=wanted
    )
