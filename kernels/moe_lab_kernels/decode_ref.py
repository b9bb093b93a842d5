"""`part_ref`, the torch twin of `decode.part`: one block's products, lane by lane, each operation rounded alike.

N weight rows of Kd values, R activation rows; the formats that `decode` multiplies as they lie.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float32, Int8, Tensor, UInt8
from moe_lab_kernels.unpack import unpack_ref


class Lanes(NamedTuple):
    """How a row is walked: `row` lanes side by side, `block` of them to a block (both powers of two)."""

    row: int
    block: int


def lanes_of(format: str, kd: int) -> Lanes:
    """The order of additions: it depends on a weight's format and width alone.

    q8_0: 4 lanes a block of 32. Super-blocks: 4 lanes take about 100 instructions for a block, 8 lanes about 76, so 8
    only where a row has one block. 32 lanes walk a row unless its last step would then leave many of them idle: 9
    blocks in steps of 8 would take 16 blocks' time, in steps of 4 12.
    """
    if format == "q8_0":
        return Lanes(32, 4)
    blocks = kd // 256
    if blocks < 2:
        return Lanes(8, 8)
    wide, narrow = -(-blocks // 8) * 8, -(-blocks // 4) * 4
    return Lanes(32 if wide == narrow else 16, 4)


def part_ref(
    raw: UInt8[Tensor, "N row_bytes"], codes: Int8[Tensor, "R Kd"], scale: Tensor, format: str, lanes: int
) -> Float32[Tensor, "R N blocks lanes"]:
    """Parts of every block's `lanes` lanes, each operation rounded as in `decode.part`. scale: fp16 [R, Kd / 32]."""
    u, d8 = unpack_ref(raw, format), scale.float()
    d = u.d.squeeze(-1)
    if u.scales is None:
        w = u.codes.int().unflatten(-1, (4, 8))
        idot = (w * codes.int().view(len(codes), 1, -1, 4, 8)).sum(-1, dtype=torch.int32)
        return (d * d8[:, None])[..., None] * idot.float()
    # element 128 h + 32 j + 16 g + 4 k + i of a block, sub-block 8 h + 2 j + g
    q, sub_scale = u.codes.unflatten(-1, (2, 4, 2, lanes // 2, -1)), u.scales.unflatten(-1, (2, 4, 2))
    x = codes.int().view(len(codes), 1, -1, 2, 4, 2, lanes // 2, 32 // lanes)
    idot = (q.int() * x).sum(-1, dtype=torch.int32)
    d8 = d8.view(len(codes), 1, -1, 2, 4, 1)
    main = d * _ordered(d8 * _fold(idot, sub_scale)).movedim((-2, -1), (0, 1))
    if u.mins is None or u.dmin is None:
        return main.movedim((0, 1), (-2, -1)).flatten(-2)
    isum = x.sum(-1, dtype=torch.int32)
    low = u.mins.unflatten(-1, (2, 4, 2))
    lows = u.dmin.squeeze(-1) * _ordered(d8 * _fold(isum, low)).movedim((-2, -1), (0, 1))
    return (main - lows).movedim((0, 1), (-2, -1)).flatten(-2)


def _fold(integers: Tensor, scale: Tensor) -> Tensor:
    """[.., h, j, g, k] integers times [.., h, j, g] sub-block scales, summed over g; as fp32 (exact)."""
    return (integers * scale[..., None].int()).sum(-2, dtype=torch.int32).float()


def _ordered(v: Tensor) -> Tensor:
    """Sum over j of [.., h, j, k], j = 0 first."""
    return ((v[..., 0, :] + v[..., 1, :]) + v[..., 2, :]) + v[..., 3, :]


def matvec_ref(
    raw: UInt8[Tensor, "N row_bytes"], codes: Tensor, scale: Tensor, format: str, lanes: Lanes | None = None
) -> Float32[Tensor, "R N"]:
    """One weight times R rows in the kernels' order: steps in sequence a lane, then lanes, halves against halves."""
    lanes = lanes or lanes_of(format, codes.shape[1])
    parts = part_ref(raw, codes, scale, format, lanes.block)
    per_step = lanes.row // lanes.block
    missing = -parts.shape[2] % per_step
    steps = torch.nn.functional.pad(parts, (0, 0, 0, missing)).unflatten(2, (-1, per_step)).flatten(-2)
    acc = torch.zeros_like(steps[:, :, 0])
    for step in range(steps.shape[2]):
        acc = acc + steps[:, :, step]
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc.squeeze(-1)
