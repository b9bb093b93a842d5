"""NVFP4: e2m1 codes, an e4m3 scale for 16 values of a row, one fp32 scale a matrix. Two makers, two conventions.

`nvfp4_modelopt`: `X.weight` U8 [N, Kd / 2], `X.weight_scale` F8_E4M3 [N, Kd / 16], `X.weight_scale_2` F32 []:
w = code * (weight_scale * weight_scale_2), weight_scale_2 = amax / (6 * 448).
`nvfp4_ct` (compressed-tensors): `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale` F32 [1]:
w = code * (weight_scale / weight_global_scale), weight_global_scale = 6 * 448 / amax.
Byte j of a row holds elements 2j (low nibble) and 2j + 1 (high); a nibble is sign * 8 + code. 4.5 bits a weight. Gate
and up of one expert have global scales of their own. GGUF's `nvfp4` packs halves of a block and is another format.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab.formats.fp8 import LEAST, finite_amax
from moe_lab.formats.kquants_search import divide
from moe_lab.formats.scaled import Parts, ScaledFormat
from moe_lab_kernels.storage.minifloat import E2M1_MAX, E4M3_MAX, e2m1_codes, e4m3_codes, e4m3_values

GROUP = 16
LARGEST = torch.finfo(torch.float32).max


class Nvfp4(ScaledFormat):
    """Both conventions: the layout says whether the global scale multiplies or divides."""

    scale_dtypes = (torch.float8_e4m3fn, torch.uint8)

    def encode(self, w: Float[Tensor, "*lead N Kd"]) -> Parts:
        """Global scale from the matrix's largest value, block scale e4m3(amax / 6) in its unit, code e2m1(w / step),
        all clamped before their casts, ties to even. A block whose scale rounds to 0 has codes 0; a matrix of zeros has
        global scale 1."""
        w = w.float()
        largest = finite_amax(w, (-2, -1))
        some = largest > 0
        whole = torch.where(some, largest, torch.ones_like(largest))
        blocks = w.unflatten(-1, (-1, GROUP))
        sixth = divide(finite_amax(blocks, (-1,)), E2M1_MAX)
        if self.layout.second == "multiplier":
            given = torch.where(some, divide(whole, E2M1_MAX * E4M3_MAX).clamp(min=LEAST), 1.0)
            scales = e4m3_codes(sixth / given[..., None, None])
            step = e4m3_values(scales) * given[..., None, None]
        else:
            given = torch.where(some, divide(E2M1_MAX * E4M3_MAX, whole).clamp(max=LARGEST), 1.0)
            scales = e4m3_codes(sixth * given[..., None, None])
            step = e4m3_values(scales) / given[..., None, None]
        dead = (step == 0)[..., None]
        codes = e2m1_codes(torch.where(dead, 0.0, blocks / torch.where(dead, 1.0, step[..., None])))
        return Parts(pack_pairs(codes.flatten(-2)), scales, given)


def pack_pairs(codes: Tensor) -> Tensor:
    """4-bit codes [.., Kd] -> bytes [.., Kd / 2], the even element in the low nibble."""
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4


NVFP4_MODELOPT, NVFP4_CT = Nvfp4("nvfp4_modelopt"), Nvfp4("nvfp4_ct")
