"""Arithmetic that the encoders share: single roundings, C's rounding of integers, sums in C's order.

Everything is fp32 and exact in what it promises, on the CPU and on CUDA: the searches compare errors that differ in
the last bit. [n, S] are S (sub-)blocks of n values as columns, so that a sum over n has the order of a C loop.
"""

import torch

from moe_lab._types import Bool, Float32, Int32, Tensor, UInt8

TRICK = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
TRICK_LIMIT = 4194303.0  # up to this size the trick is rounding to nearest even; beyond, and for inf, bits wrap around


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b rounded once. torch turns a number over a tensor into a reciprocal and a product, on any device, and on
    CUDA a tensor over a number too: two roundings, and other codes."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    a, b = (
        v if isinstance(v, Tensor) else torch.full((), float(v), dtype=like.dtype, device=like.device) for v in (a, b)
    )
    return a / b


def ordered_sum(terms: Float32[Tensor, "n ..."]) -> Float32[Tensor, "..."]:
    """Sum over the first axis from 0 upwards, one rounding an addition: the order of a C loop."""
    if terms.device.type == "cpu":  # one call that adds "in the order given in index"; CUDA's does not
        first = torch.zeros(len(terms), dtype=torch.int64)
        return torch.zeros_like(terms[:1]).flatten(1).index_add_(0, first, terms.flatten(1)).view(terms.shape[1:])
    total = terms[0].clone()
    for term in terms[1:].unbind(0):
        total += term
    return total


def nearest(v: Float32[Tensor, "*some"]) -> Int32[Tensor, "*some"]:
    """C's rounding trick, any value: nearest even up to TRICK_LIMIT, NaN 0, the wrapped bits of anything larger."""
    bits = (v + TRICK).view(torch.int32).bitwise_and_(0x7FFFFF).sub_(0x400000)
    return bits.masked_fill_(v.isnan(), 0)  # the NaN that x86 makes gives 0, the one that CUDA makes would not


def nearest_clamped_(v: Float32[Tensor, "n S"], low: int, high: int, *ends: Tensor) -> Float32[Tensor, "n S"]:
    """`nearest`, then clamped, in place. `ends` hold values that bound v: one look decides for two fast passes."""
    if all(bool((e.abs() <= TRICK_LIMIT).all()) for e in ends):  # NaN compares false
        return v.round_().clamp_(low, high)
    return v.copy_(nearest(v).clamp_(low, high))


def take_columns_(
    codes: Float32[Tensor, "n S"], other: Float32[Tensor, "n S"], where: Bool[Tensor, " S"]
) -> Float32[Tensor, "n S"]:
    """`codes` with the columns `where` taken from `other`, in place."""
    some = where.nonzero().squeeze(-1)
    return codes.index_copy_(1, some, other.index_select(1, some)) if len(some) else codes


def signed_peak(x: Float32[Tensor, "a b"], dim: int) -> Float32[Tensor, " rest"]:
    """The value of largest magnitude along `dim`, the first of equals; +0 for zeros."""
    high, low = x.amax(dim), x.amin(dim)
    peak = torch.where(high < -low, low, high)
    tied = (high == -low).logical_and_(high > 0).nonzero().squeeze(-1)
    if len(tied):
        some = x.index_select(1 - dim, tied)
        peak[tied] = some.gather(dim, some.abs().argmax(dim, keepdim=True)).squeeze(dim)
    return peak + 0.0  # -0 becomes +0


def largest_size(x: Float32[Tensor, "a b"], dim: int) -> Float32[Tensor, " rest"]:
    """max |x| along `dim`, never -0."""
    return torch.maximum(x.amax(dim), -x.amin(dim)).abs_()


def half_bytes(v: Float32[Tensor, " B"]) -> tuple[UInt8[Tensor, "B 2"], Float32[Tensor, " B"]]:
    """The bytes of each value's half (nearest even), and what they decode to."""
    half = v.to(torch.float16)
    return half.view(torch.uint8).view(-1, 2), half.float()


def inverse_or_zero(v: Float32[Tensor, "*some"]) -> Float32[Tensor, "*some"]:
    """1 / v, and 0 for 0."""
    return torch.where(v == 0, torch.zeros_like(v), divide(1.0, v))
