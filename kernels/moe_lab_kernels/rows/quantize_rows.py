"""Activations to int8: codes, a scale for each block of values, sums for the weights' minima.

R rows of Kd values in any layout of `arithmetic.LAYOUTS` but fp8, padded with zeros to Kp, a multiple of the layout's
unit. Reads R * Kd elements; writes R * Kp codes, R * Kp / block scales and at most R * Kp / 16 sums.

Per block, in fp32, each operation rounded once: the scale d and the quotients as `Arithmetic.rounding` says, codes to
the nearest integer (halves away from zero, or to even) and clamped to -127..127; d is rounded to its stored dtype only
after the codes. Raw sums add the unquantised values as ggml's CUDA kernels do: q8_1 halves against halves (distance 16,
8, 4, 2, 1), the others four consecutive values in sequence first. Launcher, interpreter and reference give the same
bits, subnormals included.

A block of zeros gives zeros, and a sum that is zero is +0. A NaN or an infinity makes its block's scale NaN or
infinite, and codes whose quotient is not finite are 0: the row's products then show it, other rows keep their bits. Of
a block so small that d or 1 / d leaves fp32, the codes are 0. fp16 scales and sums pass 65504 as infinities.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import offset64, round_to, to_f32
from moe_lab_kernels.rows.arithmetic import ActivationLayout, Arithmetic, layout_of

GRAIN = 32  # Kd is a multiple of it
MOST_VALUES = 1 << 35  # groups of 16 are numbered in 32 bits


class Tile(NamedTuple):
    """Values a program takes, and its warps."""

    values: int
    warps: int


# One decode row spreads over many multiprocessors; many rows need fewer, larger programs to hide their starts.
TILE_FEW, TILE_MANY, TILE_INTERPRETER = Tile(128, 1), Tile(1024, 2), Tile(1 << 16, 1)
FEW_VALUES = 1 << 18


@jit
def _halves(s, N: tl.constexpr):
    """[M, N] -> [M], first half plus second half until one is left. Two operands at a time, so no order is hidden."""
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        if (N >> i) > 1:
            s = tl.sum(tl.reshape(s, [s.shape[0], 2, N >> (i + 1)]), 1)
    return tl.reshape(s, [s.shape[0]])


@jit
def _fours(v, M: tl.constexpr):
    """[.., ..] -> [M], four consecutive values in sequence."""
    even, odd = tl.split(tl.reshape(v, [M, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return ((x0 + x1) + x2) + x3


@jit
def _nearest(ratio, EVEN: tl.constexpr):
    """The nearest integer of |ratio| < 2^22 as int32, halves away from zero or to even."""
    if EVEN:
        # at 1.5 * 2^23 a unit in the last place is 1, so the addition rounds, to even
        code = (ratio + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        # the largest fp32 below a half carries every half over the next integer and no smaller fraction: all 2.1e9
        # values with |ratio| < 128 checked
        half = ((ratio.to(tl.int32, bitcast=True) & -0x80000000) | 0x3EFFFFFF).to(tl.float32, bitcast=True)
        code = (ratio + half).to(tl.int32)
    return code


@jit
def q8_1_blocks(v):
    """int32 codes [M, 32], fp32 scales d and raw sums [M, 1] of blocks in fp32 [M, 32]: `_quantize`'s arithmetic with
    q8_1's choices, for kernels that quantise what they have just computed."""
    size = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(size, 1, keep_dims=True)
    d = tl.where(largest == 0, 0.0, tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0))
    inside = (largest < 0x7F800000) & (d != 0)
    ratio = tl.div_rn(tl.where(inside, v, 0.0), tl.where(inside, d, 1.0))
    code = _nearest(tl.minimum(tl.maximum(ratio, -127.0), 127.0), False)
    total = tl.reshape(_halves(v, 32), [v.shape[0], 1])
    return code, d, tl.where(total == 0, 0.0, total)


@jit
def _quantize(x, codes, scale, total, kd, blocks_per_row, all_blocks, x_row_stride, x_stride,
              BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HOW: tl.constexpr, EVEN: tl.constexpr, SIGNED: tl.constexpr,
              SUM: tl.constexpr, SUM_GROUP: tl.constexpr, KEPT: tl.constexpr, FOURS: tl.constexpr):  # fmt: skip
    """Program = tile of blocks; blocks are numbered through all rows, as codes, scales and sums lie in memory."""
    tile = tl.program_id(0)
    block = tile * BLOCKS + tl.arange(0, BLOCKS)[:, None]
    lane = tl.arange(0, BLOCK)[None, :]
    there = block < all_blocks
    row, at = block // blocks_per_row, block % blocks_per_row * BLOCK + lane
    from_x = x + offset64(row, x_row_stride) + offset64(at, x_stride)
    v = to_f32(tl.load(from_x, mask=there & (at < kd), other=0))
    # magnitudes as integers: they order alike, and a NaN is the largest (tl.max of floats drops it)
    size = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(size, 1, keep_dims=True)
    zero = largest == 0
    top = largest.to(tl.float32, bitcast=True)
    if SIGNED:
        key = tl.min(tl.where(size == largest, 2 * lane + (v < 0).to(tl.int32), 2 * BLOCK), 1, keep_dims=True)
        top = tl.where(key % 2 == 0, -top, top)
    one = tl.full([BLOCKS, 1], 1.0, tl.float32)
    if HOW == "multiply":
        factor = tl.div_rn(127.0 * one, tl.where(zero, 1.0, top))
        d = tl.where(zero, 0.0, tl.div_rn(one, factor))
    else:
        d = tl.where(zero, 0.0, tl.div_rn(top, 127.0))
        factor = tl.div_rn(one, tl.where(zero, 1.0, d))
    # outside fp32 no quotient of the block means anything; with "divide" that is d alone, not its inverse
    inside = (largest < 0x7F800000) & (d != 0 if HOW == "divide" else tl.abs(factor) < float("inf"))
    v_inside = tl.where(inside, v, 0.0)
    if HOW == "divide":
        # a d rounded among the last subnormals can leave quotients past 127
        ratio = tl.minimum(tl.maximum(tl.div_rn(v_inside, tl.where(inside, d, 1.0)), -127.0), 127.0)
    else:
        ratio = v_inside * tl.where(inside, factor, 1.0)
    code = _nearest(ratio, EVEN)
    tl.store(codes + offset64(block, BLOCK) + lane, code.to(tl.int8), mask=there)
    tl.store(scale + block, round_to(d, scale.dtype.element_ty), mask=there)
    if SUM != "none":
        GROUPS: tl.constexpr = BLOCKS * BLOCK // SUM_GROUP
        if SUM != "raw":
            s = tl.sum(tl.reshape(code, [GROUPS, SUM_GROUP]), 1)
        elif FOURS:
            s = _halves(tl.reshape(_fours(v, GROUPS * SUM_GROUP // 4), [GROUPS, SUM_GROUP // 4]), SUM_GROUP // 4)
        else:
            s = _halves(tl.reshape(v, [GROUPS, SUM_GROUP]), SUM_GROUP)
        group = tile * GROUPS + tl.arange(0, GROUPS)
        kept = (group < all_blocks * (BLOCK // SUM_GROUP)) & (group % 8 < KEPT)
        to = total + (group // 8) * KEPT + group % 8
        if SUM == "codes":
            tl.store(to, s.to(tl.int16), mask=kept)
        else:
            if SUM == "quantised":
                each = tl.broadcast_to(d, [BLOCKS, BLOCK // SUM_GROUP])
                s = s.to(tl.float32) * tl.reshape(each, [GROUPS])
            tl.store(to, round_to(tl.where(s == 0, 0.0, s), total.dtype.element_ty), mask=kept)


def quantize_int8(
    x: Float[Tensor, "R Kd"], layout: str, arithmetic: Arithmetic | None = None, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """codes int8 [R, Kp], scale [R, Kp / block], total [R, sums] or None, of fp32, fp16 or bf16 rows (Triton).

    Any strides. `total` is None where no sums are kept. `tile` changes no bit. LabError when Kd is no positive multiple
    of 32, for an unknown layout and for choices it cannot have; LabTypeError for another dtype.
    """
    return _run("quantize_int8", x, layout, arithmetic, tile)


def quantize_int8_ref(
    x: Float[Tensor, "R Kd"], layout: str, arithmetic: Arithmetic | None = None, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in torch, bit for bit; `tile` means nothing here."""
    return _run_ref("quantize_int8", x, layout, arithmetic)


def quantize_q8_1(x: Float[Tensor, "R Kd"]) -> tuple[Tensor, Tensor, Tensor]:
    """codes int8 [R, Kd], scale fp16 [R, Kd / 32], total fp16 [R, Kd / 32]: `quantize_int8` of the decode arm."""
    codes, scale, total = _run("quantize_q8_1", x, "q8_1", None, None)
    assert total is not None
    return codes, scale, total


def quantize_q8_1_ref(x: Float[Tensor, "R Kd"]) -> tuple[Tensor, Tensor, Tensor]:
    """The same in torch, bit for bit."""
    codes, scale, total = _run_ref("quantize_q8_1", x, "q8_1", None)
    assert total is not None
    return codes, scale, total


def _run(
    op: str, x: Tensor, layout: str, arithmetic: Arithmetic | None, tile: Tile | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    made = _int8_layout(op, layout, arithmetic)
    codes, scale, total = _outputs(op, x, made)
    if not x.numel():
        return codes, scale, total
    on = backend.serve(op, x=x)
    if tile is None:
        tile = TILE_INTERPRETER if on == "interpreter" else TILE_FEW if codes.numel() <= FEW_VALUES else TILE_MANY
    blocks = min(max(1, tile.values // made.block), backend.next_power_of_2(scale.numel()))
    backend.launch(
        _quantize,
        (-(-scale.numel() // blocks),),
        *(x, codes, scale, scale if total is None else total, x.shape[1], scale.shape[1], scale.numel(), *x.stride()),
        *(made.block, blocks, made.way, made.ties_to_even, made.signed),
        *(made.adds, made.sum_group, made.sums_kept, made.in_fours),
        device=x.device,
        num_warps=tile.warps,
    )
    return codes, scale, total


def _run_ref(op: str, x: Tensor, layout: str, arithmetic: Arithmetic | None) -> tuple[Tensor, Tensor, Tensor | None]:
    made = _int8_layout(op, layout, arithmetic)
    codes, scale, total = _outputs(op, x, made)
    v = torch.nn.functional.pad(x.float(), (0, codes.shape[1] - x.shape[1])).unflatten(1, (-1, made.block))
    d, code = _codes_ref(v, made)
    codes.copy_(code.flatten(1))
    scale.copy_(d.squeeze(-1))  # copy_ rounds to the stored dtype
    if total is not None:
        added = v if made.adds == "raw" else code
        s = _sum_ref(added.flatten(1).unflatten(1, (-1, made.sum_group)), made.in_fours)
        if made.adds == "quantised":
            s = s * d.squeeze(-1).repeat_interleave(made.block // made.sum_group, 1)
        s = torch.where(s == 0, 0.0, s)
        total.copy_(s if made.sums_kept == 8 else s.unflatten(1, (-1, 8))[..., : made.sums_kept].flatten(1))
    return codes, scale, total


def _codes_ref(v: Tensor, made: ActivationLayout) -> tuple[Tensor, Tensor]:
    """d [R, blocks, 1] and integer codes [R, blocks, block] in fp32. A number beside a tensor in a division is turned
    into a reciprocal by torch: other codes, so both sides are tensors."""
    size = v.abs()
    top = size.amax(-1, keepdim=True)
    zero = top == 0
    if made.signed:
        top = -v.gather(-1, size.argmax(-1, keepdim=True))
    one = torch.ones_like(top)
    if made.way == "multiply":
        inverse = torch.full_like(top, 127.0) / torch.where(zero, 1.0, top)
        d, ratio = torch.where(zero, 0.0, one / inverse), v * inverse
    else:
        d = torch.where(zero, 0.0, top / torch.full_like(top, 127.0))
        safe = torch.where(zero, 1.0, d)
        ratio = v / safe if made.way == "divide" else v * (one / safe)
    ratio = torch.where(ratio.isfinite(), ratio, 0.0).clamp(-127, 127)
    if made.ties_to_even:
        return d, ratio.round()
    whole = ratio.trunc()
    return d, whole.add(torch.copysign(((ratio - whole).abs_() >= 0.5).float(), ratio))


def _sum_ref(v: Tensor, in_fours: bool) -> Tensor:
    """fp32 sums over the last axis in the layout's order."""
    if in_fours:
        x0, x1, x2, x3 = v.unflatten(-1, (-1, 4)).unbind(-1)
        v = ((x0 + x1) + x2) + x3
    while v.shape[-1] > 1:
        half = v.shape[-1] // 2
        v = v[..., :half] + v[..., half:]
    return v.squeeze(-1)


def _int8_layout(op: str, name: str, arithmetic: Arithmetic | None) -> ActivationLayout:
    made = layout_of(name, arithmetic)
    if name == "fp8":
        raise LabError(f"{op}: fp8 has codes of another kind; quantize_fp8 makes them.")
    return made


def padded_width(op: str, x: Tensor, made: ActivationLayout) -> int:
    """Kp: Kd raised to a multiple of the layout's unit. LabError or LabTypeError for rows that no layout takes."""
    expect(op, "x", x, FLOATS, ["R", "Kd"])
    if x.shape[1] % GRAIN or not x.shape[1]:
        raise LabError(f"{op}: Kd must be a positive multiple of {GRAIN}, got x of shape {list(x.shape)}.")
    padded = -(-x.shape[1] // made.unit) * made.unit
    if len(x) * padded >= MOST_VALUES:
        raise LabError(f"{op}: {len(x)} rows of {padded} values pass {MOST_VALUES}; quantise them in parts.")
    return padded


def _outputs(op: str, x: Tensor, made: ActivationLayout) -> tuple[Tensor, Tensor, Tensor | None]:
    padded = padded_width(op, x, made)

    def empty(columns: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(len(x), columns, dtype=dtype, device=x.device)

    groups, total = padded // made.sum_group, None
    if made.adds != "none":
        total = empty(groups if made.sums_kept == 8 else groups // 8 * made.sums_kept, made.sum_storage)
    return empty(padded, torch.int8), empty(padded // made.block, made.scale_storage), total
