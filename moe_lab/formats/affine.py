"""Affine groups: unsigned 4- or 8-bit codes, and a scale and a bias for 32, 64 or 128 values of a row.

`X.weight` U32 [N, Kd * bits / 32], the first element in the lowest bits. As bytes: elements 2j (low nibble) and 2j + 1
of a 4-bit row in byte j, element j of an 8-bit row. `X.scales` and `X.biases` [N, Kd / group] in bf16, fp16 or fp32.
w = scale * q + bias: the product is rounded to fp32, then the sum. Scales may be negative. With 16-bit scales and
biases 4.5 bits a weight for int4_g64, 9 for int8_g32.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab.formats.fp4 import pack_pairs
from moe_lab.formats.kquants_search import divide
from moe_lab.formats.scaled import Parts, ScaledFormat

BITS, GROUPS = (4, 8), (32, 64, 128)


class Affine(ScaledFormat):
    """int4_g32 .. int8_g128: `bits` 4 or 8, `group` 32, 64 or 128."""

    code_dtypes = (torch.uint8, torch.uint32, torch.int32)
    scale_dtypes = (torch.bfloat16, torch.float16, torch.float32)
    signed_scales = True

    def encode(self, w: Float[Tensor, "*lead N Kd"]) -> Parts:
        """The end of a group's range that is larger in size becomes the bias and code 0; zero, where it lies in the
        range, meets a code but for rounding. Scales and biases take the dtype of w, and codes are the nearest ones to
        what was stored. A group of one value has it as its bias, scale and codes 0."""
        blocks = w.float().unflatten(-1, (-1, self.layout.group))
        known = torch.where(blocks.isfinite(), blocks, 0.0)
        low, high = known.amin(-1), known.amax(-1)
        upward, some = low.abs() > high.abs(), high > low
        edge = torch.where(upward, low, high)
        top = 2**self.layout.code_bits - 1
        # a scale that rounds to 0 in its dtype would leave every value at the edge, up to the whole range away
        least = torch.finfo(w.dtype).smallest_normal * torch.finfo(w.dtype).eps
        size = torch.where(some, divide(high - low, top).clamp(min=least), 1.0)
        # zero lies on the way from the edge to the other end: a whole number of steps away, it stays where it is
        to_zero = torch.round(edge.abs() / size)
        size = torch.where(to_zero > 0, (edge.abs() / to_zero.clamp(min=1)).clamp(min=least), size)
        step = torch.where(some, torch.where(upward, size, -size), 0.0)
        scales, biases = step.to(w.dtype), edge.to(w.dtype)
        step, edge = scales.float()[..., None], biases.float()[..., None]
        codes = torch.round((blocks - edge) / torch.where(step == 0, 1.0, step))
        codes = torch.where(step == 0, 0.0, codes).nan_to_num(0.0).clamp(0, top)
        codes = codes.to(torch.uint8).flatten(-2)
        return Parts(pack_pairs(codes) if self.layout.code_bits == 4 else codes, scales, biases=biases)


AFFINE = tuple(Affine(f"int{bits}_g{group}") for bits in BITS for group in GROUPS)
