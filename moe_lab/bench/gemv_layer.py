"""One routed layer straight on the kernels, planned once and called often: what the kernel benchmarks time and check.

Six launches from given picks on: quantise, gate + up, SwiGLU, quantise, down (scattered into token order), weighted
sum. Nothing of the lab's own layer is in the way, so a kernel's time is the kernel's. T tokens, K experts a token,
P = T * K pairs, D model width, F expert width, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.bench.workloads import LayerShape, routings
from moe_lab.formats import quantize
from moe_lab_kernels import activation, combine, gemv, quantize_rows
from moe_lab_kernels.decode_ref import BLOCK_BYTES, BLOCK_VALUES, dequantize_ref

GATE_UP, DOWN = "q2_k", "q3_k"


def bytes_a_weight(format: str) -> float:
    """Of a format the kernels decode."""
    return BLOCK_BYTES[format] / BLOCK_VALUES[format]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Raw blocks of one layer: gate and up [E, F, ..] in q2_k, down [E, D, ..] in q3_k."""

    gate: Tensor
    up: Tensor
    down: Tensor


def make_weights(shape: LayerShape, seed: int, device: str) -> Weights:
    """Genuinely quantised rows: 128 Student-t rows a matrix, dealt at random to the rows of every expert."""
    draw = torch.Generator().manual_seed(seed)

    def deal(rows: int, columns: int, format: str) -> Tensor:
        normal = torch.randn(128, columns, generator=draw)
        chi_squared = torch.randn(5, 128, columns, generator=draw).square().sum(0)
        book = quantize((normal * (5.0 / chi_squared).sqrt() / columns**0.5).to(device), format).data
        return book[torch.randint(128, (shape.experts, rows), generator=draw).to(device)]

    d, f = shape.d_model, shape.d_expert
    return Weights(deal(f, d, GATE_UP), deal(f, d, GATE_UP), deal(d, f, DOWN))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One input with its plan (pairs sorted by expert, chunks of at most 8) and every buffer a product writes."""

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
    widths = (shape.d_expert, shape.d_expert, shape.d_model)
    return Call(
        torch.randn(t, shape.d_model, device=device).bfloat16(),
        ids.to(device),
        weights.to(device),
        (order // k).int().to(device),
        order.int().to(device),
        torch.arange(t * k, dtype=torch.int32, device=device),
        torch.tensor(chunks, dtype=torch.int32, device=device),
        next(n for n in (1, 2, 4, 8) if n >= most),
        *(torch.empty(t * k, width, dtype=torch.bfloat16, device=device) for width in widths),
    )


def gate_up(
    c: Call, w: Weights, rows: tuple, tile: gemv.Tile | None = None, op: Callable[..., Any] = gemv.gemv
) -> None:
    """c.gate and c.up [P, F] from the quantised rows of x, in one launch."""
    op(rows, c.row_of, w.gate, c.chunks, GATE_UP, c.gate, w2=w.up, out2=c.up, max_rows=c.max_rows, tile=tile)


def down(c: Call, w: Weights, rows: tuple, tile: gemv.Tile | None = None, op: Callable[..., Any] = gemv.gemv) -> None:
    """c.y [P, D] in token order from the quantised rows of h, which are in pair order."""
    op(rows, c.pairs, w.down, c.chunks, DOWN, c.y, out_row=c.out_row, max_rows=c.max_rows, tile=tile)


def weighted_sum(c: Call, op: Callable[..., Tensor] = combine.combine) -> Tensor:
    """[T, D]."""
    return op(c.y.view(*c.ids.shape, -1), c.weights)


def layer(c: Call, w: Weights) -> Tensor:
    """The routed layer [T, D], bf16."""
    gate_up(c, w, quantize_rows.quantize_q8_1(c.x))
    down(c, w, quantize_rows.quantize_q8_1(activation.swiglu(c.gate, c.up)))
    return weighted_sum(c)


def exact(c: Call, w: Weights) -> Tensor:
    """The same mathematics in fp32 on the dequantised weights, without activation quantisation or store points."""
    out = torch.zeros(c.x.shape, device=c.x.device)
    for e in c.ids.unique().tolist():
        g, u = dequantize_ref(w.gate[e], GATE_UP), dequantize_ref(w.up[e], GATE_UP)
        token, slot = (c.ids == e).nonzero(as_tuple=True)
        x = c.x[token].float()
        h = torch.nn.functional.silu(x @ g.T) * (x @ u.T)
        out.index_add_(0, token, c.weights[token, slot, None] * (h @ dequantize_ref(w.down[e], DOWN).T))
    return out


def check(shape: LayerShape, w: Weights, tokens: int, seed: int, device: str) -> tuple[float, list[str]]:
    """On a fresh input, into poisoned outputs: the layer's NMSE against `exact`, and the steps whose bits differ from
    their torch reference (none, when all is well)."""
    c = make_call(shape, *routings(shape, tokens, seed=seed)[-1], device)
    c.poison()
    rows, out = quantize_rows.quantize_q8_1(c.x), layer(c, w)
    hidden = quantize_rows.quantize_q8_1(activation.swiglu(c.gate, c.up))
    got = [*rows, c.gate.clone(), c.up.clone(), c.y.clone(), out]
    c.poison()
    gate_up(c, w, rows, op=gemv.gemv_ref)
    down(c, w, hidden, op=gemv.gemv_ref)
    want = [*quantize_rows.quantize_q8_1_ref(c.x), c.gate, c.up, c.y, weighted_sum(c, combine.combine_ref)]
    names = ("codes", "scale", "total", "gate", "up", "down", "combine")
    wrong = [name for name, a, b in zip(names, got, want, strict=True) if not torch.equal(a, b)]
    target = exact(c, w).double()
    return float((out.double() - target).square().sum() / target.square().sum()), wrong
