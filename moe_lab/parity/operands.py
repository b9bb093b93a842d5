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
from moe_lab.parity.setting import STORES, Setting
from moe_lab.routing import Routing
from moe_lab_kernels.storage.unpack import unpack_ref


class Side(NamedTuple):
    """One arm's operands over the block: codes of the activations, the scales and the stored sums that cover it (None
    where the arm stores none), and the whole product."""

    arm: str
    codes: list[int]
    scales: list[float]
    sums: list[float] | None
    value: float


class Operands(NamedTuple):
    """A product of token `token` with row `row` of a part of an expert, over values first..last, where the sides' rows
    differ first (the whole row's start when codes, scales and sums agree). Weights: codes, and the scales and minima of
    the sub-blocks, as floats."""

    part: str
    expert: int
    slot: int
    token: int
    row: int
    first: int
    last: int
    a: Side
    b: Side
    weight_codes: list[int]
    weight_scales: list[float]
    weight_minima: list[float] | None


def first_operands(
    layer: MoELayer,
    x: Tensor,
    routing: Routing,
    options: Options,
    sides: tuple[Setting, Setting],
    token: int,
    column: int,
) -> Operands | None:
    """The first product of a token, slots in rank order and gate, up, down in each, whose value differs between the
    sides; of down, the row that is the output's `column`. None where no routed product differs (the shared expert's, or
    the sum, does).
    """
    store = torch.float32 if options.stores == "fp32" else x.dtype
    ctx = ArmContext(layer.spec, "torch", store)
    row = routed_rows(x[token : token + 1], layer.spec, layer.latent, layer.norms, ctx.store)
    for slot, expert in enumerate(routing.ids[token].tolist()):
        if not 0 <= expert < layer.spec.num_experts:
            continue
        with layer.experts.lease([expert]) as held:
            matrices = {part: held.stack.matrix(part, expert) for part in ("gate", "up", "down")}
            found = _in_expert(row, matrices, sides, ctx, column)
        if found is not None:
            part, at, operands = found
            return _describe(part, expert, slot, token, at, matrices[part], sides, operands)
    return None


Pair = tuple[tuple[QuantRows, Tensor], tuple[QuantRows, Tensor]]


def _in_expert(
    row: Tensor, matrices: dict[str, QuantTensor], sides: tuple[Setting, Setting], ctx: ArmContext, column: int
) -> tuple[str, int, Pair] | None:
    made: dict[str, list[Tensor]] = {}
    for part in ("gate", "up"):
        pair = tuple(_product(row, matrices[part], side) for side in sides)
        differs = (pair[0][1] != pair[1][1]).flatten().nonzero()
        if len(differs):
            return part, int(differs[0]), pair  # type: ignore[return-value]
        made[part] = [value.to(STORES[side.stores]) for (_, value), side in zip(pair, sides, strict=True)]
    hidden = [activate(gate, up, ctx) for gate, up in zip(made["gate"], made["up"], strict=True)]
    pair = tuple(_product(h, matrices["down"], side) for h, side in zip(hidden, sides, strict=True))
    at = column if len(pair[0][1][0]) > column else 0  # behind a latent projection a column is no row of down
    if bool((pair[0][1] != pair[1][1]).flatten()[at]):
        return "down", at, pair  # type: ignore[return-value]
    return None


def _product(row: Tensor, q: QuantTensor, side: Setting) -> tuple[QuantRows, Tensor]:
    arithmetic = side.arithmetic(q.format)
    rows = quantize_for(row, q.format, arithmetic)
    return rows, emulate_rows(rows, q, arithmetic)


def _describe(
    part: str, expert: int, slot: int, token: int, at: int, q: QuantTensor, sides: tuple[Setting, Setting], pair: Pair
) -> Operands:
    (rows_a, value_a), (rows_b, value_b) = pair
    width = max(rows_a.layout.block, rows_b.layout.block, min(q.codec.block, 32))
    first = _first_difference(rows_a, rows_b, q.shape[-1], width)
    last = min(first + width, q.shape[-1])
    u = unpack_ref(q.data[at : at + 1], q.format)
    codes = u.codes.flatten()
    per = u.codes.shape[-1] // max(t.shape[-1] for t in (u.d, u.scales) if t is not None)
    cut = slice(first // per, -(-last // per))
    scale = (u.d if u.scales is None else u.d * u.scales.float()).flatten()
    minimum = None if u.dmin is None else (u.dmin if u.mins is None else u.dmin * u.mins.float()).flatten()
    return Operands(
        part, expert, slot, token, at, first, last - 1,
        _side(sides[0], rows_a, value_a, at, first, last), _side(sides[1], rows_b, value_b, at, first, last),
        codes[first:last].tolist(), scale[cut].tolist(), None if minimum is None else minimum[cut].tolist(),
    )  # fmt: skip


def _first_difference(a: QuantRows, b: QuantRows, kd: int, width: int) -> int:
    """Start of the first run of `width` values whose codes or scales differ; 0 when none does."""
    steps = [r.scale.float().repeat_interleave(r.layout.block, 1)[0, :kd] for r in (a, b)]
    differs = (a.codes[0, :kd] != b.codes[0, :kd]) | (steps[0] != steps[1])
    where = differs.nonzero()
    return int(where[0]) // width * width if len(where) else 0


def _side(side: Setting, rows: QuantRows, value: Tensor, at: int, first: int, last: int) -> Side:
    block = rows.layout.block
    scales = rows.scale[0, first // block : -(-last // block)].float().tolist()
    sums = None
    if rows.total is not None:
        group, kept = rows.layout.sum_group, rows.layout.sums_kept
        stored = [g // 8 * kept + g % 8 for g in range(first // group, -(-last // group)) if g % 8 < kept]
        sums = rows.total[0, stored].double().tolist()
    return Side(side.arm, rows.codes[0, first:last].tolist(), scales, sums, float(value[0, at]))
