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
from moe_lab.parity.setting import Setting
from moe_lab.parity.terms import WIDTH, exact_terms, factors, terms
from moe_lab.routing import Routing
from moe_lab.stream.provider import ResidentExperts

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 64  # rows of an expert that its averages are taken over
COLUMNS = ("part", "expert", "block", "first", "last", "nmse_a", "nmse_b", "nmse_ab")


def product_errors(
    x: Float[Tensor, "T Kd"], q: QuantTensor, a: Setting, b: Setting, *, width: int = WIDTH
) -> Float[Tensor, "3 blocks"]:
    """Error of each `width` values of a row, as shares of the product's power: a against exact, b against exact, a
    against b. Terms of different blocks are nearly uncorrelated, so each row sums to about the product's NMSE.

    LabError unless width is a multiple of 16 that divides Kd.
    """
    if width % WIDTH or q.shape[-1] % wants_whole("width", width, WIDTH):
        raise LabError(f"blocks of {width} values: wanted a multiple of {WIDTH} that divides rows of {q.shape[-1]}.")
    exact = exact_terms(x, q)
    power = float(exact.sum(-1).square().sum())

    def of(setting: Setting) -> Tensor:
        arithmetic = setting.arithmetic(q.format)
        return terms(quantize_for(x, q.format, arithmetic), factors(q, arithmetic)).value

    def share(left: Tensor, right: Tensor) -> Tensor:
        apart = (left - right).unflatten(-1, (-1, width // WIDTH)).sum(-1)
        return apart.square().sum((0, 1)) / power if power else apart.square().sum((0, 1))

    made_a, made_b = of(a), of(b)
    return torch.stack([share(made_a, exact), share(made_b, exact), share(made_a, made_b)])


def error_map(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    arms: Sequence[str | Setting],
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    width: int = WIDTH,
) -> "pd.DataFrame":
    """A row for each part, expert with rows, and block of `width` values: part, expert, block, first and last value of
    it, nmse_a, nmse_b, nmse_ab as `product_errors` has them.

    Each product by itself: both sides get the rows that side a feeds it, at most `MOST_ROWS` an expert. Resident layers
    alone (LabError), as all experts are read.
    """
    if not isinstance(layer.experts, ResidentExperts):
        raise LabError("an error map reads every expert: open the layer without a cache.")
    a, b = (side(arm, x, options, layer) for arm in arms)
    seen: dict[tuple[str, int], Tensor] = {}
    emulate_layer(layer, x, layer.route(x) if routing is None else routing, a, options=options, seen=seen)
    rows = []
    for part in ("gate", "up", "down"):
        for (name, expert), given in seen.items():
            if name == part:
                found = product_errors(given[:MOST_ROWS], layer.experts.stack.matrix(part, expert), a, b, width=width)
                for block, (nmse_a, nmse_b, nmse_ab) in enumerate(found.T.tolist()):
                    first = block * width
                    rows.append((part, expert, block, first, first + width - 1, nmse_a, nmse_b, nmse_ab))
    return frame(rows, COLUMNS, "error_map")
