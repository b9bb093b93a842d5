"""Device code shared by the kernels: 64-bit offsets, casts that round alike everywhere, byte dot products.

`NATIVE` picks NVIDIA's instructions; the plain twin gives the same integers on every other target and in the
interpreter, which knows no inline assembly. Twins call nothing: a nested call costs the interpreter milliseconds.
"""

import torch

from moe_lab_kernels.backend import INTERPRETED, gdc_launch_dependents, gdc_wait, jit, tl

INTERPRET = tl.constexpr(INTERPRETED)


@jit
def offset64(index, stride):
    """index * stride in 64 bits: expert 8 of a [9, 16384, 16384] weight starts at 2^31, past what 32 bits hold."""
    return index.to(tl.int64) * stride


@jit
def to_f32(x):
    """fp32 from fp32, fp16 or bf16. The interpreter keeps bf16 as raw bits, so those are widened by hand."""
    if INTERPRET and x.dtype == tl.bfloat16:
        out = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        out = x.to(tl.float32)
    return out


@jit
def round_to(x, dtype: tl.constexpr):
    """fp32 rounded to nearest even in `dtype`. The interpreter's own fp32 -> bf16 cast truncates."""
    if INTERPRET and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        out = tl.where(x == x, even, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(dtype)
    return out


@jit
def fma(a, b, c):
    """a * b + c, rounded once, in fp32; `fma_ref` in torch. The interpreter's own tl.fma rounds twice, so there the sum
    is taken in float64 and made odd where it was not exact: then one more rounding is the only one that shows."""
    if INTERPRET:
        p, c64 = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
        s = p + c64
        back = s - p
        rest = (p - (s - back)) + (c64 - back)
        bits = s.to(tl.int64, bitcast=True)
        odd = tl.where((rest > 0) == (s > 0), 1, -1).to(tl.int64) + bits
        bits = tl.where(((rest > 0) | (rest < 0)) & (bits % 2 == 0), odd, bits)
        out = bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        out = tl.fma(a, b, c)
    return out


def fma_ref(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32 tensors with one rounding: `fma` in torch, on any device.

    The product is exact in float64 and the sum rounded there, so that rounding it again is wrong only where it lies
    midway between two fp32 values: those alone (and what may be subnormal, whose midpoints lie elsewhere) are looked at
    closely. A third of the time of doing so with all."""
    s = torch.addcmul(c.double(), a.double(), b.double())
    out = s.float()
    doubtful = (s.view(torch.int64) & 0x1FFFFFFF) == 0x10000000
    doubtful |= out.abs() < 2.0**-125
    if bool(doubtful.any()):
        at = doubtful.nonzero(as_tuple=True)
        out[at] = _rounded_once(*(t.expand(s.shape)[at] for t in (a, b, c)))
    return out


def _rounded_once(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, the sum in float64 made odd where it was not exact."""
    p, c64 = a.double() * b.double(), c.double()
    s = p + c64
    back = s - p
    rest = (p - (s - back)) + (c64 - back)
    bits = s.view(torch.int64)
    odd = torch.where((rest > 0) == (s > 0), 1, -1) + bits
    return torch.where(((rest > 0) | (rest < 0)) & (bits % 2 == 0), odd, bits).view(torch.float64).float()


@jit
def butterfly(v, LANES: tl.constexpr):
    """fp32 sums over the last of three axes (32 lanes), the same in every lane: lane i with i ^ 16, then 8, 4, 2, 1.
    With fewer LANES (a power of two), each group of so many lanes has its own sum."""
    lane = tl.arange(0, 32)[None, None, :]
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        if (LANES >> i) > 1:
            v = v + tl.gather(v, tl.broadcast_to(lane ^ (LANES >> (i + 1)), v.shape), 2)
    return v


@jit
def dot(a, b):
    """a @ b in fp32 without TF32. The interpreter multiplies bf16 and fp8 bit patterns, so it gets fp32 there."""
    if INTERPRET:
        a, b = to_f32(a), to_f32(b)
    return tl.dot(a, b, input_precision="ieee")


@jit
def dp4a(a, b, c, NATIVE: tl.constexpr):
    """c + the dot of the four signed bytes of a and of b; all int32."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = ((a << 24) >> 24) * ((b << 24) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24)
        out = low + ((a << 8) >> 24) * ((b << 8) >> 24) + (a >> 24) * (b >> 24) + c
    return out


@jit
def dp4a_unsigned(a, b, c, NATIVE: tl.constexpr):
    """c + the dot of the four unsigned bytes of a with the signed ones of b; all int32."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low = (a & 0xFF) * ((b << 24) >> 24) + (a >> 8 & 0xFF) * ((b << 16) >> 24)
        out = low + (a >> 16 & 0xFF) * ((b << 8) >> 24) + (a >> 24 & 0xFF) * (b >> 24) + c
    return out


@jit
def add4(a, c, NATIVE: tl.constexpr):
    """c plus the sum of the four signed bytes of a; all int32."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, 0x01010101, $2;", "=r,r,r", [a, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = c + (((a << 24) >> 24) + ((a << 16) >> 24) + ((a << 8) >> 24) + (a >> 24))
    return out


@jit
def four_words(at, NATIVE: tl.constexpr):
    """The four int32 at byte pointers that are multiples of 16, of memory that nobody writes while the kernel runs. One
    load: triton sees no four neighbours where lanes are the last axis."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];",
            "=r,=r,=r,=r,l",
            [at.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        words = at.to(tl.pointer_type(tl.int32), bitcast=True)
        out = (tl.load(words), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3))
    return out


@jit
def dp2a(a, b, HIGH: tl.constexpr, NATIVE: tl.constexpr):
    """The dot of a's two signed halves with b's signed bytes 0 and 1, or 2 and 3 when HIGH; all int32."""
    if not NATIVE:
        b = b >> 16 if HIGH else b
        out = ((a << 16) >> 16) * ((b << 24) >> 24) + (a >> 16) * ((b << 16) >> 24)
    elif HIGH:
        out = tl.inline_asm_elementwise(
            "dp2a.hi.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = tl.inline_asm_elementwise(
            "dp2a.lo.s32.s32 $0, $1, $2, 0;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return out


@jit
def pair(low, high, NATIVE: tl.constexpr):
    """The low halves of two int32 as the low and high half of one."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        out = (low & 0xFFFF) | (high << 16)
    return out


@jit
def funnel(low, high, shift, NATIVE: tl.constexpr):
    """The low 32 bits of (high:low) >> shift, for a shift of 0, 8, 16 or 24."""
    if NATIVE:
        out = tl.inline_asm_elementwise(
            "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, shift], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # high moves in two steps: a shift by 32 has no meaning
        out = ((low >> shift) & ~(-2 << (31 - shift))) | ((high << 1) << (31 - shift))
    return out


@jit
def fold_rows(v, A: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr):
    """`butterfly`'s sums of [A, B, 32] with half its exchanges: at each step a lane gives away half of its rows. Which
    row a lane ends with is `folded_row`'s matter; [A, max(1, B / LANES), 32], the same bits."""
    lane = tl.arange(0, 32)[None, None, :]
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        if (LANES >> i) > 1:
            if (B >> i) > 1:
                first, second = tl.split(tl.permute(tl.reshape(v, [A, 2, B >> (i + 1), 32]), (0, 2, 3, 1)))
                upper = lane & (LANES >> (i + 1)) != 0
                v, other = tl.where(upper, second, first), tl.where(upper, first, second)
            else:
                other = v
            v = v + tl.gather(other, tl.broadcast_to(lane ^ (LANES >> (i + 1)), other.shape), 2)
    return v


@jit
def folded_row(B: tl.constexpr, LANES: tl.constexpr):
    """The row, of B, whose sum a lane has after `fold_rows`, [1, max(1, B / LANES), 32], and whether it is the first
    lane that has it."""
    left: tl.constexpr = max(1, B // LANES)  # pyright: ignore[reportAssignmentType]
    lane = tl.arange(0, 32)[None, None, :]
    row = tl.arange(0, left)[None, :, None] + 0 * lane
    for i in tl.static_range(5):  # pyright: ignore[reportGeneralTypeIssues]
        if ((LANES >> i) > 1) & ((B >> i) > 1):
            row += tl.where(lane & (LANES >> (i + 1)) != 0, B >> (i + 1), 0)
    return row, lane % max(1, LANES // B) == 0


@jit
def by_warp(v, A: tl.constexpr, B: tl.constexpr, WARPS: tl.constexpr):
    """[A, B, 32], of whose B rows a program's warps hold one each in turn, as [A * WARPS, B / WARPS, 32]: a warp's rows
    side by side, its row b being row WARPS * b + the warp's number. `fold_rows` of that needs no shared memory."""
    turns = tl.reshape(v, [A, B // WARPS, WARPS, 32])
    return tl.reshape(tl.permute(turns, (0, 2, 1, 3)), [A * WARPS, B // WARPS, 32])


@jit
def half_bits(bits):
    """The fp16 in the low 16 bits of an int32, as fp32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def wait_for_the_kernel_before(PDL: tl.constexpr):
    """Until everything the kernel before wrote can be read (programmatic dependent launch starts this one early)."""
    if PDL:
        gdc_wait()


@jit
def let_the_next_kernel_start(PDL: tl.constexpr):
    """Called after the wait, so what the next kernel reads before its own wait is older than this kernel."""
    if PDL:
        gdc_launch_dependents()
