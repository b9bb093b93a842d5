"""The float GEMV's loop: some weight rows of one or two matrices times some rows of x, a warp's 32 lanes a row.

Each lane adds its units in sequence (`gemv_float.steps`), then the lanes are added halves against halves, so that bits
depend on a row's own operands alone; `gemv_float_ref.matvec_ref` adds in the same order. Weights are loaded a step
ahead of their use, and with EARLY = "weights" the first of them before the kernel before is waited for.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

from moe_lab_kernels.backend import gdc_launch_dependents, gdc_wait, jit, tl
from moe_lab_kernels.gemv_float.steps import block_runs, chain, fetch, numbers, run_start, scaled, sum_on, x_run
from moe_lab_kernels.primitives import butterfly


@jit
def lane_sums(x, x_scale, w, scale, second, v, v_scale, v_second, n_row, known, units, s_row, g_row, R: tl.constexpr,
          B: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr, CODE: tl.constexpr, SCALE: tl.constexpr,
          SECOND: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, BYTES: tl.constexpr, BLOCK: tl.constexpr,
          PER_BLOCK: tl.constexpr, RUNS: tl.constexpr, PERIOD: tl.constexpr, EXACT: tl.constexpr,
          X_SCALED: tl.constexpr, EARLY: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """fp32 [R, B, 32] twice: each lane's sums over its units, of w and (GATED) of v. Lanes past the last unit read it
    again against zeros, so no load of weights has a mask. Weights are loaded a step before their use."""
    lane = tl.arange(0, 32)[None, None, :]
    acc = tl.zeros((R, B, 32), tl.float32)
    acc2 = acc
    u = tl.minimum(lane, units - 1)
    codes, stored, extra = fetch(w, scale, second, n_row, u, s_row, g_row, FORMAT, CODE, SECOND, GROUP, SHARED, RUNS)
    codes2, stored2, extra2 = codes, stored, extra
    if GATED:
        codes2, stored2, extra2 = fetch(v, v_scale, v_second, n_row, u, s_row, g_row, FORMAT, CODE, SECOND, GROUP,
                                        SHARED, RUNS)  # fmt: skip
    if EARLY == "weights":
        gdc_wait()
        gdc_launch_dependents()
    for begin in range(0, units, 32):
        u = begin + lane
        there = known & (u < units)
        u = tl.minimum(u, units - 1)
        later = tl.minimum(begin + 32 + lane, units - 1)
        codes_, stored_, extra_ = fetch(w, scale, second, n_row, later, s_row, g_row, FORMAT, CODE, SECOND, GROUP,
                                        SHARED, RUNS)  # fmt: skip
        if GATED:
            codes2_, stored2_, extra2_ = fetch(v, v_scale, v_second, n_row, later, s_row, g_row, FORMAT, CODE, SECOND,
                                               GROUP, SHARED, RUNS)  # fmt: skip
        runs, runs2 = 0, 0
        if BYTES > 0:
            runs = block_runs(w, u, FORMAT, BYTES, PER_BLOCK, NATIVE)
            if GATED:
                runs2 = block_runs(v, u, FORMAT, BYTES, PER_BLOCK, NATIVE)
        dot, dot2, sums = acc, acc2, 0.0
        if CODE != "":
            dot, dot2 = tl.zeros_like(acc), tl.zeros_like(acc)
        for run in tl.static_range(RUNS):
            a = x_run(x, run_start(u, run, BLOCK, PER_BLOCK, RUNS, PERIOD), there)
            dot = chain(dot, numbers(codes, runs, run, FORMAT, CODE, GROUP, NATIVE), a, EXACT)
            if GATED:
                dot2 = chain(dot2, numbers(codes2, runs2, run, FORMAT, CODE, GROUP, NATIVE), a, EXACT)
            if SECOND == "bias":
                sums = sum_on(sums, a)
        if CODE == "":
            acc, acc2 = dot, dot2
        else:
            x_step = 1.0
            if X_SCALED:
                at = x_scale + u * (8 * RUNS) // 128
                x_step = tl.load(tl.max_contiguous(at, [1, 1, 2]), mask=there, other=0)
            acc = acc + scaled(dot, sums, stored, extra, second, x_step, CODE, SCALE, SECOND)
            if GATED:
                acc2 = acc2 + scaled(dot2, sums, stored2, extra2, v_second, x_step, CODE, SCALE, SECOND)
        codes, stored, extra = codes_, stored_, extra_
        if GATED:
            codes2, stored2, extra2 = codes2_, stored2_, extra2_
    return butterfly(acc, 32), butterfly(acc2, 32)
