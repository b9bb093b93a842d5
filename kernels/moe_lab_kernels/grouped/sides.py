"""Scales of rows in the order of pairs: sides[group, p] = scale[row_of[p], group], a launch before a wide fp8 product.

A thread of the product's accumulators holds the columns of a quarter of a tile's pairs. Where scales lie by rows it
needs an address for each of them (64 registers in tiles of 128 pairs, which spilled); here it needs one, and reads two
at a time. Reads and writes 4 bytes a pair and group. Before the first pair and behind the last one a tile may read
what means nothing.
"""

import torch

from moe_lab._types import Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import offset64

MARGIN = 128  # pairs that a tile may begin early or end late
FROM_TOKENS = 64  # rows a tile
_PAIRS = 64  # of a program


@jit(do_not_specialize=["n_pairs", "n_x", "step"])
def _sides(scale, row_of, out, n_pairs, n_x, groups, scale_row, step, GATHER: tl.constexpr, PAIRS: tl.constexpr,
           GROUPS: tl.constexpr):  # fmt: skip
    """Program = (a few pairs, a few groups)."""
    p, g = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    row = p
    if GATHER:
        row = tl.load(row_of + p, mask=p < n_pairs, other=-1)
    known = (p < n_pairs) & (row >= 0) & (row < n_x)
    at = scale + offset64(tl.where(known, row, 0), scale_row)[:, None] + g[None, :]
    s = tl.load(at, mask=known[:, None] & (g < groups)[None, :], other=0)
    to = out + offset64(g, step)[:, None] + p[None, :]
    tl.store(to, tl.trans(s), mask=(g < groups)[:, None] & (p < n_pairs)[None, :])


def sides(scale: Tensor, row_of: Tensor | None, pairs: int) -> Tensor:
    """fp32 [groups, pairs] with MARGIN readable numbers on both sides of every row; 0 where a pair has no row of
    `scale` [R, groups] (Triton)."""
    groups = scale.shape[1]
    step = -(-(pairs + 2 * MARGIN) // 4) * 4
    made = torch.empty(groups, step, dtype=torch.float32, device=scale.device)[:, MARGIN : MARGIN + pairs]
    backend.launch(
        _sides,
        (-(-pairs // _PAIRS), -(-groups // 16)),
        *(scale, scale if row_of is None else row_of, made, pairs, len(scale), groups, scale.stride(0), step),
        *(row_of is not None, _PAIRS, 16),
        device=scale.device,
        num_warps=4,
    )
    return made


def sides_ref(scale: Tensor, row_of: Tensor | None, pairs: int) -> Tensor:
    """The same in torch."""
    row = torch.arange(pairs, device=scale.device) if row_of is None else row_of[:pairs].long()
    known = (row >= 0) & (row < len(scale))
    return scale[row.where(known, torch.zeros_like(row))].masked_fill(~known[:, None], 0).T.contiguous()
