"""Inputs for the grouped GEMM's tests, the same for the interpreter and the GPU: genuinely quantised weights, rows
among poison, outputs between guards.
"""

from dataclasses import dataclass, replace

import torch

from moe_lab.formats import quantize
from moe_lab_kernels.grouped import grouped_gemm
from moe_lab_kernels.grouped import operands as grouped_gemm_operands
from moe_lab_kernels.grouped import tiles as grouped_gemm_tiles
from moe_lab_kernels.grouped.operands import DENSE, Scatter, Weight
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.rows.hidden import Gate
from tests.support.kernel_cases import DTYPES, Guarded, among_poison


def weight(format: str, slots: int, n: int, kd: int, seed: int, device: str = "cpu") -> Weight:
    """Heavy-tailed weights, quantised for real, every part of them among poison."""
    draw = torch.Generator().manual_seed(seed)
    normal, wide = torch.randn(slots, n, kd, generator=draw), torch.rand(slots, n, kd, generator=draw)
    w = normal * (1 + 2 * wide**8) / kd**0.5
    if format in DENSE:
        return Weight(among_poison(w.to(DENSE[format]).to(device), float("nan")), format, kd)
    q = quantize(w, format)
    second = q.biases if q.biases is not None else q.global_scale
    parts = (None if t is None else among_poison(t.to(device), float("nan") if t.is_floating_point() else 255)
             for t in (q.data, q.scales, second))  # fmt: skip
    data, scales, second = parts
    assert data is not None
    return Weight(data, format, kd, scales, second)


@dataclass
class GroupedCase:
    """Pairs sorted by expert, `counts[e]` of expert e; pairs read rows of x in a scrambled order."""

    x: torch.Tensor
    row_of: torch.Tensor
    gate: Weight
    up: Weight
    counts: torch.Tensor
    tokens: int
    tile: Tile | None = None
    expert: list[int] | None = None  # whose biases a slot has

    @property
    def pairs(self) -> int:
        return len(self.row_of)

    @property
    def work(self) -> WorkList:
        offsets = torch.nn.functional.pad(self.counts.cumsum(0).int(), (1, 0))
        made = grouped_gemm_tiles.work_list_ref(self.counts, offsets, self.pairs, self.tokens)
        if self.expert is None:
            return made
        owner = torch.tensor([*self.expert, -1], dtype=torch.int32, device=self.x.device)
        return made._replace(expert=owner[made.tiles[:, 0].long()])

    def product(self, op=grouped_gemm.grouped_product, dtype: str = "f32", to: Scatter | None = None,
                **options) -> Guarded:  # fmt: skip
        rows = self.pairs if to is None else int((to.row * to.slots + to.slot).max()) + 1 if self.pairs else 0
        out = Guarded((rows, self.gate.data.shape[1]), DTYPES[dtype], str(self.x.device))
        op(self.x, self.row_of, self.gate, self.work, out.view, to=to, tile=self.tile, **options)
        return out

    def gated(self, op=grouped_gemm.grouped_gate_up, dtype: str = "bf16", how: Gate = grouped_gemm.SILU,
              biases: tuple[torch.Tensor, torch.Tensor] | None = None) -> Guarded:  # fmt: skip
        out = Guarded((self.pairs, self.gate.data.shape[1]), DTYPES[dtype], str(self.x.device))
        op(self.x, self.row_of, self.gate, self.up, self.work, out.view, tile=self.tile, how=how, biases=biases)
        return out

    def exact(self) -> torch.Tensor:
        """float64 [P, N] of the operands as the kernel multiplies them."""
        slot = torch.repeat_interleave(torch.arange(len(self.counts)), self.counts.cpu().long()).tolist()
        weights = {s: grouped_gemm_operands.values_ref(self.gate, s, self.x.dtype).double() for s in set(slot)}
        rows = self.x[self.row_of.long()].double()
        return torch.stack([weights[s] @ row for s, row in zip(slot, rows, strict=True)])

    def alone(self, pair: int) -> "GroupedCase":
        """The one pair, its expert's weights at their slot."""
        until = self.counts.cumsum(0)
        expert = int((until <= pair).sum())
        one = torch.zeros_like(self.counts)
        one[expert] = 1
        return replace(self, row_of=self.row_of[pair : pair + 1].contiguous(), counts=one, tokens=16, tile=None)


def grouped_case(format: str, n: int, kd: int, counts: list[int], *, tokens: int = 16, dtype: str = "bf16",
                 device: str = "cpu", seed: int = 0) -> GroupedCase:  # fmt: skip
    """x has rows of very different sizes, and as many as there are pairs (at least one)."""
    draw = torch.Generator().manual_seed(1000 + seed)
    pairs, experts = sum(counts), len(counts)
    many = max(1, pairs)
    x = torch.randn(many, kd, generator=draw) * torch.exp(torch.randn(many, 1, generator=draw))
    row_of = torch.randint(many, (pairs,), generator=draw, dtype=torch.int32)
    w = [weight(format, experts, n, kd, seed + i, device) for i in (1, 2)]
    x = among_poison(x.to(DTYPES[dtype]).to(device), float("nan"))
    return GroupedCase(x, row_of.to(device), *w, torch.tensor(counts, dtype=torch.int32, device=device), tokens)
