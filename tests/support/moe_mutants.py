"""Formulas that are wrong in one thing. Each changes a layer in place, and says whether it applies to that layer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from moe_lab.arms import dense
from moe_lab.execution import call as execution
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.routing import Routing, plan
from moe_lab.routing import router as routing_module
from moe_lab.stream.provider import ResidentExperts
from moe_lab.weights import as_quant

Mutant = Callable[[MoELayer, pytest.MonkeyPatch], bool]


def router(layer: MoELayer, **change: Any) -> bool:
    """Other router settings; True where they differ from the layer's own."""
    old = layer.spec
    layer.spec = replace(old, router=replace(old.router, **change))
    return layer.spec != old


def spec(layer: MoELayer, **change: Any) -> bool:
    old = layer.spec
    layer.spec = replace(old, **change)
    return layer.spec != old


def experts(layer: MoELayer, gate: QuantTensor, up: QuantTensor, *, biased: bool = True) -> bool:
    stack = layer.experts.stack  # type: ignore[union-attr]
    layer.experts = ResidentExperts.of(gate, up, stack.down, stack.biases if biased else None)
    return True


def bias_ignored(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    bias = layer.router_weights.correction_bias
    if bias is None:
        return False
    layer.router_weights = replace(layer.router_weights, correction_bias=torch.zeros_like(bias))
    return True


def weights_from_biased_scores(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
    bias = layer.router_weights.correction_bias
    right = routing_module.weights_of
    if bias is None:
        return False
    patch.setattr(routing_module, "weights_of", lambda z, s, ids, spec: right(z, s + bias.double(), ids, spec))
    return True


def no_clamp(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    shared = layer.spec.shared
    return spec(layer, limit=None, shared=None if shared is None else replace(shared, limit=None))


def shared_clamp_forgotten(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    shared = layer.spec.shared
    return shared is not None and spec(layer, shared=replace(shared, limit=None))


def activation(change: Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]) -> Mutant:
    """Gate and up changed before the right formula sees them."""

    def mutant(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
        right = dense.activate_dense
        if layer.spec.limit is None:
            return False

        def wrong(gate, up, spec):
            return right(gate, up, spec) if spec.limit is None else right(*change(gate, up, spec), spec)

        patch.setattr(dense, "activate_dense", wrong)
        return True

    return mutant


def no_plus_one(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
    def wrong(gate, up, spec):
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
        return gate * torch.sigmoid(spec.alpha * gate) * up

    patch.setattr(dense, "activate_dense", wrong)
    return layer.spec.limit_mode == "oai"


def exact_gelu(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
    patch.setitem(dense.ACTIVATIONS, "gelu_tanh", functional.gelu)
    return layer.spec.activation == "gelu_tanh"


def clamp_order(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    other = {"before": "after", "after": "before"}.get(layer.spec.limit_mode)
    return layer.spec.limit is not None and other is not None and spec(layer, limit_mode=other)


def gate_up_swapped(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    stack = layer.experts.stack  # type: ignore[union-attr]
    return layer.spec.gated and experts(layer, stack.up, stack.gate)


def other_layout(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    """Halves read as interleaved rows."""
    if not layer.spec.gated:
        return False
    stack = layer.experts.stack  # type: ignore[union-attr]
    fused = torch.cat([stack.gate.dequantize(), stack.up.dequantize()], 1)
    gate, up = fused[:, ::2], fused[:, 1::2]
    return experts(layer, as_quant(gate, "gate", tuple(gate.shape)), as_quant(up, "up", tuple(up.shape)))


def expert_biases_dropped(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    stack = layer.experts.stack  # type: ignore[union-attr]
    return layer.spec.expert_bias and experts(layer, stack.gate, stack.up, biased=False)


def router_bias_dropped(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    had = layer.router_weights.bias is not None
    layer.router_weights = replace(layer.router_weights, bias=None)
    return had


def shared_dropped(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
    if layer.spec.shared is None:
        return False
    patch.setattr(execution.Execution, "shared", lambda self: torch.zeros_like(self.x))
    return True


def next_best_expert(layer: MoELayer, patch: pytest.MonkeyPatch) -> bool:
    right, taken = execution.route_plan, layer.spec.router.width

    def wrong(logits, spec, **vectors):
        routing, _ = right(logits, spec, **vectors)
        shifted = Routing((routing.ids + 1) % taken, routing.weights, width=routing.width)
        return shifted, plan(shifted, layer.spec.num_experts)

    patch.setattr(execution, "route_plan", wrong)
    return True


def per_expert_scale_dropped(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    had = layer.router_weights.per_expert_scale is not None
    layer.router_weights = replace(layer.router_weights, per_expert_scale=None)
    return had


def weight_on_the_output(layer: MoELayer, _: pytest.MonkeyPatch) -> bool:
    return spec(layer, weight_place="output")


MUTANTS: dict[str, Mutant] = {
    "correction bias ignored": bias_ignored,
    "weights from biased scores": weights_from_biased_scores,
    "normalising flipped": lambda m, _: router(m, normalize=not m.spec.router.normalize),
    "scale dropped": lambda m, _: router(m, scale=1.0),
    "scale put on weights and output": lambda m, _: router(
        m, scale=m.spec.router.scale**2 if m.spec.router.scale_on == "output" else 1.0
    ),
    "group limit ignored": lambda m, _: router(m, n_group=1, topk_group=1),
    "group maximum instead of top-2 sum": lambda m, _: m.spec.router.n_group > 1 and router(m, group_score="max"),
    "softmax over all, not over the picked": lambda m, _: (
        m.spec.router.weights_from == "softmax_topk" and router(m, weights_from="score", score="softmax")
    ),
    "clamp ignored": no_clamp,
    "clamp forgotten on the shared expert": shared_clamp_forgotten,
    "gate clamped from below too": activation(lambda g, u, s: (g.clamp(-s.limit, s.limit), u)),
    "gate and up swapped": gate_up_swapped,
    "missing + 1": no_plus_one,
    "alpha 1": lambda m, _: m.spec.limit_mode == "oai" and spec(m, alpha=1.0),
    "clamp on the other side of the activation": clamp_order,
    "exact GELU": exact_gelu,
    "interleaved and halves confused": other_layout,
    "expert biases dropped": expert_biases_dropped,
    "router bias dropped": router_bias_dropped,
    "per-expert scale dropped": per_expert_scale_dropped,
    "shared expert dropped": shared_dropped,
    "next expert": next_best_expert,
    "weight on the output, not the input": weight_on_the_output,
    "residual norms of another eps": lambda m, _: m.norms is not None and spec(m, norm_eps=1e-2),
}
