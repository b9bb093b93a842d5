"""What the launch tuner tries: each product of a layer on each kernel that serves it, and tiles worth a try there.

A job is one launch at one place of the launch table, on rotating inputs. E experts, N weight rows of Kd values; a job's
tokens give experts about as many rows as a tile of its width serves.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_lab._types import Tensor
from moe_lab.arms.grouped import weight_of
from moe_lab.bench.weights import make_matrices, split_format
from moe_lab.bench.workloads import LayerShape, routings
from moe_lab.formats import quantize_activations
from moe_lab_kernels.grouped import grouped_fp8 as g8
from moe_lab_kernels.grouped import grouped_gemm as gg
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.grouped.operands import DENSE, Scatter, Weight
from moe_lab_kernels.grouped.staged import why_not_staged
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.launch.schema import KERNELS
from moe_lab_kernels.mmq import mmq, wide
from moe_lab_kernels.mmq.opened import FORMS
from moe_lab_kernels.mmq.operands import MMQ_LAYOUTS, MmqRows, layout_for
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows.quantize_fp8 import quantize_fp8

# Rows an expert has where tiles of 16, 32, 64 and 128 serve it.
ROWS = {16: 2, 32: 24, 64: 48, 128: 96}
WIDE_ROWS = 192
BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A place of the table, the built-in tile, others to try, and calls that launch with a tile (None: the launcher's
    own choice) and give back what they wrote."""

    kernel: str
    format: str
    tokens: int
    gated: bool
    n: int
    kd: int
    default: Any
    others: tuple[Any, ...]
    calls: tuple[Callable[[Any], Tensor], ...]

    @property
    def label(self) -> str:
        """For messages."""
        form = "gate + up" if self.gated else "plain"
        return f"{self.kernel} {self.format} {form} [{self.n}, {self.kd}] in tiles of {self.tokens}"


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """Rows, hidden rows of every pair, the plan of picks, its tiles, and room for a hidden row and a down row of every
    pair."""

    x: Tensor
    hidden: Tensor
    plan: plan.Plan
    work: gt.WorkList
    to: Scatter
    h: Tensor
    y: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Gate and up [E, F, D], down [E, D, F], as kernels take them."""

    gate: Weight
    up: Weight
    down: Weight


def make_weights(shape: LayerShape, format: str, device: str, seed: int = 0) -> Matrices:
    """Genuinely quantised weights."""
    draw, (gate_up, down) = torch.Generator().manual_seed(seed), split_format(format)
    e, d, f = shape.experts, shape.d_model, shape.d_expert
    sides = (((e, f, d), gate_up), ((e, f, d), gate_up), ((e, d, f), down))
    return Matrices(*(weight_of(make_matrices(*side, draw, device)) for side in sides))


def make_inputs(shape: LayerShape, tokens: int, rows: int, device: str) -> list[Input]:
    """A rotation of inputs whose experts have `rows` rows on average, in tiles of `tokens`."""
    t = max(1, rows * shape.experts // shape.top_k)
    return [_input(shape, ids, w, tokens) for ids, w in routings(shape, t, device=device)]


def _input(shape: LayerShape, ids: Tensor, weights: Tensor, tokens: int) -> Input:
    t, k, device = *ids.shape, ids.device
    made = plan.plan(ids, weights, shape.experts)
    work = gt.work_list(made.counts, made.offsets, t * k, tokens)
    h, y = (torch.zeros(t * k, n, dtype=BF16, device=device) for n in (shape.d_expert, shape.d_model))
    x, hidden = (torch.randn(r, n, device=device).to(BF16) for r, n in ((t, shape.d_model), (t * k, shape.d_expert)))
    return Input(x, hidden, made, work, Scatter(made.token, made.slot, k), h, y)


def jobs(shape: LayerShape, format: str, device: str, kernels: Sequence[str] | None = None) -> Iterator[Job]:
    """Every place of a layer's shape and format on the named kernels (None: all), kernel by kernel."""
    w = make_weights(shape, format, device)
    formats, wanted = {w.gate.format, w.down.format}, set(kernels or KERNELS)
    for tokens, rows in ROWS.items():
        inputs = make_inputs(shape, tokens, rows, device)
        if formats <= set(STEPS) and "grouped" in wanted:
            yield from grouped_jobs(w, inputs)
        if formats == {"fp8_block"} and tokens <= gt.MOST_FP8_TOKENS:
            yield from (job for job in fp8_jobs(w, inputs) if job.kernel in wanted)
        if formats <= set(MMQ_LAYOUTS) and tokens <= mmq.MOST_TOKENS and "mmq" in wanted:
            yield from mmq_jobs(w, inputs)
    if formats <= set(MMQ_LAYOUTS) and "wide" in wanted:
        yield from wide_jobs(w, make_inputs(shape, gt.TOKENS[-1], WIDE_ROWS, device))


def _job(kernel: str, w: Weight, tokens: int, gated: bool, default: Any, tried: Sequence[Any],
         calls: Sequence[Callable[[Any], Tensor]], format: str | None = None) -> Job:  # fmt: skip
    others = tuple(t for t in dict.fromkeys(tried) if t != default)
    return Job(kernel, format or w.format, tokens, gated, w.data.shape[1], w.kd, default, others, tuple(calls))


def grouped_jobs(w: Matrices, inputs: Sequence[Input]) -> Iterator[Job]:
    """bf16 rows times weights decoded as they are multiplied."""
    tokens = inputs[0].work.tokens
    for m, is_gated in ((w.gate, True), (w.down, False)):
        default = gt.tile_for(m.format, tokens, is_gated, "cuda", why_not_staged(m, BF16) is None)
        tried = [default._replace(**dict(zip(("rows", "warps", "stages"), cut, strict=True)))
                 for cut in _tensor_cuts(m.format, tokens, is_gated, bool(default.staged))]  # fmt: skip
        tried += _persistent(default) if m.format in DENSE else []

        def gated(i: Input, tile: gt.Tile | None) -> Tensor:
            return gg.grouped_gate_up(i.x, i.plan.token, w.gate, w.up, i.work, i.h, tile=tile)

        def plain(i: Input, tile: gt.Tile | None) -> Tensor:
            return gg.grouped_product(i.hidden, None, w.down, i.work, i.y, to=i.to, tile=tile)

        yield _job("grouped", m, tokens, is_gated, default, tried, _each(gated if is_gated else plain, inputs))


def _each(run: Callable[[Input, Any], Tensor], inputs: Sequence[Input]) -> list[Callable[[Any], Tensor]]:
    return [lambda tile, i=i: run(i, tile) for i in inputs]


def _persistent(tile: gt.Tile) -> list[gt.Tile]:
    """Grids of a few programs a multiprocessor that walk the pieces: they lost wherever they were timed on an H200, by
    5 to 70 %, so few kernels are compiled for them."""
    return [tile._replace(resident=n) for n in (2, 4)]


def _tensor_cuts(format: str, tokens: int, gated: bool, staged: bool) -> Iterator[tuple[int, int, int]]:
    """(rows, warps, stages) whose sums leave a thread registers to work with."""
    narrow = () if format in DENSE else ((64, 8), (128, 16))  # decoding wants registers
    for rows, warps in ((64, 4), (128, 4), (128, 8), *narrow):
        of_both = rows * (1 + gated)
        if of_both * tokens // (32 * warps) > 128 or (staged and of_both != 16 * warps):
            continue
        most = 3 if format not in DENSE else 5 if tokens <= 32 else 4  # decoding fills registers, not stages
        yield from ((rows, warps, stages) for stages in range(2, most + 1))


def fp8_jobs(w: Matrices, inputs: Sequence[Input]) -> Iterator[Job]:
    """fp8 rows times fp8 weights; hidden rows leave in fp8, or in 16 bits where the layer quantises them apart."""
    tokens = inputs[0].work.tokens
    rows = [g8.Fp8Rows(*quantize_fp8(i.x)) for i in inputs]
    hidden = [g8.Fp8Rows(*quantize_fp8(i.hidden)) for i in inputs]
    apart = g8.quantise_apart(tokens)
    rooms = [i.h if apart else g8.Fp8Rows(*(t.clone() for t in h)) for i, h in zip(inputs, hidden, strict=True)]
    calls: dict[bool, list[Callable[[Any], Tensor]]] = {True: [], False: []}
    for i, x, h, room in zip(inputs, rows, hidden, rooms, strict=True):
        calls[True].append(lambda tile, i=i, x=x, room=room: _codes(
            g8.fp8_gate_up(x, i.plan.token, w.gate, w.up, i.work, room, tile=tile)))  # fmt: skip
        calls[False].append(lambda tile, i=i, h=h: g8.fp8_product(h, None, w.down, i.work, i.y, to=i.to, tile=tile))
    for m, gated in ((w.gate, True), (w.down, False)):
        whole = gated and not apart  # a program makes the 128 hidden values that share a scale
        default = gt.fp8_tile_for(tokens, gated, whole, "cuda")
        cuts = [(128, 8, 2), (128, 8, 3), (128, 8, 4), (128, 4, 3)]
        cuts += [] if whole else [(64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3)]
        tried = [default._replace(rows=r, warps=v, stages=s) for r, v, s in cuts]
        yield _job("grouped_fp8_hidden" if whole else "grouped_fp8", m, tokens, gated, default, tried, calls[gated])


def _codes(h: Any) -> Tensor:
    return h.codes.view(torch.uint8) if isinstance(h, g8.Fp8Rows) else h


def mmq_jobs(w: Matrices, inputs: Sequence[Input]) -> Iterator[Job]:
    """int8 rows times codes taken apart in the loop: gate and up where they go together, one product of each part."""
    tokens = inputs[0].work.tokens
    cuts = [(64, 4, 2), (64, 4, 3), (64, 2, 2), (128, 4, 2), (128, 8, 2)]

    def job(m: Weight, gated: bool, calls: Sequence[Callable[[Any], Tensor]]) -> Job:
        default = mmq.mmq_tile(m.format, False, tokens, "cuda", gated)
        tried = [default._replace(rows=r, warps=v, stages=s) for r, v, s in cuts]
        return _job("mmq", m, tokens, gated, default, tried, calls)

    if tokens == gt.TOKENS[0]:
        made = [_rows(i.x, w.gate.format) for i in inputs]
        calls = [lambda tile, i=i, x=x: mmq.mmq_gate_up(x, i.plan.token, w.gate, w.up, i.work, i.h, tile=tile)
                 for i, x in zip(inputs, made, strict=True)]  # fmt: skip
        yield job(w.gate, True, calls)
    for m, calls in _products(w, inputs):
        yield job(m, False, calls)


def wide_jobs(w: Matrices, inputs: Sequence[Input]) -> Iterator[Job]:
    """The same times weights that were opened first."""
    for m, calls in _products(w, inputs):
        if (m.format, False) not in FORMS:
            continue
        default = wide.wide_tile(m.format, False, gt.TOKENS[-1], "cuda")
        cuts = [(64, 64, 2, 3), (64, 64, 4, 3), (64, 64, 2, 2), (128, 64, 4, 3), (64, 128, 4, 3)]
        names = ("rows", "tokens", "warps", "stages")
        tried = [default._replace(**dict(zip(names, cut, strict=True))) for cut in cuts]
        yield _job("wide", m, gt.TOKENS[-1], False, default, tried, calls)


def _products(w: Matrices, inputs: Sequence[Input]) -> Iterator[tuple[Weight, list[Callable[[Any], Tensor]]]]:
    for_up, for_down = ([_rows(t, m.format) for t in some] for m, some in (
        (w.up, [i.x for i in inputs]), (w.down, [i.hidden for i in inputs])))  # fmt: skip
    up = [lambda tile, i=i, x=x: mmq.mmq_product(x, i.plan.token, w.up, i.work, i.h, tile=tile)
          for i, x in zip(inputs, for_up, strict=True)]  # fmt: skip
    down = [lambda tile, i=i, x=x: mmq.mmq_product(x, None, w.down, i.work, i.y, to=i.to, tile=tile)
            for i, x in zip(inputs, for_down, strict=True)]  # fmt: skip
    yield from ((w.up, up), (w.down, down))


def _rows(x: Tensor, format: str) -> MmqRows:
    made = quantize_activations(x, layout_for(format))
    return MmqRows(made.codes, made.scale, made.total, layout_for(format))
