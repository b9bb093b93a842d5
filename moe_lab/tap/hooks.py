"""Hooks that keep what a block was handed during one run of the model.

A tap holds the rows of one text; `take` hands them over and checks that they are one a token: a block called for padded
or missing rows would shift everything behind it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from moe_lab._types import Float, Int, Tensor
from moe_lab.errors import LabError
from moe_lab.tap.find import TappedBlock


@contextmanager
def listening(*taps: "InputTap | PickTap") -> Iterator[None]:
    """The taps listen while the block runs; their hooks are gone afterwards, whatever happened."""
    with ExitStack() as stack:
        for tap in taps:
            stack.callback(tap.listen().remove)
        yield


class InputTap:
    """The block's input: what router and experts read, x [T, D] as `MoELayer` takes it."""

    def __init__(self, block: TappedBlock) -> None:
        self.block = block
        self._rows: list[Tensor] = []

    def listen(self) -> RemovableHandle:
        """Start; the handle's `remove` ends it."""
        # The residual stream of a whole feed-forward half is seen where its first norm reads it.
        block = self.block
        at = block.owner(block.names.norms["shared_in"]) if block.names.norms else block.module
        return at.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        if x is None:
            raise LabError(f"{self.block.name} was called without a floating-point tensor.")
        self._rows.append(x.detach().reshape(-1, x.shape[-1]))

    def take(self, tokens: int) -> Float[Tensor, "T D"]:
        """x of the run just over, which must be `tokens` rows."""
        return _joined(self._rows, self.block, tokens)


class PickTap:
    """The model's own picks: ids and weights [T, K] as its experts were handed them."""

    def __init__(self, block: TappedBlock) -> None:
        self.block = block
        self._ids: list[Tensor] = []
        self._weights: list[Tensor] = []

    def listen(self) -> RemovableHandle:
        """Start; the handle's `remove` ends it."""
        block = self.block
        if block.family.layer.get("weight_place") == "input":
            # These experts get rows already weighed: the picks are seen behind the router alone, as scores [T, E].
            return block.owner(block.names.router).register_forward_hook(self._keep_scores)
        return block.owner(block.names.down).register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if len(tensors) < 3 or tensors[1].is_floating_point() or tensors[1].shape != tensors[2].shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
            raise LabError(
                f"the experts of {self.block.name} were called with tensors {shapes}; wanted x [T, D], ids [T, K] and "
                "weights [T, K]."
            )
        self._add(tensors[1], tensors[2])

    def _keep_scores(self, module: torch.nn.Module, args: tuple[Any, ...], out: Any) -> None:
        scores: Tensor = out[0]
        top_k = int(self.block.attribute(self.block.names.top_k))
        picked = torch.sort(scores, dim=-1, descending=True, stable=True)
        self._add(picked.indices[:, :top_k], picked.values[:, :top_k])

    def _add(self, ids: Tensor, weights: Tensor) -> None:
        self._ids.append(ids.detach().reshape(-1, ids.shape[-1]))
        self._weights.append(weights.detach().reshape(-1, weights.shape[-1]))

    def take(self, tokens: int) -> tuple[Int[Tensor, "T K"], Float[Tensor, "T K"]]:
        """ids and weights of the run just over, which must be `tokens` rows."""
        return _joined(self._ids, self.block, tokens), _joined(self._weights, self.block, tokens)


def _joined(rows: list[Tensor], block: TappedBlock, tokens: int) -> Tensor:
    kept, count = list(rows), sum(len(r) for r in rows)
    rows.clear()
    if not kept:
        raise LabError(f"{block.name} was not called when the model ran. Leave layer {block.number} out (layers=...).")
    if count != tokens:
        raise LabError(f"{block.name} saw {count} rows in {len(kept)} calls for a text of {tokens} tokens.")
    return kept[0] if len(kept) == 1 else torch.cat(kept)
