"""The decode step of each block format: eight bytes of codes to runs of eight fp32 values.

A *unit* is eight consecutive bytes of codes with everything that scales them. Their fields of w bits make 8 / w (q8_0:
one) runs of eight consecutive values, so a thread that takes a unit reads each byte of codes once and stores whole 16
bytes of bf16. `UNITS` says how units lie in a block: `per_block` of them, `runs` runs each, and `period` units side by
side between two runs of one unit (run j of unit u starts at value 8 (runs period (u // period) + u % period + period
j) of the block). nvfp4's two runs would lie side by side, and then each store of a warp would fill every second half
of a 32-byte sector (0.40 of a copy's bandwidth on an H200 against 0.9): there a unit is one run, the nibbles low or
high by u % 2. Below, u counts units in a block, `w` points at its block.

Products and differences are those of `unpack.values_of`, each rounded to fp32, so the bits are the reference's.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import funnel, half_bits
from moe_lab_kernels.storage.unpack import IQ4_VALUES


class Units(NamedTuple):
    """How a block is cut, see above."""

    per_block: int
    runs: int
    period: int


UNITS = {
    "q4_0": Units(2, 2, 2),
    "q4_1": Units(2, 2, 2),
    "q5_0": Units(2, 2, 2),
    "q5_1": Units(2, 2, 2),
    "q8_0": Units(4, 1, 4),
    "q2_k": Units(8, 4, 4),
    "q3_k": Units(8, 4, 4),
    "q4_k": Units(16, 2, 4),
    "q5_k": Units(16, 2, 4),
    "q6_k": Units(8, 4, 4),
    "iq4_nl": Units(2, 2, 2),
    "iq4_xs": Units(16, 2, 2),
    "mxfp4": Units(2, 2, 2),
    "nvfp4": Units(8, 1, 8),
}

# The sixteen int8 of IQ4's table as two little-endian 64-bit numbers.
_IQ4_LOW = tl.constexpr(int.from_bytes(bytes(v & 255 for v in IQ4_VALUES[:8]), "little", signed=True))
_IQ4_HIGH = tl.constexpr(int.from_bytes(bytes(v & 255 for v in IQ4_VALUES[8:]), "little", signed=True))


@jit
def runs_of(w, u, lane, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """A tuple of `runs` fp32 tensors [U, 8]. w: uint8 pointers [U, 1] to blocks, u int32 [U, 1], lane int32 [1, 8]."""
    if FORMAT == "q2_k":
        out = _q2_k(w, u, lane, NATIVE)
    elif FORMAT == "q3_k":
        out = _q3_k(w, u, lane, NATIVE)
    elif FORMAT == "q4_k":
        out = _q45_k(w, u, lane, False, NATIVE)
    elif FORMAT == "q5_k":
        out = _q45_k(w, u, lane, True, NATIVE)
    elif FORMAT == "q6_k":
        out = _q6_k(w, u, lane, NATIVE)
    elif FORMAT == "q8_0":
        a, b = eight_bytes(w + 2 + 8 * u, NATIVE)
        out = (half_at(w) * number(a ^ -0x7F7F7F80, b ^ -0x7F7F7F80, lane, 128, NATIVE),)
    elif FORMAT == "mxfp4":
        a, b = eight_bytes_anywhere(w + 1 + 8 * u, NATIVE)
        x, d = byte_of(a, b, lane), e8m0_halved(tl.load(w).to(tl.int32))
        out = d * doubled_e2m1(x), d * doubled_e2m1(x >> 4)
    elif FORMAT == "nvfp4":
        at = w.to(tl.pointer_type(tl.int32), bitcast=True) + (1 + 2 * (u // 2))
        up = 4 * (u % 2)
        x, d = byte_of(tl.load(at) >> up, tl.load(at + 1) >> up, lane), ue4m3_halved(tl.load(w + u // 2).to(tl.int32))
        out = (d * doubled_e2m1(x),)
    elif FORMAT == "iq4_nl" or FORMAT == "iq4_xs":
        out = _iq4(w, u, lane, FORMAT == "iq4_xs", NATIVE)
    else:
        tl.static_assert(FORMAT == "q4_0" or FORMAT == "q4_1" or FORMAT == "q5_0" or FORMAT == "q5_1")
        out = _q4_q5(w, u, lane, FORMAT == "q5_0" or FORMAT == "q5_1", FORMAT == "q4_1" or FORMAT == "q5_1", NATIVE)
    return out


@jit
def _q2_k(w, u, lane, NATIVE: tl.constexpr):
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    a, b = tl.load(words + 4 + 2 * u), tl.load(words + 5 + 2 * u)
    both = tl.load(words + 20)
    d, dmin = half_bits(both), half_bits(both >> 16)
    scales = w + (8 * (u // 4) + (u % 4) // 2)
    s0, s1 = tl.load(scales).to(tl.int32), tl.load(scales + 2).to(tl.int32)
    s2, s3 = tl.load(scales + 4).to(tl.int32), tl.load(scales + 6).to(tl.int32)
    m = 0x03030303
    q0, q1 = number(a & m, b & m, lane, 0, NATIVE), number(a >> 2 & m, b >> 2 & m, lane, 0, NATIVE)
    q2, q3 = number(a >> 4 & m, b >> 4 & m, lane, 0, NATIVE), number(a >> 6 & m, b >> 6 & m, lane, 0, NATIVE)
    return (
        d * (s0 & 15).to(tl.float32) * q0 - dmin * (s0 >> 4).to(tl.float32),
        d * (s1 & 15).to(tl.float32) * q1 - dmin * (s1 >> 4).to(tl.float32),
        d * (s2 & 15).to(tl.float32) * q2 - dmin * (s2 >> 4).to(tl.float32),
        d * (s3 & 15).to(tl.float32) * q3 - dmin * (s3 >> 4).to(tl.float32),
    )


@jit
def _q3_k(w, u, lane, NATIVE: tl.constexpr):
    up = 4 * (u // 4)
    a, b = eight_bytes(w + 32 + 8 * u, NATIVE)
    third_a, third_b = eight_bytes(w + 8 * (u % 4), NATIVE)
    third_a, third_b = third_a >> up, third_b >> up
    d, at = half_at(w + 108), w + (96 + (u % 4) // 2)
    n0, n1 = tl.load(at).to(tl.int32) >> up, tl.load(at + 2).to(tl.int32) >> up
    n2, n3 = tl.load(at + 4).to(tl.int32) >> up, tl.load(at + 6).to(tl.int32) >> up
    t0, t1 = tl.load(at + 8).to(tl.int32) >> up, tl.load(at + 10).to(tl.int32) >> up
    m, h = 0x03030303, 0x04040404
    q0 = number(a & m | third_a << 2 & h, b & m | third_b << 2 & h, lane, 4, NATIVE)
    q1 = number(a >> 2 & m | third_a << 1 & h, b >> 2 & m | third_b << 1 & h, lane, 4, NATIVE)
    q2 = number(a >> 4 & m | third_a & h, b >> 4 & m | third_b & h, lane, 4, NATIVE)
    q3 = number(a >> 6 & m | third_a >> 1 & h, b >> 6 & m | third_b >> 1 & h, lane, 4, NATIVE)
    return (
        d * ((n0 & 15 | (t0 & 3) << 4) - 32).to(tl.float32) * q0,
        d * ((n1 & 15 | (t1 & 3) << 4) - 32).to(tl.float32) * q1,
        d * ((n2 & 15 | (t0 & 12) << 2) - 32).to(tl.float32) * q2,
        d * ((n3 & 15 | (t1 & 12) << 2) - 32).to(tl.float32) * q3,
    )


@jit
def _q45_k(w, u, lane, FIVE: tl.constexpr, NATIVE: tl.constexpr):
    """Sub-blocks 2 g and 2 g + 1 of group g = u // 4; the first four of eight keep their six bits together."""
    words = w.to(tl.pointer_type(tl.int32), bitcast=True)
    both = tl.load(words)
    d, dmin = half_bits(both), half_bits(both >> 16)
    g = u // 4
    up = 16 * (g % 2)
    s, m, rest = tl.load(words + 1) >> up, tl.load(words + 2) >> up, tl.load(words + 3) >> up
    near = g < 2
    scale0 = tl.where(near, s & 63, rest & 15 | s >> 2 & 0x30)
    scale1 = tl.where(near, s >> 8 & 63, rest >> 8 & 15 | s >> 10 & 0x30)
    min0 = tl.where(near, m & 63, rest >> 4 & 15 | m >> 2 & 0x30)
    min1 = tl.where(near, m >> 8 & 63, rest >> 12 & 15 | m >> 10 & 0x30)
    codes, mask = words + ((12 if FIVE else 4) + 2 * u), 0x0F0F0F0F
    a, b = tl.load(codes), tl.load(codes + 1)
    a0, b0, a1, b1 = a & mask, b & mask, a >> 4 & mask, b >> 4 & mask
    if FIVE:
        at, fifth = words + (4 + 2 * (u % 4)), 0x10101010
        c, d8 = tl.load(at) >> (2 * g), tl.load(at + 1) >> (2 * g)
        a0, b0, a1, b1 = a0 | c << 4 & fifth, b0 | d8 << 4 & fifth, a1 | c << 3 & fifth, b1 | d8 << 3 & fifth
    return (
        d * scale0.to(tl.float32) * number(a0, b0, lane, 0, NATIVE) - dmin * min0.to(tl.float32),
        d * scale1.to(tl.float32) * number(a1, b1, lane, 0, NATIVE) - dmin * min1.to(tl.float32),
    )


@jit
def _q6_k(w, u, lane, NATIVE: tl.constexpr):
    half, l8 = u // 4, 8 * (u % 4)
    a, b = eight_bytes(w + (64 * half + l8), NATIVE)
    c, e = eight_bytes(w + (64 * half + l8 + 32), NATIVE)
    t, v = eight_bytes(w + 128 + 8 * u, NATIVE)
    d, at = half_at(w + 208), (w + (192 + 8 * half + (u % 4) // 2)).to(tl.pointer_type(tl.int8), bitcast=True)
    m, h = 0x0F0F0F0F, 0x30303030
    q0 = number(a & m | t << 4 & h, b & m | v << 4 & h, lane, 32, NATIVE)
    q1 = number(c & m | t << 2 & h, e & m | v << 2 & h, lane, 32, NATIVE)
    q2 = number(a >> 4 & m | t & h, b >> 4 & m | v & h, lane, 32, NATIVE)
    q3 = number(c >> 4 & m | t >> 2 & h, e >> 4 & m | v >> 2 & h, lane, 32, NATIVE)
    return (
        d * tl.load(at).to(tl.float32) * q0,
        d * tl.load(at + 2).to(tl.float32) * q1,
        d * tl.load(at + 4).to(tl.float32) * q2,
        d * tl.load(at + 6).to(tl.float32) * q3,
    )


@jit
def _q4_q5(w, u, lane, FIVE: tl.constexpr, OFFSET: tl.constexpr, NATIVE: tl.constexpr):
    head = 4 if OFFSET else 2
    middle = 0 if OFFSET else (16 if FIVE else 8)
    a, b = eight_bytes(w + (head + (4 if FIVE else 0)) + 8 * u, NATIVE)
    d, m = half_at(w), 0x0F0F0F0F
    q0, q1 = number(a & m, b & m, lane, middle, NATIVE), number(a >> 4 & m, b >> 4 & m, lane, middle, NATIVE)
    if FIVE:
        first, second = tl.load(w + head + u).to(tl.int32), tl.load(w + head + 2 + u).to(tl.int32)
        q0, q1 = q0 + (first >> lane << 4 & 16).to(tl.float32), q1 + (second >> lane << 4 & 16).to(tl.float32)
    v0, v1 = d * q0, d * q1
    if OFFSET:
        low = half_at(w + 2)
        v0, v1 = v0 + low, v1 + low
    return v0, v1


@jit
def _iq4(w, u, lane, XS: tl.constexpr, NATIVE: tl.constexpr):
    a, b = eight_bytes(w + (8 if XS else 2) + 8 * u, NATIVE)
    x, d = byte_of(a, b, lane), half_at(w)
    if XS:
        sub = u // 2
        nibble = tl.load(w + 4 + sub // 2).to(tl.int32) >> (4 * (sub % 2))
        top = tl.load(w + 2 + sub // 4).to(tl.int32) >> (2 * (sub % 4))
        d = d * ((nibble & 15 | (top & 3) << 4) - 32).to(tl.float32)
    return d * _from_table(x & 15), d * _from_table(x >> 4 & 15)


@jit
def _from_table(q):
    word = tl.where(q < 8, _IQ4_LOW, _IQ4_HIGH) >> (8 * (q & 7)).to(tl.int64)
    return word.to(tl.int8).to(tl.float32)


@jit
def doubled_e2m1(q):
    """Twice the E2M1 in the low four bits. Its bits as an fp32's sign, exponent and mantissa are that times 2^-127; the
    zero added makes +0 of -0."""
    bits = (q & 7) << 22 | (q & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38 + 0.0


@jit
def e8m0_halved(e):
    """2^(e - 128), subnormal for e = 0 and 1; 255 is 2^127."""
    return tl.where(e < 2, 0x00200000 << (e & 1), (e - 1) << 23).to(tl.float32, bitcast=True)


@jit
def ue4m3_halved(s):
    """Half of an E4M3 without its sign; 0x7f is 0 and 0xff 240."""
    bits = tl.where(s == 0x7F, 0, (s & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 6.646139978924579e35


@jit
def byte_of(low, high, lane):
    """Lane i's byte of the eight in (low, high), in the low bits; what lies above it comes along."""
    return tl.where(lane < 4, low, high) >> (8 * (lane % 4))


@jit
def number(low, high, lane, less, NATIVE: tl.constexpr):
    """Lane i's byte of the eight in (low, high), less `less`, as fp32.

    The byte under the exponent of 2^23 is 2^23 + byte: one byte permutation and one exact subtraction. A shift, a mask
    and a conversion would be three trips through the integer pipe, which is half as wide as the one for floats.
    """
    word = tl.where(lane < 4, low, high)
    if NATIVE:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x4B000000, $2;",
            "=r,r,r",
            [word, 0x7540 + lane % 4],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = word >> (8 * (lane % 4)) & 0xFF | 0x4B000000
    return bits.to(tl.float32, bitcast=True) - (8388608.0 + less)


@jit
def eight_bytes(at, NATIVE: tl.constexpr):
    """The bytes at `at` .. `at + 7`, an even address, as two int32.

    Cut out of the two aligned words that begin in them or before them, and of the last two bytes. Nothing behind the
    eight is read; before them, at most the rest of an aligned word.
    """
    skew = at.to(tl.int64).to(tl.int32) & 2
    words = (at - skew).to(tl.pointer_type(tl.int32), bitcast=True)
    first, second = tl.load(words), tl.load(words + 1)
    third = tl.load((at + 6).to(tl.pointer_type(tl.uint16), bitcast=True)).to(tl.int32)
    return funnel(first, second, 8 * skew, NATIVE), funnel(second, third, 8 * skew, NATIVE)


@jit
def eight_bytes_anywhere(at, NATIVE: tl.constexpr):
    """The same at any address: of the third word, the one, two or three bytes that belong are read by themselves."""
    skew = at.to(tl.int64).to(tl.int32) & 3
    words = (at - skew).to(tl.pointer_type(tl.int32), bitcast=True)
    first, second = tl.load(words), tl.load(words + 1)
    pair = tl.load((at + 8 - skew).to(tl.pointer_type(tl.uint16), bitcast=True), mask=skew >= 2, other=0).to(tl.int32)
    third = pair | tl.load(at + 7).to(tl.int32) << (8 * (skew - 1) & 24)
    return funnel(first, second, 8 * skew, NATIVE), funnel(second, third, 8 * skew, NATIVE)


@jit
def half_at(at):
    """The fp16 at an even address, as fp32."""
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True)).to(tl.float32)
