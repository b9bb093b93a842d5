"""The ten numeric choices of a layer with 8-bit activations, and the two sides of a comparison.

(a) to (g) are a product's (`lab.Arithmetic`), per weight format; (h) to (j) are the layer's. An eleventh, (k), stands
beside them where an arm does not serve the shared expert's formats, so that the layer gives it to another arm. A
`Setting` is one side; `Mixed` takes single choices from the other side, which is how one cause is told from another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from moe_lab.errors import LabError
from moe_lab.formats import Arithmetic
from moe_lab.formats.layouts import LAYOUTS
from moe_lab.numerics.emulation import arithmetic_of
from moe_lab.parity.attribution import Choice
from moe_lab.parity.stored import split_weights
from moe_lab_kernels.mmq.operands import FOLDED

Kind = Literal["gemv", "mmq", "mmq_folded"]
KNOWN: dict[str, Kind] = {
    "gemv": "gemv", "per_token": "gemv", "table": "gemv", "mmq": "mmq", "mmq_folded": "mmq_folded",
}  # fmt: skip
"""Arm -> the arithmetic that it computes by: ggml's decode arm, its prefill arm, or the folded form of that."""

NAMES = {
    "a": "scale block", "b": "scale dtype", "c": "weight products", "d": "sums for the minimum", "e": "rounding",
    "f": "order of fp32 sums", "g": "split of the row", "h": "store points", "i": "place of the weight",
    "j": "order of the experts", "k": "shared expert's arm", "w": "weights' format",
}  # fmt: skip
FIELDS = {
    "a": ("block",), "b": ("scale_dtype",), "c": ("product_dtype",), "d": ("sum", "safe_sum", "sum_dtype"),
    "e": ("rounding",), "f": ("order",), "g": ("k_split",), "h": ("stores",), "i": ("weight_place",),
    "j": ("combine_order",), "k": ("shared_arm",),
}  # fmt: skip
PLAIN = ("f32", "f16", "bf16")
STORES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kind_of(arm: str) -> Kind | None:
    """The arithmetic that an arm's name stands for, None where it has none that can be emulated. With a layout, as
    "gemv@planar", it is the arm's: the integers are the same in every layout, and so is each of the ten choices; what
    is left, the order in which a layout's kernel adds in fp32, moves a product by 1e-14. With weights, as "gemv:q4_k",
    it is the arm's too: which choices follow from a format is `Setting.arithmetic`'s to say."""
    name, at, layout = split_weights(arm)[0].partition("@")
    return KNOWN.get(name) if not at or layout in LAYOUTS else None


def known(arm: str) -> bool:
    """Whether an arm's name stands for an arithmetic that can be emulated."""
    return kind_of(arm) is not None


def _arithmetic(format: str, kind: Kind) -> Arithmetic:
    """The folded form multiplies q8_k rows as ggml's CPU does, sub-block scales in the codes, 256 values in integers; a
    format without sub-block scales keeps the prefill arm's arithmetic."""
    if kind != "mmq_folded":
        return arithmetic_of(format, kind)
    if format not in FOLDED:
        return arithmetic_of(format, "mmq")
    return replace(arithmetic_of(format, "cpu"), product_dtype="int8", order="super_blocks")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side: an arm's arithmetic for each format, changed by `changes` in all of them, and the layer's choices.

    arm: one of `KNOWN`, with a layout or without ("gemv@planar"), which changes nothing but the name.
    stores: dtype that gate, up, hidden and down rows pass through. weight_place: the routing weight on the "output", or
    on the "hidden" rows before down's quantising. combine_order: "rank" or "expert" (ascending id). shared_arm: an
    arm that takes the shared expert in place of this arithmetic. LabError for other words, and for an arm without 8-bit
    activations.
    """

    arm: str = "gemv"
    changes: Arithmetic | None = None
    stores: Literal["fp32", "bf16", "fp16"] = "fp32"
    weight_place: Literal["output", "hidden"] = "output"
    combine_order: Literal["rank", "expert"] = "rank"
    shared_arm: str | None = None

    def __post_init__(self) -> None:
        if not known(self.arm):
            arms, layouts = (", ".join(map(repr, names)) for names in (KNOWN, LAYOUTS))
            raise LabError(f"Setting.arm is {self.arm!r}; wanted {arms}, alone or with @ and a layout ({layouts}).")
        for name, allowed in (
            ("stores", tuple(STORES)), ("weight_place", ("output", "hidden")), ("combine_order", ("rank", "expert")),
        ):  # fmt: skip
            if getattr(self, name) not in allowed:
                raise LabError(f"Setting.{name} is {getattr(self, name)!r}; wanted {', '.join(map(repr, allowed))}.")

    def arithmetic(self, format: str) -> Arithmetic:
        """Every choice of a product with weights in `format`. LabError for a format without 8-bit arithmetic."""
        kind = kind_of(self.arm)
        assert kind is not None
        whole = _arithmetic(format, kind)
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

    def _layer(self, letter: str) -> Any:
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

    @property
    def shared_arm(self) -> str | None:
        """As Setting's."""
        return self._layer("k")


def choices(
    a: Setting, b: Setting, formats: Sequence[str], letters: Collection[str] = "abcdefghijk", *, weights: tuple = ()
) -> list[Choice]:
    """What either side chose, letter by letter; where formats differ in it, each with its own. (k) stands among them
    only where the sides differ in it: no numeric choice, but what else tells two arms' outputs apart. So does (w), of
    `weights`: either side's name for what it multiplies with. Formats that leave activations as they are have none of
    (a) to (g)."""
    quantised = [f for f in formats if not is_plain(f)]
    found = [Choice(c, NAMES[c], said(a, c, quantised), said(b, c, quantised)) for c in NAMES if c in letters]
    found += [Choice("w", NAMES["w"], *weights)] if weights else []
    return [choice for choice in found if choice.letter not in "kw" or choice.differs]


def is_plain(format: str) -> bool:
    """Whether weights in a format are floating-point numbers, with which every arm multiplies unquantised rows."""
    return format in PLAIN


def said(side: Setting, letter: str, formats: Sequence[str]) -> str:
    """A side's choice in words."""
    if letter == "k":
        return side.shared_arm or "as routed"
    if letter in "hij":
        return str(getattr(side, FIELDS[letter][0]))
    by_format = {f: _words(letter, side.arithmetic(f)) for f in dict.fromkeys(formats)}
    words = set(by_format.values()) or {"none"}
    return words.pop() if len(words) == 1 else ", ".join(f"{f}: {w}" for f, w in by_format.items())


def _words(letter: str, made: Arithmetic) -> str:
    if letter == "d":
        return "codes" if made.safe_sum else "none" if made.sum == "none" else f"{made.sum} {made.sum_dtype}"
    return str(getattr(made, FIELDS[letter][0]))
