"""What comes out of a call: the shared expert's rows, and the weighted sum over everything."""

from dataclasses import replace

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ARMS
from moe_lab.arms.guard import blaming, counting, expect_shared
from moe_lab.block import branch_rows, is_plain, leave, shared_rows
from moe_lab.execution.state import CallState
from moe_lab.routing import Routing
from moe_lab.workspace import Scratch
from moe_lab_kernels.rows import combine, shared_gate


def branch(run: CallState, scratch: Scratch) -> Tensor | None:
    """The shared expert between its norms, if it has any."""
    layer, spec, arm = run.layer, run.layer.spec, run.shared_arm
    if arm is None or run.tokens == 0:
        return None
    rows = shared_rows(run.x, spec, layer.norms, run.ctx.store)
    context = replace(run.ctx, spec=run.shared_spec, scratch=scratch)
    with run.clock.part("shared"), counting(run.work), blaming(arm, "shared", ARMS):
        given = arm.shared(rows, layer.shared_stack, context)  # type: ignore[attr-defined]
    made = expect_shared(arm, given, tuple(rows.shape), run.ctx.store_dtype)
    if layer.norms is None:
        return made
    gate = _gate(run)
    made = made if gate is None else made.float() * gate[:, None]
    return branch_rows(made, spec, layer.norms, run.ctx.store)


def combined(run: CallState, routing: Routing, shared: Tensor | None) -> Tensor:
    """Weighted sum over slots in fp32, then what the spec puts behind it, then one rounding to x's dtype."""
    if run.tokens == 0:
        return torch.empty_like(run.x)
    layer, spec, ids = run.layer, run.layer.spec, routing.ids
    gate = _gate(run) if layer.norms is None else None  # a normed branch is gated before its norm
    y = run.y[:, : routing.top_k]
    op = combine.combine_ref if run.backend == "torch" else combine.combine
    by_expert = run.options.combine_order == "expert"
    order = torch.sort(ids, stable=True).indices.to(torch.int32) if by_expert else None
    about = {"ids": ids, "width": spec.router.width, "order": order}
    weights = routing.weights
    if spec.weight_place != "output":  # the arm has weighed its rows already
        weights = torch.where(ids < spec.num_experts, torch.ones_like(weights), weights)
    if is_plain(spec):
        return op(y, weights, shared, gate, out_dtype=run.x.dtype, **about)
    routed = op(y, weights, out_dtype=torch.float32, **about)
    shared = shared.float() * gate[:, None] if gate is not None and shared is not None else shared
    return leave(routed, shared, run.x, spec, layer.latent, layer.norms, run.ctx.store).to(run.x.dtype)


def _gate(run: CallState) -> Tensor | None:
    """The shared expert's gate fp32 [T], or None."""
    vector = run.layer.shared.gate_vector if run.layer.shared is not None else None
    if vector is None:
        return None
    return (shared_gate.shared_gate_ref if run.backend == "torch" else shared_gate.shared_gate)(run.x, vector)
