"""The first product behind a difference: what either arm multiplied there, down to codes, scales and sums."""

from typing import NamedTuple

import torch

from moe_lab._types import Tensor
from moe_lab.arms import ArmContext
from moe_lab.arms.base import activate
from moe_lab.block import routed_rows
from moe_lab.execution.options import Options
from moe_lab.formats import QuantRows, QuantTensor
from moe_lab.layer import MoELayer
from moe_lab.numerics.emulation import emulate_rows, quantize_for
from moe_lab.parity.setting import STORES, Setting, is_plain
from moe_lab.routing import Routing
from moe_lab_kernels.storage.unpack import unpack_ref


class Side(NamedTuple):
    """One arm's operands over the block, and the whole product. Activations: codes, the scales and the stored sums that
    cover the block (None where the arm stores none); with weights of floating point, which multiply rows as they are,
    the values themselves under a scale of 1. Weights in their `format`: codes, and the scales and minima of the
    sub-blocks, as floats."""

    arm: str
    codes: list[float]
    scales: list[float]
    sums: list[float] | None
    value: float
    format: str
    weight_codes: list[float]
    weight_scales: list[float]
    weight_minima: list[float] | None


class Operands(NamedTuple):
    """A product of token `token` with row `row` of a part of an expert, over values first..last, where the sides' rows
    or weights differ first (the whole row's start when they agree in codes, scales and values)."""

    part: str
    expert: int
    slot: int
    token: int
    row: int
    first: int
    last: int
    a: Side
    b: Side


Matrices = dict[str, QuantTensor]
Product = tuple[QuantRows | None, Tensor]


def first_operands(
    layers: tuple[MoELayer, MoELayer],
    x: Tensor,
    routing: Routing,
    options: Options,
    sides: tuple[Setting, Setting],
    token: int,
    column: int,
) -> Operands | None:
    """The first product of a token, slots in rank order and gate, up, down in each, whose value differs between the
    sides, each with its layer's weights; of down, the row that is the output's `column`. None where no routed product
    differs (the shared expert's, or the sum, does).
    """
    layer = layers[0]
    store = torch.float32 if options.stores == "fp32" else x.dtype
    ctx = ArmContext(layer.spec, "torch", store)
    row = routed_rows(x[token : token + 1], layer.spec, layer.latent, layer.norms, ctx.store)
    for slot, expert in enumerate(routing.ids[token].tolist()):
        if not 0 <= expert < layer.spec.num_experts:
            continue
        matrices = (_matrices(layers[0], expert), _matrices(layers[1], expert))
        found = _in_expert(row, matrices, sides, ctx, column)
        if found is not None:
            part, at, rows, products = found
            made = [
                _Made(side.arm, given, own[part], *product)
                for side, given, own, product in zip(sides, rows, matrices, products, strict=True)
            ]
            return _describe((part, expert, slot, token, at), made)
    return None


def _matrices(layer: MoELayer, expert: int) -> Matrices:
    with layer.experts.lease([expert]) as held:
        return {part: held.stack.matrix(part, expert) for part in ("gate", "up", "down")}


def _in_expert(
    row: Tensor, matrices: tuple[Matrices, Matrices], sides: tuple[Setting, Setting], ctx: ArmContext, column: int
) -> tuple[str, int, tuple[Tensor, Tensor], list[Product]] | None:
    """Part, row of it, what either side fed it, and what came out."""
    made: dict[str, list[Tensor]] = {}
    for part in ("gate", "up"):
        pair = [_product(row, own[part], side) for own, side in zip(matrices, sides, strict=True)]
        differs = (pair[0][1] != pair[1][1]).flatten().nonzero()
        if len(differs):
            return part, int(differs[0]), (row, row), pair
        made[part] = [value.to(STORES[side.stores]) for (_, value), side in zip(pair, sides, strict=True)]
    hidden = [activate(gate, up, ctx) for gate, up in zip(made["gate"], made["up"], strict=True)]
    pair = [_product(h, own["down"], side) for h, own, side in zip(hidden, matrices, sides, strict=True)]
    at = column if len(pair[0][1][0]) > column else 0  # behind a latent projection a column is no row of down
    if bool((pair[0][1] != pair[1][1]).flatten()[at]):
        return "down", at, (hidden[0], hidden[1]), pair
    return None


def _product(row: Tensor, q: QuantTensor, side: Setting) -> Product:
    if is_plain(q.format):
        return None, row.float() @ q.dequantize().T
    arithmetic = side.arithmetic(q.format)
    rows = quantize_for(row, q.format, arithmetic)
    return rows, emulate_rows(rows, q, arithmetic)


class _Made(NamedTuple):
    """A side's product: the rows it was fed, the weights, the rows as quantised, all the values."""

    arm: str
    given: Tensor
    q: QuantTensor
    rows: QuantRows | None
    values: Tensor

    @property
    def width(self) -> int:
        """Values that one of its scales covers, of activations or of weights in blocks of at most 32."""
        return max(1 if self.rows is None else self.rows.layout.block, min(self.q.codec.block, 32))

    def decoded(self, at: int) -> Tensor:
        """The weights' row `at`."""
        return self.q.dequantize()[at]

    def quantised(self, kd: int) -> Tensor:
        """Codes and scales value by value, [2, Kd]; the rows themselves under a scale of 1 where they are not."""
        if self.rows is None:
            return torch.stack([self.given[0].float(), torch.ones(kd, device=self.given.device)])
        step = self.rows.scale.float().repeat_interleave(self.rows.layout.block, 1)[0, :kd]
        return torch.stack([self.rows.codes[0, :kd].float(), step])


def _describe(where: tuple[str, int, int, int, int], made: list[_Made]) -> Operands:
    a, b = made
    at, kd = where[-1], a.q.shape[-1]
    width = max(a.width, b.width)
    differs = (a.quantised(kd) != b.quantised(kd)).any(0) | (a.decoded(at) != b.decoded(at))
    found = differs.nonzero()
    first = int(found[0]) // width * width if len(found) else 0
    last = min(first + width, kd)
    return Operands(*where, first, last - 1, _side(a, at, first, last), _side(b, at, first, last))


def _side(made: _Made, at: int, first: int, last: int) -> Side:
    weights = (made.q.format, *_weights(made.q, at, first, last))
    value = float(made.values[0, at])
    if made.rows is None:
        return Side(made.arm, made.given[0, first:last].tolist(), [1.0], None, value, *weights)
    rows, block = made.rows, made.rows.layout.block
    scales = rows.scale[0, first // block : -(-last // block)].float().tolist()
    sums = None
    if rows.total is not None:
        group, kept = rows.layout.sum_group, rows.layout.sums_kept
        stored = [g // 8 * kept + g % 8 for g in range(first // group, -(-last // group)) if g % 8 < kept]
        sums = rows.total[0, stored].double().tolist()
    return Side(made.arm, rows.codes[0, first:last].tolist(), scales, sums, value, *weights)


def _weights(q: QuantTensor, at: int, first: int, last: int) -> tuple[list[float], list[float], list[float] | None]:
    """Codes, scales and minima of a row's values first..last - 1."""
    if is_plain(q.format):
        return q.dequantize()[at, first:last].tolist(), [1.0], None
    u = unpack_ref(q.data[at : at + 1], q.format)
    per = u.codes.shape[-1] // max(t.shape[-1] for t in (u.d, u.scales) if t is not None)
    cut = slice(first // per, -(-last // per))
    scale = (u.d if u.scales is None else u.d * u.scales.float()).flatten()
    minimum = None if u.dmin is None else (u.dmin if u.mins is None else u.dmin * u.mins.float()).flatten()
    codes = u.codes.flatten()[first:last].tolist()
    return codes, scale[cut].tolist(), None if minimum is None else minimum[cut].tolist()
