"""`part_ref`, the torch twin of `steps.part`: one block's products, lane by lane, each operation rounded alike.

N weight rows of Kd values, R activation rows; the formats of `blocks.GEMV_FORMATS`, raw or planar (`forms`): planes are
given as the raw blocks that they came from.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab_kernels.gemv.forms import format_of, is_planar, values_of
from moe_lab_kernels.storage.unpack import Unpacked, unpack_ref


class Lanes(NamedTuple):
    """How a row is walked: `row` lanes side by side, `block` of them to a block (both powers of two)."""

    row: int
    block: int


_PER_BLOCK = {"q8_0": 4, "q4_0": 1, "mxfp4": 1, "nvfp4": 2, "planar q8_0": 1, "planar q4_0": 1, "planar mxfp4": 1,
              "planar nvfp4": 2}  # fmt: skip


@cache
def lanes_of(form: str, kd: int) -> Lanes:
    """The order of additions: it depends on a weight's form and width alone.

    A lane takes 8 values of q8_0 (of planes 32), 32 of q4_0, mxfp4 and nvfp4, 64 of a super-block. 32 lanes walk a row
    unless 16 leave fewer idle in its last step: 9 super-blocks in steps of 8 would take 16 blocks' time, in steps of 4
    12. A row of one super-block has 4 lanes.
    """
    blocks = kd // values_of(form)
    each = _PER_BLOCK.get(form, 4)
    if each == 4 and blocks == 1:
        return Lanes(4, 4)
    wide, narrow = 32 // each, 16 // each
    return Lanes(32 if -(-blocks // wide) * wide == -(-blocks // narrow) * narrow else 16, each)


def part_ref(
    raw: UInt8[Tensor, "N row_bytes"], rows: Sequence[Tensor], form: str, lanes: int
) -> Float32[Tensor, "R N blocks lanes"]:
    """Parts of every block's `lanes` lanes, each operation rounded as in `steps.part`. rows: codes int8 [R, Kd],
    scale and, for q4_0, total fp16 [R, Kd / 32]."""
    format = format_of(form)
    u, codes = unpack_ref(raw, format), rows[0].int()
    x, d8 = codes.view(len(codes), 1, -1, u.codes.shape[-1]), rows[1].float()
    d8 = d8.view(len(codes), 1, x.shape[2], -1)
    if is_planar(form) and format in ("q2_k", "q3_k", "q6_k"):
        return _consecutive_ref(u, x, d8)
    if format in ("q2_k", "q3_k"):
        return _super_block_ref(u, x, d8, lanes)
    if format in ("q4_k", "q5_k"):
        return _sub_blocks_ref(u, x, d8)
    if format == "q6_k":
        q, sub = u.codes.int().unflatten(-1, (2, 4, 2, 16)), u.scales.int().unflatten(-1, (2, 4, 2))  # type: ignore
        idot = (q * x.unflatten(-1, (2, 4, 2, 16))).sum(-1, dtype=torch.int32)
        scaled = d8.unflatten(-1, (2, 4))[..., None] * (idot * sub).float()
        return (u.d[..., None] * _ordered(scaled)).flatten(-2)
    if format == "nvfp4":
        idot = (u.codes.int() * x).unflatten(-1, (2, 2, 16)).sum(-1, dtype=torch.int32)
        both = u.d.unflatten(-1, (2, 2)) * idot.float()
        return d8 * (both[..., 0] + both[..., 1])
    if format == "q4_0":
        idot = ((u.codes.int() + 8) * x).sum(-1, keepdim=True, dtype=torch.int32).float()
        return u.d * (d8 * idot - 8.0 * rows[2].float()[:, None, :, None])
    idot = (u.codes.int() * x).unflatten(-1, (lanes, -1)).sum(-1, dtype=torch.int32)
    return (u.d * d8) * idot.float()


def _super_block_ref(u: Unpacked, x: Tensor, d8: Tensor, lanes: int) -> Tensor:
    """q2_k, q3_k: element 128 h + 32 j + 16 g + 4 k + i of a block, sub-block 8 h + 2 j + g."""
    assert u.scales is not None
    q, sub_scale = u.codes.unflatten(-1, (2, 4, 2, lanes // 2, -1)), u.scales.unflatten(-1, (2, 4, 2))
    x = x.unflatten(-1, (2, 4, 2, lanes // 2, 32 // lanes))
    idot = (q.int() * x).sum(-1, dtype=torch.int32)
    d8, d = d8.unflatten(-1, (2, 4))[..., None], u.d[..., None]
    main = d * _ordered(d8 * _fold(idot, sub_scale))
    if u.mins is None or u.dmin is None:
        return main.flatten(-2)
    isum = x.sum(-1, dtype=torch.int32)
    lows = u.dmin[..., None] * _ordered(d8 * _fold(isum, u.mins.unflatten(-1, (2, 4, 2))))
    return (main - lows).flatten(-2)


def _consecutive_ref(u: Unpacked, x: Tensor, d8: Tensor) -> Tensor:
    """q2_k, q3_k, q6_k in planes: lane k has values 64 k .. + 63, sub-block 4 k + 2 i + g under activation scale i."""
    assert u.scales is not None
    x, d8 = x.unflatten(-1, (4, 2, 2, 16)), d8.unflatten(-1, (4, 2))
    idot = (u.codes.int().unflatten(-1, (4, 2, 2, 16)) * x).sum(-1, dtype=torch.int32)
    main = d8 * (idot * u.scales.int().unflatten(-1, (4, 2, 2))).sum(-1, dtype=torch.int32).float()
    main = u.d * (main[..., 0] + main[..., 1])
    if u.mins is None or u.dmin is None:
        return main
    low = x.sum(-1, dtype=torch.int32) * u.mins.int().unflatten(-1, (4, 2, 2))
    low = d8 * low.sum(-1, dtype=torch.int32).float()
    return main - u.dmin * (low[..., 0] + low[..., 1])


def _sub_blocks_ref(u: Unpacked, x: Tensor, d8: Tensor) -> Tensor:
    """q4_k, q5_k: lane g has sub-blocks 2 g and 2 g + 1, of 32 values each."""
    assert u.scales is not None
    assert u.mins is not None
    assert u.dmin is not None
    x = x.unflatten(-1, (4, 2, 32))
    idot = (u.codes.int().unflatten(-1, (4, 2, 32)) * x).sum(-1, dtype=torch.int32)
    isum, d8 = x.sum(-1, dtype=torch.int32), d8.unflatten(-1, (4, 2))
    main = d8 * (u.scales.int().unflatten(-1, (4, 2)) * idot).float()
    low = d8 * (u.mins.int().unflatten(-1, (4, 2)) * isum).float()
    return u.d * (main[..., 0] + main[..., 1]) - u.dmin * (low[..., 0] + low[..., 1])


def _fold(integers: Tensor, scale: Tensor) -> Tensor:
    """[.., h, j, g, k] integers times [.., h, j, g] sub-block scales, summed over g; as fp32 (exact)."""
    return (integers * scale[..., None].int()).sum(-2, dtype=torch.int32).float()


def _ordered(v: Tensor) -> Tensor:
    """Sum over j of [.., h, j, k], j = 0 first."""
    return ((v[..., 0, :] + v[..., 1, :]) + v[..., 2, :]) + v[..., 3, :]


def matvec_ref(
    raw: UInt8[Tensor, "N row_bytes"], rows: Sequence[Tensor], form: str, lanes: Lanes | None = None
) -> Float32[Tensor, "R N"]:
    """One weight times R rows in the kernels' order: steps in sequence a lane, then lanes, halves against halves."""
    lanes = lanes or lanes_of(form, rows[0].shape[1])
    parts = part_ref(raw, rows, form, lanes.block)
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
