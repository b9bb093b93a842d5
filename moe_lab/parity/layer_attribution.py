"""The choices of a layer, attributed: which of them makes two arms' outputs differ, and which costs accuracy."""

from dataclasses import replace
from typing import TYPE_CHECKING

from moe_lab._types import Float, Tensor
from moe_lab.arms import ARMS
from moe_lab.arms.names import split_layout
from moe_lab.execution.options import Options
from moe_lab.execution.parts import pick_shared_arm
from moe_lab.formats import QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.numerics.distance import nmse
from moe_lab.numerics.emulation import emulate
from moe_lab.parity.attribution import MOST, attribute
from moe_lab.parity.emulated import Memo, emulate_layer
from moe_lab.parity.exact import exact_layer
from moe_lab.parity.setting import STORES, Mixed, Setting, choices, known
from moe_lab.parity.stored import formats_said, same_bytes, split_weights
from moe_lab.routing import Routing
from moe_lab_kernels.backend import backend_of

if TYPE_CHECKING:
    import pandas as pd

LAYER_ROWS = 64  # of a layer's rows, enough for its averages: shares of 64 and of 512 rows agree within a tenth


def attribute_layer(
    layer: MoELayer,
    x: Float[Tensor, "T D"],
    a: str | Setting,
    b: str | Setting,
    *,
    routing: Routing | None = None,
    options: Options | None = None,
    outputs: tuple[Tensor, Tensor] | None = None,
    second: MoELayer | None = None,
    truth: MoELayer | None = None,
    rows: int = LAYER_ROWS,
    most: int = MOST,
) -> "pd.DataFrame":
    """`attribution.attribute` of sides a and b on the first `rows` rows of x: letters a to j, and k and w where the
    sides differ in them. An arm's name is its Setting under `options`; `outputs`: what the two arms made of x.

    `second`: the layer that b computes with, where its experts are stored otherwise (`stored.quantized`, another file):
    that is choice (w), with all that a format brings of (a) to (g); those letters stand for what the arms do about the
    formats at hand. Errors are then against `truth`'s formula, or else against that of the weights in place; attrs
    weights_ab is what the formats alone make, the NMSE of b's formula against a's. LabError for an arm or a format
    without 8-bit arithmetic."""
    x = x[:rows]
    routing = layer.route(x) if routing is None else _first(routing, rows)
    layers = (layer, layer if second is None else second)
    side_a, side_b = (side(arm, x, options, own) for arm, own in zip((a, b), layers, strict=True))
    one = same_bytes(*layers)
    formulas = [exact_layer(own, x, routing) for own in (layers[:1] if one else layers)]
    true = None if truth is None else exact_layer(truth, x, routing)
    found = choices(side_a, side_b, formats_of(*layers), weights=() if one else weights_said(*layers))
    memos: tuple[Memo, Memo] = ({}, {})

    def run(letters: frozenset[str]) -> Tensor:
        at, how = int("w" in letters), Mixed(side_a, side_b, letters)
        return emulate_layer(layers[at], x, routing, how, options=options, memo=memos[at])

    def exact(letters: frozenset[str]) -> Tensor:
        return true if true is not None else formulas["w" in letters]

    own = None if outputs is None else (outputs[0][:rows], outputs[1][:rows])
    made = attribute(run, found, exact, outputs=own, most=most)
    if not one:
        made.attrs["weights_ab"] = nmse(formulas[1], formulas[0])
    return made


def weights_said(layer: MoELayer, second: MoELayer) -> tuple[str, str]:
    """What either side multiplies with, in words that differ."""
    ours, theirs = formats_said(layer), formats_said(second)
    return ours, theirs if ours != theirs else f"{theirs}, other values"


def attribute_product(
    x: Float[Tensor, "T Kd"], q: QuantTensor, a: str | Setting = "gemv", b: str | Setting = "mmq", *, most: int = MOST
) -> "pd.DataFrame":
    """The same for one product x q^T: letters a to g."""
    side_a, side_b = side(a, x, None), side(b, x, None)
    exact = x.double() @ q.dequantize().double().T

    def run(letters: frozenset[str]) -> Tensor:
        return emulate(x, q, Mixed(side_a, side_b, letters).arithmetic(q.format))

    return attribute(run, choices(side_a, side_b, [q.format], "abcdefg"), exact, most=most)


def side(arm: str | Setting, x: Tensor, options: Options | None, layer: MoELayer | None = None) -> Setting:
    """An arm's Setting as a layer runs it: store points in x's dtype unless the options say fp32, and the shared
    expert by another arm where this one does not serve its formats."""
    if isinstance(arm, Setting):
        return arm
    options = options or Options()
    names = {dtype: name for name, dtype in STORES.items()}
    stores = "fp32" if options.stores == "fp32" else names.get(x.dtype, "fp32")
    shared_arm = None if layer is None or not known(arm) else _shared_arm(layer, arm, x, options)
    return Setting(arm, stores=stores, combine_order=options.combine_order, shared_arm=shared_arm)  # type: ignore[arg-type]


def _shared_arm(layer: MoELayer, arm: str, x: Tensor, options: Options) -> str | None:
    """Who takes the shared expert in place of the arm; None where it does itself, and where the options name one."""
    own = ARMS[split_layout(split_weights(arm)[0])[0]]
    picked = pick_shared_arm(layer, own, replace(options, shared="main"), backend_of(x), len(x))
    return None if options.shared_arm is not None or picked is None or picked is own else picked.name


def formats_of(*layers: MoELayer) -> tuple[str, ...]:
    """Formats of the routed and the shared experts, each once."""
    both = [(*own.experts.formats, *(own.shared.formats if own.shared else ())) for own in layers]
    return tuple(dict.fromkeys(f for formats in both for f in formats))


def _first(routing: Routing, rows: int) -> Routing:
    return Routing(routing.ids[:rows], routing.weights[:rows], width=routing.width)


__all__ = ["attribute_layer", "attribute_product", "formats_of", "side"]
