"""FP8 in blocks of 128 x 128 values, as DeepSeek-V3 style checkpoints hold it.

`X.weight` F8_E4M3 [N, Kd] (fn: 448 is the largest, 0x7f is NaN), `X.weight_scale_inv` F32 [ceil(N / 128), ceil(Kd /
128)]; w[i, j] = code[i, j] * scale_inv[i // 128, j // 128]: a product, whatever the name says. The last blocks of rows
and columns may be short and have scales of their own. 8.002 bits a weight. Scales may come as bfloat16 or E8M0 bytes
and are kept as fp32 in the first case's dtype, as their exact fp32 powers in the second.
"""

import torch
from torch.nn import functional

from moe_lab._types import Float, Tensor
from moe_lab.formats.kquants_search import divide
from moe_lab.formats.scaled import Parts, ScaledFormat
from moe_lab_kernels.storage.minifloat import E4M3_MAX, e4m3_codes, e8m0_values

BLOCK = 128
LEAST = 2.0**-149  # the smallest fp32: scales of blocks whose largest value is below 448 times it


class Fp8Block(ScaledFormat):
    """e4m3 codes, one fp32 scale for each 128 x 128 block."""

    code_dtypes = (torch.uint8, torch.float8_e4m3fn)
    scale_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)

    def encode(self, w: Float[Tensor, "*lead N Kd"]) -> Parts:
        """scale = amax / 448 in fp32, code = e4m3(w / scale), clamped first. A block of zeros gets scale 1, so that no
        reader divides by it; one too small to divide by 448 the smallest fp32. A NaN keeps its place and changes no
        other value."""
        n, kd = w.shape[-2:]
        padded = functional.pad(w.float(), (0, -kd % BLOCK, 0, -n % BLOCK))
        tiles = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [.., rows, 128, columns, 128]
        scales = block_scale(finite_amax(tiles, (-3, -1)), E4M3_MAX)
        codes = e4m3_codes(tiles / scales[..., :, None, :, None])
        return Parts(codes.flatten(-2).flatten(-3, -2)[..., :n, :kd].contiguous(), scales)

    def _scales(self, scales: Tensor) -> Tensor:
        given = super()._scales(scales)
        return e8m0_values(given) if given.dtype == torch.uint8 else given


def finite_amax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Largest finite |x| over `axes`, 0 where there is none."""
    sizes = torch.where(x.isfinite(), x.abs(), 0.0)
    return sizes.amax(axes) if x.numel() else sizes.sum(axes)  # nothing has no largest, but it has a sum, 0


def block_scale(amax: Tensor, largest: float) -> Tensor:
    """amax / largest, at least the smallest fp32; 1 for a block of zeros."""
    # the quotient of a value below 2^-140 can round to 0, and then x / scale is infinite
    return torch.where(amax > 0, divide(amax, largest).clamp(min=LEAST), torch.ones_like(amax))


FP8_BLOCK = Fp8Block("fp8_block")
