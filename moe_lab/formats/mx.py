"""The OCP microscaling formats of safetensors files: 32 values of a row share a power of two, an e8m0 byte.

`mxfp4_oss` (GPT-OSS): `X_blocks` U8 [.., N, Kd / 32, 16], `X_scales` U8 [.., N, Kd / 32]; byte j of a row holds
elements 2j (low nibble) and 2j + 1; w = e2m1 * 2^(byte - 127). 4.25 bits a weight. Whether rows are gate and up in turn
is the family's business. GGUF's `mxfp4` packs the halves of a block instead and reads exponent 255 as 2^127.
`mxfp8`: `X.weight` F8_E4M3 [.., N, Kd], `X.weight_scale` U8 or F8_E8M0 [.., N, Kd / 32]; w = e4m3 * 2^(byte - 127).
8.25 bits. Exponents are exponents, also where a file calls them U8: 127 is 1. Byte 0 is 2^-127, byte 255 is NaN.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab.formats.fp4 import pack_pairs
from moe_lab.formats.fp8 import finite_amax
from moe_lab.formats.scaled import Parts, ScaledFormat
from moe_lab_kernels.storage.minifloat import e2m1_codes, e4m3_codes, e8m0_values

GROUP = 32


class Microscaled(ScaledFormat):
    """e2m1 or e4m3 codes under a shared power of two."""

    scale_dtypes = (torch.uint8, torch.float8_e8m0fnu)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.code_dtypes = (torch.uint8, *((torch.float8_e4m3fn,) if self.layout.code == "e4m3" else (torch.int8,)))
        self.top = 8 if self.layout.code == "e4m3" else 2  # exponent of the codes' largest power of two

    def encode(self, w: Float[Tensor, "*lead N Kd"]) -> Parts:
        """OCP's rule: exponent = floor(log2 amax) less that of the codes' largest power of two, so the largest values
        of a block may saturate (448 of up to 511, 6 of up to 7.99). A block of zeros gets exponent 127, which is 1."""
        blocks = w.float().unflatten(-1, (-1, GROUP))
        amax = finite_amax(blocks, (-1,))
        exponent = torch.frexp(amax).exponent - 1 - self.top + 127
        scales = torch.where(amax > 0, exponent.clamp(0, 254), 127).to(torch.uint8)
        # the inverse of a power of two is one as well, so the product is exact where it matters
        codes = (e4m3_codes if self.layout.code == "e4m3" else e2m1_codes)(
            blocks * e8m0_values(254 - scales)[..., None]
        )
        codes = codes.flatten(-2)
        return Parts(codes if self.layout.code_bits == 8 else pack_pairs(codes), scales)


MXFP4_OSS, MXFP8 = Microscaled("mxfp4_oss"), Microscaled("mxfp8")
