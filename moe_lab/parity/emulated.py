"""A layer under any mix of the numeric choices: an arm whose products are emulated, and the layer around it.

Routing, plan, fetching and combining are the layer's own; the products come from `numerics.emulation`. Slower than an
arm, and with an arm's own choices equal to it but for the order in which the arm's own path adds.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from moe_lab._types import Float, Tensor
from moe_lab.arms import ArmContext, ExpertStack, Group, Schedule
from moe_lab.arms.base import activate, lacks_kernel
from moe_lab.execution.options import Options
from moe_lab.formats import Arithmetic
from moe_lab.layer import MoELayer
from moe_lab.numerics.emulation import emulate
from moe_lab.parity.setting import STORES, Mixed, Setting, is_plain
from moe_lab.routing import Routing
from moe_lab.spec import MoESpec

Seen = dict[tuple[str, int], Tensor]
Memo = dict[tuple, Tensor]


class Emulated:
    """The experts' formula by `how`; `weights` [T, K] where they belong on the hidden rows.

    `seen` receives the rows that went into each product, by (part, expert). `memo` keeps rows by the choices that made
    them, for calls with the same x and picks: of 32 mixes of two arms half share a gate product.
    """

    name = "emulated"
    per_token = False

    def __init__(
        self, how: Setting | Mixed, weights: Tensor | None = None, *, seen: Seen | None = None, memo: Memo | None = None
    ) -> None:
        self.how, self.weights, self.seen = how, weights, seen
        self._arithmetic = cache(self._numbers)  # asked for once a product: a tenth of a mix's time without the cache
        self.memo: Memo = {} if memo is None else memo

    def _numbers(self, format: str) -> Arithmetic | None:
        """Scales folded into codes have the numbers of "integer": by one name `memo` knows them as one product. None
        for weights with which rows are multiplied as they are."""
        if is_plain(format):
            return None
        made = self.how.arithmetic(format)
        return replace(made, product_dtype="integer") if made.product_dtype == "int8" else made

    def supports(self, formats: Sequence[str], backend: str) -> str | None:
        """Formats with an arithmetic: `arithmetic` refuses the others by name."""
        for f in formats:
            self._arithmetic(f)
        return None

    def lacks(self, spec: MoESpec) -> str | None:
        """As the arms that it emulates."""
        return "expert biases" if spec.expert_bias else lacks_kernel(spec)

    def reads(self, layout: str, activation: str | None) -> str | None:
        """Every layout: `ExpertStack.matrix` gives raw blocks of each."""
        return None

    def experts(
        self, x: Tensor, stack: ExpertStack, schedule: Schedule, groups: Sequence[Group], y: Tensor, ctx: ArmContext
    ) -> None:
        """See `Arm.experts`."""
        for g in groups:
            pairs = slice(g.first, g.first + g.rows)
            token, slot = schedule.token[pairs], schedule.slot[pairs]
            weight = None if self.weights is None else self.weights[token, slot]
            y[token, slot] = self._mlp(x[token], stack, g.expert, ctx, weight).to(y.dtype)

    def shared(self, x: Tensor, stack: ExpertStack, ctx: ArmContext) -> Tensor:
        """See `ArmExtras.shared`."""
        return self._mlp(x, stack, 0, ctx, None, label="shared ").to(ctx.store_dtype)

    def _mlp(
        self, x: Tensor, stack: ExpertStack, expert: int, ctx: ArmContext, weight: Tensor | None, label: str = ""
    ) -> Tensor:
        dtype = STORES[self.how.stores]
        chosen = {part: self._arithmetic(stack.part(part).format) for part in ("gate", "up", "down")}

        def product(part: str, rows: Tensor) -> Tensor:
            if self.seen is not None:
                self.seen[label + part, expert] = rows
            how = chosen[part]
            if how is None:  # fp32 as the arms have it, but for the order of adding
                return (rows.float() @ stack.values(part, expert).T).to(dtype)
            return emulate(rows, stack.matrix(part, expert), how).to(dtype)

        def made_of_x(part: str) -> Tensor:
            return self._known((label + part, expert, chosen[part], dtype), lambda: product(part, x))

        def down() -> Tensor:
            hidden = activate(made_of_x("gate"), made_of_x("up"), ctx)
            return product("down", hidden if weight is None else (hidden.float() * weight.unsqueeze(-1)).to(dtype))

        return self._known((label, expert, *chosen.values(), dtype, weight is None), down)

    def _known(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]


def emulate_layer(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    routing: Routing,
    how: Setting | Mixed,
    *,
    options: Options | None = None,
    seen: Seen | None = None,
    memo: Memo | None = None,
) -> Float[Tensor, "T D"]:
    """The layer's output in x's dtype for given picks. `seen`, `memo`: see `Emulated`; a memo serves one x and one set
    of picks.
    """
    # the arm rounds at the store points by itself; the buffer of down rows holds rounded values as well in fp32
    options = options or Options()
    shared_arm = options.shared_arm if options.shared_arm is not None else how.shared_arm
    options = replace(options, combine_order=how.combine_order, stores="fp32", shared_arm=shared_arm)
    weights = None
    if how.weight_place == "hidden":
        weights = routing.weights
        real = (routing.ids >= 0) & (routing.ids < layer.spec.num_experts)
        routing = replace(routing, weights=torch.where(real, torch.ones_like(weights), weights))
    return layer(x, Emulated(how, weights, seen=seen, memo=memo), routing=routing, options=options).out
