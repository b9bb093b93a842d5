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
    "router/product": Tolerance(
        4e-6, "relative to the sum of |x_i w_i|",
        "fp32 sums of 256 products at a time, 16 to a tensor-core step that may truncate: 16 steps of 2^-23 each is "
        "2e-6, and the segments' sum the same again; fp32 chains give 1e-7.",
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
    "trace/activations": Tolerance(
        1e-3, "margin between the K-th and (K+1)-th probability",
        "Recorded MoE inputs are fp16, which moved the recorded probabilities by up to 3e-4 (3,072 rows measured); "
        "below three times that the choice may differ from the one made on fp32 inputs.",
    ),
}  # fmt: skip


def tol(name: str) -> float:
    """The bound of a row. LabError for an unknown name."""
    if name not in TOLERANCES:
        raise LabError(f"no tolerance is called {name!r}; known: {', '.join(TOLERANCES)}.")
    return TOLERANCES[name].bound
