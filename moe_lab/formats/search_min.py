"""The search for a scale and a minimum: q2_k, q4_k and q5_k, every sub-block a column.

Formulas: the reference quantiser of ggml's k-quants, checked bit for bit against the C library in tests/oracles. The
search compares errors that differ in the last bit, so each product and each sum has C's order.
"""

from typing import NamedTuple

import numpy as np
import torch

from moe_lab._types import Float32, Tensor
from moe_lab.formats.kquants_search import divide, nearest_clamped_, ordered_sum


class MinSearch(NamedTuple):
    """How a format searches: codes 0..`top`, `steps` + 1 tries from `first` by 0.1, absolute or squared errors."""

    top: int
    first: float
    steps: int
    squared: bool

    def numerators(self, device: torch.device) -> Tensor:
        """fp32 [steps + 1]: first + 0.1 * step + top, rounded after each operation."""
        step = np.arange(self.steps + 1, dtype=np.float32)
        return torch.from_numpy(
            np.float32(self.first) + np.float32(0.1) * step + np.float32(self.top)
        ).to(device)  # fmt: skip


class _Columns:
    """The values, their weights, and room for what each try computes."""

    def __init__(self, x: Tensor, weights: Tensor, how: MinSearch) -> None:
        n, s = x.shape
        self.x, self.weights, self.how = x, weights, how
        self.low, self.high = x.amin(0), x.amax(0)
        self.codes, self.work, self.products = torch.empty_like(x), torch.empty_like(x), x.new_empty(n, 3, s)

    def encode(self, inverse: Tensor, offset: Tensor) -> Tensor:
        """nearest(inverse * (x - offset)) within 0..top. Where max is the offset the inverse is infinite: code 0."""
        ends = (inverse * (self.low - offset), inverse * (self.high - offset))
        torch.sub(self.x, offset, out=self.codes).mul_(inverse)
        return nearest_clamped_(self.codes, 0, self.how.top, *ends)

    def error(self, scale: Tensor, offset: Tensor) -> Tensor:
        """Sum of weight * |scale * code + offset - x|, or of its square."""
        e = torch.mul(self.codes, scale, out=self.work).add_(offset).sub_(self.x)
        e = e.mul_(e) if self.how.squared else e.abs_()
        return ordered_sum(e.mul_(self.weights))

    def sums(self) -> Tensor:
        """[3, S]: the sums of w q, w q q and w q x."""
        p = self.products
        weighted = torch.mul(self.weights, self.codes, out=p[:, 0])
        torch.mul(weighted, self.codes, out=p[:, 1])
        torch.mul(weighted, self.x, out=p[:, 2])
        return ordered_sum(p)


def search_scale_min(
    x: Float32[Tensor, "n S"], weights: Float32[Tensor, "n S"], how: MinSearch
) -> tuple[Float32[Tensor, " S"], Float32[Tensor, " S"], Float32[Tensor, "n S"]]:
    """Scale, minimum (>= 0, to be subtracted) and codes 0..top of each column, by least weighted error.

    Tries inverse scales (first + 0.1 * step + top) / (max - offset so far); for each the weighted least-squares scale
    and offset of its codes; keeps the one of least error. Columns of equal values <= 0 have scale 0.
    """
    c = _Columns(x, weights, how)
    lo, hi = c.low.clamp(max=0.0), c.high
    flat = hi == lo
    span = torch.where(flat, torch.ones_like(hi), hi - lo)
    sum_w, sum_x = ordered_sum(weights), ordered_sum(weights * x)
    inverse, offset = divide(how.top, span), lo
    scale = divide(1.0, inverse)
    c.encode(inverse, offset)
    error, codes_of = c.error(scale, offset), (inverse, offset)
    for numerator in how.numerators(x.device):
        # the offset kept so far replaces the minimum here too, so each try depends on the one before
        inverse = numerator / torch.where(flat, span, hi - offset)
        c.encode(inverse, offset)
        sum_l, sum_l2, sum_xl = c.sums()
        det = sum_w * sum_l2 - sum_l * sum_l
        new_scale = (sum_w * sum_xl - sum_x * sum_l) / det
        new_offset = (sum_l2 * sum_x - sum_l * sum_xl) / det
        positive = new_offset > 0
        new_scale = torch.where(positive, sum_xl / sum_l2, new_scale)
        new_offset = new_offset.masked_fill_(positive, 0.0)
        new_error = c.error(new_scale, new_offset)
        better = (det > 0) & (new_error < error)
        codes_of = torch.where(better, inverse, codes_of[0]), torch.where(better, offset, codes_of[1])
        error = torch.where(better, new_error, error)
        scale, offset = torch.where(better, new_scale, scale), torch.where(better, new_offset, offset)
    codes = c.encode(codes_of[0].masked_fill_(flat, 0.0), codes_of[1])
    return scale.masked_fill_(flat, 0.0), torch.where(flat, -lo, -offset), codes
