"""A transformers MoE module as a MoELayer, so that `layer(x)` can be compared with `block(x)`.

The family's row says where the module keeps its tensors and settings; this file only follows it. Weights are taken as
they are (views where the layout allows). The layer computes its router in float64 whatever the module's dtype, so
picks may differ from a bf16 module's where two scores are closer than its rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.families import Family, ModuleNames, family_of_module, get_family
from moe_lab.layer import MoELayer
from moe_lab.spec import MoESpec
from moe_lab.weights import Latent, ResidualNorms, RouterWeights, SharedWeights, as_quant


def from_module(block: torch.nn.Module, *, family: str | Family | None = None, number: int | None = None) -> MoELayer:
    """A resident layer holding `block`'s weights. `block` is a transformers MoE block (for Gemma-4 the decoder layer,
    of which this is the feed-forward half). The family comes from the class name unless given; `number` names the
    layer.

    LabTypeError for what is no module, LabError for a class without a row, a missing tensor or setting, or a parameter
    that the row does not read: nothing a module holds is left out silently.
    """
    parts = _read(block, family)
    return MoELayer.from_tensors(parts.spec, router=parts.router, **parts.rest, number=number)


def router_from_module(block: torch.nn.Module, *, family: str | Family | None = None) -> tuple[RouterWeights, MoESpec]:
    """`block`'s router and the spec that reads it, without the experts' copies that a layer may need. Errors as in
    `from_module`.
    """
    parts = _read(block, family)
    return parts.router, parts.spec


def _read(block: torch.nn.Module, family: str | Family | None) -> "_Parts":
    if not isinstance(block, torch.nn.Module):
        raise LabTypeError(f"from_module wants a torch module, got {type(block).__name__}.")
    row = _row(block, family)
    assert row.module is not None
    reader = _Reader(block, row.module)
    parts = _parts(row, row.module, reader)
    reader.check_all_read()
    return parts


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A block, read: views of its tensors. `rest`: what MoELayer.from_tensors takes beside spec and router."""

    spec: MoESpec
    router: RouterWeights
    rest: dict[str, Any]


def _row(block: torch.nn.Module, family: str | Family | None) -> Family:
    name = type(block).__name__
    row = family_of_module([c.__name__ for c in type(block).__mro__]) if family is None else get_family(family)
    if row is None:
        raise LabError(
            f"no family reads the module class {name}. Pass the MoE block itself (not the model around it), or "
            "family=a Family of your own whose `module` says where its tensors are."
        )
    if row.module is None:
        raise LabError(f"family {row.name} does not say where a transformers module keeps its tensors.")
    return row


@dataclass(slots=True)
class _Reader:
    """Attributes by path, remembering which parameters and buffers were taken."""

    block: torch.nn.Module
    names: ModuleNames
    taken: set[int] = field(default_factory=set)

    def value(self, path: str) -> Any:
        """The attribute at `path`. LabError naming the first step that is not there."""
        at: Any = self.block
        for step in path.split("."):
            if not hasattr(at, step):
                raise LabError(f"{type(self.block).__name__} has no {path}: {type(at).__name__} lacks {step!r}.")
            at = getattr(at, step)
        return at

    def has(self, path: str) -> bool:
        """Whether something other than None stands at `path`."""
        try:
            return self.value(path) is not None
        except LabError:
            return False

    def tensor(self, path: str) -> Tensor:
        """The tensor at `path`, detached; it counts as read."""
        t = self.value(path)
        if not isinstance(t, Tensor):
            raise LabError(f"{type(self.block).__name__}.{path} is {type(t).__name__}; wanted a tensor.")
        self.taken.add(id(t))
        return t.detach()

    def role(self, role: str) -> Tensor | None:
        """The tensor of a role that the row may not have, or that it calls optional and the module lacks."""
        path = getattr(self.names, role)
        if path is None or (role in self.names.optional and not self.has(path)):
            return None
        return self.tensor(path)

    def check_all_read(self) -> None:
        """LabError naming parameters and buffers that the row left unread."""
        held = [*self.block.named_parameters(), *self.block.named_buffers()]
        skip = tuple(f"{path}." for path in self.names.unread)
        left = [name for name, t in held if id(t) not in self.taken and not name.startswith(skip)]
        if left:
            raise LabError(
                f"{type(self.block).__name__} holds {', '.join(left)}, which its family's row does not read."
            )


def _parts(row: Family, names: ModuleNames, reader: _Reader) -> _Parts:
    router = RouterWeights(
        weight=reader.tensor(names.router),
        bias=reader.role("router_bias"),
        correction_bias=_flat(reader.role("correction_bias")),
        hash_table=reader.role("hash_table"),
        per_expert_scale=reader.role("per_expert_scale"),
        input_scale=reader.role("input_scale"),
    )
    gate, up, down = _experts(names, reader)
    shared, latent = _shared(row, names, reader), _latent(names, reader)
    found = _settings(names, reader, has_shared=shared is not None)
    found["layer"]["correction_bias"] = router.correction_bias is not None
    found["layer"]["latent"] = None if latent is None else latent.enter.shape[0]
    found["router"]["zero_experts"] = router.weight.shape[0] - down.shape[0]
    spec = (row if shared is not None else row.without_shared()).spec(
        num_experts=down.shape[0],
        top_k=reader.value(names.top_k),
        d_model=router.weight.shape[1],
        d_expert=up.shape[1],
        d_shared=None if shared is None else shared.up.shape[0],
        settings=found["router"],
        layer_settings=found["layer"],
        shared_settings=found["shared"],
    )
    norms = ResidualNorms(**{f: reader.tensor(path) for f, path in names.norms.items()}) if names.norms else None
    rest = {
        "gate": gate, "up": up, "down": down, "biases": _biases(names, reader), "shared": shared, "latent": latent,
        "norms": norms,
    }  # fmt: skip
    return _Parts(spec, router, rest)


def _flat(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.reshape(-1)


def _split(fused: Tensor, names: ModuleNames, axis: int) -> tuple[Tensor, Tensor]:
    """Gate and up from a fused tensor whose `axis` holds both."""
    if fused.shape[axis] % 2:
        raise LabError(f"{names.gate_up} has {fused.shape[axis]} rows of gate and up; wanted an even number.")
    if names.interleaved:
        pairs = fused.unflatten(axis, (-1, 2))
        return pairs.select(axis + 1, 0), pairs.select(axis + 1, 1)
    gate, up = fused.chunk(2, dim=axis)
    return gate, up


def _experts(names: ModuleNames, reader: _Reader) -> tuple[Tensor | None, Tensor, Tensor]:
    """gate (None where there is none), up [E, F, D] and down [E, D, F], whatever the module's layout."""
    turn: Callable[[Tensor], Tensor] = (lambda t: t.transpose(1, 2)) if names.transposed else (lambda t: t)
    down = turn(reader.tensor(names.down))
    if names.gate_up is None:
        assert names.up is not None
        return None, turn(reader.tensor(names.up)), down
    # A module may hold gate and up for its zero experts too, which compute nothing; down counts the real ones.
    gate, up = _split(turn(reader.tensor(names.gate_up))[: down.shape[0]], names, 1)
    return gate, up, down


def _biases(names: ModuleNames, reader: _Reader) -> dict[str, Tensor] | None:
    if names.gate_up_bias is None or names.down_bias is None:
        return None
    gate, up = _split(reader.tensor(names.gate_up_bias), names, 1)
    return {"gate": gate, "up": up, "down": reader.tensor(names.down_bias)}


def _shared(row: Family, names: ModuleNames, reader: _Reader) -> SharedWeights | None:
    if names.shared is None or ("shared" in names.optional and not reader.has(names.shared)):
        return None
    gated = bool(row.layer.get("gated", True))
    parts = dict(zip(("gate", "up", "down"), names.shared_parts, strict=True))
    read = {p: reader.tensor(f"{names.shared}.{at}.weight") for p, at in parts.items() if gated or p != "gate"}
    quant = {p: as_quant(t, f"shared {p}", tuple(t.shape)) for p, t in read.items()}
    vector = _flat(reader.role("shared_gate"))
    return SharedWeights(quant.get("gate"), quant["up"], quant["down"], vector)


def _latent(names: ModuleNames, reader: _Reader) -> Latent | None:
    if names.latent is None or ("latent" in names.optional and not reader.has(names.latent[0])):
        return None
    enter, leave = (reader.tensor(path) for path in names.latent)
    return Latent(enter, leave)


def _settings(names: ModuleNames, reader: _Reader, *, has_shared: bool) -> dict[str, dict[str, Any]]:
    """Spec fields the module sets, by record: router, layer, shared."""
    found: dict[str, dict[str, Any]] = {"router": {}, "layer": {}, "shared": {}}
    for setting in names.settings:
        record, name = setting.field.split(".")
        if record == "shared" and not has_shared:
            continue
        if setting.when is not None and reader.value(setting.when[0]) != setting.when[1]:
            continue
        found[record][name] = _setting(reader, setting.path, setting.codes)
    return found


def _setting(reader: _Reader, path: str, codes: Any) -> Any:
    value = reader.value(path)
    if callable(value):
        value = type(value).__name__ if isinstance(value, torch.nn.Module) else getattr(value, "__name__", value)
    if codes is not None:
        if value not in codes:
            raise LabError(f"{type(reader.block).__name__}.{path} is {value!r}; known: {', '.join(map(str, codes))}.")
        return codes[value]
    # No clamp is written as an infinite one.
    return None if isinstance(value, float) and math.isinf(value) else value
