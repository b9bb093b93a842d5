"""Inputs for kernel tests, the same for the interpreter and the GPU: genuinely quantised weights, guarded buffers."""

from dataclasses import dataclass, field, replace
from functools import cache

import torch

from moe_lab.formats import get_format, quantize
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.rows import quantize_rows

GUARD = 64
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Guarded:
    """A tensor in the middle of a larger buffer whose ends hold one value; `view` starts poisoned with NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str, fill: float = -7.0) -> None:
        n = torch.Size(shape).numel()
        self.whole = torch.full((n + 2 * GUARD,), fill, dtype=dtype, device=device)
        self.fill = fill
        self.view = self.whole[GUARD : GUARD + n].view(shape)
        self.view.fill_(float("nan"))

    def intact(self) -> bool:
        ends = torch.cat([self.whole[:GUARD], self.whole[-GUARD:]])
        return bool((ends == self.fill).all())


def among_poison(t: torch.Tensor, poison: float) -> torch.Tensor:
    """The same values inside a buffer of `poison`, so that a read past either end shows in the result."""
    whole = torch.full((t.numel() + 2 * GUARD,), poison, dtype=t.dtype, device=t.device)
    view = whole[GUARD : GUARD + t.numel()].view(t.shape)
    view.copy_(t)
    return view


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, for comparisons in which -0 and 0 differ and each NaN equals each other."""
    if t.is_floating_point():
        t = t.masked_fill(t.isnan(), float("nan"))
    return t.contiguous().view({4: torch.int32, 2: torch.int16, 1: torch.int8}[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a.cpu()), bits(b.cpu()))


def nmse(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float(((a - b) ** 2).sum() / (b**2).sum())


def worst_relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| / (|b| + tiny), tiny = 1e-30 or the dtype's smallest normal, whichever is larger."""
    tiny = max(1e-30, torch.finfo(b.dtype).smallest_normal)
    return float(((a.double() - b.double()).abs() / (b.double().abs() + tiny)).max())


@dataclass
class GemvCase:
    """One grouped product: pairs in chunks (slot, first pair, rows) over weights [S, N, row_bytes]."""

    format: str
    rows: tuple[torch.Tensor, torch.Tensor]
    row_of: torch.Tensor
    w: torch.Tensor
    chunks: torch.Tensor
    dtype: torch.dtype = torch.float32
    extra: dict = field(default_factory=dict)

    @property
    def n(self) -> int:
        return self.w.shape[1]

    def run(self, op=gemv.gemv) -> Guarded:
        out = Guarded((len(self.row_of), self.n), self.dtype, str(self.w.device))
        op(self.rows, self.row_of, self.w, self.chunks, self.format, out.view, **self.extra)
        return out

    def exact(self) -> torch.Tensor:
        """float64 [P, N] of the operands as they are: codes * scale times dequantised weights; NaN outside chunks."""
        codes, scale = (t.double().cpu() for t in self.rows)
        x = (codes.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)
        w = get_format(self.format).dequantize(self.w.cpu()).double()
        out = torch.full((len(self.row_of), self.n), float("nan"), dtype=torch.float64)
        for slot, first, n in self.chunks.tolist():
            out[first : first + n] = x[self.row_of[first : first + n].long().cpu()] @ w[slot].T
        return out


@cache
def _book(format: str, kd: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    normal, wide = torch.randn(48, kd, generator=draw), torch.rand(48, kd, generator=draw)
    return quantize(normal * (1 + 2 * wide**8) / kd**0.5, format).data


def weights(format: str, slots: int, n: int, kd: int, seed: int = 0) -> torch.Tensor:
    """Raw blocks [S, N, row_bytes] of heavy-tailed weights, quantised for real (random bytes would not be centred): 48
    rows, dealt out again and again in changing order."""
    rows = torch.arange(slots * n) * 29 + torch.arange(slots * n) // 48
    return _book(format, kd, seed)[rows % 48].view(slots, n, -1)


def gemv_case(
    format: str,
    n: int,
    kd: int,
    counts: list[int],
    *,
    slots: int = 3,
    x_rows: int | None = None,
    dtype: str = "f32",
    device: str = "cpu",
    seed: int = 0,
) -> GemvCase:
    """A case whose chunk c has counts[c] rows of slot c % slots; pairs use activation rows in a scrambled order."""
    draw = torch.Generator().manual_seed(1000 + seed)
    pairs = sum(counts)
    many = x_rows or max(1, pairs)
    x = torch.randn(many, kd, generator=draw) * torch.exp(torch.randn(many, 1, generator=draw))
    codes, scale, _ = quantize_rows.quantize_q8_1_ref(x)
    row_of = torch.randint(many, (pairs,), generator=draw, dtype=torch.int32)
    starts = torch.tensor([0, *counts]).cumsum(0)[:-1]
    chunks = torch.stack([torch.arange(len(counts)) % slots, starts, torch.tensor(counts)], 1).int().view(-1, 3)
    w = among_poison(weights(format, slots, n, kd, seed).to(device), 255)
    rows = (among_poison(codes.to(device), 127), among_poison(scale.to(device), float("nan")))
    return GemvCase(format, rows, row_of.to(device), w, chunks.to(device), DTYPES[dtype])


def alone(case: GemvCase, pair: int) -> GemvCase:
    """The one pair of `case`, in a chunk of its own."""
    slot = next(s for s, first, n in case.chunks.tolist() if first <= pair < first + n)
    one = torch.tensor([[slot, 0, 1]], dtype=torch.int32, device=case.chunks.device)
    return replace(case, row_of=case.row_of[pair : pair + 1], chunks=one)
