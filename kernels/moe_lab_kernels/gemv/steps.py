"""`part`: one step of a weight format, blocks times q8_1 codes, as per-lane fp32 parts. The one list of steps.

To add a format: its step in `raw` (blocks as the file has them) and `planar` (planes), its twin in `ref`, its lanes in
`ref.lanes_of`, its name in `blocks.GEMV_FORMATS`, a line here. Nothing else in the
GEMV kernels knows a format.
"""
# pyright: reportGeneralTypeIssues=false

from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.gemv.planar.steps import planar
from moe_lab_kernels.gemv.raw.steps import q2_k, q3_k, q8_0
from moe_lab_kernels.gemv.raw.steps_nibbles import mxfp4, nvfp4, q4_0, q6_k, q45_k


@jit
def part(w, base, first, blocks, x, ordered, d8, total, block, sub, there, FORMAT: tl.constexpr,
         PER_BLOCK: tl.constexpr, STRIDE: tl.constexpr, NATIVE: tl.constexpr):  # fmt: skip
    """fp32 parts [.., .., LANES] of one step. FORMAT: a form (`forms`).

    w: uint8 pointers [.., .., 1] to weight rows of raw blocks; base: of planes, to the weight, of `blocks` blocks, of
    which a row's first is number `first`, int32 [1, B, 32]; x int8, d8 and total fp16 pointers [.., .., 1] to
    activation rows; block, sub int32 [1, 1, LANES], sub < PER_BLOCK lanes a block; `there` masks activations, weight
    addresses are always valid. STRIDE: 0 for rows in value order, else 8 * LANES: they are in lane order (`lane_rows`),
    and `ordered` points at each lane's first unit of the step.
    """
    half: tl.constexpr = PER_BLOCK // 2
    if FORMAT == "q2_k":
        out = q2_k(
            w + block * 84,
            x + block * 256,
            ordered,
            d8 + block * 8,
            sub // half,
            sub % half,
            there,
            PER_BLOCK == 4,
            STRIDE,
            NATIVE,
        )
    elif FORMAT == "q3_k":
        out = q3_k(
            w + block * 110,
            x + block * 256,
            ordered,
            d8 + block * 8,
            sub // half,
            sub % half,
            there,
            PER_BLOCK == 4,
            STRIDE,
            NATIVE,
        )
    elif FORMAT == "q8_0":
        out = q8_0(w + block * 34, x + block * 32, tl.max_contiguous(d8 + block, [1, 1, 2]), sub, there, NATIVE)
    elif FORMAT == "q4_k":
        out = q45_k(w + block * 144, x + block * 256, ordered, d8 + block * 8, sub, there, False, STRIDE, NATIVE)
    elif FORMAT == "q5_k":
        out = q45_k(w + block * 176, x + block * 256, ordered, d8 + block * 8, sub, there, True, STRIDE, NATIVE)
    elif FORMAT == "q6_k":
        out = q6_k(w + block * 210, x + block * 256, ordered, d8 + block * 8, sub, there, STRIDE, NATIVE)
    elif FORMAT == "q4_0":
        out = q4_0(w + block * 18, x + block * 32, ordered, d8 + block, total + block, there, sub, STRIDE, NATIVE)
    elif FORMAT == "mxfp4":
        out = mxfp4(w + block * 17, x + block * 32, ordered, d8 + block, there, sub, STRIDE, NATIVE)
    elif FORMAT == "nvfp4":
        out = nvfp4(w + block * 36, x + block * 64, ordered, d8 + block * 2, sub, there, STRIDE, NATIVE)
    else:
        super_block: tl.constexpr = PER_BLOCK == 4  # pyright: ignore[reportAssignmentType]
        groups: tl.constexpr = 8 if super_block else PER_BLOCK  # pyright: ignore[reportAssignmentType]
        at = first + block
        out = planar(base, blocks, x + block * (32 * groups), ordered, d8 + block * groups, total + block, at, sub,
                     there, FORMAT, STRIDE, NATIVE)  # fmt: skip
    return out
