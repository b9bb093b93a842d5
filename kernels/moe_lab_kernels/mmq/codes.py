"""int8 codes of 32 values of a weight's rows, as words: what the tensor cores multiply.

A word is four neighbouring codes in an int32, and 32 values of R rows are [R, 8] of them, made of words of the raw
block by shifts and masks that serve four codes at once; `codes_of` hands them on as int8 [R, 32] without moving a bit.
Word indices are added to word pointers, and `max_contiguous` names them as the axis for neighbouring threads: else the
compiler gives rows to threads, and codes are stored to shared memory byte by byte. No load gets wider by it.

A sub-block scale is folded in by one integer product of the word: where codes may be negative, each byte is biased by
128 (-0x7F7F7F80) first, so that nothing is borrowed between bytes, and the bias is taken off by an exclusive or.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import funnel

# nibbles of $1 to doubled E2M1: two byte permutations look the size up for either sign, and the sign bits choose
_E2M1 = tl.constexpr(
    "{ .reg .b32 s, n, t, a, b; and.b32 s, $1, 0x07070707; shr.b32 t, s, 4; or.b32 s, s, t; prmt.b32 s, s, s, 0x4420; "
    "shl.b32 n, $1, 4; prmt.b32 n, n, n, 0xBA98; mov.b32 a, 0x03020100; mov.b32 b, 0x0C080604; prmt.b32 t, a, b, s; "
    "mov.b32 a, 0xFDFEFF00; mov.b32 b, 0xF4F8FAFC; prmt.b32 s, a, b, s; lop3.b32 $0, n, s, t, 0xCA; }"
)


@jit
def word():
    """Numbers of the words of 32 codes, [1, 8]."""
    return tl.arange(0, 8)[None, :]


@jit
def pick(first, second):
    """[R, 8], one for each sixteen values."""
    return tl.where(word() < 4, first, second)


@jit
def of_word(bytes_, up: tl.constexpr):
    """Two neighbouring bytes from bit `up` on, int32 [R, 1], to [R, 8]: one for each sixteen values; what lies above
    the byte comes along."""
    return bytes_ >> (up + word() // 4 * 8)


@jit
def codes_of(words):
    """int8 [.., 4 W] of int32 [.., W], two or three axes, lowest byte first."""
    even = tl.join(words.to(tl.int8), (words >> 16).to(tl.int8))
    odd = tl.join((words >> 8).to(tl.int8), (words >> 24).to(tl.int8))
    if len(words.shape) == 3:
        out = tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1], 4 * words.shape[2]])
    else:
        out = tl.reshape(tl.join(even, odd), [words.shape[0], 4 * words.shape[1]])
    return out


@jit
def apart(words):
    """[V, R, W] with an axis more, [R, W] as it is. What is made of words so and then put `together` is made in the
    registers of the product's operand; without it, the compiler makes it in another layout, to go through shared
    memory, wherever a load has more than one use."""
    return words[:, :, None, :] if len(words.shape) == 3 else words


@jit
def together(words):
    """The axis taken away."""
    return tl.reshape(words, [words.shape[0], words.shape[1], words.shape[3]]) if len(words.shape) == 4 else words


@jit
def _near(at, N: tl.constexpr):
    """Pointers, N neighbours of which lie together along the last axis."""
    return tl.max_contiguous(at, [1, 1, N]) if len(at.shape) == 3 else tl.max_contiguous(at, [1, N])


@jit
def words_at(at, i, ALIGNED: tl.constexpr, NATIVE: tl.constexpr):
    """Words i int32 [1, 8] of rows that start at byte pointers `at` [R, 1], multiples of ALIGNED = 4 or 2. Cut out of
    two aligned words in the latter case: at most two bytes behind a word are read, which most blocks have; codes that
    end their block use `last_words_at`."""
    if ALIGNED == 4:
        words = at.to(tl.pointer_type(tl.int32), bitcast=True)
        out = tl.load(_near(words + i, 2))
    else:
        skew = at.to(tl.int64).to(tl.int32) & 2
        words = (at - skew).to(tl.pointer_type(tl.int32), bitcast=True)
        low, high = tl.load(_near(words + i, 2)), tl.load(_near(words + 1 + i, 2))
        out = funnel(low, high, tl.broadcast_to(8 * skew, low.shape), NATIVE)
    return out


@jit
def side_by_side(at, MOST: tl.constexpr, NATIVE: tl.constexpr):
    """The first MOST words of rows that start at byte pointers `at` [V, R, 1], multiples of 2: [V, R, 32], zeros
    behind them. A warp reads a row's words together, two cache lines a load; eight rows to a load, as operands lie,
    are as many lines. Nothing behind the words is read."""
    i, skew = tl.arange(0, 32)[None, None, :], at.to(tl.int64).to(tl.int32) & 2
    words = (at - skew).to(tl.pointer_type(tl.int32), bitcast=True) + i
    low = tl.load(words, mask=i < MOST, other=0)
    high = tl.load(words + 1, mask=(i < MOST) & (skew > 0), other=0)
    return funnel(low, high, tl.broadcast_to(8 * skew, low.shape), NATIVE)


@jit
def quarters(words):
    """[V, R, 32] or [V, R, 4, 8] as four tensors [V, R, 8]."""
    out = tl.permute(tl.reshape(words, [words.shape[0], words.shape[1], 2, 2, 8]), (0, 1, 4, 3, 2))
    even, odd = tl.split(out)
    w0, w1 = tl.split(even)
    w2, w3 = tl.split(odd)
    return w0, w1, w2, w3


@jit
def blocks_at(words, first: tl.constexpr, BYTES: tl.constexpr, MOST: tl.constexpr, NATIVE: tl.constexpr):
    """Words 0 to 7, of MOST = 4 twice, of four blocks of BYTES bytes that together start at int32 pointers [V, R, 1];
    a block's words start at its byte `first`, and the last one's end on a whole word. Four tensors [V, R, 8]."""
    start = first + BYTES * tl.arange(0, 4)[None, None, :, None]
    at = words[:, :, :, None] + (start // 4 + tl.arange(0, 8)[None, None, None, :] % MOST)
    low = tl.load(at)
    skew = tl.broadcast_to(start % 4, low.shape)
    return quarters(funnel(low, tl.load(at + 1, mask=skew > 0, other=0), 8 * skew, NATIVE))


@jit
def first_four(words):
    """Words 0 to 3 of eight, int32 [V, R, 1] each."""
    v = tl.reshape(words, [words.shape[0], words.shape[1], 2, 2, 2])
    even, odd = tl.split(v)
    first, _ = tl.split(tl.permute(even, (0, 1, 3, 2)))
    second, _ = tl.split(tl.permute(odd, (0, 1, 3, 2)))
    w0, w2 = tl.split(first)
    w1, w3 = tl.split(second)
    return w0[:, :, None], w1[:, :, None], w2[:, :, None], w3[:, :, None]


@jit
def words_from(words, i, skew: tl.constexpr, NATIVE: tl.constexpr):
    """Words i int32 [1, 8] of rows, `skew` bytes behind word pointers [R, 1]."""
    out = tl.load(_near(words + i, 1))
    if skew > 0:
        high = tl.load(_near(words + 1 + i, 1))
        out = funnel(out, high, tl.full(out.shape, 8 * skew, tl.int32), NATIVE)
    return out


@jit
def last_words_at(at, i, ALIGNED: tl.constexpr):
    """The same for multiples of ALIGNED = 2 or 1; nothing behind the words is read."""
    if ALIGNED == 2:
        halves = _near(at.to(tl.pointer_type(tl.uint16), bitcast=True) + 2 * i, 4)
        out = tl.load(halves).to(tl.int32) | tl.load(halves + 1).to(tl.int32) << 16
    else:
        at = _near(at + 4 * i, 4)
        low = tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8
        out = low | tl.load(at + 2).to(tl.int32) << 16 | tl.load(at + 3).to(tl.int32) << 24
    return out


@jit
def digits(words, scale, offset: tl.constexpr):
    """(code - offset) * scale of a word's bytes as 256 * high + low, two words of signed bytes: two codes to a product,
    each beside 2^15 so that nothing is borrowed."""
    beside = -0x7FFF8000 - scale * (offset * 0x10001)
    even = (words & 0x00FF00FF) * scale + beside
    odd = (words >> 8 & 0x00FF00FF) * scale + beside
    low = (even & 0x00FF00FF) | (odd & 0x00FF00FF) << 8
    high = ((even + 0x00800080) >> 8 & 0x00FF00FF | (odd + 0x00800080) & -0xFF0100) ^ -0x7F7F7F80
    return high, low


@jit
def three_bits(words, third, up, j: tl.constexpr, scale):
    """Less the code (-4..3) times its scale (-32..31): -128..124. `third`: bytes with the third bit at bit `up`."""
    code = words >> (2 * j) & 0x03030303 | (third >> up & 0x01010101) << 2
    return (scale * 0x04040404 - 0x7F7F7F80 - code * scale) ^ -0x7F7F7F80


@jit
def six_bits_times_4(words, top, j: tl.constexpr):
    """4 (code - 32): nibble j // 2 of each byte under two-bit field j of `top`."""
    return ((words >> (4 * (j // 2)) & 0x0F0F0F0F) << 2 | (top >> (2 * j) & 0x03030303) << 6) ^ -0x7F7F7F80


@jit
def nibbles_times_16(words, down):
    """16 (code - 8) of the nibbles at bit `down`, 0 or 4."""
    return (words >> down & 0x0F0F0F0F) << 4 ^ -0x7F7F7F80


@jit
def doubled_e2m1(words, down, NATIVE: tl.constexpr):
    """-12..12 of the nibbles at bit `down`, 0 or 4. Plain: sizes 4 to 7 of the code's three bits add their low two and,
    for 7, two more."""
    nibbles = words >> down & 0x0F0F0F0F
    if NATIVE:
        out = tl.inline_asm_elementwise(_E2M1, "=r,r", [nibbles], dtype=tl.int32, is_pure=True, pack=1)
    else:
        m = nibbles & 0x07070707
        large = m >> 2 & 0x01010101
        size = m + (m & large * 3) + ((m & m >> 1 & large) << 1)
        out = (size - 0x7F7F7F80 - 2 * (size & (nibbles >> 3 & 0x01010101) * 255)) ^ -0x7F7F7F80
    return out
