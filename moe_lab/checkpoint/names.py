"""Which tensors of a file make up which layer: a family's name patterns applied to the names that are there."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from moe_lab.checkpoint.tensor_file import TensorFile
from moe_lab.checkpoint.tensor_info import ScaledInfo, TensorInfo
from moe_lab.errors import CheckpointError
from moe_lab.families import Family, FileRow, TensorNames
from moe_lab.families.files import FUSED, GROUPS

EXPERT = "{expert}"
# The parts that make a layer a MoE layer; a shared expert alone does not.
_ROUTED = ("router", "gate", "up", "gate_up", "down")
_LISTED = 8
_NUMBER = r"(?:0|[1-9][0-9]{0,8})"  # as it is written back: no leading zeros, ASCII digits


@dataclass(frozen=True, slots=True)
class Stored:
    """One role's place in a file: a tensor, or one for each expert (then `name` has {expert} in it)."""

    name: str
    infos: tuple[TensorInfo | ScaledInfo, ...]

    @property
    def per_expert(self) -> bool:
        """Whether every expert has a tensor of its own."""
        return EXPERT in self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in values as stored, numpy order; a stack of single experts has E in front."""
        shape = self.infos[0].shape
        return (len(self.infos), *shape) if self.per_expert else shape

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats in it, each once: more than one where experts differ."""
        return tuple(dict.fromkeys(_format(info) for info in self.infos))

    @property
    def nbytes(self) -> float:
        """Bytes of all of it, scales included; NaN where a type's size is unknown."""
        return sum(math.nan if info.nbytes is None else info.nbytes for info in self.infos)

    @property
    def scaled(self) -> bool:
        """Whether scales stand in tensors of their own."""
        return any(isinstance(info, ScaledInfo) for info in self.infos)


def _format(info: TensorInfo | ScaledInfo) -> str:
    return info.format or f"type {info.ggml_type}"  # type: ignore[union-attr]  # a ScaledInfo always has a format


def find_names(row: FileRow, file: TensorFile) -> tuple[TensorNames, list[int]] | None:
    """The layout and prefix the file uses, and its MoE layers, ascending; None when it has none.

    The first of the row's layouts of which the file holds experts counts; one with other routed parts alone is a MoE
    file too, from which something is missing.
    """
    present = (*file.tensors, *file.scaled)
    first = None
    for names in (prefixed(plain, prefix) for plain in row.names for prefix in plain.prefixes):
        layers = moe_layers(names, present)
        if layers and moe_layers(names, present, roles=("down",)):
            return names, layers
        first = first or ((names, layers) if layers else None)
    return first


def moe_layers(names: TensorNames, present: Iterable[str], roles: tuple[str, ...] = _ROUTED) -> list[int]:
    """Numbers of the layers of which `present` holds any of the roles' tensors, ascending."""
    patterns = {pattern for role in roles if (pattern := names.pattern(role)) is not None}
    # One alternation: a model may have a hundred thousand tensors.
    any_of = re.compile("|".join(_regex(pattern) for pattern in sorted(patterns)))
    return sorted({int(m[m.lastindex or 0]) for name in present if (m := any_of.fullmatch(name))})


def _regex(pattern: str) -> str:
    escaped = re.escape(pattern).replace(r"\{layer\}", f"({_NUMBER})", 1)
    return escaped.replace(r"\{expert\}", _NUMBER)


def prefixed(names: TensorNames, prefix: str) -> TensorNames:
    """The names with `prefix` before each."""
    if not prefix:
        return names
    held = {f.name: getattr(names, f.name) for f in fields(names)}
    full = {field: prefix + name for field, name in held.items() if isinstance(name, str)}
    return replace(names, norms={n: prefix + name for n, name in names.norms.items()}, **full)


def layer_tensors(
    file: TensorFile, family: Family, names: TensorNames, layer: int, num_experts: int
) -> dict[str, Stored]:
    """Role -> where it is, for one layer. CheckpointError "missing tensor" naming what the layer lacks."""
    found: dict[str, Stored] = {}
    missing: list[str] = []
    for role in _wanted(file, family, names, layer):
        stored = _locate(file, names, role, layer, num_experts)
        if stored is None:
            if role not in names.optional:
                missing += _absent(file, names.pattern(role) or _fused_name(names, role), layer, num_experts)
        else:
            found[stored[0]] = stored[1]
    if missing:
        raise _missing(file, family, layer, missing)
    return found


def _wanted(file: TensorFile, family: Family, names: TensorNames, layer: int) -> Iterator[str]:
    """The family's roles, without groups that the layer lacks and may lack, and the optional ones it has."""
    lacking: set[str] = set()
    extra = names.optional - set(GROUPS)
    for group, (tells, members) in GROUPS.items():
        pattern = names.pattern(tells)
        if group in names.optional and pattern is not None:
            here = file.has(pattern.format(layer=layer, expert=0))
            lacking |= set() if here else set(members)
            extra |= {m for m in members if m not in lacking} if group == "latent" else set()
    yield from dict.fromkeys(role for role in (*family.roles(), *sorted(extra)) if role not in lacking)


def _locate(file: TensorFile, names: TensorNames, role: str, layer: int, num_experts: int) -> tuple[str, Stored] | None:
    """(role, place), the role being the fused one where the file holds that."""
    fused = next((both for both, parts in FUSED.items() if role in parts and names.pattern(both)), None)
    for candidate in (fused, role):
        pattern = None if candidate is None else names.pattern(candidate)
        if pattern is None or candidate is None:
            continue
        wanted = _names(pattern, layer, num_experts)
        if all(file.has(name) for name in wanted):
            infos = tuple(file.scaled.get(name) or file.tensors[name] for name in wanted)
            return candidate, Stored(pattern.replace("{layer}", str(layer)), infos)
    return None


def _names(pattern: str, layer: int, num_experts: int) -> list[str]:
    name = pattern.replace("{layer}", str(layer))
    return [name.replace(EXPERT, str(e)) for e in range(num_experts)] if EXPERT in name else [name]


def _fused_name(names: TensorNames, role: str) -> str:
    return next(names.pattern(both) or "" for both, parts in FUSED.items() if role in parts and names.pattern(both))


def _absent(file: TensorFile, pattern: str, layer: int, num_experts: int) -> list[str]:
    return [name for name in _names(pattern, layer, num_experts) if not file.has(name)]


def _missing(file: TensorFile, family: Family, layer: int, missing: list[str]) -> CheckpointError:
    missing = list(dict.fromkeys(missing))
    more = f", and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
    others = f" (also missing: {', '.join(missing[1:_LISTED])}{more})" if len(missing) > 1 else ""
    return CheckpointError(
        file.path,
        "missing tensor",
        f"layer {layer} of a {family.name} model needs this tensor, but the file has none{others}.",
        tensor=missing[0],
        wanted=", ".join(missing[:_LISTED]),
    )


def extra_experts(file: TensorFile, tensors: Mapping[str, Stored], num_experts: int) -> str | None:
    """The name of an expert's tensor beyond the E that the metadata counts, if there is one."""
    for stored in tensors.values():
        name = stored.name.replace(EXPERT, str(num_experts))
        if stored.per_expert and file.has(name):
            return name
    return None
