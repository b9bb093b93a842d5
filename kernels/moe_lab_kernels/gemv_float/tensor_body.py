"""A chunk of rows times tiles of 16 rows of 4-bit integers on the tensor cores, both read as they lie.

Weight rows are the instruction's M side, rows of x its N side, so one row costs what eight do. A step is 256 values of
a row; steps go round P parts of it in turn, which lie on a program's warps. Of a group, `tensor_steps.mma` sums codes
times x in one chain and x alone in another (the same instruction on ones); the group's part of a row's sum is then

    acc = fma(dot, scale, acc), acc = fma(sum, bias, acc)        bias: less 16 * scale, as codes are 16 too large

and at the end parts are added, halves against halves. `tensor_ref` has the same order: a row's bits depend on its own
operands and on Kd alone.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAssignmentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv_float.tensor_steps import four_words, mma, nibble_pairs, row_words, stored_number, words_at
from moe_lab_kernels.primitives import fma, offset64, to_f32


@jit
def step_numbers(p, GROUP: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr):
    """A step's scales or biases as they are stored, one behind the other: 16-bit ones two to a word where WIDE."""
    if WIDE:
        out = words_at(p, 128 // GROUP, NATIVE)
    elif GROUP == 128:
        out = (stored_number(p, NATIVE), stored_number(p + 1, NATIVE))
    elif GROUP == 64:
        out = (
            stored_number(p, NATIVE), stored_number(p + 1, NATIVE), stored_number(p + 2, NATIVE),
            stored_number(p + 3, NATIVE),
        )  # fmt: skip
    else:
        out = (
            stored_number(p, NATIVE), stored_number(p + 1, NATIVE), stored_number(p + 2, NATIVE),
            stored_number(p + 3, NATIVE), stored_number(p + 4, NATIVE), stored_number(p + 5, NATIVE),
            stored_number(p + 6, NATIVE), stored_number(p + 7, NATIVE),
        )  # fmt: skip
    return out


@jit
def number(stored, i: tl.constexpr, element: tl.constexpr, WIDE: tl.constexpr):
    """fp32 of number i of a step's (`step_numbers`). element: their type."""
    if WIDE:
        out = stored[i // 2]
        if i % 2 == 0:
            out = out << 16
        if element == tl.bfloat16:
            out = (out & -65536).to(tl.float32, bitcast=True)
        else:
            out = (out >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        out = to_f32(stored[i])
    return out


@jit
def of_rows(w, scale, second, held, w_row, s_row, g_row, GROUP: tl.constexpr):
    """Each lane's places in a row: codes, scales, biases."""
    q = tl.arange(0, 32)[None, None, None, :] % 4
    return (
        w + offset64(held, w_row) + q * (GROUP // 8),
        scale + offset64(held, s_row),
        second + offset64(held, g_row),
    )


@jit
def step_operands(low, high, start, GROUP: tl.constexpr, WIDE: tl.constexpr, NATIVE: tl.constexpr):
    """What a step needs as it is stored: words of rows g and g + 8 of its first half and of its second, scales of both
    rows, biases."""
    g = start // GROUP
    return (
        (four_words(low[0] + start // 2, GROUP, NATIVE), four_words(low[0] + (start // 2 + 64), GROUP, NATIVE)),
        (four_words(high[0] + start // 2, GROUP, NATIVE), four_words(high[0] + (start // 2 + 64), GROUP, NATIVE)),
        (step_numbers(low[1] + g, GROUP, WIDE, NATIVE), step_numbers(high[1] + g, GROUP, WIDE, NATIVE)),
        (step_numbers(low[2] + g, GROUP, WIDE, NATIVE), step_numbers(high[2] + g, GROUP, WIDE, NATIVE)),
    )


@jit
def add_group(acc, dots, sums, scales, biases, there, i: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr,
              EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Group i's part of the four sums; nothing where not `there`."""
    s_low, s_high = number(scales[0], i, SCALE, WIDE), number(scales[1], i, SCALE, WIDE)
    b_low, b_high = number(biases[0], i, BIAS, WIDE) - 16.0 * s_low, number(biases[1], i, BIAS, WIDE) - 16.0 * s_high
    if not EVEN:
        s_low, s_high = tl.where(there, s_low, 0), tl.where(there, s_high, 0)
        b_low, b_high = tl.where(there, b_low, 0), tl.where(there, b_high, 0)
    return (
        fma(sums[0], b_low, fma(dots[0], s_low, acc[0])),
        fma(sums[1], b_low, fma(dots[1], s_low, acc[1])),
        fma(sums[0], b_high, fma(dots[2], s_high, acc[2])),
        fma(sums[1], b_high, fma(dots[3], s_high, acc[3])),
    )


@jit
def tensor_sums(x, low, high, Kd, SCALE: tl.constexpr, BIAS: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
                WIDE: tl.constexpr, R: tl.constexpr, B: tl.constexpr, P: tl.constexpr,
                NATIVE: tl.constexpr):  # fmt: skip
    """fp32 sums [R, B, P, 32], four of each lane. x: each lane's place in its row; low, high: in the rows of weights.
    Each next step's operands are asked for before the one before is used. EVEN: all parts have as many whole steps."""
    part = tl.arange(0, P)[None, None, :, None]
    zero, none = tl.zeros((R, B, P, 32), tl.float32), tl.zeros((R, 1, P, 32), tl.float32)
    one = tl.zeros((1, 1, P, 32), tl.int32) + 0x3F803F80
    acc, dots, sums = (zero, zero, zero, zero), (zero, zero, zero, zero), (none, none, none, none)
    ready = step_operands(low, high, tl.minimum(256 * part, Kd - 256), GROUP, WIDE, NATIVE)
    for first in range(0, Kd, 256 * P):
        begin = first + 256 * part
        start = tl.minimum(begin, Kd - 256)  # a last step starts early: groups before `begin` have had their turn
        later = step_operands(low, high, tl.minimum(begin + 256 * P, Kd - 256), GROUP, WIDE, NATIVE)
        for j in tl.static_range(8):
            if 32 * j % GROUP == 0:
                dots, sums = (zero, zero, zero, zero), (none, none, none, none)
            of_group = start + 32 * j // GROUP * GROUP
            b = row_words(x + of_group + 8 * (j % (GROUP // 32)), NATIVE)
            a, c = nibble_pairs(ready[0][j // 4][j % 4], NATIVE), nibble_pairs(ready[1][j // 4][j % 4], NATIVE)
            dots = mma(a[0], c[0], a[1], c[1], b[0], b[1], dots, NATIVE)
            dots = mma(a[2], c[2], a[3], c[3], b[2], b[3], dots, NATIVE)
            sums = mma(one, one, one, one, b[0], b[1], sums, NATIVE)
            sums = mma(one, one, one, one, b[2], b[3], sums, NATIVE)
            if 32 * (j + 1) % GROUP == 0:
                acc = add_group(acc, dots, sums, ready[2], ready[3], of_group >= begin, 32 * j // GROUP, SCALE, BIAS,
                                EVEN, WIDE)  # fmt: skip
        ready = later
    return acc


@jit
def parts_added(acc, R: tl.constexpr, B: tl.constexpr, P: tl.constexpr):
    """[R, B, 1, 32, 2, 2]: parts of the first half against those of the second. Last axes: row g or g + 8 of the
    weights, row 2 q or 2 q + 1 of x."""
    out = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
    for i in tl.static_range(3):
        if (P >> i) > 1:
            halves = tl.reshape(out, [R, B, 2, P >> (i + 1), 32, 2, 2])
            first, second = tl.split(tl.permute(halves, (0, 1, 3, 4, 5, 6, 2)))
            out = first + second
    return out
