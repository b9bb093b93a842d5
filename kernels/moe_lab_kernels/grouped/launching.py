"""What the launchers and references of the grouped products share: the ends of a launch, whatever is multiplied.

Ends: which rows of x the pairs read, where their rows go, biases, and how hidden rows are made.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import Backend
from moe_lab_kernels.grouped.operands import Scatter
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.rows.activation import GELU_CUBE, GELU_INNER
from moe_lab_kernels.rows.hidden import Gate

Biases = tuple[Tensor, ...]  # of the product, or of gate and up; empty for none


class Ends(NamedTuple):
    """Arguments of either kernel: its `pointers`, `scalars` and `constants` around those of x and weights."""

    pointers: tuple[Any, ...]
    scalars: tuple[Any, ...]
    constants: tuple[Any, ...]


def ends(row_of: Tensor | None, work: WorkList, to: Scatter | None, biases: Biases, how: Gate | None,
         mode: str) -> Ends:  # fmt: skip
    """`how` is None for a plain product; `mode`: its kernels' LIMIT."""
    none, gate = work.tiles, how or Gate()  # any tensor stands for one that is not read
    row, slot, slots = to or (none, none, 0)
    whose = none if work.expert is None else work.expert
    first, last = (biases[0], biases[-1]) if biases else (none, none)
    weight = none if gate.weight is None else gate.weight
    return Ends(
        (none if row_of is None else row_of, row, slot, none, whose, weight, first, last),
        (0.0 if gate.limit is None else float(gate.limit), float(gate.alpha), slots, whose.stride(0), first.stride(0)),
        (row_of is not None, to is not None, how is not None, gate.gelu, mode, bool(biases), work.expert is not None,
         gate.weight is not None, GELU_INNER, GELU_CUBE),
    )  # fmt: skip


def named(row_of: Tensor | None, work: WorkList, to: Scatter | None, biases: Biases,
          how: Gate | None) -> dict[str, Tensor | None]:  # fmt: skip
    """Tensors of the ends by name, for `backend.serve`."""
    of_bias = {f"bias {i}": b for i, b in enumerate(biases)}
    sent = {} if to is None else {"row": to.row, "slot": to.slot}
    weight = None if how is None else how.weight
    return {"row_of": row_of, "tiles": work.tiles, "tiles' experts": work.expert, "weight": weight, **sent, **of_bias}


def programs(pieces: int, tile: Tile, on: Backend, device: torch.device) -> int:
    """Programs of a launch: one a piece, or as many as `tile.resident` says that a multiprocessor holds."""
    if not tile.resident or on != "cuda":
        return min(pieces, tile.resident) if tile.resident else pieces
    return min(pieces, tile.resident * backend.processors(device))


class Part(NamedTuple):
    """A tile as the references walk it: pairs [n], rows of x [n] (0 where not `known`), the slot, the biases' row."""

    pairs: Tensor
    row: Tensor
    known: Tensor
    slot: int
    expert: int

    def rows(self, t: Tensor) -> Tensor:
        """Rows of t, zeros for those that do not exist."""
        return t[self.row].masked_fill(~self.known[:, None], 0)


def parts(row_of: Tensor | None, n_x: int, work: WorkList, slots: int, pairs: int) -> Iterator[Part]:
    """Tiles with pairs, in order."""
    for i, (slot, first, n) in enumerate(work.tiles.tolist()):
        begin, end = max(first, 0), min(first + n, pairs)
        if 0 <= slot < slots and begin < end:
            p = torch.arange(begin, end, device=work.tiles.device)
            row = p if row_of is None else row_of[p].long()
            known = (row >= 0) & (row < n_x)
            yield Part(p, row.where(known, torch.zeros_like(row)), known, slot,
                       slot if work.expert is None else int(work.expert[i]))  # fmt: skip


def with_bias(sums: Tensor, biases: Biases, which: int, part: Part) -> Tensor:
    """fp32 sums [n, N] and the bias of the part's expert."""
    return sums + biases[which][part.expert].float() if biases else sums


def of_part(how: Gate, part: Part) -> Gate:
    """`how` for the part's pairs alone."""
    return how if how.weight is None else how._replace(weight=how.weight[part.pairs])


def places(part: Part, to: Scatter | None) -> Tensor:
    """Rows of the output."""
    return part.pairs if to is None else (to.row[part.pairs] * to.slots + to.slot[part.pairs]).long()
