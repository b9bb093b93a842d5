"""The oracle: weights decoded to fp32, every product and sum in fp32, no activation quantising.

The same sums as a plain loop over tokens and slots (a test writes that loop out); pairs of one expert share its decoded
matrix, so that a 512-token layer stays interactive on a laptop.
"""

from collections.abc import Sequence

from moe_lab._types import Tensor
from moe_lab.arms.base import ArmContext
from moe_lab.arms.dense import dense_mlp
from moe_lab.arms.schedule import Group, Schedule
from moe_lab.arms.stack import ExpertStack


class Reference:
    """fp32 torch, on whatever device the weights live."""

    name = "reference"
    per_token = False

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Every format that decodes, everywhere."""
        return None

    def reads(self, layout: str, activation: str | None) -> str | None:
        """Every layout: what a group needs is decoded from its raw blocks."""
        return None

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        for g in groups:
            pairs = slice(g.first, g.first + g.rows)
            token, slot = schedule.token[pairs], schedule.slot[pairs]
            rows = dense_mlp(x[token], stack, g.expert, ctx, schedule.weight[pairs])
            y[token, slot] = rows.to(y.dtype)
            ctx.work.products += len(stack.parts)
            ctx.work.weight_bytes += stack.expert_bytes

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """The shared expert over all rows: x [T, D] -> [T, D] of the stored dtype."""
        ctx.work.products += len(stack.parts)
        ctx.work.weight_bytes += stack.expert_bytes
        return dense_mlp(x, stack, 0, ctx)
