"""What the staged decode steps share: a row's words handed out to units, and values put together again.

A unit is (row, half of the words): `four` gives [R, 2] tensors, one for each word of a unit, so a thread has
a whole unit. Values travel in pairs, two 16-bit floats in an int32, until `floats` takes them apart.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import round_to


@jit
def four(v):
    """[R, 2] four times, word q of each half, from [R, 8]."""
    R: tl.constexpr = v.shape[0]
    even, odd = tl.split(tl.reshape(v, [R, 2, 2, 2]))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


_MOVE = tl.constexpr("".join(f"prmt.b32 ${i}, $4, 0x4B000000, {0x7540 + i}; " for i in range(4)))


@jit
def numbers(word, less: tl.constexpr, NATIVE: tl.constexpr):
    """An int32's four bytes, less `less` each, as fp32."""
    if NATIVE:
        a, b, c, d = tl.inline_asm_elementwise(
            _MOVE, "=f,=f,=f,=f,r", [word], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
    else:
        a = (word & 255 | 0x4B000000).to(tl.float32, bitcast=True)
        b = (word >> 8 & 255 | 0x4B000000).to(tl.float32, bitcast=True)
        c = (word >> 16 & 255 | 0x4B000000).to(tl.float32, bitcast=True)
        d = (word >> 24 & 255 | 0x4B000000).to(tl.float32, bitcast=True)
    under: tl.constexpr = 8388608.0 + less
    return a - under, b - under, c - under, d - under


@jit
def pair_of(low, high, like: tl.constexpr, NATIVE: tl.constexpr):
    """Two fp32, each rounded to the dtype `like`, as one int32."""
    if not NATIVE:
        a, b = round_to(low, like).to(tl.int16, bitcast=True), round_to(high, like).to(tl.int16, bitcast=True)
        out = (a.to(tl.int32) & 0xFFFF) | (b.to(tl.int32) << 16)
    elif like == tl.bfloat16:
        out = tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], tl.int32, True, 1)
    else:
        out = tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", [high, low], tl.int32, True, 1)
    return out


@jit
def joined(a, b, c, d):
    """[R, 2, .., 2, 2]: four tensors side by side, in this order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@jit
def floats(pairs, VALUES: tl.constexpr, like: tl.constexpr, NATIVE: tl.constexpr):
    """[R, VALUES] in the dtype `like` from pairs [R, half, ..], a row's in order."""
    R: tl.constexpr = pairs.shape[0]
    pairs = tl.reshape(pairs, [R, VALUES // 2])
    if NATIVE:
        low, high = tl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], (tl.int16, tl.int16), True, 1
        )
    else:
        low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
    low, high = low.to(like, bitcast=True), high.to(like, bitcast=True)
    return tl.reshape(tl.join(low, high), [R, VALUES])
