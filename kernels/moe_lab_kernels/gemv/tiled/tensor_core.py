"""What the steps of `tiled` share: the int8 product of the tensor cores, and loads from tiles (`storage.row_tiles`).

`mma` is the instruction m16n8k32: 16 rows of 32 weight codes times 8 columns of 32 activation codes, exact in int32. A
warp's lane 4 g + q holds, of the weights, word q and word 4 + q of 32 bytes of rows g and g + 8; of the activations,
the same words of column g; of the sums, columns 2 q and 2 q + 1 of both rows. Which values a word stands for is the
steps' matter, as long as both sides agree.

Tensors are [R, B, P, 32]: rows of activations, tiles of 16 weight rows, parts of a row, lanes. `ld` names lanes as the
axis for a warp's threads and parts as the next one: the instruction is right only where thread i of a warp has lane i
(a test reads that in the compiled layouts). Without it triton 3.6 sees no contiguous axis and spreads lanes over parts.
With it no load gets wider, as nothing is known of alignment. It holds for a pointer computed in the same function, not
for a parameter: hence bases and offsets.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import four_words

UNSIGNED = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)
SIGNED_CODES = tl.constexpr(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
)


@jit
def mma(a0, a1, a2, a3, b0, b1, c, SIGNED: tl.constexpr, NATIVE: tl.constexpr):
    """Sums c (four: columns 2 q and 2 q + 1 of row g, then of row g + 8) and what this product adds to them.

    a0, a2: the words of row g that meet b0 and b1; a1, a3: of row g + 8. Their bytes are signed where SIGNED.
    """
    c0, c1, c2, c3 = c
    if NATIVE:
        out = tl.inline_asm_elementwise(
            SIGNED_CODES if SIGNED else UNSIGNED,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        # 16 codes of 8 rows and of 8 columns at a time, as fp32, which holds such sums exactly
        n: tl.constexpr = c0.shape[0] * c0.shape[1] * c0.shape[2]
        byte = (8 * tl.arange(0, 4))[None, None, :]
        low, high = tl.zeros((n, 8, 8), tl.float32), tl.zeros((n, 8, 8), tl.float32)
        for part in tl.static_range(2):
            left = tl.join(tl.broadcast_to(a2 if part else a0, c0.shape), tl.broadcast_to(a3 if part else a1, c0.shape))
            left = tl.reshape(tl.permute(left, (4, 0, 1, 2, 3)), [2 * n, 32, 1]) >> byte & 0xFF
            right = tl.reshape(tl.broadcast_to(b1 if part else b0, c0.shape), [n, 32, 1]) >> byte
            if SIGNED:
                left = (left << 24) >> 24
            left = tl.reshape(left, [2, n, 8, 16]).to(tl.float32)
            right = tl.reshape((right << 24) >> 24, [1, n, 8, 16]).to(tl.float32)
            left_low, left_high = tl.split(tl.permute(left, (1, 2, 3, 0)))
            columns = tl.permute(tl.reshape(right, [n, 8, 16]), (0, 2, 1))
            low += tl.dot(left_low, columns)
            high += tl.dot(left_high, columns)
        low0, low1 = tl.split(tl.reshape(low.to(tl.int32), [n, 8, 4, 2]))
        high0, high1 = tl.split(tl.reshape(high.to(tl.int32), [n, 8, 4, 2]))
        out = (
            c0 + tl.reshape(low0, c0.shape),
            c1 + tl.reshape(low1, c0.shape),
            c2 + tl.reshape(high0, c0.shape),
            c3 + tl.reshape(high1, c0.shape),
        )
    return out


@jit
def ld(base, offset):
    """What lies at base + offset, a pointer for each lane."""
    return tl.load(tl.max_contiguous(base + offset, [1, 1, 2, 4]))


@jit
def ld_there(base, offset, there):
    """The same, 0 where `there` does not hold."""
    return tl.load(tl.max_contiguous(base + offset, [1, 1, 2, 4]), mask=there, other=0)


@jit
def word(base, offset):
    """The four bytes there, at an address that is a multiple of 4."""
    at = (base + offset).to(tl.pointer_type(tl.int32), bitcast=True)
    return tl.load(tl.max_contiguous(at, [1, 1, 2, 4]))


@jit
def quad(w, at, lane, NATIVE: tl.constexpr):
    """`mma`'s four words of a lane, 16 of the 512 bytes at `at` of a tile's step: of row g, of row g + 8, then of both
    again."""
    return four_words(w + (at + 16 * lane), NATIVE)


@jit
def touch(at):
    """Bring the cache lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32,
                              is_pure=False, pack=1)  # fmt: skip


@jit
def halves(w, at):
    """Two bytes of row g, and the two of row g + 8 behind them, zero-extended."""
    both = word(w, at)
    return both & 0xFFFF, both >> 16 & 0xFFFF


@jit
def bytes_of(w, at):
    """The same of one byte."""
    both = tl.load(tl.max_contiguous((w + at).to(tl.pointer_type(tl.uint16), bitcast=True), [1, 1, 2, 4])).to(tl.int32)
    return both & 0xFF, both >> 8
