"""How hidden rows are made of gate and up, said once for every kernel that makes them: its options, check, reference.

h[p] = act(gate[p]) * up[p] (times the pair's weight), gate and up already rounded to the dtype of stored rows, h in
fp32 with one rounding to it. The device code is `activation.gated_value`.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab_kernels.checks import expect, expect_contiguous
from moe_lab_kernels.rows.activation import OAI_ALPHA, geglu, geglu_ref, limit_of, swiglu, swiglu_ref


class Gate(NamedTuple):
    """How hidden rows are made of gate and up, as in `activation`; `weight` fp32 [P] multiplies each pair's row before
    it is stored."""

    gelu: bool = False
    limit: float | None = None
    limit_mode: str = "before"
    alpha: float = OAI_ALPHA
    weight: Tensor | None = None


SILU = Gate()


def check_gate(op: str, how: Gate, pairs: int) -> str:
    """The kernels' LIMIT. LabError for a limit or mode that `activation` does not have, or a weight that is not one
    fp32 number for each of `pairs`."""
    if how.weight is not None:
        expect(op, "weight", how.weight, [torch.float32], [pairs])
        expect_contiguous(op, "weight", how.weight)
    return limit_of(op, how.limit, how.limit_mode, gelu=how.gelu)


def hidden_rows(gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], how: Gate) -> Float[Tensor, "P F"]:
    """h of gate's dtype through the activation's kernels, which the fused products' bits are."""
    return _hidden(gate, up, how, (swiglu, geglu))


def hidden_rows_ref(gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], how: Gate) -> Float[Tensor, "P F"]:
    """The same in torch."""
    return _hidden(gate, up, how, (swiglu_ref, geglu_ref))


def _hidden(gate: Tensor, up: Tensor, how: Gate, ops: tuple) -> Tensor:
    op, more = (ops[1], {}) if how.gelu else (ops[0], {"alpha": how.alpha})
    given = {"limit": how.limit, "limit_mode": how.limit_mode, **more}
    if how.weight is None:
        return op(gate, up, **given)
    return (op(gate.float(), up.float(), **given) * how.weight[:, None]).to(gate.dtype)
