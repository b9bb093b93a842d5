"""Decode steps whose values go through shared memory: a thread makes 64 weights of one row out of whole words.

The tensor core's own layout gives a thread 4 of the 16 values that share a scale, so in registers every thread of four
decodes the same scales. Here a thread owns a unit, half a row's words of a step, and decodes each scale once.

`staged_words` loads a step's words as they lie, `staged_values` makes the step's values of them, in the operands' dtype
and with the bits of `steps.block_values` or `steps.scaled_values` rounded once. `STAGED` says which formats have it,
and how many values of a row a step takes, in parts of how many.
"""
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false

import torch

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.grouped.staged_lookup import q2_k_pairs, q2_k_words, q3_k_pairs, q3_k_words
from moe_lab_kernels.grouped.staged_nibbles import e2m1_pairs, e2m1_words, q4_k_pairs, q4_k_words
from moe_lab_kernels.grouped.staged_parts import floats
from moe_lab_kernels.grouped.staged_six import q6_k_pairs, q6_k_words
from moe_lab_kernels.grouped.steps import Step

# Parts of 32 or 64 values, whichever spreads a step's stores over all banks of shared memory.
STAGED = {
    "q2_k": Step(128, 32),
    "q3_k": Step(128, 32),
    "q4_k": Step(128, 32),
    "q6_k": Step(128, 32),
    "mxfp4_oss": Step(128, 64),
}


def why_not_staged(w: Weight, dtype: torch.dtype) -> str | None:
    """None when these weights can be decoded by whole words for operands of `dtype`."""
    if w.format not in STAGED:
        return f"(formats that are: {', '.join(STAGED)})"
    if w.format == "mxfp4_oss" and dtype != torch.bfloat16:
        return f"for {dtype} rows"  # whose exponents do not hold every scale
    whole_steps = w.kd % STAGED[w.format].values == 0  # then scales are read as words too
    for t in () if w.scales is None else (w.data, w.scales) if whole_steps else (w.data,):
        if t.data_ptr() % 4 or any(s % 4 for s in t.stride()[:2]):
            return "unless their rows start at 4-byte addresses"
    return None


@jit
def staged_words(w, scale, step, Kd, FORMAT: tl.constexpr, EVEN: tl.constexpr):
    """What a step needs of each row. w: uint8 pointers [R, 1] to rows; scale: to a row's scales, where it has some."""
    if FORMAT == "q2_k":
        out = q2_k_words(w, step)
    elif FORMAT == "q3_k":
        out = q3_k_words(w, step)
    elif FORMAT == "q4_k":
        out = q4_k_words(w, step)
    elif FORMAT == "q6_k":
        out = q6_k_words(w, step)
    else:
        tl.static_assert(FORMAT == "mxfp4_oss")
        out = e2m1_words(w, scale, step, Kd, EVEN)
    return out


@jit
def staged_values(raw, step, like: tl.constexpr, FORMAT: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Parts [R, values of a part] in the dtype `like`."""
    if FORMAT == "q2_k":
        pairs = q2_k_pairs(raw, like, NATIVE)
    elif FORMAT == "q3_k":
        pairs = q3_k_pairs(raw, step % 2, like, NATIVE)
    elif FORMAT == "q4_k":
        pairs = q4_k_pairs(raw, step % 2, like, NATIVE)
    elif FORMAT == "q6_k":
        pairs = q6_k_pairs(raw, like, NATIVE)
    else:
        pairs = e2m1_pairs(raw, like, EVEN, NATIVE)
    if FORMAT == "mxfp4_oss":
        v0, v1 = pairs
        out = (floats(v0, 64, like, NATIVE), floats(v1, 64, like, NATIVE))
    else:
        v0, v1, v2, v3 = pairs
        out = (floats(v0, 32, like, NATIVE), floats(v1, 32, like, NATIVE), floats(v2, 32, like, NATIVE),
               floats(v3, 32, like, NATIVE))  # fmt: skip
    return out
