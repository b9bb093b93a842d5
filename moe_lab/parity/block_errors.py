"""Where along a row of weights the error arises: by part, expert and quant block."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moe_lab._types import Float, Tensor
from moe_lab.analysis.frames import frame
from moe_lab.checks import wants_whole
from moe_lab.errors import LabError
from moe_lab.execution.options import Options
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.numerics.emulation import quantize_for
from moe_lab.parity.emulated import emulate_layer
from moe_lab.parity.layer_attribution import side
from moe_lab.parity.setting import Setting, is_plain
from moe_lab.parity.terms import WIDTH, exact_terms, factors, terms
from moe_lab.routing import Routing
from moe_lab.stream.provider import ResidentExperts

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 64  # rows of an expert that its averages are taken over
COLUMNS = ("part", "expert", "block", "first", "last", "block_a", "block_b", "nmse_a", "nmse_b", "nmse_ab")


def product_errors(
    x: Float[Tensor, "T Kd"],
    q: QuantTensor,
    a: Setting,
    b: Setting,
    *,
    width: int = WIDTH,
    second: QuantTensor | None = None,
    truth: QuantTensor | None = None,
) -> Float[Tensor, "3 blocks"]:
    """Error of each `width` values of a row, as shares of the product's power: a against exact, b against exact, a
    against b. Terms of different blocks are nearly uncorrelated, so each row sums to about the product's NMSE.

    `second`: b's weights where they are stored otherwise. Exact is each side's own product with unquantised rows, or
    that of `truth`. LabError unless width is a multiple of 16 that divides Kd.
    """
    if width % WIDTH or q.shape[-1] % wants_whole("width", width, WIDTH):
        raise LabError(f"blocks of {width} values: wanted a multiple of {WIDTH} that divides rows of {q.shape[-1]}.")
    theirs = q if second is None else second
    exact_a = exact_terms(x, q if truth is None else truth)
    exact_b = exact_a if truth is not None or second is None else exact_terms(x, theirs)
    power = float(exact_a.sum(-1).square().sum())

    def of(setting: Setting, weights: QuantTensor, exact: Tensor) -> Tensor:
        if is_plain(weights.format):
            return exact if truth is None else exact_terms(x, weights)
        arithmetic = setting.arithmetic(weights.format)
        return terms(quantize_for(x, weights.format, arithmetic), factors(weights, arithmetic)).value

    def share(left: Tensor, right: Tensor) -> Tensor:
        apart = (left - right).unflatten(-1, (-1, width // WIDTH)).sum(-1)
        return apart.square().sum((0, 1)) / power if power else apart.square().sum((0, 1))

    made_a, made_b = of(a, q, exact_a), of(b, theirs, exact_b)
    return torch.stack([share(made_a, exact_a), share(made_b, exact_b), share(made_a, made_b)])


def error_map(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arms: Sequence[str | Setting],
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    width: int = WIDTH,
    second: MoELayer | None = None,
    truth: MoELayer | None = None,
) -> "pd.DataFrame":
    """A row for each part, expert with rows, and block of `width` values: part, expert, block, first and last value of
    it, block_a and block_b (the quant block of either side's format that holds them), nmse_a, nmse_b, nmse_ab as
    `product_errors` has them, shares of a's power.

    Each product by itself: both sides get the rows that side a feeds it, at most `MOST_ROWS` an expert. `second`,
    `truth`: see `attribute_layer`. Resident layers alone (LabError), as all experts are read.
    """
    layers = [own for own in (layer, second, truth) if own is not None]
    stacks = [own.experts.stack for own in layers if isinstance(own.experts, ResidentExperts)]
    if len(stacks) < len(layers):
        raise LabError("an error map reads every expert: open the layer without a cache.")
    ours, theirs = stacks[0], stacks[1] if second is not None else stacks[0]
    a, b = (side(arm, x, options, own) for arm, own in zip(arms, (layer, second or layer), strict=True))
    seen: dict[tuple[str, int], Tensor] = {}
    emulate_layer(layer, x, layer.route(x) if routing is None else routing, a, options=options, seen=seen)
    rows = []
    for part in ("gate", "up", "down"):
        for (name, expert), given in seen.items():
            if name == part:
                q, other = (stack.matrix(part, expert) for stack in (ours, theirs))
                true = None if truth is None else stacks[-1].matrix(part, expert)
                at = given[:MOST_ROWS]
                found = product_errors(at, q, a, b, width=width, second=None if second is None else other, truth=true)
                for block, errors in enumerate(found.T.tolist()):
                    first = block * width
                    own = first // q.codec.block, first // other.codec.block
                    rows.append((part, expert, block, first, first + width - 1, *own, *errors))
    return frame(rows, COLUMNS, "error_map")
