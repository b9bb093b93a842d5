"""Raw GGUF blocks taken apart in torch: integer codes, sub-block scales and mins, and the floats that scale those.

The one place that knows where a bit lies. A byte array of w-bit fields with *run* r holds, in every r bytes, 8 / w
rows of r values: value k r + i in byte i at bits w k. Every array of codes here is of that kind, whatever its width:

    format  codes: bytes, width, run                 scales and mins                         floats
    q4_0    2..17, 4, 16; less 8                                                             d f16 @0
    q4_1    4..19, 4, 16                                                                     d f16 @0, m f16 @2 (added)
    q5_0    6..21, 4, 16; bit 4: 2..5, 1, 1; less 16                                         d f16 @0
    q5_1    8..23, 4, 16; bit 4: 4..7, 1, 1                                                  d f16 @0, m f16 @2 (added)
    q8_0    2..33 int8                                                                       d f16 @0
    q2_k    16..79, 2, 32                            0..15: scale in the low nibble, min     d f16 @80, dmin f16 @82
    q3_k    32..95, 2, 32; bit 2: 0..31, 1, 32; less 4   96..107: 16 of 6 bits; less 32      d f16 @108
    q4_k    16..143, 4, 32                           4..15: 8 scales, 8 mins of 6 bits       d f16 @0, dmin f16 @2
    q5_k    48..175, 4, 32; bit 4: 16..47, 1, 32     as q4_k                                 d f16 @0, dmin f16 @2
    q6_k    0..127, 4, 64; bits 4, 5: 128..191, 2, 32; less 32   192..207 int8               d f16 @208
    iq4_nl  2..17, 4, 16; a table of 16 values                                               d f16 @0
    iq4_xs  8..135, 4, 16; the same table            4..7, 4, 1; bits 4, 5: 2..3, 2, 1; less 32   d f16 @0
    mxfp4   1..16, 4, 16; doubled E2M1                                                       2^(byte 0 - 128)
    nvfp4   4..35, 4, 8; doubled E2M1                                                        bytes 0..3: E4M3 / 2

Values as ggml reads them: an mxfp4 exponent of 255 is 2^127, an nvfp4 scale ignores its sign bit, and 0x7f (but
not 0xff) is 0.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_lab._types import Tensor, UInt8
from moe_lab.errors import LabError, LabTypeError
from moe_lab_kernels.storage.blocks import block_of

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class Unpacked(NamedTuple):
    """value = (d * scales) * codes - dmin * mins, over blocks of V values in G groups.

    codes int8 [.., blocks, V]; d fp32 [.., blocks, 1], for nvfp4 [.., blocks, G]; scales int8 [.., blocks, G] or None
    (1); dmin fp32 [.., blocks, 1] or None (nothing is subtracted); mins int8 [.., blocks, G] or None (1).
    """

    codes: Tensor
    d: Tensor
    scales: Tensor | None = None
    dmin: Tensor | None = None
    mins: Tensor | None = None


def check_rows(raw: UInt8[Tensor, "*rows row_bytes"], format: str) -> None:
    """LabTypeError unless uint8, LabError for an unknown format or rows that are not whole blocks."""
    size = block_of("unpack", format).bytes
    if raw.dtype != torch.uint8:
        raise LabTypeError(f"{format} blocks are uint8 bytes, got {raw.dtype}.")
    if not raw.ndim or raw.shape[-1] % size:
        raise LabError(f"{format} rows are multiples of {size} bytes, got shape {list(raw.shape)}.")


def unpack_ref(raw: UInt8[Tensor, "*rows row_bytes"], format: str) -> Unpacked:
    """Take whole rows apart. Errors as `check_rows`."""
    check_rows(raw, format)
    size = block_of("unpack", format).bytes
    return _UNPACK[format](raw.unflatten(-1, (raw.shape[-1] // size, size)))


def fields(b: UInt8[Tensor, "*rows bytes"], width: int, run: int) -> UInt8[Tensor, "*rows values"]:
    """The `width`-bit fields of b in value order; len(b) is a multiple of `run`. See the module's first lines."""
    groups, mask = b.unflatten(-1, (-1, run)), (1 << width) - 1
    # one shift by a number each: by a tensor of shifts takes 2 to 9 times as long on a CPU
    parts = [(groups >> k if k else groups) & mask for k in range(0, 8, width)]
    return torch.stack(parts, -2).flatten(-3)


def pack_fields(values: UInt8[Tensor, "*rows values"], width: int, run: int) -> UInt8[Tensor, "*rows bytes"]:
    """The inverse of `fields`; values below 2^width."""
    parts = values.unflatten(-1, (-1, 8 // width, run)).unbind(-2)
    out = parts[0].clone()
    for k, part in enumerate(parts[1:], 1):
        out |= part << (width * k)
    return out.flatten(-2)


def half(b: UInt8[Tensor, "*rows bytes"], at: int) -> Tensor:
    """The little-endian fp16 at byte `at`, as fp32 [.., 1]."""
    return b[..., at : at + 2].contiguous().view(torch.float16).float()


def six_bits(low: Tensor, top: Tensor) -> Tensor:
    """Sixteen 6-bit numbers from their low nibbles and their top two bits."""
    return low | top << 4


def _looked_up(nibbles: Tensor, table: tuple[int, ...]) -> Tensor:
    values = torch.tensor(table, dtype=torch.int8, device=nibbles.device)
    # ten times as quick on a CPU as values[nibbles]
    return values.index_select(0, nibbles.flatten().int()).view(nibbles.shape)


def _signed(b: Tensor) -> Tensor:
    return b.contiguous().view(torch.int8)


def _less(codes: Tensor, offset: int) -> Tensor:
    return codes.view(torch.int8).sub_(offset)


def _q4_0(b: Tensor) -> Unpacked:
    return Unpacked(_less(fields(b[..., 2:], 4, 16), 8), half(b, 0))


def _q4_1(b: Tensor) -> Unpacked:
    return Unpacked(_signed(fields(b[..., 4:], 4, 16)), half(b, 0), dmin=-half(b, 2))


def _q5_0(b: Tensor) -> Unpacked:
    return Unpacked(_less(fields(b[..., 6:], 4, 16) | fields(b[..., 2:6], 1, 1) << 4, 16), half(b, 0))


def _q5_1(b: Tensor) -> Unpacked:
    codes = fields(b[..., 8:], 4, 16) | fields(b[..., 4:8], 1, 1) << 4
    return Unpacked(_signed(codes), half(b, 0), dmin=-half(b, 2))


def _q8_0(b: Tensor) -> Unpacked:
    return Unpacked(_signed(b[..., 2:]), half(b, 0))


def _q2_k(b: Tensor) -> Unpacked:
    scales, mins = _signed(b[..., :16] & 15), _signed(b[..., :16] >> 4)
    return Unpacked(_signed(fields(b[..., 16:80], 2, 32)), half(b, 80), scales, half(b, 82), mins)


def _q3_k(b: Tensor) -> Unpacked:
    codes = fields(b[..., 32:96], 2, 32) | fields(b[..., :32], 1, 32) << 2
    scales = six_bits(fields(b[..., 96:104], 4, 8), fields(b[..., 104:108], 2, 4))
    return Unpacked(_less(codes, 4), half(b, 108), _less(scales, 32))


def scales_and_mins(b: UInt8[Tensor, "*rows 12"]) -> tuple[Tensor, Tensor]:
    """Low nibbles and top two bits [.., 16] of q4_k's and q5_k's 8 scales and then 8 mins.

    Bytes 0..3 hold scales 0..3 and, in their top bits, those of scales 4..7; bytes 4..7 the same of the mins; bytes
    8..11 the low nibbles of scales 4..7 (low) and of mins 4..7 (high).
    """
    scale, low_min, rest = b[..., :4], b[..., 4:8], b[..., 8:]
    low = torch.cat([scale & 15, rest & 15, low_min & 15, rest >> 4], -1)
    top = torch.cat([scale >> 4 & 3, scale >> 6, low_min >> 4 & 3, low_min >> 6], -1)
    return low, top


def pack_scales_and_mins(low: UInt8[Tensor, "*rows 16"], top: UInt8[Tensor, "*rows 16"]) -> UInt8[Tensor, "*rows 12"]:
    """The inverse of `scales_and_mins`."""
    (s, s4, m, m4), (t, t4, u, u4) = low.unflatten(-1, (4, 4)).unbind(-2), top.unflatten(-1, (4, 4)).unbind(-2)
    return torch.cat([s | t << 4 | t4 << 6, m | u << 4 | u4 << 6, s4 | m4 << 4], -1)


def _q4_k(b: Tensor) -> Unpacked:
    both = six_bits(*scales_and_mins(b[..., 4:16]))
    codes = _signed(fields(b[..., 16:], 4, 32))
    return Unpacked(codes, half(b, 0), _signed(both[..., :8]), half(b, 2), _signed(both[..., 8:]))


def _q5_k(b: Tensor) -> Unpacked:
    both = six_bits(*scales_and_mins(b[..., 4:16]))
    codes = _signed(fields(b[..., 48:], 4, 32) | fields(b[..., 16:48], 1, 32) << 4)
    return Unpacked(codes, half(b, 0), _signed(both[..., :8]), half(b, 2), _signed(both[..., 8:]))


def _q6_k(b: Tensor) -> Unpacked:
    codes = fields(b[..., :128], 4, 64) | fields(b[..., 128:192], 2, 32) << 4
    return Unpacked(_less(codes, 32), half(b, 208), _signed(b[..., 192:208]))


def _iq4_nl(b: Tensor) -> Unpacked:
    return Unpacked(_looked_up(fields(b[..., 2:], 4, 16), IQ4_VALUES), half(b, 0))


def _iq4_xs(b: Tensor) -> Unpacked:
    scales = six_bits(fields(b[..., 4:8], 4, 1), fields(b[..., 2:4], 2, 1))
    return Unpacked(_looked_up(fields(b[..., 8:], 4, 16), IQ4_VALUES), half(b, 0), _less(scales, 32))


def _mxfp4(b: Tensor) -> Unpacked:
    return Unpacked(_looked_up(fields(b[..., 1:], 4, 16), E2M1_DOUBLED), e8m0_halved(b[..., :1]))


def _nvfp4(b: Tensor) -> Unpacked:
    return Unpacked(_looked_up(fields(b[..., 4:], 4, 8), E2M1_DOUBLED), ue4m3_halved(b[..., :4]))


def e8m0_halved(e: UInt8[Tensor, "*shape"]) -> Tensor:
    """2^(e - 128) in fp32: a normal number's exponent field from e = 2 on, a subnormal's leading bit below."""
    e = e.int()
    return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1).clamp(min=0) << 23).view(torch.float32)


def ue4m3_halved(s: UInt8[Tensor, "*shape"]) -> Tensor:
    """Half the E4M3 value of the low seven bits, in fp32; 0x7f is 0, yet 0xff is 240, as ggml and gguf read them.

    The seven bits as an fp32's exponent and mantissa, times 2^119, are that value, subnormals included.
    """
    s = s.int()
    scale = torch.full((), 2.0**119, device=s.device)
    return torch.where(s == 0x7F, 0, (s & 0x7F) << 20).view(torch.float32) * scale


_UNPACK: dict[str, Callable[[Tensor], Unpacked]] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
    "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs, "mxfp4": _mxfp4, "nvfp4": _nvfp4,
}  # fmt: skip


def values_of(u: Unpacked) -> Tensor:
    """fp32 [.., Kd]: the step (d * scale) and the offset (dmin * min) are rounded to fp32, then each product and the
    difference, as ggml does."""
    step = u.d if u.scales is None else u.d * u.scales
    values = u.codes.float().unflatten(-1, (step.shape[-1], -1)).mul_(step.unsqueeze(-1))
    if u.dmin is not None:
        values = values.sub_((u.dmin if u.mins is None else u.dmin * u.mins).unsqueeze(-1))
    return values.flatten(-3)
