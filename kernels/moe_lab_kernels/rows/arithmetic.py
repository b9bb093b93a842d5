"""The numeric choices in which 8-bit activations and integer products differ, and the layouts that fix them.

A layout (`LAYOUTS`) is ggml's or DeepSeek's: how many values share a scale, the scale's dtype, which sums are kept,
how a code is rounded. `Arithmetic` switches one choice at a time on top of it; of its choices `product_dtype`, `order`
and `k_split` are a product's, and the quantisers pass them by. Knows no weights.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

import torch

from moe_lab.errors import LabError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Block = Literal[32, 64, 128, 256]
ScaleDtype = Literal["fp16", "bf16", "fp32", "e8m0"]
SumKind = Literal["raw", "raw_all", "quantised", "none"]
SumDtype = Literal["fp16", "bf16", "fp32"]
Rounding = Literal["divide", "reciprocal", "multiply", "divide_even", "reciprocal_even", "multiply_even"]
ProductDtype = Literal["integer", "int8", "fp16", "bf16", "fp32"]
Order = Literal["blocks", "mmq", "super_blocks", "mmvq", "pairwise", "exact"]
OF_PRODUCTS = ("product_dtype", "order", "k_split")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One or more choices; None keeps the layout's. With x a value, amax the largest magnitude of its block, and
    top = 127 (448 for fp8):

    block       values that share a scale: 32, 64, 128 or 256
    scale_dtype what the stored scale is rounded to: "fp16", "bf16", "fp32"; for fp8 "fp32", or "e8m0": rounded up to a
                power of two, kept as fp32. Codes come from the fp32 scale before that rounding, except with "e8m0"
    product_dtype what a weight's float scale times its sub-block scale becomes: rounded to "fp16" (ggml's prefill arm),
                "bf16", "fp32"; "integer": the sub-block scale multiplies the integer dot instead (its decode arm);
                "int8": it is folded into the codes, which has the numbers of "integer" (the fast form)
    sum         what is kept for a weight's minimum: "raw" sums of the values as they came (d2s6: of 6 of every 8
                groups), "raw_all" of all groups, "quantised" scale * sum of codes, "none"
    sum_dtype   "fp16", "bf16" or "fp32", for all but safe sums
    rounding    "divide": d = amax / top, code = x / d; "reciprocal": code = x * (1 / d) with that d; "multiply":
                inv = top / amax, code = x * inv, d = 1 / inv. Each operation is rounded once, in fp32. Codes of int8
                go to the nearest integer, halves away from zero, or to even with the suffix "_even"
    order       of a product's additions: "blocks" group after group, as the lab's kernels add; "mmq" groups of 256
                values in sequence, then those; "super_blocks" groups of 256 values exactly (integers under one scale:
                the folded form), each rounded once, then those in sequence; "mmvq" over ggml's threads, then halves
                against halves; "pairwise"; "exact" in float64 with one rounding
    k_split     runs of whole 256-value blocks (1, 2, ..) that a row is cut into, each added by itself, then their sums
                in sequence
    safe_sum    sums of codes as int16 (at most 32 * 127), which cannot overflow as fp16 sums do past 65504; a `sum`
                asked for alone switches them off

    LabError for a value outside these, and for safe sums of raw values.
    """

    block: Block | None = None
    scale_dtype: ScaleDtype | None = None
    product_dtype: ProductDtype | None = None
    sum: SumKind | None = None
    rounding: Rounding | None = None
    order: Order | None = None
    k_split: int | None = None
    safe_sum: bool | None = None
    sum_dtype: SumDtype | None = None

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                choices = ", ".join(map(repr, known))
                raise LabError(f"Arithmetic: {name}={value!r}; it must be one of {choices}, or None.")
        if self.k_split is not None and (type(self.k_split) is not int or self.k_split < 1):
            raise LabError(f"Arithmetic: k_split={self.k_split!r}; it must be a whole number from 1 on, or None.")
        if self.safe_sum and self.sum not in (None, "quantised"):
            raise LabError(f"Arithmetic: safe_sum adds codes, so sum must be 'quantised' or None, got {self.sum!r}.")


_KNOWN: dict[str, tuple] = {
    "block": get_args(Block),
    "scale_dtype": get_args(ScaleDtype),
    "product_dtype": get_args(ProductDtype),
    "order": get_args(Order),
    "sum": get_args(SumKind),
    "sum_dtype": get_args(SumDtype),
    "rounding": get_args(Rounding),
    "safe_sum": (False, True),
}


@dataclass(frozen=True, slots=True)
class ActivationLayout:
    """A layout with every choice made; those of `Arithmetic` mean what they mean there.

    unit: rows are padded with zeros to a multiple of it. sum_group: values a sum covers. sums_kept: sums stored of
    every 8 groups. in_fours: a raw sum adds four consecutive values in sequence before the halves; else halves alone.
    signed: the scale has the sign that makes the first largest value's code -127.
    """

    name: str
    unit: int
    block: Block
    scale_dtype: ScaleDtype
    rounding: Rounding
    sum: SumKind = "none"
    sum_dtype: SumDtype = "fp16"
    safe_sum: bool = False
    sum_group: int = 32
    sums_kept: int = 8
    in_fours: bool = True
    signed: bool = False

    @property
    def way(self) -> str:
        """The rounding without its ties: "divide", "reciprocal" or "multiply"."""
        return self.rounding.removesuffix("_even")

    @property
    def ties_to_even(self) -> bool:
        """Whether halves go to even; else away from zero."""
        return self.rounding.endswith("_even")

    @property
    def adds(self) -> Literal["raw", "quantised", "codes", "none"]:
        """What a sum adds: values as they came, codes times the scale, codes alone, or nothing."""
        if self.safe_sum:
            return "codes"
        return "raw" if self.sum == "raw_all" else self.sum

    @property
    def scale_storage(self) -> torch.dtype:
        """The dtype that holds the scales."""
        return DTYPES["fp32" if self.scale_dtype == "e8m0" else self.scale_dtype]

    @property
    def sum_storage(self) -> torch.dtype:
        """The dtype that holds the sums."""
        return torch.int16 if self.safe_sum else DTYPES[self.sum_dtype]


LAYOUTS: dict[str, ActivationLayout] = {
    layout.name: layout
    for layout in (
        ActivationLayout("q8_0", 32, 32, "fp16", "reciprocal"),
        ActivationLayout("q8_1", 32, 32, "fp16", "divide", "raw", in_fours=False),
        ActivationLayout("d4", 128, 32, "fp32", "multiply"),
        ActivationLayout("ds4", 128, 32, "fp16", "multiply", "raw"),
        ActivationLayout("d2s6", 128, 64, "fp16", "multiply", "raw", sum_group=16, sums_kept=6),
        ActivationLayout(
            "q8_k", 256, 256, "fp32", "multiply_even", "quantised", safe_sum=True, sum_group=16, signed=True
        ),
        ActivationLayout("fp8", 128, 128, "fp32", "divide"),
    )
}


def layout_of(name: str, changes: Arithmetic | None = None) -> ActivationLayout:
    """A layout by name, with `changes` made to it. LabError for an unknown name and a choice it cannot have."""
    if name not in LAYOUTS:
        raise LabError(f"no activation layout is called {name!r}; known: {', '.join(LAYOUTS)}.")
    layout = LAYOUTS[name]
    if changes is None:
        return layout
    given = {f.name: getattr(changes, f.name) for f in fields(changes) if f.name not in OF_PRODUCTS}
    made = {name: choice for name, choice in given.items() if choice is not None}
    if changes.safe_sum:
        made["sum"] = "quantised"
    elif changes.sum is not None and changes.safe_sum is None:
        made["safe_sum"] = False
    out = replace(layout, **made)
    if name == "fp8":
        if out.scale_dtype not in ("fp32", "e8m0") or out.sum != "none" or out.ties_to_even:
            raise LabError(f"fp8 has fp32 or e8m0 scales, no sums, and its codes round to even anyway, got {changes}.")
    elif out.scale_dtype == "e8m0":
        raise LabError(f"{name} keeps fp16, bf16 or fp32 scales; e8m0 belongs to fp8.")
    return replace(out, unit=max(out.unit, out.block), sums_kept=out.sums_kept if out.sum == "raw" else 8)
