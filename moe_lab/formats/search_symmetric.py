"""The searches for a signed scale: q3_k and q6_k, every sub-block of 16 a column, errors weighted by x^2.

Formulas: the reference quantisers of ggml's k-quants, checked bit for bit against the C library in tests/oracles. Both
maximise (sum w x q)^2 / (sum w q^2), whose root is the least-squares scale; every product and sum has C's order.
"""

import numpy as np
import torch

from moe_lab._types import Float32, Tensor
from moe_lab.formats.kquants_search import divide, ordered_sum, signed_peak

ROUNDS = 5
GROUP_EPS = 1e-15  # below this largest magnitude a sub-block is all zero


def _start(x: Tensor) -> tuple[Tensor, Tensor]:
    """Which columns are all zero, and each column's peak (1 for those)."""
    peak = signed_peak(x, 0)
    tiny = peak.abs() < GROUP_EPS
    return tiny, peak.masked_fill_(tiny, 1.0)


class _Weighted:
    """w x and w of each value, w = x^2, side by side, and room for their products with codes."""

    def __init__(self, x: Tensor) -> None:
        self.pairs = x.new_empty(len(x), 2, x.shape[1])
        torch.mul(x, x, out=self.pairs[:, 1])
        torch.mul(self.pairs[:, 1], x, out=self.pairs[:, 0])
        self.products = torch.empty_like(self.pairs)

    def sums(self, q: Tensor) -> Tensor:
        """[2, S]: sum w x q and sum w q q of each column."""
        torch.mul(self.pairs, q[:, None], out=self.products)
        self.products[:, 1].mul_(q)
        return ordered_sum(self.products)


def search_by_inverse(
    x: Float32[Tensor, "n S"], nmax: int = 32
) -> tuple[Float32[Tensor, " S"], Float32[Tensor, "n S"]]:
    """Scale and codes 0..2 nmax - 1 (nmax added): the best of 19 inverse scales -(nmax + 0.1 i) / peak, |i| <= 9."""
    tiny, peak = _start(x)
    weighted, q = _Weighted(x), torch.empty_like(x)

    def encode(inverse: Tensor) -> Tensor:
        return torch.mul(x, inverse, out=q).round_().clamp_(-nmax, nmax - 1)  # |inverse * x| <= nmax + 1

    best_inverse = divide(-nmax, peak)
    sum_lx, sum_l2 = weighted.sums(encode(best_inverse))
    scale = torch.where(sum_l2 == 0, torch.zeros_like(sum_l2), sum_lx / sum_l2)
    best = scale * sum_lx
    shifts = np.float32(0.1) * np.array([i for i in range(-9, 10) if i], dtype=np.float32)
    for numerator in torch.from_numpy(-(np.float32(nmax) + shifts)).to(x.device):
        inverse = numerator / peak
        sum_lx, sum_l2 = weighted.sums(encode(inverse))
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        scale = torch.where(better, sum_lx / sum_l2, scale)
        best = torch.where(better, scale * sum_lx, best)
        best_inverse = torch.where(better, inverse, best_inverse)
    codes = encode(best_inverse).add_(nmax).mul_(~tiny)
    return scale.masked_fill_(tiny, 0.0), codes


def search_by_moves(x: Float32[Tensor, "16 S"], nmax: int = 4) -> tuple[Float32[Tensor, " S"], Float32[Tensor, "16 S"]]:
    """Scale and codes 0..2 nmax - 1 (nmax added): from -nmax / peak, up to five rounds of moving single codes.

    C looks at one value after another and moves a code at once. Until something moves the sums stay what they are, so
    all 16 values are judged together here; the first mover from `start` on is the one that C comes to next, and only
    columns that moved are judged again. A code moves only while the other codes' sum of w x q is positive; codes have
    the sign of -x * peak, so columns with a positive peak keep their first codes.
    """
    tiny, peak = _start(x)
    weighted = _Weighted(x)
    q = (x * divide(-nmax, peak)).round_().clamp_(-nmax, nmax - 1)
    sums = weighted.sums(q)
    ids = (sums[0] > 0).nonzero().squeeze(-1)
    start = torch.zeros(2, len(ids), dtype=torch.int8, device=x.device)  # the value that comes next, and the round
    while len(ids):
        part = (t.index_select(1, ids) for t in (x, q, sums))
        row, new, after = _first_move(*part, start[0], nmax)
        turn = start[1] + (row < start[0])
        keep = ((row < 16) & (turn < ROUNDS)).nonzero().squeeze(-1)
        ids, row = ids[keep], row[keep]
        at = row.long()
        q[at, ids], sums[:, ids] = new[at, keep], after[:, at, keep]
        start = torch.stack([row + 1, turn[keep]])
    scale = torch.where(sums[1] > 0, sums[0] / sums[1], torch.zeros_like(sums[0]))
    return scale.masked_fill_(tiny, 0.0), q.add_(nmax).mul_(~tiny)


def _first_move(x: Tensor, q: Tensor, sums: Tensor, start: Tensor, nmax: int) -> tuple[Tensor, ...]:
    """The value that moves first, counted on from `start` and round (16: none does); all new codes; the sums after.

    Codes other than 0 belong to values of at least peak / (2 nmax), so x * l2 / lx is a small number wherever lx > 0.
    Conditions are floats 0 and 1, not bools: torch compares four times as fast on a CPU.
    """
    sum_lx, sum_l2 = sums
    w = x * x
    wx = w * x
    lx, l2 = sum_lx - wx * q, sum_l2 - (w * q).mul_(q)
    new = (x * l2).div_(lx).round_().clamp_(-nmax, nmax - 1)
    new_lx, new_l2 = wx.mul_(new).add_(lx), w.mul_(new).mul_(new).add_(l2)
    moves = (new_lx * new_lx).mul_(sum_l2)
    moves = torch.gt(moves, (sum_lx * sum_lx) * new_l2, out=moves)
    moves.mul_(torch.minimum(lx, new_l2, out=lx).gt_(0.0)).mul_(torch.ne(new, q, out=l2))
    rows = torch.arange(16, dtype=torch.int8, device=q.device)[:, None]
    order = (rows - start).bitwise_and_(15)
    steps = torch.sub(order, moves, alpha=16).amin(0).to(torch.int8)  # movers first, in their order: -16..-1
    return torch.where(steps < 0, steps + start & 15, 16), new, torch.stack([new_lx, new_l2])
