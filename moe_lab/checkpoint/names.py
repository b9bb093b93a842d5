"""Which tensors of a file make up which layer: a family's name patterns applied to the names that are there."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from moe_lab.families import Family, GgufTensors

# The parts that make a layer a MoE layer; a shared expert alone does not.
_ROUTED = ("router", "gate", "up", "down")
_SHARED = ("shared_gate", "shared_up", "shared_down")


@dataclass(frozen=True, slots=True)
class ExpertSlice:
    """One of a layer's three expert stacks in the file: expert e is `expert_nbytes` from offset + e * expert_nbytes on.

    `shape` is [E, N, Kd]: [E, F, D] for gate and up, [E, D, F] for down. `offset` counts from the start of the file.
    """

    name: str
    format: str
    offset: int
    expert_nbytes: int
    shape: tuple[int, int, int]


def roles(family: Family) -> tuple[str, ...]:
    """The fields of GgufTensors that every MoE layer of the family has."""
    shared = {"none": (), "plain": _SHARED, "gated": (*_SHARED, "shared_router")}[family.shared]
    return (*_ROUTED, *shared)


def layer_names(family: Family, layer: int) -> dict[str, str]:
    """Role -> tensor name for one layer."""
    return {role: getattr(family.tensors, role).format(layer=layer) for role in roles(family)}


def moe_layers(tensors: GgufTensors, names: Iterable[str]) -> list[int]:
    """Numbers of the layers of which `names` holds any routed part, ascending."""
    patterns = [
        re.compile(re.escape(getattr(tensors, role)).replace(r"\{layer\}", r"(\d{1,9})", 1)) for role in _ROUTED
    ]
    return sorted({int(match[1]) for name in names for pattern in patterns if (match := pattern.fullmatch(name))})
