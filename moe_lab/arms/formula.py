"""The experts' formula as the arms with kernels compute it: activation, clamp, and the routing weight's place."""

import math

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext
from moe_lab.arms.stack import ExpertBiases
from moe_lab.spec import MoESpec
from moe_lab_kernels.rows import hidden
from moe_lab_kernels.rows.hidden import Gate


def lacks_formula(spec: MoESpec) -> str | None:
    """None when `hidden_rows` computes the spec's experts, else what it lacks."""
    if not spec.gated:
        return "experts without a gate"
    return None if spec.activation in ("silu", "gelu_tanh") else f"activation {spec.activation!r}"


def gate_of(spec: MoESpec, weight: Tensor | None = None) -> Gate:
    """How hidden rows are made; `weight` fp32 [P], the router's, counts where the spec has it on the hidden rows.
    gpt-oss's formula without a clamp is one whose clamp changes nothing: the kernels want a number."""
    limit = math.inf if spec.limit is None and spec.limit_mode == "oai" else spec.limit
    inside = weight if spec.weight_place == "hidden" else None
    return Gate(spec.activation == "gelu_tanh", limit, spec.limit_mode, spec.alpha, inside)


def hidden_rows(gate: Tensor, up: Tensor, weight: Tensor | None, ctx: ArmContext) -> Tensor:
    """h [P, F] of the stored dtype from gate and up, which have it already."""
    op = hidden.hidden_rows_ref if ctx.backend == "torch" else hidden.hidden_rows
    return op(gate, up, gate_of(ctx.spec, weight))


def weighed_rows(x: Tensor, token: Tensor, weight: Tensor | None, spec: MoESpec) -> Tensor | None:
    """fp32 rows [P, D], each pair's own, where the router's weight belongs on the input; else None: rows of x serve
    every pair. Tokens of pairs that mean nothing may be any."""
    if weight is None or spec.weight_place != "input":
        return None
    return x[token.long().clamp(0, max(0, len(x) - 1))].float() * weight.float()[:, None]


def source_rows(x: Tensor, token: Tensor, weight: Tensor | None, spec: MoESpec) -> tuple[Tensor, Tensor | None]:
    """What the first products read: rows, and the row of each pair (None: pairs have rows of their own, weighed)."""
    own = weighed_rows(x, token, weight, spec)
    return (x, token) if own is None else (own, None)


def bias_parts(biases: ExpertBiases | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Biases of gate, up and down, None where there are none."""
    return (None, None, None) if biases is None else (biases.gate, biases.up, biases.down)
