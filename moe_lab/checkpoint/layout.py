"""From a GGUF's metadata and tensor table to a MoESpec, with every shape checked against it.

What a layer lacks, or holds in another shape than the metadata says, is refused here, before a tensor is read.
"""

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.checkpoint.gguf_header import TensorInfo
from moe_lab.checkpoint.header_bytes import shown
from moe_lab.checkpoint.names import layer_names, moe_layers
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import Family, FileSetting
from moe_lab.spec import MoESpec


@dataclass(frozen=True, slots=True)
class MoELayout:
    """The MoE part of a file: one spec, and for each MoE layer the tensors by role."""

    family: Family
    spec: MoESpec
    layers: Mapping[int, Mapping[str, TensorInfo]]


def read_layout(file: GgufFile, family: Family) -> MoELayout | None:
    """The file's MoE layers as `family` lays them out; None when it has none. CheckpointError for what does not fit."""
    numbers = moe_layers(family.tensors, file.tensors)
    if not numbers:
        return None
    layers = {layer: _layer_tensors(file, family, layer) for layer in numbers}
    spec = _spec(file, family, layers[numbers[0]])
    for tensors in layers.values():
        _check_shapes(file, spec, tensors)
    return MoELayout(family, spec, layers)


def _layer_tensors(file: GgufFile, family: Family, layer: int) -> dict[str, TensorInfo]:
    wanted = layer_names(family, layer)
    missing = [name for name in wanted.values() if name not in file.tensors]
    if missing:
        others = f" (also missing: {', '.join(missing[1:])})" if len(missing) > 1 else ""
        raise CheckpointError(
            file.path,
            "missing tensor",
            f"layer {layer} of a {family.name} model needs this tensor, but the file has none{others}.",
            tensor=missing[0],
            wanted=", ".join(missing),
        )
    return {role: file.tensors[name] for role, name in wanted.items()}


def _spec(file: GgufFile, family: Family, first: Mapping[str, TensorInfo]) -> MoESpec:
    keys = family.keys
    widths = {"d_expert": (keys.d_expert, first["gate"])}
    if family.shared != "none":
        widths["d_shared"] = (keys.d_shared, first["shared_gate"])
    sizes = {name: _size(file, getattr(keys, name)) for name in ("num_experts", "top_k", "d_model")}
    for name, (key, tensor) in widths.items():
        # Older converters left the widths out; the first layer's shape tells them and the other tensors must agree.
        full = _key(file, key)
        sizes[name] = _size(file, key) if full in file.metadata else _row_count(file, tensor)
    settings = _settings(file, family)
    try:
        return family.spec(
            num_experts=sizes["num_experts"],
            top_k=sizes["top_k"],
            d_model=sizes["d_model"],
            d_expert=sizes["d_expert"],
            d_shared=sizes.get("d_shared"),
            settings=settings,
        )
    except LabError as error:
        raise CheckpointError(
            file.path, "model shape", f"the metadata does not describe a {family.name} layer: {error}"
        ) from error


def _key(file: GgufFile, pattern: str) -> str:
    return pattern.format(arch=file.metadata.get("general.architecture", ""))


def _size(file: GgufFile, pattern: str) -> int:
    key = _key(file, pattern)
    value = file.metadata.get(key)
    if value is None:
        raise CheckpointError(
            file.path, "missing key", f"the metadata has no {shown(key)}, which a MoE layer needs.", wanted=key
        )
    if type(value) is not int or value < 1:
        raise CheckpointError(
            file.path,
            "value",
            f"{shown(key)} is {reprlib.repr(value)}; wanted a whole number of at least 1.",
            seen=value,
        )
    return value


def _row_count(file: GgufFile, tensor: TensorInfo) -> int:
    if len(tensor.shape) < 2:
        raise _surprise(file, tensor, "[.., N, Kd]")
    return tensor.shape[-2]


def _settings(file: GgufFile, family: Family) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in family.file_settings:
        value = file.metadata.get(_key(file, setting.key))
        if value is not None and value != setting.unset:
            found[setting.field] = _setting(file, family, setting, value)
    return found


def _setting(file: GgufFile, family: Family, setting: FileSetting, value: Any) -> Any:
    key = shown(_key(file, setting.key))
    if type(value) is not setting.kind:
        raise CheckpointError(
            file.path, "value", f"{key} is {reprlib.repr(value)}; wanted a {setting.kind.__name__}.", seen=value
        )
    if setting.codes is None:
        return value
    if value not in setting.codes:
        known = ", ".join(f"{code} ({name})" for code, name in setting.codes.items())
        raise CheckpointError(
            file.path, "value", f"{key} is {value}; family {family.name} knows {known}.", seen=value, wanted=known
        )
    return setting.codes[value]


def _check_shapes(file: GgufFile, spec: MoESpec, tensors: Mapping[str, TensorInfo]) -> None:
    for role, (axes, *accepted) in _wanted_shapes(spec).items():
        if tensors[role].shape not in accepted:
            raise _surprise(file, tensors[role], f"{axes} = {list(accepted[0])}")


def _wanted_shapes(spec: MoESpec) -> dict[str, tuple]:
    """Role -> (axes, the shapes that may stand for them)."""
    experts, d_model, d_expert = spec.num_experts, spec.d_model, spec.d_expert
    wanted: dict[str, tuple] = {
        "router": ("[R, D]", (spec.router.width, d_model)),
        "gate": ("[E, F, D]", (experts, d_expert, d_model)),
        "up": ("[E, F, D]", (experts, d_expert, d_model)),
        "down": ("[E, D, F]", (experts, d_model, d_expert)),
    }
    if spec.shared is not None:
        width = spec.shared.d_expert
        wanted["shared_gate"] = wanted["shared_up"] = ("[F shared, D]", (width, d_model))
        wanted["shared_down"] = ("[D, F shared]", (d_model, width))
        if spec.shared.gated:
            # One row: some converters store it as a vector, some as a matrix.
            wanted["shared_router"] = ("[D]", (d_model,), (1, d_model))
    return wanted


def _surprise(file: GgufFile, tensor: TensorInfo, wanted: str) -> CheckpointError:
    seen = list(tensor.shape)
    message = f"has shape {seen}, but the metadata and the other tensors want {wanted}."
    return CheckpointError(file.path, "model shape", message, tensor=tensor.name, seen=seen, wanted=wanted)
