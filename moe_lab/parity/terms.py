"""A product taken apart by the 16 values that share a weight's sub-block scale: what each adds, in float64.

The codes' part scale * (codes . x codes) and the minimum's part are kept apart, as an arm multiplies them: with raw
sums of the activations the minimum's part is exact while the codes' part carries the error alone.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.formats import Arithmetic, QuantRows, QuantTensor
from moe_lab_kernels.rows.arithmetic import DTYPES
from moe_lab_kernels.storage.unpack import unpack_ref

WIDTH = 16


class Terms(NamedTuple):
    """main, minimum [R, N, Kd / 16] in float64: row r times row n of the weights is the sum of main - minimum."""

    main: Tensor
    minimum: Tensor | None

    @property
    def value(self) -> Tensor:
        """What each 16 values add."""
        return self.main if self.minimum is None else self.main - self.minimum


class Factors(NamedTuple):
    """A weight's codes [N, G, 16], the factors [N, G] of 16 codes each, and those of the minimum, or None."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None


def factors(q: QuantTensor, arithmetic: Arithmetic | None) -> Factors:
    """float64; rounded as the arithmetic's `product_dtype` says (None: exactly)."""
    u = unpack_ref(q.data, q.format)
    n, values = q.data.shape[0], u.codes.shape[-1]
    groups = values // WIDTH

    def spread(d: Tensor, small: Tensor | None) -> Tensor:
        product = d.double() if small is None else d.double() * small.double()
        kind = arithmetic.product_dtype if arithmetic is not None else None
        if kind in DTYPES:
            product = (d if small is None else d * small.float()).to(DTYPES[kind]).double()  # type: ignore[index]
        return product.repeat_interleave(groups // product.shape[-1], -1).reshape(n, -1)

    codes, scale = u.codes.reshape(n, -1, WIDTH).double(), spread(u.d, u.scales)
    if unsigned(q.format, arithmetic):
        return Factors(codes + 8, scale, 8 * scale)
    return Factors(codes, scale, None if u.dmin is None else spread(u.dmin, u.mins))


def unsigned(format: str, arithmetic: Arithmetic | None) -> bool:
    """Whether q4_0's codes are multiplied as 0..15 and 8 times the raw sum is taken off, as ggml's decode arm does."""
    return format == "q4_0" and arithmetic is not None and arithmetic.sum in ("raw", "raw_all")


def terms(rows: QuantRows, weights: Factors) -> Terms:
    """The terms of quantised rows [R, Kd] with a weight's factors: for an arm's own `rows`."""
    n_groups = weights.scale.shape[1]
    x = rows.codes.double().unflatten(1, (-1, WIDTH))[:, :n_groups]
    step = rows.scale.double().repeat_interleave(rows.layout.block // WIDTH, 1)[:, :n_groups]
    main = torch.einsum("rgi,ngi->rng", x, weights.codes) * step[:, None] * weights.scale
    if weights.minimum is None:
        return Terms(main, None)
    return Terms(main, weights.minimum * sums(rows, x, step)[:, None])


def sums(rows: QuantRows, x: Tensor, step: Tensor) -> Tensor:
    """Sum of each 16 values as the arm has it, [R, G]: the stored raw sums where there are any (those of 32 values in
    halves of what they cover), the codes' times the scale elsewhere."""
    quantised = x.sum(-1) * step
    layout = rows.layout
    if rows.total is None or layout.adds != "raw":
        return quantised
    stored = rows.total.double()
    wide = layout.sum_group // WIDTH
    if wide > 1:  # one sum of 32: its halves in the proportion of the codes' sums, so that both together give it
        both = quantised.unflatten(1, (-1, wide))
        missing = stored[:, : both.shape[1]] - both.sum(-1)
        return (both + missing.unsqueeze(-1) / wide).flatten(1)
    kept = layout.sums_kept
    eights = stored.unflatten(1, (-1, kept))
    out = quantised.unflatten(1, (-1, 8)).clone()
    out[..., :kept] = eights[:, : out.shape[1]]
    return out.flatten(1)


def exact_terms(x: Float[Tensor, "R Kd"], q: QuantTensor) -> Tensor:
    """[R, N, Kd / 16] of unquantised rows and decoded weights in float64."""
    w = q.dequantize().double().unflatten(-1, (-1, WIDTH))
    return torch.einsum("rgi,ngi->rng", x.double().unflatten(-1, (-1, WIDTH)), w)
