"""MoE layers as a GGUF: names, keys and codes are those of the family's row, read in the other direction.

What was written is read back before it takes its place: a setting that such a file cannot say is refused, not lost.
"""

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_lab._types import Tensor
from moe_lab.checkpoint.gguf_writer import fill_gguf
from moe_lab.checkpoint.promised import WRITTEN
from moe_lab.checks import wants, wants_path, wants_whole
from moe_lab.errors import CheckpointError, LabError
from moe_lab.families import Family, FileRow, FileSetting, When, get_family
from moe_lab.families.row import NORMS
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.open import open as open_checkpoint
from moe_lab.spec import MoESpec, differences
from moe_lab.stream.provider import ResidentExperts
from moe_lab.system.files import replace_file


def write_gguf(
    path: str | Path,
    layers: Mapping[int, MoELayer],
    *,
    family: str | Family | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor | QuantTensor] | None = None,
) -> Path:
    """Write resident layers, by number, as a GGUF of their family's architecture; weights keep their formats.

    `family`: the row, where it is not the one the layers' specs name. `metadata` and `tensors` go in beside what the
    layers need (other parts of a model, its name). LabError for layers of different families, a family without a GGUF,
    streamed experts, a format that is none of ggml's, `tensors` of the layers' own names, or a spec that the file would
    not give back.
    """
    path = wants_path("the GGUF's path", path)
    _check_layers(layers)
    row, file = _row(layers, family)
    specs = {number: layer.spec for number, layer in sorted(layers.items())}
    keys = {**_sizes(file, specs), **_settings(row, file, specs), **dict(metadata or {})}
    named = {name: value for number in specs for name, value in _tensors(row, file, layers[number], number).items()}
    others = dict(tensors or {})
    if twice := sorted(named.keys() & others.keys()):
        raise LabError(f"tensors names {', '.join(twice)}, which the layers write themselves.")

    def write(part: Path) -> None:
        fill_gguf(part, file.types[0], named | others, keys)
        try:
            _check(part, row, specs)
        except CheckpointError as error:  # its file is the part, which nobody has seen
            message = str(error).replace(str(part), str(path))
            raise LabError(f"{message} So a GGUF of family {row.name} cannot hold these layers.") from error

    return replace_file(path, write)


def _check_layers(layers: Mapping[int, MoELayer]) -> None:
    wants("layers", layers, Mapping, "a mapping from layer number to MoELayer, such as {0: layer}")
    if not layers:
        raise LabError("a GGUF of MoE layers wants at least one layer.")
    for number, layer in layers.items():
        wants_whole("a layer's number", number, 0)
        wants(f"layers[{number}]", layer, MoELayer, "a MoELayer")


def _row(layers: Mapping[int, MoELayer], family: str | Family | None) -> tuple[Family, FileRow]:
    names = sorted({layer.spec.family for layer in layers.values()})
    if family is None and len(names) > 1:
        raise LabError(f"the layers are of families {', '.join(names)}; a file holds one.")
    row = get_family(names[0] if family is None else family)
    if row.gguf is None:
        raise LabError(f"family {row.name} has no GGUF architecture. Give family=a Family whose `gguf` names one.")
    return row, row.gguf


def _sizes(file: FileRow, specs: Mapping[int, MoESpec]) -> dict[str, Any]:
    arch = file.types[0]
    found: dict[str, Any] = {f"{arch}.block_count": max(specs) + 1}
    if len(specs) <= max(specs):  # some of a model's layers, which no other key of every architecture says
        found[WRITTEN] = list(specs)
    for field, keys in (
        ("num_experts", file.sizes.num_experts), ("top_k", file.sizes.top_k), ("d_model", file.sizes.d_model),
        ("d_expert", file.sizes.d_expert), ("d_shared", file.sizes.d_shared),
    ):  # fmt: skip
        values = {number: _size(spec, field) for number, spec in specs.items()}
        if keys and all(value is not None for value in values.values()):
            found[_key(keys[0], arch)] = _one_or_all(values, 0)
    return found


def _size(spec: MoESpec, field: str) -> int | None:
    if field == "d_shared":
        return None if spec.shared is None else spec.shared.d_expert
    return getattr(spec, field)


def _settings(row: Family, file: FileRow, specs: Mapping[int, MoESpec]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in file.settings:
        values = {number: _stored(row, setting, spec) for number, spec in specs.items()}
        if any(value is not None for value in values.values()):
            filler = setting.off if setting.off is not None else next(v for v in values.values() if v is not None)
            whole = {number: filler if value is None else value for number, value in values.items()}
            found[_key(setting.key, file.types[0])] = _one_or_all(whole, filler)
    return {**found, **_conditions(file.when, file.types[0], found)}


def _stored(row: Family, setting: FileSetting, spec: MoESpec) -> Any:
    """The value that says the spec's field; None where there is nothing to say."""
    record, _, field = setting.field.partition(".")
    target = {"router": spec.router, "layer": spec, "shared": spec.shared}[record]
    if target is None:
        return None
    value = getattr(target, field)
    if value is None:
        return setting.off
    if setting.codes is None:
        return setting.kind(value)
    code = next((code for code, meaning in setting.codes.items() if meaning == value), None)
    if code is None:
        raise LabError(f"a GGUF of family {row.name} has no code for {setting.field} = {value!r} ({setting.key}).")
    return code


def _conditions(when: tuple[When, ...], arch: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """Keys by which the family is told apart, where nothing else has set them."""
    wanted = {_key(c.key, arch): c.values[0] for c in when if c.values and c.values[0] is not None}
    return {key: value for key, value in wanted.items() if key not in found}


def _key(pattern: str, arch: str) -> str:
    return pattern.replace("{arch}", arch)


def _one_or_all(values: Mapping[int, Any], filler: Any) -> Any:
    """One value where all layers agree, else a list with one for each layer up to the last."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    return [values.get(number, filler) for number in range(max(values) + 1)]


def _tensors(row: Family, file: FileRow, layer: MoELayer, number: int) -> dict[str, Tensor | QuantTensor]:
    if not isinstance(layer.experts, ResidentExperts):
        raise LabError(f"layer {number} is streamed; write resident layers (open them without a cache).")
    names = file.names[0]
    found: dict[str, Tensor | QuantTensor] = {}
    for role, value in _by_role(layer).items():
        pattern = names.pattern(role)
        if pattern is None:
            raise LabError(f"layer {number} has a {role}, for which a GGUF of family {row.name} has no name.")
        found[pattern.replace("{layer}", str(number))] = value
    return found


def _by_role(layer: MoELayer) -> dict[str, Tensor | QuantTensor]:
    assert isinstance(layer.experts, ResidentExperts)
    router, stack, shared = layer.router_weights, layer.experts.stack, layer.shared
    found: dict[str, Tensor | QuantTensor | None] = {
        "router": router.weight, "router_bias": router.bias, "correction_bias": router.correction_bias,
        "hash_table": None if router.hash_table is None else router.hash_table.int(),
        "per_expert_scale": router.per_expert_scale, "input_scale": router.input_scale,
    }  # fmt: skip
    found |= {part: q.to_raw() for part, q in stack.parts.items()}
    if stack.biases is not None:
        found |= {f"{part}_bias": getattr(stack.biases, part) for part in ("gate", "up", "down")}
    if shared is not None:
        parts = {"shared_gate": shared.gate, "shared_up": shared.up, "shared_down": shared.down}
        found |= {role: None if q is None else q.to_raw() for role, q in parts.items()}
        found |= {"shared_router": shared.gate_vector}
    if layer.latent is not None:
        found |= {"latent_in": layer.latent.enter, "latent_out": layer.latent.leave}
    if layer.norms is not None:
        found |= {f"norm.{name}": getattr(layer.norms, name) for name in NORMS}
    return {role: value for role, value in found.items() if value is not None}


def stored_spec(spec: MoESpec, family: str | Family) -> MoESpec:
    """The spec as a GGUF gives it back: settings that are fractions are fp32 there (2.826 becomes 2.82599997...)."""
    row = get_family(family)
    router, shared, layer = spec.router, spec.shared, spec
    for setting in row.gguf.settings if row.gguf else ():
        record, _, field = setting.field.partition(".")
        if setting.kind is not float:
            continue
        if record == "router":
            router = replace(router, **{field: _fp32(getattr(router, field))})
        elif record == "layer":
            layer = replace(layer, **{field: _fp32(getattr(layer, field))})
        elif shared is not None:
            shared = replace(shared, **{field: _fp32(getattr(shared, field))})
    return replace(layer, router=router, shared=shared)


def _fp32(value: float | None) -> float | None:
    return None if value is None else struct.unpack("<f", struct.pack("<f", value))[0]


def _check(part: Path, row: Family, specs: Mapping[int, MoESpec]) -> None:
    """LabError unless the file says what the layers are."""
    with open_checkpoint(part, family=row) as ckpt:
        for number, spec in specs.items():
            if number not in ckpt.moe_layers:
                raise LabError(f"a GGUF of family {row.name} would not show layer {number} as a MoE layer.")
            wanted = replace(stored_spec(spec, row), family=row.name)
            if lost := _differences(wanted, ckpt.layer_spec(number)):
                raise LabError(f"a GGUF of family {row.name} cannot say layer {number}'s {'; '.join(lost)}.")


def _differences(wanted: MoESpec, back: MoESpec) -> list[str]:
    """ "router.scale = 2.0 (read as 1.0)" for every field that differs."""
    return [f"{name} = {ours!r} (read as {theirs!r})" for name, ours, theirs in differences(wanted, back)]
