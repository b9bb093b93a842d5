"""Whole routed layers from given picks on, as the grouped arm runs them: what the benchmarks of two arms share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from moe_lab.arms.grouped import DECODED_BYTES, decode_from
from moe_lab.bench.workloads import LayerShape
from moe_lab.formats import quantize
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.grouped import decoded
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows import combine
from moe_lab_kernels.rows.hidden import Gate, hidden_rows_ref
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8
from moe_lab_kernels.storage import planar
from moe_lab_kernels.storage.blocks import BLOCKS

DEVICE = "cuda"


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """gate, up [E, F, D] and down [E, D, F]."""

    gate: go.Weight
    up: go.Weight
    down: go.Weight
    fp8_rows: bool = False
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # [E, F], [E, F], [E, D]; gpt-oss's formula

    @property
    def how(self) -> Gate:
        """The formula of the hidden rows."""
        return Gate() if self.biases is None else Gate(limit=7.0, limit_mode="oai")


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of x a tile, and the tiles of the two products; None: the package's choice."""

    tokens: int | None = None
    gate_up: gt.Tile | None = None
    down: gt.Tile | None = None


def one_weight(format: str, experts: int, rows: int, columns: int, draw: torch.Generator) -> go.Weight:
    """Random bf16, or 128 Student-t rows quantised and dealt at random to the rows of every expert."""
    if format == "bf16":
        data = torch.empty(experts, rows, columns, dtype=torch.bfloat16, device=DEVICE)
        for e in range(experts):
            data[e] = torch.randn(rows, columns, generator=draw, device=DEVICE) / columns**0.5
        return go.Weight(data, format, columns)
    normal = torch.randn(128, columns, generator=draw, device=DEVICE)
    chi_squared = torch.randn(5, 128, columns, generator=draw, device=DEVICE).square().sum(0)
    book = quantize(normal * (5.0 / chi_squared).sqrt() / columns**0.5, format)
    if format not in BLOCKS:  # scales of their own: whole matrices, as rows may share a scale
        full = quantize(torch.randn(rows, columns, generator=draw, device=DEVICE) / columns**0.5, format)
        parts = (full.data, full.scales, full.biases if full.biases is not None else full.global_scale)
        data, scales, second = (None if p is None else p.expand(experts, *p.shape).contiguous() for p in parts)
        assert data is not None
        return go.Weight(data, format, columns, scales, second)
    pick = torch.randint(128, (experts, rows), generator=draw, device=DEVICE)
    data = torch.empty(experts, rows, book.data.shape[1], dtype=torch.uint8, device=DEVICE)
    for e in range(experts):
        data[e] = book.data[pick[e]]
    return go.Weight(data, format, columns)


def make_weights(shape: LayerShape, format: str) -> Weights:
    """`format` is one name, or that of gate and up, a plus, that of down; behind it "@fp8" asks for rows in fp8,
    "@planar" for weights in planes."""
    format, _, form = format.partition("@")
    gate_up, down = format.split("+") if "+" in format else (format, format)
    draw = torch.Generator(DEVICE).manual_seed(5)
    e, d, f = shape.experts, shape.d_model, shape.d_expert
    biases = None
    if shape.name.startswith("gpt-oss"):
        made = [torch.randn(e, n, generator=draw, device=DEVICE).bfloat16() / 4 for n in (f, f, d)]
        biases = made[0], made[1], made[2]
    parts = [one_weight(name, e, *side, draw) for name, side in ((gate_up, (f, d)), (gate_up, (f, d)), (down, (d, f)))]
    if form == "planar":
        parts = [m._replace(data=planar.repack(m.data, m.format)[:, None], layout="planar") for m in parts]
    gate, up, last = parts
    return Weights(gate, up, last, form == "fp8", biases)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One input, and every buffer a product writes."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor


def make_call(shape: LayerShape, ids: torch.Tensor, weights: torch.Tensor) -> Call:
    """Fresh Gaussian rows, poisoned buffers."""
    t, k = ids.shape
    nan = {"dtype": torch.bfloat16, "device": DEVICE, "fill_value": float("nan")}
    x = torch.randn(t, shape.d_model, device=DEVICE).bfloat16()
    return Call(x, ids.to(DEVICE), weights.to(DEVICE), torch.full((t * k, shape.d_expert), **nan),
                torch.full((t * k, shape.d_model), **nan))  # fmt: skip


def planned(c: Call, experts: int, cut: Cut) -> tuple[plan.Plan, gt.WorkList]:
    """The plan and its tiles."""
    p = plan.plan(c.ids, c.weights, experts)
    pairs = c.ids.numel()
    return p, gt.work_list(p.counts, p.offsets, pairs, cut.tokens or gt.tokens_for(pairs, experts))


def gate_up(c: Call, w: Weights, p: plan.Plan, work: gt.WorkList, cut: Cut) -> None:
    """c.h from c.x."""
    both = None if w.biases is None else w.biases[:2]
    gg.grouped_gate_up(c.x, p.token, w.gate, w.up, work, c.h, how=w.how, biases=both, tile=cut.gate_up)


def down(c: Call, w: Weights, p: plan.Plan, work: gt.WorkList, cut: Cut) -> None:
    """c.y from c.h."""
    to, bias = go.Scatter(p.token, p.slot, c.ids.shape[1]), None if w.biases is None else w.biases[2]
    gg.grouped_product(c.h, None, w.down, work, c.y, to=to, bias=bias, tile=cut.down)


def layer(c: Call, w: Weights, cut: Cut) -> torch.Tensor:
    """The routed layer [T, D], bf16, as the arm runs it."""
    if w.fp8_rows:
        return fp8_layer(c, w, cut)
    p, work = planned(c, len(w.gate.data), cut)
    for (gate, up), some in ready((w.gate, w.up), work, c):
        gate_up(c, replace(w, gate=gate, up=up), p, some, Cut() if gate.format != w.gate.format else cut)
    for (last,), some in ready((w.down,), work, c):
        down(c, replace(w, down=last), p, some, Cut() if last.format != w.down.format else cut)
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights)


def is_decoded(c: Call, parts: Sequence[go.Weight]) -> bool:
    """Whether the arm would decode these weights, which are multiplied together, to scratch memory first."""
    if parts[0].layout != "raw":
        return True
    many = c.ids.numel() >= decode_from(parts) * len(parts[0].data)
    return many and all(map(decoded.can_decode, parts))


def ready(
    parts: Sequence[go.Weight], work: gt.WorkList, c: Call, first: bool | None = None
) -> Iterator[tuple[Sequence[go.Weight], gt.WorkList]]:
    """The weights and the tiles that meet them: as they lie, or decoded, wave after wave. `first`: whether they are
    decoded (None: as the arm would)."""
    if not (is_decoded(c, parts) if first is None else first):
        yield parts, work
        return
    wave = decoded.slots_a_wave(parts, DECODED_BYTES)
    rooms = [torch.empty(decoded.scratch_values(m, wave), dtype=c.x.dtype, device=DEVICE) for m in parts]
    for at, some in decoded.waves(work, len(parts[0].data), wave):
        yield [decoded.decode_slots(m, at, wave, r) for m, r in zip(parts, rooms, strict=True)], some


def fp8_layer(c: Call, w: Weights, cut: Cut) -> torch.Tensor:
    """The same with rows and hidden rows in fp8."""
    pairs, experts, n = c.ids.numel(), len(w.gate.data), w.gate.data.shape[1]
    tokens = cut.tokens or gt.tokens_for(pairs, experts, gt.MOST_FP8_TOKENS)
    p, work = planned(c, experts, Cut(tokens))
    h = c.h
    if not g8.quantise_apart(work.tokens):
        codes = torch.empty(pairs, n, dtype=torch.float8_e4m3fn, device=DEVICE)
        h = g8.Fp8Rows(codes, torch.empty(pairs, n // g8.GROUP, device=DEVICE))
    g8.fp8_gate_up(g8.Fp8Rows(*quantize_fp8(c.x)), p.token, w.gate, w.up, work, h, tile=cut.gate_up)
    h = h if isinstance(h, g8.Fp8Rows) else g8.Fp8Rows(*quantize_fp8(h))
    to = go.Scatter(p.token, p.slot, c.ids.shape[1])
    g8.fp8_product(h, None, w.down, work, c.y, to=to, tile=cut.down)
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights)


def values(w: go.Weight, slot: int) -> torch.Tensor:
    """fp32 [N, Kd] of one slot."""
    if w.layout == "planar":
        return dequantize_planar(w.data[slot], w.format, w.rows, w.kd, torch.float32)[0]
    return go.values_ref(w, slot, torch.float32)


def exact(c: Call, w: Weights) -> torch.Tensor:
    """The same mathematics in fp32 on the decoded weights, without store points."""
    out = torch.zeros(c.x.shape, device=DEVICE)
    for e in c.ids.unique().tolist():
        token, slot = (c.ids == e).nonzero(as_tuple=True)
        x = c.x[token].float()
        g, u, d = (values(m, e) for m in (w.gate, w.up, w.down))
        of_gate, of_up, of_down = (b[e].float() for b in w.biases) if w.biases else (0.0, 0.0, 0.0)
        h = hidden_rows_ref(x @ g.T + of_gate, x @ u.T + of_up, w.how)
        out.index_add_(0, token, c.weights[token, slot, None] * (h @ d.T + of_down))
    return out
