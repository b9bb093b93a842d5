"""What every GEMV kernel shares: one weight row times one activation row, in an order that is written out.

A row of blocks is walked by LANES lanes, PER_BLOCK of them a block (`ref.lanes_of` says how many); each lane
adds the parts of its own steps in sequence, then the lanes are added halves against halves, lane i to i + LANES / 2
and so on. `matvec_ref` adds in the same order, so bits depend on a row's own operands and LANES alone: on no tile,
no chunk, no grid, no launch.
"""
# pyright: reportGeneralTypeIssues=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.steps import part
from moe_lab_kernels.primitives import offset64, round_to


@jit
def lane_sums(w, w_row_stride, n_row, N, x, d8, total, known, blocks, A: tl.constexpr, B: tl.constexpr,
              FORMAT: tl.constexpr, LANES: tl.constexpr, PER_BLOCK: tl.constexpr, VALUES: tl.constexpr,
              ORDERED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """fp32 [A, B, 32]: each lane's sum over its steps. w: pointer to a weight of N rows; n_row int32 [1, B, 32]: each
    lane's, LANES lanes a row; x, d8, total: pointers to activation rows [.., .., 1], of which `known` masks what is not
    there; weight addresses are always valid. VALUES: of a block. ORDERED: 1 where x is in lane order (`lane_rows`),
    else 0.

    The last axis is a whole warp whatever LANES is: with a shorter one, weights and activations would be laid over
    threads in different ways. Lanes past the last block read it again against zeros, so the loop needs no mask on
    weights.
    """
    lane = tl.arange(0, 32)[None, None, :] % LANES
    acc = tl.zeros((A, B, 32), tl.float32)
    w_row, first, count = w + offset64(n_row, w_row_stride), n_row * blocks, N * blocks
    for first_block in range(0, blocks, LANES // PER_BLOCK):
        block = first_block + lane // PER_BLOCK
        there = known & (block < blocks)
        acc += part(w_row, w, first, count, x, x + (first_block * VALUES + lane * 8), d8, total,
                    tl.minimum(block, blocks - 1), lane % PER_BLOCK, there, FORMAT, PER_BLOCK, 8 * LANES * ORDERED,
                    NATIVE)  # fmt: skip
    return acc


@jit
def stored_as(v, dtype: tl.constexpr):
    """fp32 v rounded in `dtype`; where that is int32, its bits inverted: a product on its way (`hand_over`)."""
    return ~v.to(tl.int32, bitcast=True) if dtype == tl.int32 else round_to(v, dtype)
