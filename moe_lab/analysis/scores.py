"""A layer's router, asked for more than its picks: its logits, and its experts in order of choice."""

from dataclasses import replace

import torch

from moe_lab._types import Float, Float32, Int, Tensor
from moe_lab.block import router_logits
from moe_lab.errors import LabError
from moe_lab.layer import MoELayer
from moe_lab.routing import route


def layer_logits(layer: MoELayer, x: Float[Tensor, "T D"]) -> Float32[Tensor, "T R"]:
    """The layer's router logits for rows x, product in float64, rounded once: what `layer.route(x)` picks from."""
    return router_logits(x, layer.router_weights, layer.spec)


def ranking(layer: MoELayer, x: Float[Tensor, "T D"], width: int) -> Int[Tensor, "T W"]:
    """Ids of the `width` experts with the best choice scores, best first (C1 order); the first K are the picks.

    LabError for a hash router, which ranks nothing, and for a width that the router's groups or R cannot fill.
    """
    spec = layer.spec.router
    if spec.hash_routing:
        raise LabError(f"layer {layer.number} picks by a table of token ids: there is no order beyond its K picks.")
    if spec.weights_from == "sparsemixer":
        spec = replace(spec, score="none", weights_from="softmax_topk")  # the same order, for any number of picks
    own = layer.router_weights
    with torch.inference_mode():
        return route(layer_logits(layer, x), replace(spec, top_k=width), correction_bias=own.correction_bias).ids
