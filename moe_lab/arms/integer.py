"""The int8 decode arithmetic in torch, quick enough for a laptop.

One output of the decode arm is  sum over super-blocks of  d * sum_b d8_b * I_b  -  dmin * sum_b d8_b * J_b,  where
I_b is the
integer dot of the weight codes (sub-block scale folded in) with the activation codes over 32 values, and J_b the same
with the sub-block minima (kquants 2.4). |I_b| <= 32 * 128 * 127 < 2^24, so fp32 matrix products give the integers
exactly
in any order, and a row's bits cannot depend on the rows beside it. The fp32 sums run block after block.
"""

import torch

from moe_lab._types import Tensor
from moe_lab.formats import IntegerForm, QuantRows

BLOCK = 32


# Formats whose decode arithmetic shifts codes up to be unsigned and takes the shift back with the activations' own
# sums: d * (d8 * dot - offset * s). Those sums are of unquantised values, so the result differs from the signed dot's.
RAW_SUM_OFFSET = {"q4_0": 8}


def integer_matmul(rows: QuantRows, form: IntegerForm, offset: int = 0) -> Tensor:
    """fp32 [r, N] from q8_1 rows [r, Kd] and an IntegerForm of [N, Kd]; `offset`: see `RAW_SUM_OFFSET`."""
    if offset:
        return _with_raw_sums(rows, form, offset)
    block = min(BLOCK, form.group)  # nvfp4 has a scale for each 16 values
    a = rows.codes.float().unflatten(-1, (-1, block)).transpose(0, 1)
    d8 = rows.scale.float().T.repeat_interleave(BLOCK // block, 0).unsqueeze(-1)
    main = _scaled(a, form.codes, d8, form, form.scale)
    if form.mins is None:
        return main
    assert form.min_scale is not None
    halves = a.unflatten(-1, (2, -1)).sum(-1)
    return main - _scaled(halves, form.mins, d8, form, form.min_scale)


def _with_raw_sums(rows: QuantRows, form: IntegerForm, offset: int) -> Tensor:
    """sum_b scale[n, b] * (d8_b * dot(codes + offset) - offset * s_b), block after block."""
    assert rows.total is not None
    a = rows.codes.float().unflatten(-1, (-1, BLOCK)).transpose(0, 1)
    n, blocks = form.codes.shape[0], a.shape[0]
    dots = torch.bmm(a, (form.codes + offset).view(n, blocks, -1).permute(1, 2, 0))
    d8, sums = (t.float().T.unsqueeze(-1) for t in (rows.scale, rows.total))
    parts = dots.mul_(d8).sub_(sums * offset).mul_(form.scale.T.unsqueeze(1))
    total = torch.zeros_like(parts[0])
    for part in parts:
        total.add_(part)
    return total


def _scaled(a: Tensor, w: Tensor, d8: Tensor, form: IntegerForm, scale: Tensor) -> Tensor:
    """sum_g scale[n, g] * (sum of the group's d8_b * integer dot): a [blocks, r, i], w [N, blocks * i] -> [r, N]."""
    n = w.shape[0]
    dots = torch.bmm(a, w.view(n, a.shape[0], -1).permute(1, 2, 0)).mul_(d8)
    # multiply and add stay separate ops: a fused addcmul may round once or twice depending on where a row falls in a
    # vector
    groups = dots.unflatten(0, (-1, max(1, form.group // BLOCK)))
    total = torch.zeros_like(dots[0])
    for g, blocks in enumerate(groups):
        inner = blocks[0]
        for block in blocks[1:]:
            inner = inner.add_(block)
        total.add_(inner.mul_(scale[:, g]))
    return total
