"""The ten numeric choices of a layer with 8-bit activations, and the two sides of a comparison.

(a) to (g) are a product's (`lab.Arithmetic`), per weight format; (h) to (j) are the layer's. A `Setting` is one side;
`mixed` takes single choices from the other side, which is how one cause is told from another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from moe_lab.emulation import arithmetic_of
from moe_lab.errors import LabError
from moe_lab.formats import Arithmetic
from moe_lab.parity.attribution import Choice

KNOWN: dict[str, Literal["gemv", "mmq"]] = {"gemv": "gemv", "per_token": "gemv", "table": "gemv", "mmq": "mmq"}
"""Arm -> ggml's arm whose arithmetic it computes by."""

NAMES = {
    "a": "scale block", "b": "scale dtype", "c": "weight products", "d": "sums for the minimum", "e": "rounding",
    "f": "order of fp32 sums", "g": "split of the row", "h": "store points", "i": "place of the weight",
    "j": "order of the experts",
}  # fmt: skip
FIELDS = {
    "a": ("block",), "b": ("scale_dtype",), "c": ("product_dtype",), "d": ("sum", "safe_sum", "sum_dtype"),
    "e": ("rounding",), "f": ("order",), "g": ("k_split",), "h": ("stores",), "i": ("weight_place",),
    "j": ("combine_order",),
}  # fmt: skip
STORES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def known(arm: str) -> bool:
    """Whether an arm's name stands for an arithmetic that can be emulated."""
    return arm in KNOWN


@dataclass(frozen=True, slots=True)
class Setting:
    """One side: an arm's arithmetic for each format, changed by `changes` in all of them, and the layer's choices.

    stores: dtype that gate, up, hidden and down rows pass through. weight_place: the routing weight on the "output", or
    on the "hidden" rows before down's quantising. combine_order: "rank" or "expert" (ascending id). LabError for other
    words, and for an arm without 8-bit activations.
    """

    arm: str = "gemv"
    changes: Arithmetic | None = None
    stores: Literal["fp32", "bf16", "fp16"] = "fp32"
    weight_place: Literal["output", "hidden"] = "output"
    combine_order: Literal["rank", "expert"] = "rank"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("arm", tuple(KNOWN)), ("stores", tuple(STORES)), ("weight_place", ("output", "hidden")),
            ("combine_order", ("rank", "expert")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise LabError(f"Setting.{name} is {getattr(self, name)!r}; wanted {', '.join(map(repr, allowed))}.")

    def arithmetic(self, format: str) -> Arithmetic:
        """Every choice of a product with weights in `format`. LabError for a format without 8-bit arithmetic."""
        whole = arithmetic_of(format, KNOWN[self.arm])
        if self.changes is None:
            return whole
        made = {f.name: v for f in fields(Arithmetic) if (v := getattr(self.changes, f.name)) is not None}
        return replace(whole, **made)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Side a with the choices `letters` taken from side b; offers what a Setting does."""

    a: Setting
    b: Setting
    letters: frozenset[str]

    def arithmetic(self, format: str) -> Arithmetic:
        """As Setting's."""
        mine, other = self.a.arithmetic(format), self.b.arithmetic(format)
        taken = [name for letter in "abcdefg" if letter in self.letters for name in FIELDS[letter]]
        return replace(mine, **{name: getattr(other, name) for name in taken})

    def _layer(self, letter: str) -> str:
        return getattr(self.b if letter in self.letters else self.a, FIELDS[letter][0])

    @property
    def stores(self) -> str:
        """As Setting's."""
        return self._layer("h")

    @property
    def weight_place(self) -> str:
        """As Setting's."""
        return self._layer("i")

    @property
    def combine_order(self) -> str:
        """As Setting's."""
        return self._layer("j")


def choices(a: Setting, b: Setting, formats: Sequence[str], letters: Collection[str] = "abcdefghij") -> list[Choice]:
    """What either side chose, letter by letter; where formats differ in it, each with its own."""
    return [Choice(c, NAMES[c], said(a, c, formats), said(b, c, formats)) for c in NAMES if c in letters]


def said(side: Setting, letter: str, formats: Sequence[str]) -> str:
    """A side's choice in words."""
    if letter in "hij":
        return str(getattr(side, FIELDS[letter][0]))
    by_format = {f: _words(letter, side.arithmetic(f)) for f in dict.fromkeys(formats)}
    words = set(by_format.values())
    return words.pop() if len(words) == 1 else ", ".join(f"{f}: {w}" for f, w in by_format.items())


def _words(letter: str, made: Arithmetic) -> str:
    if letter == "d":
        return "codes" if made.safe_sum else "none" if made.sum == "none" else f"{made.sum} {made.sum_dtype}"
    return str(getattr(made, FIELDS[letter][0]))
