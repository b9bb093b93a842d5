"""Activations to q8_1: blocks of 32 values as int8 codes, an fp16 scale and the fp16 sum of the original values.

R rows of Kd values. Reads R * Kd elements, writes R * Kd * 36 / 32 bytes. Per block: d = amax / 127 in fp32 (a
division); code = x / d rounded to nearest, halves away from zero, with the fp32 d; scale = fp16(d); total = fp16 of the
sum of the *unquantised* values, added as a butterfly over lanes does (distance 16, 8, 4, 2, 1). The launcher, the
interpreter and the reference give the same bits, subnormals included. A block of zeros gives zeros. A NaN, an infinity
or an amax past 127 * 65504 makes the block's scale NaN or infinite and its non-finite quotients' codes 0: the row's
products then show it, other rows keep their bits.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import butterfly, offset64, to_f32

BLOCK = 32
# Blocks a program takes. Few, so that one decode row spreads over many multiprocessors.
BLOCKS_CUDA, BLOCKS_INTERPRETER = 4, 256


@jit
def _quantize(x, codes, scale, total, per_row, tiles, x_row_stride, x_stride, BLOCKS: tl.constexpr):
    """Program = (row, tile of blocks)."""
    pid = tl.program_id(0)
    row, tile = pid // tiles, pid % tiles
    # axes: one, block, the block's 32 values
    block = tile * BLOCKS + tl.arange(0, BLOCKS)[None, :, None]
    lane = tl.arange(0, 32)[None, None, :]
    there, at = (block < per_row) & (lane < 32), block * 32 + lane
    v = to_f32(tl.load(x + offset64(row, x_row_stride) + offset64(at, x_stride), mask=there, other=0))
    # tl.max drops NaN, so a NaN is carried to the scale by hand
    amax, broken = tl.max(tl.abs(v), 2, keep_dims=True), tl.max((v != v).to(tl.int32), 2, keep_dims=True) > 0
    d = tl.where(broken, float("nan"), tl.div_rn(amax, 127.0))
    zero = amax == 0
    ratio = tl.div_rn(v, tl.where(zero, 1.0, d))
    # a quotient can pass 127 only where d is subnormal in fp32 or not a number; scale is 0 or broken there
    ratio = tl.where(tl.abs(ratio) < 127.5, ratio, 0.0)
    whole = ratio.to(tl.int32)
    away = tl.abs(ratio - whole.to(tl.float32)) >= 0.5
    code = whole + tl.where(away, tl.where(ratio < 0, -1, 1), 0)
    out = offset64(row, per_row)
    tl.store(codes + out * 32 + at, code.to(tl.int8), mask=there)
    first, of_block = there & (lane == 0), out + block + lane * 0
    tl.store(scale + of_block, (d + lane * 0.0).to(tl.float16), mask=first)
    tl.store(total + of_block, tl.where(zero, 0.0, butterfly(v)).to(tl.float16), mask=first)


def quantize_q8_1(x: Float[Tensor, "R Kd"]) -> tuple[Tensor, Tensor, Tensor]:
    """codes int8 [R, Kd], scale fp16 [R, Kd / 32], total fp16 [R, Kd / 32] of fp32, fp16 or bf16 rows (Triton).

    Any strides. LabError when Kd is no multiple of 32; LabTypeError for another dtype.
    """
    codes, scale, total = _outputs(x)
    if not x.numel():
        return codes, scale, total
    on = backend.serve("quantize_q8_1", x=x)
    per_row = scale.shape[1]
    blocks = min(BLOCKS_CUDA if on == "cuda" else BLOCKS_INTERPRETER, backend.next_power_of_2(per_row))
    tiles = -(-per_row // blocks)
    backend.launch(
        _quantize,
        (len(x) * tiles,),
        *(x, codes, scale, total, per_row, tiles, *x.stride(), blocks),
        device=x.device,
        num_warps=1,
    )
    return codes, scale, total


def quantize_q8_1_ref(x: Float[Tensor, "R Kd"]) -> tuple[Tensor, Tensor, Tensor]:
    """The same in torch, bit for bit."""
    codes, scale, total = _outputs(x)
    v = x.float().reshape(*scale.shape, BLOCK)
    amax = v.abs().amax(-1)
    d = amax / torch.full_like(amax, 127.0)  # torch multiplies by the reciprocal of a plain number on CUDA: other codes
    zero = amax == 0
    ratio = v / torch.where(zero, 1.0, d).unsqueeze(-1)
    ratio = torch.where(ratio.abs() < 127.5, ratio, 0.0)
    whole = ratio.trunc()
    code = whole.add(torch.copysign(((ratio - whole).abs_() >= 0.5).float(), ratio))
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = v[..., :half] + v[..., half:]
    codes.copy_(code.reshape(codes.shape))
    scale.copy_(d.to(torch.float16))
    total.copy_(torch.where(zero, 0.0, v.squeeze(-1)).to(torch.float16))
    return codes, scale, total


def _outputs(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    expect("quantize_q8_1", "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] % BLOCK or not x.shape[1]:
        raise LabError(f"quantize_q8_1: Kd must be a positive multiple of {BLOCK}, got x of shape {list(x.shape)}.")
    r, blocks = len(x), x.shape[1] // BLOCK
    codes = torch.empty(r, x.shape[1], dtype=torch.int8, device=x.device)
    scale, total = (torch.empty(r, blocks, dtype=torch.float16, device=x.device) for _ in range(2))
    return codes, scale, total
