"""The scale searches of the k-quant encoders, vectorised over sub-blocks.

Both follow ggml's reference quantisers step by step (formulas: spec of the GGUF k-quants; checked bit for bit against
the C library in tests/oracles). Sums run over the 16 values one after another, as C does, because the search compares
errors that differ in the last bit. Everything is fp32; columns are separate tensors so that no reduction may reorder.
"""

import torch

from moe_lab._types import Float32, Int32, Tensor

GROUP_EPS = 1e-15  # below this largest magnitude a sub-block is all zero


def ordered_sum(columns: list[Tensor]) -> Tensor:
    """Left-to-right sum of equally shaped tensors: one rounding an addition, in the order given."""
    total = columns[0]
    for c in columns[1:]:
        total = total + c
    return total


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b rounded once. torch turns a number over a tensor into a reciprocal and a product, on any device, and on
    CUDA
    a tensor over a number too: two roundings, and other codes."""
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    a, b = (
        v if isinstance(v, Tensor) else torch.full((), float(v), dtype=like.dtype, device=like.device) for v in (a, b)
    )
    return a / b


def search_scale_min(
    x: Float32[Tensor, "S 16"], nmax: int, rmin: float = -0.5, rdelta: float = 0.1, steps: int = 15
) -> tuple[Float32[Tensor, " S"], Float32[Tensor, " S"], Int32[Tensor, "S 16"]]:
    """Scale, minimum (>= 0, to be subtracted) and codes 0..nmax of each sub-block, by least absolute error.

    Tries `steps + 1` inverse scales (rmin + rdelta * step + nmax) / (max - offset so far); for each the weighted
    least-squares
    scale and offset of its codes; keeps the one with the smallest sum of |x| * |error|.
    """
    cols = list(x.unbind(-1))
    weights = [c.abs() for c in cols]
    lo, hi = x.amin(-1).clamp(max=0.0), x.amax(-1)
    sum_w = ordered_sum(weights)
    sum_x = ordered_sum([w * c for w, c in zip(weights, cols, strict=True)])
    span = hi - lo
    flat = span == 0
    safe_span = torch.where(flat, torch.ones_like(span), span)

    def codes_for(inverse: Tensor, offset: Tensor) -> list[Tensor]:
        # max == offset makes the inverse infinite; C's integer rounding trick then yields 0, never nmax
        scaled = (inverse * (c - offset) for c in cols)
        return [torch.round(v).nan_to_num(0.0, 0.0, 0.0).clamp(0, nmax) for v in scaled]

    def error(scale: Tensor, offset: Tensor, codes: list[Tensor]) -> Tensor:
        return ordered_sum([w * (scale * q + offset - c).abs() for w, q, c in zip(weights, codes, cols, strict=True)])

    inverse = divide(nmax, safe_span)
    best_scale, best_min = 1.0 / inverse, lo
    codes = codes_for(inverse, lo)
    best_codes, best_error = torch.stack(codes, -1), error(best_scale, lo, codes)
    for step in range(steps + 1):
        # C evaluates rmin + rdelta * step + nmax in fp32
        numerator = torch.tensor(rmin, dtype=torch.float32) + torch.tensor(rdelta, dtype=torch.float32) * step + nmax
        # the offset kept so far replaces the minimum here too, so each step depends on the one before
        codes = codes_for(numerator.to(x.device) / torch.where(flat, safe_span, hi - best_min), best_min)
        weighted = [w * q for w, q in zip(weights, codes, strict=True)]
        sum_l = ordered_sum(weighted)
        sum_l2 = ordered_sum([wq * q for wq, q in zip(weighted, codes, strict=True)])
        sum_xl = ordered_sum([wq * c for wq, c in zip(weighted, cols, strict=True)])
        det = sum_w * sum_l2 - sum_l * sum_l
        ok = det > 0
        safe_det = torch.where(ok, det, torch.ones_like(det))
        scale = (sum_w * sum_xl - sum_x * sum_l) / safe_det
        offset = (sum_l2 * sum_x - sum_l * sum_xl) / safe_det
        positive = offset > 0
        scale = torch.where(positive, sum_xl / torch.where(sum_l2 == 0, torch.ones_like(sum_l2), sum_l2), scale)
        offset = torch.where(positive, torch.zeros_like(offset), offset)
        e = error(scale, offset, codes)
        better = ok & (e < best_error)
        best_error = torch.where(better, e, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_min = torch.where(better, offset, best_min)
        best_codes = torch.where(better.unsqueeze(-1), torch.stack(codes, -1), best_codes)
    zero = torch.zeros_like(best_scale)
    return (
        torch.where(flat, zero, best_scale),
        torch.where(flat, -lo, -best_min),
        torch.where(flat.unsqueeze(-1), torch.zeros_like(best_codes), best_codes).to(torch.int32),
    )


def search_scale_symmetric(
    x: Float32[Tensor, "S 16"], nmax: int
) -> tuple[Float32[Tensor, " S"], Int32[Tensor, "S 16"]]:
    """Signed scale and codes -nmax..nmax-1 of each sub-block (returned shifted by nmax), x^2-weighted.

    Starts from -nmax / (signed element of largest magnitude) and then, at most five times, moves single codes
    wherever that raises (sum w x q)^2 / (sum w q^2).
    """
    cols = list(x.unbind(-1))
    amax, where = x.abs().max(-1)
    peak = x.gather(-1, where.unsqueeze(-1)).squeeze(-1)
    tiny = amax < GROUP_EPS
    inverse = torch.where(tiny, torch.zeros_like(peak), divide(-nmax, torch.where(tiny, torch.ones_like(peak), peak)))
    weights = [c * c for c in cols]
    codes = [torch.round(inverse * c).clamp(-nmax, nmax - 1) for c in cols]
    sum_lx = ordered_sum([w * c * q for w, c, q in zip(weights, cols, codes, strict=True)])
    sum_l2 = ordered_sum([w * q * q for w, q in zip(weights, codes, strict=True)])
    active = ~tiny
    for _ in range(5):
        changed = torch.zeros_like(active)
        for i, (c, w) in enumerate(zip(cols, weights, strict=True)):
            q = codes[i]
            lx, l2 = sum_lx - w * c * q, sum_l2 - w * q * q
            candidate = active & (lx > 0)
            safe_lx = torch.where(candidate, lx, torch.ones_like(lx))
            new = torch.round(c * l2 / safe_lx).clamp(-nmax, nmax - 1)
            new_lx, new_l2 = lx + w * c * new, l2 + w * new * new
            gain = new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2
            take = candidate & (new != q) & (new_l2 > 0) & gain
            codes[i] = torch.where(take, new, q)
            sum_lx, sum_l2 = torch.where(take, new_lx, sum_lx), torch.where(take, new_l2, sum_l2)
            changed |= take
        active = active & changed
        if not bool(active.any()):
            break
    usable = (sum_l2 > 0) & ~tiny
    scale = torch.where(usable, sum_lx / torch.where(usable, sum_l2, torch.ones_like(sum_l2)), torch.zeros_like(sum_lx))
    shifted = torch.stack(codes, -1) + nmax
    return scale, torch.where(tiny.unsqueeze(-1), torch.zeros_like(shifted), shifted).to(torch.int32)
