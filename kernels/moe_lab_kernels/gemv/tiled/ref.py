"""The torch twin of `tiled`: one weight times activation rows, every operation rounded and added in the kernels' order.

N weight rows of Kd values, R activation rows. A row's steps (`storage.row_tiles`: 256 values of a super-block, else 128
values) go round P parts of a row in turn; a part has four lanes, one for every 32 values of 128, which add what their
steps give in sequence. Then lanes q and q + 2 are added, then 0 and 1, then parts, halves against halves.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Float32, Tensor, UInt8
from moe_lab_kernels.storage.row_tiles import steps_of
from moe_lab_kernels.storage.unpack import Unpacked, unpack_ref

LANES = 4


def parts_of(format: str, kd: int) -> int:
    """Parts of a row, the order of additions: it depends on a weight's format and width alone. Four, unless their last
    turn would leave too many idle (3, 6 and 9 steps)."""
    steps = steps_of(format, kd)
    return 4 if 10 * (-(-steps // 4) * 4) <= 11 * steps else 1


def lane_parts(
    raw: UInt8[Tensor, "N row_bytes"], rows: Sequence[Tensor], format: str
) -> Float32[Tensor, "R N steps q"]:
    """What each step gives each of its four lanes. rows: codes int8 [R, Kd], scale and, for q4_0, total fp16
    [R, Kd / 32]."""
    u, codes = unpack_ref(raw, format), rows[0].int()
    d8 = rows[1].float()[:, None]
    x = codes.view(len(codes), 1, -1, u.codes.shape[-1])
    if format in ("q2_k", "q3_k", "q6_k"):
        return _sixteens(u, x, d8.unflatten(-1, (-1, 2, LANES)))
    if format in ("q4_k", "q5_k"):
        return _thirty_twos(u, x, d8.unflatten(-1, (-1, 2, LANES)))
    if format == "q4_0":
        idot = ((u.codes.int() + 8) * x).sum(-1, dtype=torch.int32).float()
        return _by_steps(u.d[..., 0] * (d8 * idot - 8.0 * rows[2].float()[:, None]), format)
    idot = (u.codes.int() * x).sum(-1, dtype=torch.int32)
    return _by_steps((u.d[..., 0] * d8) * idot.float(), format)


def _sixteens(u: Unpacked, x: Tensor, d8: Tensor) -> Tensor:
    """q2_k, q3_k, q6_k: value 128 h + 32 q + 16 t + i of a block, sub-block 8 h + 2 q + t."""
    assert u.scales is not None
    shape = (2, LANES, 2)
    x = x.unflatten(-1, (*shape, 16))
    idot = (u.codes.int().unflatten(-1, (*shape, 16)) * x).sum(-1, dtype=torch.int32)
    main = d8 * (idot * u.scales.int().unflatten(-1, shape)).sum(-1, dtype=torch.int32).float()
    main = u.d * (main[..., 0, :] + main[..., 1, :])
    if u.mins is None or u.dmin is None:
        return main
    low = d8 * (x.sum(-1, dtype=torch.int32) * u.mins.int().unflatten(-1, shape)).sum(-1, dtype=torch.int32).float()
    return main - u.dmin * (low[..., 0, :] + low[..., 1, :])


def _thirty_twos(u: Unpacked, x: Tensor, d8: Tensor) -> Tensor:
    """q4_k, q5_k: value 128 h + 32 q + i of a block, sub-block 4 h + q."""
    assert u.scales is not None
    assert u.mins is not None
    assert u.dmin is not None
    x = x.unflatten(-1, (2, LANES, 32))
    idot = (u.codes.int().unflatten(-1, (2, LANES, 32)) * x).sum(-1, dtype=torch.int32)
    main = d8 * (u.scales.int().unflatten(-1, (2, LANES)) * idot).float()
    low = d8 * (u.mins.int().unflatten(-1, (2, LANES)) * x.sum(-1, dtype=torch.int32)).float()
    return u.d * (main[..., 0, :] + main[..., 1, :]) - u.dmin * (low[..., 0, :] + low[..., 1, :])


def _by_steps(values: Float32[Tensor, "R N sub"], format: str) -> Float32[Tensor, "R N steps q"]:
    """Values of 32 weights each, as the lanes of steps have them: a last step that starts early has zeros for what was
    the one's before."""
    subs, each = values.shape[-1], LANES
    steps = -(-subs // each)
    first = torch.arange(steps, device=values.device)[:, None] * each
    sub = first.clamp(max=subs - each) + torch.arange(each, device=values.device)
    return torch.where(sub >= first, values[..., sub], 0.0)


def matvec_ref(raw: UInt8[Tensor, "N row_bytes"], rows: Sequence[Tensor], format: str) -> Float32[Tensor, "R N"]:
    """One weight times R rows in the kernels' order."""
    given = lane_parts(raw, rows, format)
    parts = parts_of(format, rows[0].shape[1])
    given = torch.nn.functional.pad(given, (0, 0, 0, -given.shape[2] % parts)).unflatten(2, (-1, parts))
    acc = torch.zeros_like(given[:, :, 0])
    for turn in range(given.shape[2]):
        acc = acc + given[:, :, turn]
    acc = acc[..., :2] + acc[..., 2:]
    acc = acc[..., 0] + acc[..., 1]
    while acc.shape[-1] > 1:
        half = acc.shape[-1] // 2
        acc = acc[..., :half] + acc[..., half:]
    return acc.squeeze(-1)
