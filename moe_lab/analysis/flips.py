"""Tokens whose experts change with the precision of the router: how many, how close they were, what they lose.

Two logits [T, R] of the same tokens, a (the reference) and b, go through `lab.route`. A token is flipped when the two
sets of experts differ; slot order does not count. margin = K-th minus (K+1)-th choice score of a, in the units of the
score (a probability for softmax): how far the token was from other experts. weight_moved = share of a's weight that sat
on experts which b does not pick.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_lab._types import Float, Tensor
from moe_lab.activations import Activations, Inputs
from moe_lab.analysis.frames import frame, pandas
from moe_lab.analysis.recorded import layer_numbers, layer_of, recorded, rows_for
from moe_lab.analysis.scores import layer_logits
from moe_lab.block import router_logits
from moe_lab.checks import wants, wants_tensor
from moe_lab.errors import LabError
from moe_lab.formats import quantize
from moe_lab.layer import MoELayer
from moe_lab.open import Checkpoint
from moe_lab.routing import choice_margin, route
from moe_lab.spec import RouterSpec

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("token", "flipped", "changed", "margin", "weight_moved")
LEAST_TOKENS = 20  # fewer in the first bin would draw a rate out of one or two tokens
RATE_COLUMNS = ("pair", "margin_from", "margin_to", "tokens", "flipped", "flip_rate")


def flips(
    a: Float[Tensor, "T R"],
    b: Float[Tensor, "T R"],
    spec: RouterSpec,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
) -> "pd.DataFrame":
    """A row a token: token, flipped, changed (experts of a that b does not pick), margin, weight_moved.

    Any two logits of one router: two dtypes, two weight formats, or its logits for what two arms fed it. LabError for
    shapes that differ or a hash router, whose picks no logit moves.
    """
    wants_tensor("a", a)
    wants_tensor("b", b)
    wants("spec", spec, RouterSpec, "a RouterSpec (of a layer: layer.spec.router)")
    if a.shape != b.shape:
        raise LabError(f"lab.analysis.flips compares equal shapes, got {tuple(a.shape)} and {tuple(b.shape)}.")
    if spec.hash_routing:
        raise LabError("lab.analysis.flips: a hash router takes its experts from a table; logits cannot flip them.")
    was, now = (
        route(z.float(), spec, correction_bias=correction_bias, per_expert_scale=per_expert_scale) for z in (a, b)
    )
    kept = (was.ids[:, :, None] == now.ids[:, None, :]).any(-1)
    weight = was.weights.double().abs()
    moved = torch.where(kept, torch.zeros_like(weight), weight).sum(-1)
    total = weight.sum(-1)
    share = torch.where(
        total > 0, moved / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(total)
    )
    margin = choice_margin(a.float(), spec, correction_bias=correction_bias)
    changed = (~kept).sum(-1)
    columns = [t.cpu().tolist() for t in (changed > 0, changed, margin, share)]
    return frame(zip(range(len(a)), *columns, strict=True), COLUMNS, "flips")


def bf16_result(layer: MoELayer, x: Tensor) -> Tensor:
    """Logits rounded to bf16 at the end: a router product that stores its result in the model's dtype."""
    return layer_logits(layer, x).bfloat16()


def bf16_inputs(layer: MoELayer, x: Tensor) -> Tensor:
    """x and the router's weight rounded to bf16, result in fp32: a bf16 product with fp32 accumulation and result."""
    return _product(layer, x.bfloat16().float(), layer.router.bfloat16().float())


def q8_0_weight(layer: MoELayer, x: Tensor) -> Tensor:
    """The router's weight stored as Q8_0 (blocks of 32, fp16 scale), product and result exact."""
    return _product(layer, x, quantize(layer.router.float(), "q8_0").dequantize())


ROUTER_VARIANTS: dict[str, Callable[[MoELayer, Tensor], Tensor]] = {
    "bf16 result": bf16_result,
    "bf16 inputs": bf16_inputs,
    "q8_0 weight": q8_0_weight,
}


def _product(layer: MoELayer, x: Tensor, weight: Tensor) -> Tensor:
    return router_logits(x, replace(layer.router_weights, weight=weight), layer.spec)


def router_flips(
    model: Checkpoint | Mapping[int, MoELayer],
    inputs: Activations | Inputs,
    variants: Mapping[str, Callable[[MoELayer, Tensor], Tensor]] | None = None,
) -> "pd.DataFrame":
    """`flips` of each layer's fp32 logits against each variant's, on recorded rows; columns layer and pair (the
    variant's name) in front.

    `variants`: name -> function (layer, x [T, D]) -> logits [T, R]; default: logits rounded to bf16, a product of bf16
    inputs, a Q8_0 router weight. Synthetic rows are refused.
    """
    numbers, rows_of = layer_numbers(model, "router_flips"), recorded(inputs, "router_flips")
    chosen = ROUTER_VARIANTS if variants is None else variants
    wants("variants", chosen, Mapping, "a mapping from name to function (layer, x) -> logits")
    if not chosen:
        raise LabError("lab.analysis.router_flips: variants is empty; name one function (layer, x) -> logits, or none.")
    parts = []
    for number in numbers:
        layer = layer_of(model, number)
        x, own = rows_for(layer, rows_of, number, "router_flips"), layer.router_weights
        exact = layer_logits(layer, x)
        for name, variant in chosen.items():
            found = flips(
                exact, variant(layer, x), layer.spec.router,
                correction_bias=own.correction_bias, per_expert_scale=own.per_expert_scale,
            )  # fmt: skip
            found.insert(0, "layer", number)
            found.insert(1, "pair", name)
            parts.append(found)
    return pandas("router_flips").concat(parts, ignore_index=True)


def flip_rate(df: "pd.DataFrame", edges: Sequence[float] | None = None) -> "pd.DataFrame":
    """A row for each (pair, margin bin [from, to)) with tokens in it: columns `RATE_COLUMNS`. `df`: rows of
    `router_flips`, or of `flips` (one pair, named "a vs b").

    Default bins: two a factor of ten, the first from 0 and wide enough for `LEAST_TOKENS` tokens of each pair. Infinite
    and NaN margins have no bin.
    """
    wants("df", df, pandas("flip_rate").DataFrame, "the DataFrame of lab.analysis.flips or router_flips")
    if lacking := [name for name in ("margin", "flipped") if name not in df]:
        raise LabError(
            f"lab.analysis.flip_rate: df lacks {', '.join(lacking)}; wanted the rows of flips or router_flips."
        )
    named = df if "pair" in df else df.assign(pair="a vs b")
    finite = named[np.isfinite(named["margin"])]
    bounds = np.array(_edges([g.to_numpy() for _, g in finite.groupby("pair")["margin"]]) if edges is None else edges)
    rows = []
    by_pair: Any = finite.groupby("pair", sort=False)
    for pair, group in by_pair:
        place = np.digitize(group["margin"], bounds) - 1
        flipped = group["flipped"].to_numpy()
        for i in range(len(bounds) - 1):
            inside = flipped[place == i]
            if len(inside):
                rows.append((pair, bounds[i], bounds[i + 1], len(inside), int(inside.sum()), float(inside.mean())))
    return frame(rows, RATE_COLUMNS, "flip_rate")


def _edges(margins: Sequence[np.ndarray]) -> list[float]:
    together = np.concatenate([np.zeros(1), *margins])
    top = together.max()
    if top == 0:
        return [0.0, 1.0]
    low, high = (int(np.floor(2 * np.log10(v))) for v in (together[together > 0].min(), top))
    edges = [10 ** (i / 2) for i in range(low + 1, high + 2)]
    while len(edges) > 1 and min((m < edges[0]).sum() for m in margins) < LEAST_TOKENS:
        edges.pop(0)
    return [0.0, *edges]
