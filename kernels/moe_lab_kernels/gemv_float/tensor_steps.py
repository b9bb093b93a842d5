"""Products of 4-bit integers with bf16 rows on the tensor cores: the instruction, what it is given, and its twins.

`mma` is m16n8k16 on bf16: 16 weight rows times 8 rows of x, 16 values of each. A warp's lane 4 g + q holds words of
weight rows g and g + 8, words of row g of x, and sums of both weight rows with rows 2 q and 2 q + 1 of x. Which values
a word stands for is free, as long as both sides agree; sums of one instruction have no order (below).

**The instruction's arithmetic** (Hopper, as measured: `tests/gpu/test_gemv_float_gpu.py` holds it): the 16 exact
products and the sum so far are aligned to the largest exponent among them (a product's is the sum of its factors'),
each cut towards zero after 25 further bits, added exactly, and the sum is cut towards zero to fp32. `summed` is that in
torch; the interpreter's twin is in `mma`. So the references have the device's bits. (Operands below 2^-126 and sums
below 2^-100 are outside of that promise.)

A nibble becomes the top of a bf16's mantissa at exponent 4, hence 16 + code; what is too much goes with the biases.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

import torch

from moe_lab._types import Tensor
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import pair

STEP = 256  # values that a warp multiplies in one turn
OFFSET = 16.0  # what a code's bf16 is too large by
KEPT_BITS = 25  # of an addend, below the largest exponent
CHAIN = 16  # values of one instruction
_LOWEST = -400  # an exponent below all others

_MMA = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
_QUAD = tl.constexpr("ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];")
# No load is called pure: the compiler would put off what is asked for a step ahead until it is wanted. Rows are read
# without `.nc`: the kernel that this one waits for may write them.
_ROW_QUAD = tl.constexpr("ld.global.v4.b32 {$0,$1,$2,$3}, [$4];")
_TWO_PAIRS = tl.constexpr("ld.global.nc.v2.b32 {$0,$1}, [$4]; ld.global.nc.v2.b32 {$2,$3}, [$4+32];")
# mask and exponent in one instruction each, which the compiler makes two of
_NIBBLES = tl.constexpr(
    "shl.b32 $0, $4, 3; shr.b32 $1, $4, 1; shr.b32 $2, $4, 5; shr.b32 $3, $4, 9; "
    + " ".join(f"lop3.b32 ${i}, ${i}, 0x00780078, 0x41804180, 0xEA;" for i in range(4))
)
_FOUR_WORDS = tl.constexpr(
    "ld.global.nc.b32 $0, [$4]; ld.global.nc.b32 $1, [$4+16]; ld.global.nc.b32 $2, [$4+32]; "
    "ld.global.nc.b32 $3, [$4+48];"
)


def summed(products: tuple[Tensor, Tensor], c: Tensor) -> Tensor:
    """fp32 [..] of exact products (float64 [.., 16], and their factors' exponents added) and sums so far c [..]."""
    value, exponent = products
    exponent = torch.where(value == 0, _LOWEST, exponent)
    own = torch.where(c == 0, _LOWEST, c.abs().view(torch.int32) // 2**23 - 127)
    top = torch.maximum(exponent.amax(-1), own)
    unit = torch.exp2((top - KEPT_BITS).double())
    total = (value / unit[..., None]).trunc().sum(-1) + (c.double() / unit).trunc()
    bits = (total * unit).view(torch.int64) & -(2**29)
    plain = value.sum(-1) + c.double()
    return torch.where(plain.isfinite(), bits.view(torch.float64), plain).float()


def products_of(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What `summed` takes of fp32 factors that bf16 holds: values in float64, exponents in int32."""
    a, b = torch.broadcast_tensors(a, b)
    exponents = [t.contiguous().view(torch.int32) // 2**23 % 256 for t in (a.abs(), b.abs())]
    return a.double() * b.double(), exponents[0] + exponents[1] - 254


@jit
def mma(a0, a1, a2, a3, b0, b1, c, NATIVE: tl.constexpr):
    """Sums c (four, [R, B, P, 32]: rows 2 q and 2 q + 1 of x times weight row g, then g + 8) and this product's part.

    a0, a2: two values each of row g that meet b0 and b1; a1, a3: of row g + 8.
    """
    c0, c1, c2, c3 = c
    if NATIVE:
        out = tl.inline_asm_elementwise(
            _MMA, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        n: tl.constexpr = c0.shape[0] * c0.shape[1] * c0.shape[2]
        zero = tl.zeros(c0.shape, tl.int32)
        first, second = tl.join(a0 + zero, a1 + zero), tl.join(a2 + zero, a3 + zero)
        left = tl.join(tl.join(first << 16, first & -65536), tl.join(second << 16, second & -65536))
        left = tl.reshape(tl.permute(left, (4, 0, 1, 2, 3, 5, 6)), [2, n, 8, 1, 16])
        right = tl.join(tl.join(b0 << 16, b0 & -65536), tl.join(b1 << 16, b1 & -65536))
        right = tl.reshape(tl.broadcast_to(right, (*c0.shape, 2, 2)), [1, n, 1, 8, 16])
        own = tl.permute(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (4, 0, 1, 2, 3, 5))
        own = tl.reshape(own, [2, n, 8, 8])
        value = left.to(tl.float32, bitcast=True).to(tl.float64) * right.to(tl.float32, bitcast=True).to(tl.float64)
        plain = tl.sum(value, 4) + own.to(tl.float64)
        finite = (plain - plain) == 0
        exponent = tl.where(value == 0, -400, (left >> 23 & 255) + (right >> 23 & 255) - 254)
        of_own = tl.where(own == 0, -400, (own.to(tl.int32, bitcast=True) >> 23 & 255) - 127)
        top = tl.maximum(tl.max(exponent, 4), of_own)
        steps = ((1048 - top).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        unit = ((998 + top).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        total = (tl.where(finite[:, :, :, :, None], value, 0) * steps[:, :, :, :, None]).to(tl.int64)
        total = tl.sum(total, 4) + (tl.where(finite, own, 0).to(tl.float64) * steps).to(tl.int64)
        cut = ((total.to(tl.float64) * unit).to(tl.int64, bitcast=True) & -536870912).to(tl.float64, bitcast=True)
        sums = tl.reshape(tl.where(finite, cut, plain).to(tl.float32), [2, n, 8, 4, 2])
        low, high = tl.split(tl.permute(sums, (1, 2, 3, 4, 0)))
        low0, low1 = tl.split(low)
        high0, high1 = tl.split(high)
        out = (
            tl.reshape(low0, c0.shape), tl.reshape(low1, c0.shape), tl.reshape(high0, c0.shape),
            tl.reshape(high1, c0.shape),
        )  # fmt: skip
    return out


@jit
def four_words(w, GROUP: tl.constexpr, NATIVE: tl.constexpr):
    """The four words of codes a lane has of a step. w: pointers to its first byte in the step; its bytes of a group lie
    together, groups GROUP / 2 bytes apart."""
    if NATIVE:
        how: tl.constexpr = _QUAD if GROUP == 128 else (_TWO_PAIRS if GROUP == 64 else _FOUR_WORDS)
        out = tl.inline_asm_elementwise(
            how, "=&r,=&r,=&r,=&r,l", [w.to(tl.int64)], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        p = w.to(tl.pointer_type(tl.int32), bitcast=True)
        far: tl.constexpr = 2 if GROUP == 128 else 8
        near: tl.constexpr = 4 if GROUP == 32 else 1
        out = (tl.load(p), tl.load(p + near), tl.load(p + far), tl.load(p + far + near))
    return out


@jit
def words_at(p, COUNT: tl.constexpr, NATIVE: tl.constexpr):
    """COUNT (1, 2 or 4) words of 32 bits at p, whose type is free and whose alignment is theirs together."""
    if NATIVE:
        at = p.to(tl.int64)
        if COUNT == 1:
            w0 = tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
            out = (w0, w0)
        elif COUNT == 2:
            out = tl.inline_asm_elementwise(
                "ld.global.nc.v2.b32 {$0,$1}, [$2];", "=r,=r,l", [at], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
            )
        else:
            out = tl.inline_asm_elementwise(
                _QUAD, "=r,=r,=r,=r,l", [at], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
            )
    else:
        q = p.to(tl.pointer_type(tl.int32), bitcast=True)
        w0 = tl.load(q)
        if COUNT == 1:
            out = (w0, w0)
        elif COUNT == 2:
            out = (w0, tl.load(q + 1))
        else:
            out = (w0, tl.load(q + 1), tl.load(q + 2), tl.load(q + 3))
    return out


@jit
def row_words(x, NATIVE: tl.constexpr):
    """Eight bf16 from x on, as pairs of values 0 and 4, 1 and 5, 2 and 6, 3 and 7: what a word's nibbles meet."""
    if NATIVE:
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            _ROW_QUAD, "=r,=r,=r,=r,l", [x.to(tl.int64)], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        p = x.to(tl.pointer_type(tl.int32), bitcast=True)
        x0, x1, x2, x3 = tl.load(p), tl.load(p + 1), tl.load(p + 2), tl.load(p + 3)
    return pair(x0, x2, NATIVE), _high_pair(x0, x2, NATIVE), pair(x1, x3, NATIVE), _high_pair(x1, x3, NATIVE)


@jit
def nibble_pairs(word, NATIVE: tl.constexpr):
    """A word's eight nibbles as bf16 of 16 + code: pairs of 0 and 4, 1 and 5, 2 and 6, 3 and 7."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            _NIBBLES, "=&r,=&r,=&r,=&r,r", [word], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
        )
    else:
        out = (
            ((word << 3) & 0x00780078) | 0x41804180,
            ((word >> 1) & 0x00780078) | 0x41804180,
            ((word >> 5) & 0x00780078) | 0x41804180,
            ((word >> 9) & 0x00780078) | 0x41804180,
        )
    return out


@jit
def stored_number(p, NATIVE: tl.constexpr):
    """The scale or bias at p (fp32, fp16 or bf16), as it is stored."""
    element: tl.constexpr = p.dtype.element_ty
    if not NATIVE:
        out = tl.load(p)
    elif element == tl.float32:
        out = tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [p.to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        out = tl.inline_asm_elementwise(
            "ld.global.nc.b16 $0, [$1];", "=h,l", [p.to(tl.int64)], dtype=tl.int16, is_pure=False, pack=1
        ).to(element, bitcast=True)
    return out


@jit
def _high_pair(low, high, NATIVE: tl.constexpr):
    """The high halves of two int32 as the low and high half of one."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = (low >> 16 & 0xFFFF) | (high & -65536)
    return out
