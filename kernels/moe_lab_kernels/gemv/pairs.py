"""What the grouped products share on the host: pairs, chunks and weights of a call, and chunk after chunk in torch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.errors import LabError
from moe_lab_kernels.checks import FLOATS, expect, expect_contiguous, expect_rows
from moe_lab_kernels.slots.pointer_table import Weights, is_pointers

MAX_CHUNK_ROWS = 8
MAX_GRID_Y = 65_535


class Pairs(NamedTuple):
    """Which activation row meets which weight, and where its product goes."""

    row_of: Tensor
    chunks: Tensor
    out_row: Tensor | None
    max_rows: int


def check_pairs(op: str, pairs: Pairs, w: Weights, w2: Weights | None, out2: Tensor | None) -> None:
    """LabError where lists do not fit together, or one weight and the other, or a second weight and its output."""
    expect(op, "row_of", pairs.row_of, [torch.int32], ["P"])
    expect(op, "chunks", pairs.chunks, [torch.int32], ["C", 3])
    if pairs.max_rows not in (1, 2, 4, MAX_CHUNK_ROWS):
        raise LabError(f"{op}: max_rows={pairs.max_rows}; it must be 1, 2, 4 or {MAX_CHUNK_ROWS}.")
    if pairs.out_row is not None:
        expect(op, "out_row", pairs.out_row, [torch.int32], [len(pairs.row_of)])
        expect_contiguous(op, "out_row", pairs.out_row)
    expect_contiguous(op, "row_of", pairs.row_of)
    expect_contiguous(op, "chunks", pairs.chunks)
    if w2 is not None and is_pointers(w) != is_pointers(w2):
        raise LabError(f"{op}: w and w2 are both tensors or both tables of addresses, got one of each.")
    if (w2 is None) != (out2 is None):
        raise LabError(f"{op}: w2 and out2 come together, got only one of them.")


def check_out(op: str, name: str, out: Tensor, pairs: Pairs, n: int) -> None:
    """LabError unless `out` takes N values of every pair, or has rows of its own where pairs say which."""
    expect(op, name, out, FLOATS, [len(pairs.row_of) if pairs.out_row is None else "P", n])
    expect_rows(op, name, out)


def grid_y(op: str, n: int, height: int) -> int:
    """Programs of `height` weight rows that N make. LabError past what a grid's second axis holds."""
    if -(-n // height) > MAX_GRID_Y:
        raise LabError(f"{op}: N={n} in tiles of {height} rows passes the grid's {MAX_GRID_Y}; take a taller tile.")
    return -(-n // height)


def by_chunks(rows: Sequence[Tensor], pairs: Pairs, slots: int) -> Iterator[tuple[int, tuple[Tensor, ...], Tensor]]:
    """(slot, its activation rows, the rows of out they go to) of every chunk that has any; rows that are none are 0."""
    for slot, first, n in pairs.chunks.tolist():
        begin, end = max(first, 0), min(first + n, len(pairs.row_of))
        if not 0 <= slot < slots or begin >= end:
            continue
        pair = torch.arange(begin, end, device=pairs.row_of.device)
        row = pairs.row_of[pair].long()
        known = (row >= 0) & (row < len(rows[0]))
        x = tuple(t[torch.where(known, row, 0)] * known[:, None] for t in rows)
        yield slot, x, pair if pairs.out_row is None else pairs.out_row[pair].long()
