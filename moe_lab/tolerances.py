"""How close is close enough: one table, each row with its reason. No test keeps a bound of its own.

Bounds on "relative to the largest output" use max|a - b| / max|b|; NMSE is sum (a - b)^2 / sum b^2.
"""

from typing import NamedTuple

from moe_lab.errors import LabError


class Tolerance(NamedTuple):
    """A bound, the measure it bounds, and why it is what it is."""

    bound: float
    measure: str
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    "reference/loop": Tolerance(
        2e-6, "relative to the largest output",
        "The reference groups rows by expert; BLAS then sums 256 fp32 products in another order than one row's dot.",
    ),
    "reference/transformers": Tolerance(
        2e-6, "relative to the largest output",
        "The same fp32 mathematics with sums in another order (transformers adds experts by id, we by rank).",
    ),
    "route/transformers": Tolerance(
        2e-6, "relative to the largest weight",
        "The router product in fp32 there, in float64 here: 1e-7 of a logit, a few times that behind an exponential.",
    ),
    "margin/fp16 inputs": Tolerance(
        3e-4, "difference of choice scores",
        "The router in float64 on inputs stored as fp16, against the model's own run in fp32: 9e-5 measured on the "
        "shipped model; picks may differ only where the margin is below this (7e-6 to 2e-5 measured).",
    ),
    "gemv/emulation": Tolerance(
        1e-12, "NMSE",
        "Integer parts are exact and scales equal, so only the order of fp32 sums differs: 5e-15 measured, "
        "while a wrong scale dtype gives 5e-8.",
    ),
    "gemv/layer": Tolerance(
        5e-4, "NMSE",
        "Two rounds of 8-bit activations: 3e-5 a product on Gaussian rows and up to 1e-4 on SwiGLU outputs, whose "
        "largest value of 32 sets the scale for 31 small ones.",
    ),
    "gemv/product": Tolerance(
        6e-5, "NMSE",
        "One product with q8_1 activations and genuinely quantised weights on Gaussian rows: 3e-5 measured for "
        "q2_k, q3_k and q8_0, twice that is the budget.",
    ),
    "gemv/q4_0 layer": Tolerance(
        2e-3, "NMSE",
        "As gemv/layer, but its codes are unsigned and the 8 is taken back with sums of unquantised values, so the "
        "error of the activations meets codes of one sign: 2e-4 a product, 8e-4 on SwiGLU outputs; 9.6e-4 measured.",
    ),
    "gemv/fp8 rows": Tolerance(
        5e-3, "NMSE",
        "Two rounds of e4m3 activations, half a step of 2^-3 each at most: (2^-4)^2 / 3 is 1.3e-3 at worst and half of "
        "that on average, and the second round meets SwiGLU outputs: 2.4e-3 measured.",
    ),
    "gemv/float product": Tolerance(
        1e-11, "NMSE",
        "fp32 products and sums in another order than BLAS; affine codes lose three bits to their bias: 1.3e-13 "
        "measured at Kd = 704.",
    ),
    "replay/sum": Tolerance(
        0.01, "relative to the wall time",
        "Phases, waits and marks come from different stamps of one clock: they add up to the wall but for the "
        "microseconds between two stamps; 1e-6 measured, the issue asks for 1 %.",
    ),
    "mmq/emulation": Tolerance(
        1e-12, "NMSE",
        "As gemv/emulation, for ggml's prefill arithmetic: integers exact, scales equal, fp32 sums in another order.",
    ),
    "mmq/arms": Tolerance(
        2e-7, "NMSE",
        "Decode arm against prefill arm where no minimum is summed (q3_k q6_k q8_0 mxfp4 nvfp4): scales in fp16 or "
        "fp32, x / d or x * inv, 5e-8.",
    ),
    "mmq/layer": Tolerance(
        5e-3, "NMSE",
        "Two rounds of 8-bit activations with raw sums: 2e-4 a product on Gaussian rows, 6e-4 on SwiGLU outputs "
        "(q4_k, q5_k), three products; a forgotten expert gives 1e-2 and more.",
    ),
    "mmq/row": Tolerance(
        2e-2, "NMSE",
        "One row of such a layer: 4.7e-3 (q4_k) and 5.8e-3 (q5_k) measured, five times its layer's; a row without one "
        "of its two experts is 0.3 off.",
    ),
    "mmq/finding": Tolerance(
        0.2, "relative to the recorded NMSE",
        "Hundreds of tokens and rows leave a few per cent of noise; a wrong choice among the seven moves the NMSE by "
        "30 % and more.",
    ),
    "bench/layer": Tolerance(
        5e-4, "NMSE",
        "What a benchmark takes for right: two rounds of 8-bit activations, as gemv/layer; a forgotten expert "
        "gives 1e-2 and more.",
    ),
    "bench/row": Tolerance(
        5e-3, "NMSE",
        "One row of a benchmarked layer; rows differ in how much their experts cancel: 4e-4 measured for 8-bit "
        "activations, while a row 10 % off gives 1e-2.",
    ),
    "router/product": Tolerance(
        4e-6, "relative to the sum of |x_i w_i|",
        "fp32 sums of 256 products at a time, 16 to a tensor-core step that may truncate: 16 steps of 2^-23 each is "
        "2e-6, and the segments' sum the same again; fp32 chains give 1e-7.",
    ),
    "grouped/product": Tolerance(
        1e-9, "NMSE",
        "Exact products of 16-bit operands, fp32 sums in the tensor core that may truncate: up to 2^-23 a step of 16, "
        "all to one side, is 2e-5 of a sum over 2,880 and 4e-10 squared; a bf16 rounding anywhere would be 3e-6.",
    ),
    "grouped/fp8 product": Tolerance(
        4e-6, "NMSE",
        "Exact products of e4m3 values; 128 of them are four steps of the fp8 tensor core, which aligns what it adds "
        "to the largest and keeps some 13 bits: 4 * 2^-13 of terms up to four times the sum, squared.",
    ),
    "store/bf16": Tolerance(
        1e-4, "NMSE",
        "Five store points in bf16 (2^-9 relative each, uncorrelated): 5 * (2^-9)^2 / 3 = 6e-6 plus the sum over K.",
    ),
    "store/f16": Tolerance(
        2e-6, "NMSE", "As store/bf16 with 2^-12 a store: 5 * (2^-12)^2 / 3 = 1e-7 plus the sum over K.",
    ),
    "activation/f32": Tolerance(
        3e-5, "relative to |b| + tiny",
        "exp of an fp32 argument z: two or three roundings of z cost up to 3 |z| * 2^-24, and |z| is 70 where the "
        "result "
        "is tiny (1e-30). Values that matter (|z| < 10) are within 2e-6.",
    ),
    "activation/f16": Tolerance(
        1e-3, "relative to |b| + tiny", "One unit in the last place of fp16 (2^-10) when fp32 values straddle a tie.",
    ),
    "activation/bf16": Tolerance(
        8e-3, "relative to |b| + tiny", "One unit in the last place of bf16 (2^-7) when fp32 values straddle a tie.",
    ),
    "analysis/pairs": Tolerance(
        1e-8, "absolute, of a probability",
        "Inclusion probabilities are fitted to 1e-10; a pair's probability follows them with a factor below the number "
        "of experts in the cases tested.",
    ),
    "emulation/layer": Tolerance(
        1e-8, "NMSE",
        "An arm against its emulation, which adds in the lab's own order: where the arm's torch path adds otherwise, "
        "hidden rows differ by 1e-7 and a few of their codes by one: 2.5e-10 measured; one choice that is not the "
        "arm's gives 2e-7 and more.",
    ),
    "carry/recorded": Tolerance(
        4e-3, "absolute",
        "Rows recorded as fp16 (values below 8, so 2^-9 at most) against fp32: 0.0020 measured, but for tokens one of "
        "whose picks hung on a tie.",
    ),
    "runs/coverage": Tolerance(
        0.03, "absolute, of a share",
        "How often a 95 % bootstrap interval holds the ratio: 95.6 % to 96.9 % measured for 5 to 60 samples (the "
        "percentile interval of a median runs a little wide); 400 trials have a standard error of 1.1 %.",
    ),
    "runs/interval": Tolerance(
        0.02, "relative to each end",
        "Two bootstraps of 2,000 and 4,000 draws agree to their own noise: up to 1.1 % measured at n = 21.",
    ),
    "stream/memory plan": Tolerance(
        0.05, "relative to the plan's bytes",
        "What the process grows by against what the plan says: pages are exact, huge pages round up by 2 MiB, and the "
        "allocators of Python and torch take a little more.",
    ),
    "trace/activations": Tolerance(
        1e-3, "margin between the K-th and (K+1)-th probability",
        "Recorded MoE inputs are fp16, which moved the recorded probabilities by up to 3e-4 (3,072 rows measured); "
        "below three times that the choice may differ from the one made on fp32 inputs.",
    ),
    **{f"quantise/{name}": Tolerance(
        bound, "NMSE", "Gaussian rows: a fifth above what ggml's own bytes give; the bits a weight decide it.",
    ) for name, bound in {
        "q8_0": 3.5e-5, "q4_0": 8.9e-3, "q2_k": 0.106, "q3_k": 0.0275, "q4_k": 6.2e-3, "q5_k": 1.6e-3, "q6_k": 3.8e-4,
        "mxfp4": 0.016, "nvfp4": 0.011,
    }.items()},
}  # fmt: skip


def tol(name: str) -> float:
    """The bound of a row. LabError for an unknown name."""
    if name not in TOLERANCES:
        raise LabError(f"no tolerance is called {name!r}; known: {', '.join(TOLERANCES)}.")
    return TOLERANCES[name].bound
