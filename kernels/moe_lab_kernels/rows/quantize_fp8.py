"""Activations to fp8: e4m3 codes and one fp32 scale for each group of values of a row.

R rows of Kd values, padded with zeros to Kp, a multiple of the layout's unit (128). Reads R * Kd elements, writes
R * Kp bytes of codes and R * Kp / block scales. Groups hold 128 values (DeepSeek-V3), or what `Arithmetic.block` says.

Per group, in fp32, each operation rounded once: d = max(amax, floor) / 448 and quotients as `Arithmetic.rounding` says;
"e8m0" raises d to a power of two (at least 2^-126) before the quotients. Quotients are clamped to -448..448 in fp32,
then rounded to nearest even: casts to e4m3 differ in what they make of 464 and more, so none sees such a value.
Launcher, interpreter and reference give the same bits.

A group of zeros has scale 0 (2^-126 under "e8m0") and codes 0. NaN stays NaN (code 0x7f) and does not move the scale of
its group; an infinity makes the scale infinite and its own code NaN. Of a group so small that d or 1 / d leaves fp32,
finite codes are 0.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import offset64, to_f32
from moe_lab_kernels.rows.arithmetic import ActivationLayout, Arithmetic, layout_of
from moe_lab_kernels.rows.quantize_rows import FEW_VALUES, TILE_FEW, TILE_INTERPRETER, TILE_MANY, Tile, padded_width
from moe_lab_kernels.storage.minifloat import f32_to_e4m3

TOP = 448.0


@jit
def _power_of_two(d):
    """The smallest power of two >= d, at least 2^-126; infinity and NaN as they are."""
    bits = d.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1)
    return tl.where(bits < 0x7F800000, (exponent << 23).to(tl.float32, bitcast=True), d)


@jit
def fp8_codes(v, amax, floor, HOW: tl.constexpr, POWER: tl.constexpr):
    """(e4m3 bits, scale) of fp32 values whose group's largest magnitude is `amax`."""
    top = tl.maximum(amax, floor)
    one = tl.full(top.shape, 1.0, tl.float32)
    if HOW == "multiply":
        factor = tl.div_rn(448.0 * one, tl.where(top == 0, 1.0, top))
        d = tl.where(top == 0, 0.0, tl.div_rn(one, factor))
    else:
        d = tl.div_rn(top, 448.0)
    if POWER:
        d = _power_of_two(d)
    if HOW != "multiply" or POWER:
        factor = tl.div_rn(one, tl.where(d == 0, 1.0, d))
    inside = d != 0 if HOW == "divide" else (d != 0) & (factor < float("inf"))
    v = tl.where(inside | (v != v), v, 0.0)
    ratio = tl.div_rn(v, tl.where(inside, d, 1.0)) if HOW == "divide" else v * tl.where(inside, factor, 1.0)
    return f32_to_e4m3(ratio), d


@jit
def _quantize_fp8(x, codes, scale, kd, blocks_per_row, all_blocks, floor, x_row_stride, x_stride,
                  BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOW: tl.constexpr, POWER: tl.constexpr):  # fmt: skip
    """Program = tile of groups, numbered through all rows."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    there = block < all_blocks
    row, at = block // blocks_per_row, block % blocks_per_row * BLOCK + lane
    from_x = x + offset64(row, x_row_stride) + offset64(at, x_stride)
    v = to_f32(tl.load(from_x, mask=there & (at < kd), other=0))
    amax = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1, keep_dims=True)
    code, d = fp8_codes(v, amax, floor, HOW, POWER)
    tl.store(codes + offset64(block, BLOCK) + lane, code, mask=there)
    tl.store(scale + block, d, mask=there)


def quantize_fp8(
    x: Float[Tensor, "R Kd"], arithmetic: Arithmetic | None = None, *, floor: float = 0.0, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """codes float8_e4m3fn [R, Kp], scale fp32 [R, Kp / block] of fp32, fp16 or bf16 rows (Triton).

    Any strides. `floor`: the least amax (DeepSeek's own kernels take 1e-4). LabError when Kd is no positive multiple of
    32, for choices that fp8 cannot have and a negative or infinite floor; LabTypeError for another dtype.
    """
    made, codes, scale = _outputs(x, arithmetic, floor)
    if not x.numel():
        return codes, scale
    on = backend.serve("quantize_fp8", x=x)
    if tile is None:
        tile = TILE_INTERPRETER if on == "interpreter" else TILE_FEW if codes.numel() <= FEW_VALUES else TILE_MANY
    blocks = min(max(1, tile.values // made.block), backend.next_power_of_2(scale.numel()))
    backend.launch(
        _quantize_fp8,
        (-(-scale.numel() // blocks),),
        *(x, codes.view(torch.uint8), scale, x.shape[1], scale.shape[1], scale.numel(), float(floor), *x.stride()),
        *(made.block, blocks, made.way, made.scale_dtype == "e8m0"),
        device=x.device,
        num_warps=tile.warps,
    )
    return codes, scale


def quantize_fp8_ref(
    x: Float[Tensor, "R Kd"], arithmetic: Arithmetic | None = None, *, floor: float = 0.0, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """The same in torch, bit for bit; `tile` means nothing here."""
    made, codes, scale = _outputs(x, arithmetic, floor)
    v = torch.nn.functional.pad(x.float(), (0, codes.shape[1] - x.shape[1])).unflatten(1, (-1, made.block))
    top = v.abs().nan_to_num(0.0, float("inf")).amax(-1, keepdim=True).clamp(min=floor)
    most, one = torch.full_like(top, TOP), torch.ones_like(top)
    power = made.scale_dtype == "e8m0"
    factor = most / torch.where(top == 0, 1.0, top)
    d = torch.where(top == 0, 0.0, one / factor) if made.way == "multiply" else top / most
    if power:
        mantissa, exponent = torch.frexp(d)  # d = mantissa * 2^exponent with mantissa in [0.5, 1)
        raised = torch.ldexp(one, (exponent - (mantissa == 0.5).int()).clamp(min=-126))
        d = torch.where(d.isinf(), d, torch.where(d == 0, 2.0**-126, raised))
    if made.way != "multiply" or power:
        factor = one / torch.where(d == 0, 1.0, d)
    ratio = v / torch.where(d == 0, 1.0, d) if made.way == "divide" else v * factor
    lost = (d == 0) | ((made.way != "divide") & factor.isinf())
    ratio = torch.where(lost & ~v.isnan(), 0.0, ratio).clamp(-TOP, TOP)
    codes.copy_(_cast_ref(ratio).flatten(1))
    scale.copy_(d.squeeze(-1))
    return codes, scale


def _cast_ref(v: Tensor) -> Tensor:
    """|v| <= 448 or NaN as float8_e4m3fn; every NaN becomes 0x7f (torch keeps its sign)."""
    return torch.where(v.isnan(), 0x7F, v.to(torch.float8_e4m3fn).view(torch.uint8)).view(torch.float8_e4m3fn)


def _outputs(x: Tensor, arithmetic: Arithmetic | None, floor: float) -> tuple[ActivationLayout, Tensor, Tensor]:
    made = layout_of("fp8", arithmetic)
    if not 0 <= floor < float("inf"):
        raise LabError(f"quantize_fp8: floor must be a finite number >= 0, got {floor}.")
    padded = padded_width("quantize_fp8", x, made)
    codes = torch.empty(len(x), padded, dtype=torch.float8_e4m3fn, device=x.device)
    return made, codes, torch.empty(len(x), padded // made.block, dtype=torch.float32, device=x.device)
