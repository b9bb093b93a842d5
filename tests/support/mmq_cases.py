"""Inputs for the int8 grouped product's tests, the same for the interpreter and the GPU: genuinely quantised weights
among poison, rows of very different sizes, outputs between guards.
"""

from dataclasses import dataclass, replace

import torch

from moe_lab.formats import quantize_activations
from moe_lab_kernels.grouped import tiles as grouped_gemm_tiles
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.operands import MMQ_LAYOUTS, MmqRows, folded_layout, layout_for
from moe_lab_kernels.mmq.wide import WideTile
from moe_lab_kernels.rows.arithmetic import Arithmetic
from tests.support.grouped_cases import weight
from tests.support.kernel_cases import DTYPES, Guarded, among_poison

# every format with ggml's arithmetic, and the folded form where there is another
KINDS = tuple(f"{f}-{layout}" for f in MMQ_LAYOUTS for layout in dict.fromkeys((layout_for(f), folded_layout(f))))


def rows_of(x: torch.Tensor, layout: str, arithmetic: Arithmetic | None = None) -> MmqRows:
    made = quantize_activations(x, layout, arithmetic)
    parts = (None if t is None else among_poison(t, float("nan") if t.is_floating_point() else 99)
             for t in (made.scale, made.total))  # fmt: skip
    scale, total = parts
    assert scale is not None
    return MmqRows(made.codes, scale, total, layout)


@dataclass
class MmqCase:
    """Pairs sorted by expert, `counts[e]` of expert e; pairs read rows in a scrambled order. `experts`: whose biases
    each slot's tiles have (None: slots are experts)."""

    rows: MmqRows
    row_of: torch.Tensor
    gate: Weight
    up: Weight
    counts: torch.Tensor
    tokens: int
    tile: Tile | WideTile | None = None
    experts: torch.Tensor | None = None

    @property
    def pairs(self) -> int:
        return len(self.row_of)

    @property
    def work(self) -> WorkList:
        offsets = torch.nn.functional.pad(self.counts.cumsum(0).int(), (1, 0))
        work = grouped_gemm_tiles.work_list_ref(self.counts, offsets, self.pairs, self.tokens)
        if self.experts is None:
            return work
        return work._replace(expert=self.experts[work.tiles[:, 0].long().clamp(min=0)].contiguous())

    def product(self, op=mmq.mmq_product, dtype: str = "f32", to: Scatter | None = None, **how) -> Guarded:
        rows = self.pairs if to is None else int((to.row * to.slots + to.slot).max()) + 1 if self.pairs else 0
        out = Guarded((rows, self.gate.rows), DTYPES[dtype], str(self.row_of.device))
        op(self.rows, self.row_of, self.gate, self.work, out.view, to=to, tile=self.tile, **how)
        return out

    def gated(self, op=mmq.mmq_gate_up, dtype: str = "bf16", **options) -> Guarded:
        out = Guarded((self.pairs, self.gate.rows), DTYPES[dtype], str(self.row_of.device))
        op(self.rows, self.row_of, self.gate, self.up, self.work, out.view, tile=self.tile, **options)
        return out

    def alone(self, pair: int) -> "MmqCase":
        """The one pair, its expert's weights at their slot."""
        one = torch.zeros_like(self.counts)
        one[int((self.counts.cumsum(0) <= pair).sum())] = 1
        return replace(self, row_of=self.row_of[pair : pair + 1].contiguous(), counts=one, tokens=16, tile=None)


def mmq_case(kind: str, n: int, kd: int, counts: list[int], *, tokens: int = 16, device: str = "cpu", seed: int = 0,
             arithmetic: Arithmetic | None = None, size: float = 1.0) -> MmqCase:  # fmt: skip
    """`kind`: format and layout as in KINDS. As many rows as pairs (at least one); one of their blocks is zero."""
    format, layout = kind.split("-")
    draw = torch.Generator().manual_seed(1000 + seed)
    pairs, experts = sum(counts), len(counts)
    many = max(1, pairs)
    x = size * torch.randn(many, kd, generator=draw) * torch.exp(torch.randn(many, 1, generator=draw))
    x[-1, :32] = 0
    row_of = torch.randint(many, (pairs,), generator=draw, dtype=torch.int32)
    w = [weight(format, experts, n, kd, seed + i, device) for i in (1, 2)]
    rows = rows_of(x.to(device), layout, arithmetic)
    return MmqCase(rows, row_of.to(device), *w, torch.tensor(counts, dtype=torch.int32, device=device), tokens)
