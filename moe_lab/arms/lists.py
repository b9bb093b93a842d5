"""Work lists: groups that the host knows as chunks of rows, and the lists that a decode step needs again and again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms.schedule import Group
from moe_lab.arms.stack import ExpertStack
from moe_lab_kernels.grouped.tiles import TOKENS, WorkList, tokens_for

MOST_KEPT = 512
_KEPT: dict[Any, Tensor] = {}


def chunk_table(
    groups: Sequence[Group], slot_of: dict[int, int], base: int, chunk_rows: int
) -> list[tuple[int, int, int]]:
    """(slot, first pair, rows <= chunk_rows) of every chunk; pairs counted from `base`."""
    return [
        (slot_of[g.expert], g.first - base + i, min(chunk_rows, g.rows - i))
        for g in groups
        for i in range(0, g.rows, chunk_rows)
    ]


def closed_up(groups: Sequence[Group]) -> list[Group]:
    """The groups one after another, as if nothing lay between them."""
    first, out = 0, []
    for g in groups:
        out.append(Group(g.expert, first, g.rows))
        first += g.rows
    return out


def tiles_of(
    stack: ExpertStack, groups: Sequence[Group], pairs: int, device: torch.device, most: int = TOKENS[-1]
) -> WorkList:
    """Groups that follow each other from 0 on, in tiles of as many rows as an expert has on average, at most `most`;
    each with its expert where experts have biases."""
    tokens = tokens_for(pairs, len(groups), most)
    entries = chunk_table(groups, stack.slot_of, 0, tokens)
    experts = [] if stack.biases is None else [g.expert for g in groups for _ in range(0, g.rows, tokens)]
    flat = [*(n for entry in entries for n in entry), *experts]  # one copy to the device
    both = torch.tensor(flat, dtype=torch.int32, device=device)
    return WorkList(both[: 3 * len(entries)].view(-1, 3), tokens, both[3 * len(entries) :] if experts else None)


def shared_tiles(rows: int, device: torch.device, most: int = TOKENS[-1]) -> WorkList:
    """All rows in tiles of slot 0, of at most `most` rows."""
    tokens = tokens_for(rows, 1, most)
    return WorkList(shared_table(rows, tokens, device), tokens)


def shared_table(rows: int, chunk_rows: int, device: torch.device) -> Tensor:
    """Chunks int32 [C, 3] of rows that all use slot 0."""

    def make() -> Tensor:
        first = torch.arange(0, rows, chunk_rows, dtype=torch.int32, device=device)
        return torch.stack([torch.zeros_like(first), first, (rows - first).clamp(max=chunk_rows)], 1)

    return _kept(("shared", rows, chunk_rows, device), make)


def numbers(n: int, device: torch.device) -> Tensor:
    """int32 0 .. n - 1, to be read only."""
    return _kept(("numbers", n, device), lambda: torch.arange(n, dtype=torch.int32, device=device))


def zeros(n: int, device: torch.device) -> Tensor:
    """int32 zeros, to be read only."""
    return _kept(("zeros", n, device), lambda: torch.zeros(n, dtype=torch.int32, device=device))


def _kept(key: Any, make: Callable[[], Tensor]) -> Tensor:
    """What was made once for each shape, on the device, so that neither a decode step nor a capture copies from the
    host. Made, it is waited for: any stream may read it afterwards."""
    if key in _KEPT:
        return _KEPT[key]
    made = make()
    if made.is_cuda and torch.cuda.is_current_stream_capturing():
        return made  # memory of a graph being captured is the graph's own
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()
    if len(_KEPT) < MOST_KEPT:
        _KEPT[key] = made
    return made
