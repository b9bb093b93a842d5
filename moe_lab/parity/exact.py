"""The layer's formula in float64 with unquantised activations: what every arm's error is measured against.

Weights are the decoded fp32 values, picks and routing weights are given; everything behind them, store points included,
is float64.
"""

from dataclasses import replace

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import ArmContext, batched_schedule, waves
from moe_lab.arms.dense import dense_mlp
from moe_lab.block import branch_rows, leave, routed_rows, shared_rows
from moe_lab.execution.parts import shared_formula
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing, plan


def exact_layer(layer: MoELayer, x: Float[Tensor, "T D"], routing: Routing) -> Float[Tensor, "T D"]:
    """The output for rows x and given picks in float64; 8 T K D bytes beside it. Slots without a pick add nothing."""
    spec, ids = layer.spec, routing.ids
    ctx = ArmContext(spec, "torch", torch.float64)
    x = x.detach().double()
    rows = routed_rows(x, spec, layer.latent, layer.norms, ctx.store)
    y = rows.new_zeros(len(x), routing.top_k, spec.d_routed)
    real = (ids >= 0) & (ids < spec.num_experts)
    if spec.router.zero_experts:
        y = torch.where(((ids >= 0) & ~real).unsqueeze(-1), rows.unsqueeze(1), y)
    schedule = batched_schedule(plan(replace(routing, width=spec.router.width), spec.num_experts))
    for step in schedule.steps:
        for wave in waves(step, layer.experts.slots):
            with layer.experts.lease([g.expert for g in wave]) as held:
                for g in wave:
                    pairs = slice(g.first, g.first + g.rows)
                    token, slot, weight = schedule.token[pairs], schedule.slot[pairs], schedule.weight[pairs]
                    y[token, slot] = dense_mlp(rows[token], held.stack, g.expert, ctx, weight)
    weights = routing.weights.double()
    if spec.weight_place != "output":
        weights = torch.where(real, torch.ones_like(weights), weights)
    routed = (y * torch.where(ids >= 0, weights, torch.zeros_like(weights)).unsqueeze(-1)).sum(1)
    return leave(routed, _shared(layer, x, ctx), x, spec, layer.latent, layer.norms, ctx.store)


def _shared(layer: MoELayer, x: Tensor, ctx: ArmContext) -> Tensor | None:
    """The shared branch's rows: gated, then normed, where the layer does so."""
    if layer.shared is None or layer.shared_stack is None:
        return None
    rows = shared_rows(x, layer.spec, layer.norms, ctx.store)
    made = dense_mlp(rows, layer.shared_stack, 0, replace(ctx, spec=shared_formula(layer.spec)))
    vector = layer.shared.gate_vector
    made = made if vector is None else made * torch.sigmoid(x @ vector.double()).unsqueeze(-1)
    return branch_rows(made, layer.spec, layer.norms, ctx.store)
