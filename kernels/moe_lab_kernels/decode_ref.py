"""Raw blocks in torch: their geometry, their values, and `part_ref`, the twin of `decode.part`.

N weight rows of Kd values, R activation rows. Three formats: q2_k and q3_k hold 256 values in 84 and 110 bytes, q8_0
holds 32 in 34.
"""

import torch

from moe_lab._types import Float32, Int8, Tensor, UInt8
from moe_lab.errors import LabError

BLOCK_BYTES = {"q2_k": 84, "q3_k": 110, "q8_0": 34}
BLOCK_VALUES = {"q2_k": 256, "q3_k": 256, "q8_0": 32}


def row_bytes(format: str, kd: int) -> int:
    """Bytes of a row of `kd` values. LabError for a format without a kernel, or a row that is not whole blocks."""
    if format not in BLOCK_BYTES:
        raise LabError(f"no kernel decodes format {format!r}; there are kernels for {', '.join(BLOCK_BYTES)}.")
    block = BLOCK_VALUES[format]
    if kd < block or kd % block:
        raise LabError(f"{format} rows hold whole blocks of {block} values, got Kd={kd}.")
    return kd // block * BLOCK_BYTES[format]


def dequantize_ref(raw: UInt8[Tensor, "*rows row_bytes"], format: str) -> Float32[Tensor, "*rows Kd"]:
    """fp32 values of raw rows: (d * sc) * q - dmin * m, each product rounded to fp32."""
    b = _blocks(raw, format)
    if format == "q8_0":
        return (_half(b, 0)[..., None] * b[..., 2:].view(torch.int8).float()).flatten(-2)
    q, scale, low, d, dmin = _super_blocks(b, format)
    step = d[..., None, None, None] * scale.float()
    values = step[..., None, None] * q.float()
    if low is not None and dmin is not None:
        values = values - (dmin[..., None, None, None] * low.float())[..., None, None]
    return values.flatten(-6)


def lanes_per_block(format: str, kd: int) -> int:
    """Lanes that share a block, and so the order of additions: it depends on a weight's format and width alone.

    A step has 32 lanes. q8_0: 4 lanes a block of 32. Super-blocks: 4 lanes take about 100 instructions for 8 blocks, 8
    lanes about 76 for 4 blocks, so 4 lanes from 5 blocks on, where a second narrow step would begin.
    """
    return 4 if format == "q8_0" or kd > 4 * 256 else 8


def part_ref(
    raw: UInt8[Tensor, "N row_bytes"], codes: Int8[Tensor, "R Kd"], scale: Tensor, format: str, lanes: int
) -> Float32[Tensor, "R N blocks lanes"]:
    """Parts of every block's `lanes` lanes, each operation rounded as in `decode.part`. scale: fp16 [R, Kd / 32]."""
    b, d8 = _blocks(raw, format), scale.float()
    if format == "q8_0":
        w = b[..., 2:].contiguous().view(torch.int8).int().unflatten(-1, (4, 8))
        idot = (w * codes.int().view(len(codes), 1, -1, 4, 8)).sum(-1, dtype=torch.int32)
        return (_half(b, 0) * d8[:, None])[..., None] * idot.float()
    q, sub_scale, low, d, dmin = _super_blocks(b, format)
    q = q.flatten(-2).unflatten(-1, (lanes // 2, -1))
    x = codes.int().view(len(codes), 1, -1, 2, 4, 2, lanes // 2, 32 // lanes)
    idot = (q.int() * x).sum(-1, dtype=torch.int32)
    d8 = d8.view(len(codes), 1, -1, 2, 4, 1)
    main = d * _ordered(d8 * _fold(idot, sub_scale)).movedim((-2, -1), (0, 1))
    if low is None or dmin is None:
        return main.movedim((0, 1), (-2, -1)).flatten(-2)
    isum = x.sum(-1, dtype=torch.int32)
    lows = dmin * _ordered(d8 * _fold(isum, low)).movedim((-2, -1), (0, 1))
    return (main - lows).movedim((0, 1), (-2, -1)).flatten(-2)


def _fold(integers: Tensor, scale: Tensor) -> Tensor:
    """[.., h, j, g, k] integers times [.., h, j, g] sub-block scales, summed over g; as fp32 (exact)."""
    return (integers * scale[..., None].int()).sum(-2, dtype=torch.int32).float()


def _ordered(v: Tensor) -> Tensor:
    """Sum over j of [.., h, j, k], j = 0 first."""
    return ((v[..., 0, :] + v[..., 1, :]) + v[..., 2, :]) + v[..., 3, :]


def _super_blocks(b: Tensor, format: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
    """Codes int8 [.., h, j, g, k, i] (element 128 h + 32 j + 16 g + 4 k + i), sub-block scales and mins
    [.., h, j, g], d and dmin fp32 [..]; of a symmetric format the mins are None."""
    j = torch.arange(4, dtype=torch.uint8, device=b.device).view(4, 1)
    if format == "q2_k":
        q = (b[..., 16:80].unflatten(-1, (2, 1, 32)) >> (2 * j)) & 3
        scale, low, halves = b[..., :16] & 15, b[..., :16] >> 4, (_half(b, 80), _half(b, 82))
        return (
            q.unflatten(-1, (2, 4, 4)).to(torch.int8),
            scale.unflatten(-1, (2, 4, 2)),
            low.unflatten(-1, (2, 4, 2)),
            *halves,
        )
    bit = torch.arange(8, dtype=torch.uint8, device=b.device).view(2, 4, 1)
    q = (b[..., 32:96].unflatten(-1, (2, 1, 32)) >> (2 * j)) & 3
    q = q.to(torch.int8) + 4 * ((b[..., None, None, :32] >> bit) & 1).to(torch.int8) - 4
    s = b[..., 96:108]
    low = torch.cat([s[..., :8] & 15, s[..., :8] >> 4], -1)
    top = ((s[..., None, 8:] >> (2 * j)) & 3).flatten(-2)
    scale = (low | top << 4).to(torch.int8) - 32
    return q.unflatten(-1, (2, 4, 4)), scale.unflatten(-1, (2, 4, 2)), None, _half(b, 108), None


def _blocks(raw: Tensor, format: str) -> Tensor:
    return raw.unflatten(-1, (-1, BLOCK_BYTES[format]))


def _half(b: Tensor, offset: int) -> Tensor:
    return b[..., offset : offset + 2].contiguous().view(torch.float16).float().squeeze(-1)
