"""The MoE blocks of a torch model, and the model's identity."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab.checks import wants_wholes
from moe_lab.errors import LabError, LabTypeError
from moe_lab.families import Family, ModuleNames, family_of_module, get_family

_SAMPLES = 64


@dataclass(frozen=True, slots=True, eq=False)
class TappedBlock:
    """One MoE block: the layer's number, its path in the model, the module, and the row that reads it."""

    number: int
    path: str
    module: torch.nn.Module
    family: Family

    @property
    def name(self) -> str:
        """What messages call it: its path, or its class where it is the model itself."""
        return self.path or type(self.module).__name__

    @property
    def names(self) -> ModuleNames:
        """Where the module keeps its tensors."""
        assert self.family.module is not None
        return self.family.module

    def attribute(self, path: str) -> Any:
        """What stands at a path of the row, None where nothing does."""
        return _at(self.module, path)

    def owner(self, tensor_path: str) -> torch.nn.Module:
        """The sub-module that holds a tensor of the row."""
        return self.module.get_submodule(tensor_path.rpartition(".")[0])


def moe_blocks(
    model: torch.nn.Module, layers: Sequence[int] | None = None, family: str | Family | None = None
) -> list[TappedBlock]:
    """The MoE blocks inside `model`, in its order: modules of a class that a family's row names, holding a router.

    A block's number is the first number in its path ("model.layers.3.mlp" is 3) where these differ from block to block,
    else its place in the model. `layers`: these numbers alone. `family`: a row of your own, beside the known ones.
    LabTypeError for what is no module; LabError for a model without a block or without values (on the meta device), an
    unknown layer, or a family that reads none of the blocks.
    """
    if not isinstance(model, torch.nn.Module):
        raise LabTypeError(f"the model is a {type(model).__name__}; wanted a torch module.")
    if any(t.is_meta for t in model.parameters()):
        raise LabError(f"{type(model).__name__} is on the meta device and holds no values: load its weights first.")
    own = None if family is None else get_family(family)
    found: list[tuple[str, torch.nn.Module, Family]] = []
    for path, module in model.named_modules():
        row = _row(module, own)
        if row is not None and not any(path.startswith(f"{outer}." if outer else "") for outer, _, _ in found):
            found.append((path, module, row))
    if not found:
        raise LabError(
            f"{type(model).__name__} holds no MoE block that a family reads. Pass family=a Family of your own whose "
            "`module` names the block's class."
        )
    if own is not None and all(row is not own for _, _, row in found):
        rows = ", ".join(sorted({row.name for _, _, row in found}))
        raise LabError(f"family {own.name} reads no block of {type(model).__name__}; its blocks are of {rows}.")
    numbers = [_first_number(path) for path, _, _ in found]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(found)))
    blocks = [TappedBlock(n, *at) for n, at in zip(numbers, found, strict=True) if n is not None]
    if layers is None:
        return blocks
    layers = wants_wholes("layers", layers)
    unknown = sorted(set(layers) - set(numbers))
    if unknown or not layers:
        raise LabError(
            f"layers={list(layers)}: {type(model).__name__} has MoE layers {', '.join(str(b.number) for b in blocks)}."
        )
    return [b for b in blocks if b.number in layers]


def _row(module: torch.nn.Module, own: Family | None) -> Family | None:
    classes = [c.__name__ for c in type(module).__mro__]
    if own is not None and own.module is not None and set(classes) & set(own.module.classes):
        row = own
    else:
        row = family_of_module(classes)
    if row is None or row.module is None:
        return None
    dense = not isinstance(_at(module, row.module.router), torch.Tensor)  # as a decoder layer of the class may be
    return None if dense else row


def _at(module: torch.nn.Module, path: str) -> Any:
    at: Any = module
    for step in path.split("."):
        at = getattr(at, step, None)
    return at


def _first_number(path: str) -> int | None:
    return next((int(step) for step in path.split(".") if step.isdigit()), None)


def model_name(model: torch.nn.Module) -> str:
    """What the model calls itself: its `name_or_path`, else its class."""
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def model_hash(model: torch.nn.Module) -> str:
    """Cheap identity of a model in memory, hex sha256 over each parameter's name, dtype, shape and up to 64 of its
    values spread evenly. Tells two trainings of one shape apart, but is no checksum of the weights.
    """
    digest = hashlib.sha256()
    for name, t in model.named_parameters():
        digest.update(f"{name} {t.dtype} {tuple(t.shape)};".encode())
        if t.device.type != "meta" and t.numel():
            flat = t.detach().reshape(-1)
            at = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), device=t.device).long()
            digest.update(flat[at].double().cpu().numpy().tobytes())
    return digest.hexdigest()
