"""Whole routed layers of the int8 grouped product: the call, its check against fp32 and itself, compiling it ahead."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any

import torch
from grouped_layers import Call, Weights, exact, make_call

from moe_lab.bench.workloads import LayerShape, routings
from moe_lab.formats import quantize_activations
from moe_lab.tolerances import tol
from moe_lab_kernels.backend import record_launches
from moe_lab_kernels.grouped import operands as go
from moe_lab_kernels.grouped import tiles as gt
from moe_lab_kernels.launch.ahead import Job, Pointer, job_of, prepare
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq import operands as mo
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows import combine
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.planar import repack

KEPT, EXACT = 32, 8  # rows that are put among others; of those, rows that fp32 mathematics is made for
BF16 = torch.bfloat16


def rows_of(x: torch.Tensor, layout: str) -> mo.MmqRows:
    """Quantised by the kernel."""
    q = quantize_activations(x, layout)
    return mo.MmqRows(q.codes, q.scale, q.total, layout)


def in_layout(w: Weights, layout: str) -> Weights:
    """The weights as they are, "raw", or in planes."""
    if layout == "raw":
        return w
    named = {"gate": w.gate, "up": w.up, "down": w.down}
    planes = {k: go.Weight(repack(m.data, m.format)[:, None], m.format, m.kd, layout=layout) for k, m in named.items()}
    return replace(w, **planes)


def layer(c: Call, w: Weights, folded: bool) -> torch.Tensor:
    """The routed layer [T, D], bf16: quantise, gate, up, activation, quantise, down, weighted sum."""
    p = plan.plan(c.ids, c.weights, len(w.gate.data))
    pairs = c.ids.numel()
    work = gt.work_list(p.counts, p.offsets, pairs, gt.tokens_for(pairs, len(w.gate.data)))
    named = mo.folded_layout if folded else mo.layout_for
    x = rows_of(c.x, named(w.gate.format))
    room = max(mmq.scratch_for(work, named(m.format) == "q8_k", m) for m in (w.gate, w.down))
    scratch = torch.empty(room, dtype=torch.uint8, device=c.x.device) if room else None
    both, last = (w.biases[:2], w.biases[2]) if w.biases else (None, None)
    hidden = mmq.mmq_hidden(x, p.token, w.gate, w.up, work, BF16, how=w.how, biases=both, scratch=scratch)
    to = go.Scatter(p.token, p.slot, c.ids.shape[1])
    down = rows_of(hidden, named(w.down.format))
    mmq.mmq_product(down, None, w.down, work, c.y, to=to, bias=last, scratch=scratch)
    return combine.combine(c.y.view(*c.ids.shape, -1), c.weights)


class Known:
    """Rows with a result that is known to be right: a batch of their own, whose first rows are near fp32 mathematics
    and equal those of a row alone. `wrong` says what is not so. `raw`: the weights in raw blocks."""

    def __init__(self, shape: LayerShape, w: Weights, folded: bool, raw: Weights) -> None:
        self.shape, self.w, self.folded = shape, w, folded
        self.c = make_call(shape, *routings(shape, KEPT, seed=77)[0])
        self.want = layer(self.c, w, folded)
        few, one = self._first(EXACT), self._first(1)
        fp32 = exact(few, raw).double()
        self.nmse = float((self.want[:EXACT].double() - fp32).square().sum() / fp32.square().sum())
        self.wrong = "" if self.nmse <= tol("mmq/layer") else "WRONG: far from fp32"
        if not torch.equal(layer(one, w, folded), self.want[:1]):
            self.wrong = "WRONG: bits differ in a batch of 1"

    def _first(self, n: int) -> Call:
        c, k = self.c, self.c.ids.shape[1]
        return Call(
            c.x[:n].contiguous(), c.ids[:n].contiguous(), c.weights[:n].contiguous(), c.h[: n * k], c.y[: n * k]
        )

    def among(self, tokens: int) -> str:
        """ "yes", or what is wrong with these rows' bits in a batch of so many."""
        c = make_call(self.shape, *routings(self.shape, tokens, seed=78)[0])
        n = min(KEPT, max(1, tokens // 2))
        at = torch.randperm(tokens, device=c.x.device)[:n]
        c.x[at], c.ids[at], c.weights[at] = self.c.x[:n], self.c.ids[:n], self.c.weights[:n]
        got = layer(c, self.w, self.folded)
        bad = int((got[at] != self.want[:n]).sum()) + int(got.isnan().sum())
        return self.wrong or (f"WRONG: {bad} values differ in a batch of {tokens}" if bad else "yes")


def way(shape: LayerShape, w: Weights, tokens: int, folded: bool) -> str:
    """ "list of 64 rows", and which of gate and down open their weights."""
    pairs, experts = tokens * shape.top_k, shape.experts
    n = gt.tokens_for(pairs, experts)
    work = gt.WorkList(torch.empty(gt.most_tiles(pairs, experts, n), 3, dtype=torch.int32), n)
    wide = [name for name in ("gate", "down") if mmq.goes_wide(getattr(w, name), work, folded)]
    return f"list of {n} rows" + (f", opened: {' '.join(wide)}" if wide else "")


def empty_weights(shape: LayerShape, format: str, layout: str) -> Weights:
    """Weights of the right sizes that hold nothing, on the host, whose pages are never touched."""
    gate_up, down = format.split("+") if "+" in format else (format, format)
    e, d, f = shape.experts, shape.d_model, shape.d_expert

    def one(format: str, n: int, kd: int) -> go.Weight:
        row = kd // BLOCKS[format].values * BLOCKS[format].bytes
        size = (e, n, row) if layout == "raw" else (e, 1, -(-n * row // 16) * 16)
        return go.Weight(torch.empty(size, dtype=torch.uint8), format, kd, layout=layout)

    biases = [torch.empty(e, n, dtype=BF16) for n in (f, f, d)] if shape.name.startswith("gpt-oss") else []
    given = (biases[0], biases[1], biases[2]) if biases else None
    return Weights(one(gate_up, f, d), one(gate_up, f, d), one(down, d, f), biases=given)


def jobs_of(shape: LayerShape, format: str, layout: str, folded: bool, tokens: int) -> Iterator[Job]:
    """What a cell and its check launch, for compilers that have no GPU."""
    w = empty_weights(shape, format, layout)
    for t in (tokens, KEPT):
        k = shape.top_k
        x = torch.empty(t, shape.d_model, dtype=BF16)
        ids, weights = torch.zeros(t, k, dtype=torch.int32), torch.zeros(t, k)
        c = Call(x, ids, weights, torch.empty(0, dtype=BF16), torch.empty(t * k, shape.d_model, dtype=BF16))
        with record_launches() as made:
            layer(c, w, folded)
        yield from map(job_of, made)


def variant_of(job: Job) -> tuple[Any, ...]:
    """What the compiler tells launches apart by."""

    def told(p: Any, arg: Any) -> Any:
        if p.is_constexpr or isinstance(arg, Pointer):
            return repr(arg)
        return None if p.do_not_specialize or not isinstance(arg, int) else (arg == 1, arg % 16 == 0)

    args = zip(job.function().params, job.args, strict=True)
    return job.module, job.kernel, *(told(p, arg) for p, arg in args), job.meta


class Ahead:
    """Compilations under way, a variant once, in the order that they were asked for."""

    def __init__(self, compilers: Executor) -> None:
        self._compilers, self._known = compilers, {}

    def ask(self, jobs: Sequence[Job]) -> list[Future[list[str]]]:
        """The compilations that these jobs wait for."""
        out: dict[tuple[Any, ...], Future[list[str]]] = {}
        for job in jobs:
            variant = variant_of(job)
            if variant not in self._known:
                self._known[variant] = self._compilers.submit(prepare, [job])
            out[variant] = self._known[variant]
        return list(out.values())
