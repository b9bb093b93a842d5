"""One step of a raw weight format: blocks times q8_1 codes, as per-lane fp32 parts.

A step covers consecutive blocks of a row; each block is shared by a few lanes. A lane multiplies its own words of codes
with `dp4a`, folds the sub-block scales in with `dp2a`, and only then meets a float. Lane order, the order of additions
inside a lane and the rounding of every product are written out, so the interpreter, the compiled kernel and the torch
reference (`decode_ref`) agree bit for bit. The integers are exact: below 2^18 in magnitude a lane.

Part of one lane (d8: fp16 scale of 32 activations; a dot: integer dot over the lane's own elements):
    q2_k   d * sum_j d8_j * (sc . idot)_j - dmin * sum_j d8_j * (m . isum)_j        j = 0..3 in this order
    q3_k   d * sum_j d8_j * ((sc - 32) . idot)_j
    q8_0   (d * d8) * idot
A lane of a 256-block is h, k = lane // 4 % 2, lane % 4: words k and k + 4 of the block's half h. An int32 of codes
holds four groups of four, 32 values apart (shift 2 j), so word k meets activations 128 h + 32 j + 4 k .. + 3, and word
k + 4 those 16 further on, which lie in the next sub-block.

q2_k rows lie on 4-byte addresses, q3_k and q8_0 rows on 2-byte ones: words of those are put together from two halves.
"""

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import dp2a_hi, dp2a_lo, dp4a, sum4


@jit
def part(w, x, d8, block, sub, there, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 parts [R, ROWS, LANES] of one step.

    w: uint8 pointers [1, ROWS, 1] to weight rows; x int8 and d8 fp16 pointers [R, 1, 1] to activation rows; block, sub
    int32 [1, 1, LANES]; `there` masks activations [R, 1, LANES], weight addresses are always valid.
    """
    if FORMAT == "q2_k":
        out = _q2_k(w + block * 84, x + block * 256, d8 + block * 8, sub // 4, sub % 4, there, NATIVE)
    elif FORMAT == "q3_k":
        out = _q3_k(w + block * 110, x + block * 256, d8 + block * 8, sub // 4, sub % 4, there, NATIVE)
    else:
        tl.static_assert(FORMAT == "q8_0")
        out = _q8_0(w + block * 34, x + block * 32, d8 + block, sub, there, NATIVE)
    return out


@jit
def _q2_k(w, x, d8, h, k, there, NATIVE: tl.constexpr):
    codes0, codes1 = word4(w, 16 + 32 * h + 4 * k), word4(w, 32 + 32 * h + 4 * k)
    packed01, packed23, both = word4(w, 8 * h), word4(w, 8 * h + 4), word4(w, 80)
    scales01, scales23 = packed01 & 0x0F0F0F0F, packed23 & 0x0F0F0F0F
    mins01, mins23 = (packed01 >> 4) & 0x0F0F0F0F, (packed23 >> 4) & 0x0F0F0F0F
    for j in tl.static_range(4):
        x0, x1, s8 = _activations(x, d8, h, k, j, there)
        idot0 = dp4a((codes0 >> (2 * j)) & 0x03030303, x0, 0, NATIVE)
        idot1 = dp4a((codes1 >> (2 * j)) & 0x03030303, x1, 0, NATIVE)
        main_j = s8 * _fold(pair(idot0, idot1), scales01, scales23, j, NATIVE)
        low_j = s8 * _fold(pair(sum4(x0, NATIVE), sum4(x1, NATIVE)), mins01, mins23, j, NATIVE)
        main = main_j if j == 0 else main + main_j  # noqa: F821 (bound when j = 0)
        low = low_j if j == 0 else low + low_j  # noqa: F821
    return half_bits(both) * main - half_bits(both >> 16) * low


@jit
def _q3_k(w, x, d8, h, k, there, NATIVE: tl.constexpr):
    """Codes are low + 4 high (0..7) less 4; the 4 is taken off through the activations' sum."""
    codes0, codes1 = word2(w, 32 + 32 * h + 4 * k), word2(w, 48 + 32 * h + 4 * k)
    high0, high1 = word2(w, 4 * k) >> (4 * h), word2(w, 16 + 4 * k) >> (4 * h)
    top = word2(w, 104) >> (4 * h)
    scales01 = _minus_32(((word2(w, 96) >> (4 * h)) & 0x0F0F0F0F) | ((top & 0x03030303) << 4))
    scales23 = _minus_32(((word2(w, 100) >> (4 * h)) & 0x0F0F0F0F) | (((top >> 2) & 0x03030303) << 4))
    d = half_at(w, 108)
    for j in tl.static_range(4):
        x0, x1, s8 = _activations(x, d8, h, k, j, there)
        code0 = ((codes0 >> (2 * j)) & 0x03030303) | (((high0 >> j) & 0x01010101) << 2)
        code1 = ((codes1 >> (2 * j)) & 0x03030303) | (((high1 >> j) & 0x01010101) << 2)
        idot0 = dp4a(code0, x0, -4 * sum4(x0, NATIVE), NATIVE)
        idot1 = dp4a(code1, x1, -4 * sum4(x1, NATIVE), NATIVE)
        main_j = s8 * _fold(pair(idot0, idot1), scales01, scales23, j, NATIVE)
        main = main_j if j == 0 else main + main_j  # noqa: F821 (bound when j = 0)
    return d * main


@jit
def _q8_0(w, x, d8, sub, there, NATIVE: tl.constexpr):
    """32-value blocks of four lanes; a lane holds words 2 sub and 2 sub + 1."""
    at = (x + 8 * sub).to(tl.pointer_type(tl.int32), bitcast=True)
    x0, x1 = tl.load(at, mask=there, other=0), tl.load(at + 1, mask=there, other=0)
    s8 = tl.load(d8, mask=there, other=0).to(tl.float32)
    idot = dp4a(word2(w, 6 + 8 * sub), x1, dp4a(word2(w, 2 + 8 * sub), x0, 0, NATIVE), NATIVE)
    return (half_at(w, 0) * s8) * idot.to(tl.float32)


@jit
def _activations(x, d8, h, k, j, there):
    """The lane's two words of codes at step j of a 256-block, and the scale they share."""
    at = (x + (128 * h + 32 * j + 4 * k)).to(tl.pointer_type(tl.int32), bitcast=True)
    x0, x1 = tl.load(at, mask=there, other=0), tl.load(at + 4, mask=there, other=0)
    return x0, x1, tl.load(d8 + (4 * h + j), mask=there, other=0).to(tl.float32)


@jit
def _fold(two, scales01, scales23, J: tl.constexpr, NATIVE: tl.constexpr):
    """Two sub-block integers (halves of `two`) times their scales (bytes 2J, 2J + 1 of eight), added; as fp32."""
    if J == 0:
        out = dp2a_lo(two, scales01, NATIVE)
    elif J == 1:
        out = dp2a_hi(two, scales01, NATIVE)
    elif J == 2:
        out = dp2a_lo(two, scales23, NATIVE)
    else:
        out = dp2a_hi(two, scales23, NATIVE)
    return out.to(tl.float32)


@jit
def _minus_32(packed):
    """Four bytes 0..63 to four signed bytes -32..31; the set top bit keeps borrows from crossing bytes."""
    return ((packed | -0x7F7F7F80) - 0x20202020) ^ -0x7F7F7F80


@jit
def pair(low, high):
    """Two small integers as the signed halves of an int32."""
    return (low & 0xFFFF) | (high << 16)


@jit
def word4(ptr, offset):
    """The int32 at byte `offset` from 4-byte aligned uint8 pointers."""
    return tl.load((ptr + offset).to(tl.pointer_type(tl.int32), bitcast=True))


@jit
def word2(ptr, offset):
    """The int32 at byte `offset` from 2-byte aligned uint8 pointers: two half-word loads."""
    at = (ptr + offset).to(tl.pointer_type(tl.uint16), bitcast=True)
    return tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 16)


@jit
def half_at(ptr, offset):
    """The fp16 at byte `offset` from 2-byte aligned uint8 pointers, as fp32."""
    return tl.load((ptr + offset).to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)


@jit
def half_bits(bits):
    """The fp16 in the low 16 bits of an int32, as fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
