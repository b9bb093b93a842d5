"""The oracle: weights decoded to fp32, every product and sum in fp32, no activation quantising.

The same sums as a plain loop over tokens and slots (a test writes that loop out); pairs of one expert share its decoded
matrix, so that a 512-token layer stays interactive on a laptop.
"""

from collections.abc import Sequence

import torch

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext, ExpertStack, Group, Schedule, activate


class Reference:
    """fp32 torch, on whatever device the weights live."""

    name = "reference"
    per_token = False

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Every format that decodes, everywhere."""
        return None

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        for g in groups:
            pairs = slice(g.first, g.first + g.rows)
            token, slot = schedule.token[pairs], schedule.slot[pairs]
            y[token, slot] = dense_mlp(x[token].float(), lambda part, e=g.expert: stack.values(part, e), ctx).to(
                y.dtype
            )
            ctx.work.products += 3
            ctx.work.weight_bytes += stack.expert_bytes

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        ctx.work.products += 3
        ctx.work.weight_bytes += stack.expert_bytes
        return dense_mlp(x.float(), lambda part: stack.values(part, 0), ctx)


def dense_mlp(x: Tensor, weight, ctx: ArmContext) -> Tensor:
    """down(act(gate x) * up x) of fp32 rows [r, D] with the store points between. IEEE fp32 also on CUDA."""
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        gate, up = (ctx.store(x @ weight(part).T) for part in ("gate", "up"))
        return ctx.store(activate(gate, up, ctx).float() @ weight("down").T)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = previous
