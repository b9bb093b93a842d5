"""The float GEMV's loop: some weight rows of one or two matrices times some rows of x, a warp's 32 lanes a row.

Each lane adds its units in sequence (`gemv_float.steps`), then the lanes are added halves against halves, so that bits
depend on a row's own operands alone; `ref.matvec_ref` adds in the same order. Weights are loaded a step ahead of their
use.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv_float.steps import (
    block_runs,
    chain,
    chain_of_four,
    fetch,
    numbers,
    run_start,
    scaled,
    sum_on,
    x_run,
)
from moe_lab_kernels.primitives import fold_rows


@jit
def fetch_both(w, scale, second, v, v_scale, v_second, n_row, u, s_row, g_row, GATED: tl.constexpr,
               FORMAT: tl.constexpr, CODE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr,
               SHARED: tl.constexpr, RUNS: tl.constexpr):  # fmt: skip
    """`fetch` of w's unit u and (GATED) of v's, else w's again."""
    codes, stored, extra = fetch(w, scale, second, n_row, u, s_row, g_row, FORMAT, CODE, SECOND, GROUP, SHARED, RUNS)
    codes2, stored2, extra2 = codes, stored, extra
    if GATED:
        codes2, stored2, extra2 = fetch(v, v_scale, v_second, n_row, u, s_row, g_row, FORMAT, CODE, SECOND, GROUP,
                                        SHARED, RUNS)  # fmt: skip
    return codes, stored, extra, codes2, stored2, extra2


@jit
def lane_sums(x, x_scale, ready, w, scale, second, v, v_scale, v_second, n_row, known, units, s_row, g_row,
          R: tl.constexpr, B: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr, CODE: tl.constexpr,
          SCALE: tl.constexpr, SECOND: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, BYTES: tl.constexpr,
          BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr, RUNS: tl.constexpr, PERIOD: tl.constexpr, EXACT: tl.constexpr,
          X_SCALED: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """`fold_rows`' sums of w's and (GATED) v's rows, fp32 [R, max(1, B / 32), 32] twice, short of `steps.finished`.

    ready: `fetch_both` of each lane's first unit. Lanes past the last unit read it again against zeros, so no load of
    weights has a mask.
    """
    lane = tl.arange(0, 32)[None, None, :]
    acc = tl.zeros((R, B, 32), tl.float32)
    acc2 = acc
    codes, stored, extra, codes2, stored2, extra2 = ready
    for begin in range(0, units, 32):
        u = begin + lane
        there = known & (u < units)
        u = tl.minimum(u, units - 1)
        codes_, stored_, extra_, codes2_, stored2_, extra2_ = fetch_both(
            w, scale, second, v, v_scale, v_second, n_row, tl.minimum(begin + 32 + lane, units - 1), s_row, g_row,
            GATED, FORMAT, CODE, SECOND, GROUP, SHARED, RUNS)  # fmt: skip
        runs, runs2 = 0, 0
        if BYTES > 0:
            runs = block_runs(w, u, FORMAT, BYTES, PER_BLOCK, NATIVE)
            if GATED:
                runs2 = block_runs(v, u, FORMAT, BYTES, PER_BLOCK, NATIVE)
        dot, dot2, sums = acc, acc2, 0.0
        if CODE != "":
            dot, dot2 = tl.zeros_like(acc), tl.zeros_like(acc)
        odd, odd2 = dot, dot2
        for run in tl.static_range(RUNS):
            a = x_run(x, run_start(u, run, BLOCK, PER_BLOCK, RUNS, PERIOD), there, NATIVE)
            c = numbers(codes, runs, run, FORMAT, CODE, GROUP, NATIVE)
            if CODE == "u4":
                dot, odd = chain_of_four(dot, c, a, 0, EXACT), chain_of_four(odd, c, a, 1, EXACT)
            else:
                dot = chain(dot, c, a, EXACT)
            if GATED:
                c = numbers(codes2, runs2, run, FORMAT, CODE, GROUP, NATIVE)
                if CODE == "u4":
                    dot2, odd2 = chain_of_four(dot2, c, a, 0, EXACT), chain_of_four(odd2, c, a, 1, EXACT)
                else:
                    dot2 = chain(dot2, c, a, EXACT)
            if SECOND == "bias":
                sums = sum_on(sums, a)
        if CODE == "u4":
            dot, dot2 = dot + odd * 0.0625, dot2 + odd2 * 0.0625
        if CODE == "":
            acc, acc2 = dot, dot2
        else:
            x_step = 1.0
            if X_SCALED:
                at = x_scale + u * (8 * RUNS) // 128
                x_step = tl.load(tl.max_contiguous(at, [1, 1, 2]), mask=there, other=0)
            acc = acc + scaled(dot, sums, stored, extra, x_step, CODE, SCALE, SECOND, X_SCALED)
            if GATED:
                acc2 = acc2 + scaled(dot2, sums, stored2, extra2, x_step, CODE, SCALE, SECOND, X_SCALED)
        codes, stored, extra, codes2, stored2, extra2 = codes_, stored_, extra_, codes2_, stored2_, extra2_
    folded = fold_rows(acc, R, B, 32)
    folded2 = folded
    if GATED:
        folded2 = fold_rows(acc2, R, B, 32)
    return folded, folded2
