"""One routed layer straight on the kernels, planned once and called often: what the kernel benchmarks time and check.

From given picks on, in two forms whose results have the same bits:
    together  three launches: quantise; gate + up + SwiGLU + quantise + down; weighted sum (what the arm does)
    apart     six: quantise, gate + up, SwiGLU, quantise, down (scattered into token order), weighted sum
and, of weights in other layouts, in three launches whose bits are their own:
    planar    as together, of planes (arm `gemv` on a layer in layout "planar")
    tiled     as together, of tiles (likewise, layout "tiles")
`planned` puts the launch before each of them that makes its chunks on the device.
Nothing of the lab's own layer is in the way, so a kernel's time is the kernel's. T tokens, K experts a token,
P = T * K pairs, D model width, F expert width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.bench.workloads import LayerShape, routings
from moe_lab.formats import quantize
from moe_lab_kernels import backend
from moe_lab_kernels.dequantize.dequantize import dequantize_ref
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv import mlp as gemv_mlp
from moe_lab_kernels.gemv.lane_rows import LaneRows, Rows
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.tiled import mlp as tiled_mlp
from moe_lab_kernels.gemv.tiled import sum_rows, tiled
from moe_lab_kernels.gemv.tiled.tiles import TileCut
from moe_lab_kernels.gemv.tiles import Tile
from moe_lab_kernels.rows import activation, combine
from moe_lab_kernels.slots import slot_table
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar_layout import planes_of
from moe_lab_kernels.storage.row_tiles import ROWS, refusal, tile_bytes, to_tiles

GATE_UP, DOWN = "q2_k", "q3_k"


def bytes_a_weight(format: str) -> float:
    """Of a format the kernels decode."""
    return BLOCKS[format].bytes / BLOCKS[format].values


def fits(shape: LayerShape, gate_up: str, down: str) -> bool:
    """Whether both widths are whole blocks of these formats."""
    return shape.d_model % BLOCKS[gate_up].values == 0 and shape.d_expert % BLOCKS[down].values == 0


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Raw blocks of one layer: gate and up [E, F, ..] in one format, down [E, D, ..] in another."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_up_format: str = GATE_UP
    down_format: str = DOWN
    tiles: tuple[Tensor, Tensor, Tensor] | None = None  # the same three, in tiles
    planes: tuple[Tensor, Tensor, Tensor] | None = None  # in planes

    @property
    def forms(self) -> tuple[str, ...]:
        """Forms of the whole layer that these weights have, in three launches each."""
        there = {"together": self.gate, "planar": self.planes, "tiled": self.tiles}
        return tuple(form for form, held in there.items() if held is not None)


def with_planes(w: Weights, shape: LayerShape, empty: bool = False) -> Weights:
    """The weights and their planes; `empty`: room for them."""
    sides = ((w.gate, w.gate_up_format), (w.up, w.gate_up_format), (w.down, w.down_format))

    def planes(raw: Tensor, format: str) -> Tensor:
        if not empty:
            return planar.repack(raw, format)[:, None]
        _, n, width = raw.shape
        size = planes_of(format, n * (width // BLOCKS[format].bytes))[1]
        return torch.empty(len(raw), 1, size, dtype=torch.uint8, device=raw.device)

    gate, up, down = (planes(raw, format) for raw, format in sides)
    return replace(w, planes=(gate, up, down))


def with_tiles(w: Weights, shape: LayerShape, empty: bool = False) -> Weights:
    """The weights and their tiles, where all of them have any; `empty`: room for them."""
    d, f = shape.d_model, shape.d_expert
    sides = ((w.gate, w.gate_up_format, f, d), (w.up, w.gate_up_format, f, d), (w.down, w.down_format, d, f))
    if any(refusal(format, n, kd) for _, format, n, kd in sides):
        return w

    def tiles(raw: Tensor, format: str, n: int, kd: int) -> Tensor:
        if not empty:
            return to_tiles(raw, format, kd)
        return torch.empty(len(raw), n // ROWS, tile_bytes(format, kd), dtype=torch.uint8, device=raw.device)

    gate, up, down = (tiles(*side) for side in sides)
    return replace(w, tiles=(gate, up, down))


def make_weights(
    shape: LayerShape,
    seed: int,
    device: str,
    gate_up_format: str = GATE_UP,
    down_format: str = DOWN,
    empty: bool = False,
) -> Weights:
    """Genuinely quantised rows: 128 Student-t rows a matrix, dealt at random to the rows of every expert; `empty`: room
    for them, for a compiler that asks for shapes."""
    draw = torch.Generator().manual_seed(seed)

    def deal(rows: int, columns: int, format: str) -> Tensor:
        if empty:
            width = columns // BLOCKS[format].values * BLOCKS[format].bytes
            return torch.empty(shape.experts, rows, width, dtype=torch.uint8, device=device)
        normal = torch.randn(128, columns, generator=draw)
        chi_squared = torch.randn(5, 128, columns, generator=draw).square().sum(0)
        book = quantize((normal * (5.0 / chi_squared).sqrt() / columns**0.5).to(device), format).data
        return book[torch.randint(128, (shape.experts, rows), generator=draw).to(device)]

    d, f = shape.d_model, shape.d_expert
    gate, up = deal(f, d, gate_up_format), deal(f, d, gate_up_format)
    return Weights(gate, up, deal(d, f, down_format), gate_up_format, down_format)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One input with its plan (pairs sorted by expert, chunks of at most 8) and every buffer a product writes; `y` is
    in token order, row t K + k."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    row_of: Tensor
    out_row: Tensor
    pairs: Tensor
    chunks: Tensor
    max_rows: int
    gate: Tensor
    up: Tensor
    y: Tensor

    def poison(self) -> None:
        """Fill every output with NaN."""
        for buffer in (self.gate, self.up, self.y):
            buffer.fill_(float("nan"))


def make_call(shape: LayerShape, ids: Tensor, weights: Tensor, device: str) -> Call:
    """Plan one routing (ids int32 [T, K]) for fresh Gaussian bf16 rows."""
    t, k = ids.shape
    expert, order = ids.cpu().flatten().sort(stable=True)
    chunks, first = [], 0
    for e, n in zip(*(v.tolist() for v in expert.unique_consecutive(return_counts=True)), strict=True):
        chunks += [(e, first + i, min(8, n - i)) for i in range(0, n, 8)]
        first += n
    most = max(n for _, _, n in chunks)
    d, f, pairs = shape.d_model, shape.d_expert, t * k

    def empty(rows: int, width: int) -> Tensor:
        return torch.empty(rows, width, dtype=torch.bfloat16, device=device)

    return Call(
        x=torch.randn(t, d, device=device).bfloat16(),
        ids=ids.to(device),
        weights=weights.to(device),
        row_of=(order // k).int().to(device),
        out_row=order.int().to(device),
        pairs=torch.arange(pairs, dtype=torch.int32, device=device),
        chunks=torch.tensor(chunks, dtype=torch.int32, device=device),
        max_rows=next(n for n in (1, 2, 4, 8) if n >= most),
        gate=empty(pairs, f),
        up=empty(pairs, f),
        y=empty(pairs, d),
    )


def quantised(c: Call, w: Weights) -> LaneRows:
    """x [T, D] as the gate and up products read it."""
    return lane_rows.quantize_lanes(c.x, w.gate_up_format)


def gate_up(c: Call, w: Weights, rows: Rows, tile: Tile | None = None, op: Callable[..., Any] = gemv.gemv) -> None:
    """c.gate and c.up [P, F] from the quantised rows of x, in one launch."""
    format = w.gate_up_format
    op(rows, c.row_of, w.gate, c.chunks, format, c.gate, w2=w.up, out2=c.up, max_rows=c.max_rows, tile=tile)


def down(c: Call, w: Weights, rows: Rows, tile: Tile | None = None, op: Callable[..., Any] = gemv.gemv) -> None:
    """c.y [P, D] in token order from the quantised rows of h, which are in pair order."""
    op(rows, c.pairs, w.down, c.chunks, w.down_format, c.y, out_row=c.out_row, max_rows=c.max_rows, tile=tile)


def weighted_sum(c: Call, op: Callable[..., Tensor] = combine.combine, **options: Any) -> Tensor:
    """[T, D]."""
    return op(c.y.view(*c.ids.shape, -1), c.weights, **options)


def experts(c: Call, w: Weights, tile: Tile | None = None, down_tile: Tile | None = None) -> None:
    """c.y [P, D] in token order from x, in two launches."""
    more = {"max_rows": c.max_rows, "tile": tile, "down_tile": down_tile}
    own = Experts(w.gate, w.up, w.down, w.gate_up_format, w.down_format)
    gemv_mlp.gemv_mlp(c.x, c.row_of, own, c.chunks, c.y, c.out_row, **more)


def layer(c: Call, w: Weights, tile: Tile | None = None, down_tile: Tile | None = None) -> Tensor:
    """The routed layer [T, D], bf16, in three launches."""
    experts(c, w, tile, down_tile)
    return weighted_sum(c, pdl=backend.has_early_start(c.x.device))


def layer_apart(c: Call, w: Weights) -> Tensor:
    """The same in six."""
    gate_up(c, w, quantised(c, w))
    down(c, w, lane_rows.quantize_lanes(activation.swiglu(c.gate, c.up), w.down_format))
    return weighted_sum(c)


def layer_planar(c: Call, w: Weights, tile: Tile | None = None, down_tile: Tile | None = None) -> Tensor:
    """The routed layer from planes, in three launches. `w` has planes."""
    assert w.planes is not None
    more = {"max_rows": c.max_rows, "tile": tile, "down_tile": down_tile, "layout": "planar"}
    own = Experts(*w.planes, w.gate_up_format, w.down_format)
    gemv_mlp.gemv_mlp(c.x, c.row_of, own, c.chunks, c.y, c.out_row, **more)
    return weighted_sum(c, pdl=backend.has_early_start(c.x.device))


def layer_tiled(c: Call, w: Weights, cut: TileCut | None = None, down_tiles: int | None = None) -> Tensor:
    """The routed layer from tiles, in three launches. `w` has tiles."""
    assert w.tiles is not None
    more: dict[str, Any] = {"max_rows": c.max_rows, "cut": cut, "down_tiles": down_tiles}
    own = Experts(*w.tiles, w.gate_up_format, w.down_format)
    tiled_mlp.gemv_tiled_mlp(c.x, c.row_of, own, c.chunks, c.y, c.out_row, **more)
    return weighted_sum(c, pdl=backend.has_early_start(c.x.device))


Ends = tuple[Tensor, Tensor, Tensor]


def all_resident(w: Weights) -> Ends:
    """What a slot table is asked with where expert e lies in slot e: tokens affected (none), slot_of, owner."""
    slot = torch.arange(len(w.gate), dtype=torch.int32, device=w.gate.device)
    return torch.zeros((), dtype=torch.int32, device=w.gate.device), slot, slot


def planned(c: Call, w: Weights, ends: Ends, form: Callable[[Call, Weights], Tensor]) -> Tensor:
    """A form from given picks with its chunks made on the device, by one launch more (`all_resident` gives `ends`)."""
    rows = 1 if c.max_rows == 1 else gemv.MAX_CHUNK_ROWS
    table = slot_table.slot_table(c.ids, c.weights, *ends, rows)
    return form(replace(c, row_of=table.token, out_row=table.row, chunks=table.chunks), w)


LAYERS: dict[str, Callable[[Call, Weights], Tensor]] = {
    "together": layer,
    "planar": layer_planar,
    "tiled": layer_tiled,
    "apart": layer_apart,
}


def exact(c: Call, w: Weights) -> Tensor:
    """The same mathematics in fp32 on the dequantised weights, without activation quantisation or store points."""
    out = torch.zeros(c.x.shape, device=c.x.device)
    for e in c.ids.unique().tolist():
        g, u = dequantize_ref(w.gate[e], w.gate_up_format), dequantize_ref(w.up[e], w.gate_up_format)
        token, slot = (c.ids == e).nonzero(as_tuple=True)
        x = c.x[token].float()
        h = torch.nn.functional.silu(x @ g.T) * (x @ u.T)
        out.index_add_(0, token, c.weights[token, slot, None] * (h @ dequantize_ref(w.down[e], w.down_format).T))
    return out


def check(shape: LayerShape, w: Weights, tokens: int, seed: int, device: str) -> tuple[float, list[str]]:
    """On a fresh input, into poisoned outputs: the layer's NMSE against `exact`, and the steps whose bits differ from
    their torch reference, then "together" where the few launches do, then "planned" where they do with chunks made on
    the device (none, when all is well)."""
    c = make_call(shape, *routings(shape, tokens, seed=seed)[-1], device)
    c.poison()
    rows, out = quantised(c, w), layer_apart(c, w)
    hidden = lane_rows.quantize_lanes(activation.swiglu(c.gate, c.up), w.down_format)
    got = [*lane_rows.to_plain(rows), c.gate.clone(), c.up.clone(), c.y.clone(), out]
    c.poison()
    gate_up(c, w, rows, op=gemv.gemv_ref)
    down(c, w, hidden, op=gemv.gemv_ref)
    want = [
        *lane_rows.to_plain(lane_rows.quantize_lanes_ref(c.x, w.gate_up_format)),
        c.gate,
        c.up,
        c.y.clone(),
        weighted_sum(c, combine.combine_ref),
    ]
    names = ("codes", "scale", "total", "gate", "up", "down", "combine")
    wrong = [name for name, a, b in zip(names, got, want, strict=True) if not torch.equal(a, b)]
    c.poison()
    if not torch.equal(layer(c, w), want[-1]) or not torch.equal(c.y, want[5]):
        wrong.append("together")
    c.poison()
    if not torch.equal(planned(c, w, all_resident(w), layer), want[-1]):
        wrong.append("planned")
    target = exact(c, w).double()
    return float((out.double() - target).square().sum() / target.square().sum()), wrong


def check_form(form: str, shape: LayerShape, w: Weights, tokens: int, seed: int, device: str) -> list[str]:
    """As `check`, of planes or tiles: the products whose bits differ from their torch reference, then the form where
    its one grid does (none, when all is well)."""
    weights = w.planes if form == "planar" else w.tiles
    assert weights is not None
    c, (gate, up, down) = make_call(shape, *routings(shape, tokens, seed=seed)[-1], device), weights
    more: dict[str, Any] = {"max_rows": c.max_rows} | ({"layout": "planar"} if form == "planar" else {})

    def quantised(x: Tensor, format: str) -> Any:
        return lane_rows.quantize_lanes(x, format, layout="planar") if form == "planar" else sum_rows.quantize_sums(x)

    def products(op: Callable[..., Any]) -> list[Tensor]:
        c.poison()
        rows = quantised(c.x, w.gate_up_format)
        op(rows, c.row_of, gate, c.chunks, w.gate_up_format, c.gate, w2=up, out2=c.up, **more)
        hidden = quantised(activation.swiglu(c.gate, c.up), w.down_format)
        op(hidden, c.pairs, down, c.chunks, w.down_format, c.y, out_row=c.out_row, **more)
        return [c.gate.clone(), c.up.clone(), c.y.clone()]

    kernel, twin = (gemv.gemv, gemv.gemv_ref) if form == "planar" else (tiled.gemv_tiled, tiled.gemv_tiled_ref)
    got, want = products(kernel), products(twin)
    wrong = [f"{form} {n}" for n, a, b in zip(("gate", "up", "down"), got, want, strict=True) if not torch.equal(a, b)]
    c.poison()
    if not torch.equal(LAYERS[form](c, w), weighted_sum(replace(c, y=want[2]), combine.combine_ref)):
        wrong.append(form)
    return wrong


def alone(c: Call, w: Weights, form: Callable[[Call, Weights], Tensor], shape: LayerShape) -> bool:
    """Whether every token has the bits that it has in a call of its own."""
    together, device = form(c, w).clone(), str(c.x.device)
    for t in range(len(c.x)):
        one = replace(make_call(shape, c.ids[t : t + 1], c.weights[t : t + 1], device), x=c.x[t : t + 1])
        if not torch.equal(form(one, w)[0], together[t]):
            return False
    return True


def nmse(c: Call, w: Weights, form: Callable[[Call, Weights], Tensor]) -> float:
    """Of the layer, against fp32 mathematics."""
    c.poison()
    out, target = form(c, w).double(), exact(c, w).double()
    return float((out - target).square().sum() / target.square().sum())
