"""The router's product: logits [T, R] = x [T, D] @ w [R, D]^T (+ bias), fp32 sums and an fp32 result.

Reads T * D and R * D elements, writes T * R * 4 bytes; 2 * T * R * D operations. One order of addition in every form:
D falls into segments of SEGMENT, each summed by one chain of dots of BLOCK_D values from the left, segments added from
the left, then the bias. So a row's bits depend neither on T nor on the form. Spread form (T <= SPREAD_ROWS): a program
a segment, so that few rows keep the whole device busy, and a second launch that adds them (T = 1024 in one launch took
19 us at D=2048 on an H200: too few programs); whole form: a program takes its segments one after the other.
Rows and weights of one 16-bit dtype go to the tensor cores (exact products); their instruction is part of the order,
and tiles stay below the 64 rows at which the compiler would take another. Everything else is fp32 without TF32.
Knows nothing about experts or scores.
"""

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import INTERPRET, offset64, to_f32

SEGMENT, BLOCK_D = 256, 64
SPREAD_ROWS, SMALL_ROWS = 1024, 64
# tokens and experts that a program takes, and its warps; the small tile up to SMALL_ROWS
SMALL_TILE, LARGE_TILE = (16, 16, 1), (32, 64, 4)


@jit
def _segment(x, w, row, expert, start, T, R, D, x_row, x_col, w_row, w_col, EXACT: tl.constexpr, M: tl.constexpr,
             N: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """fp32 [M, N]: the products of columns start .. start + SEGMENT, added from the left."""
    acc = tl.zeros((M, N), tl.float32)
    of_x, of_w = x + offset64(row, x_row)[:, None], w + offset64(expert, w_row)[:, None]
    for d in range(start, tl.minimum(start + SEGMENT, D), BLOCK_D):
        at = d + tl.arange(0, BLOCK_D)
        a = tl.load(of_x + offset64(at, x_col)[None, :], mask=(row < T)[:, None] & (at < D)[None, :], other=0)
        b = tl.load(of_w + offset64(at, w_col)[None, :], mask=(expert < R)[:, None] & (at < D)[None, :], other=0)
        if INTERPRET:
            # the interpreter's own dot is BLAS, whose order of addition depends on a row's place in the tile
            acc = acc + tl.sum(to_f32(a)[:, :, None] * tl.trans(to_f32(b))[None, :, :], 1)
        elif EXACT:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        else:
            acc = tl.dot(to_f32(a), tl.trans(to_f32(b)), acc, input_precision="ieee")
    return acc


@jit
def _segments(x, w, parts, T, R, D, x_row, x_col, w_row, w_col, row_tiles, expert_tiles, EXACT: tl.constexpr,
              M: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Program = (segment, tile of experts, tile of rows): parts fp32 [segments, T, R]."""
    pid = tl.program_id(0)
    row = pid % row_tiles * M + tl.arange(0, M)
    expert = pid // row_tiles % expert_tiles * N + tl.arange(0, N)
    segment = pid // row_tiles // expert_tiles
    acc = _segment(x, w, row, expert, segment * SEGMENT, T, R, D, x_row, x_col, w_row, w_col, EXACT, M, N, SEGMENT,
                   BLOCK_D)  # fmt: skip
    out = parts + (segment * T + row)[:, None] * R + expert[None, :]
    tl.store(out, acc, mask=(row < T)[:, None] & (expert < R)[None, :])


@jit
def _add_segments(parts, bias, out, n, R, segments, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Program = a block of the n = T * R results."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for segment in range(segments):
        total = total + tl.load(parts + segment * n + at, mask=at < n, other=0)
    if BIAS:
        total = total + to_f32(tl.load(bias + at % R, mask=at < n, other=0))
    tl.store(out + at, total, mask=at < n)


@jit
def _whole(x, w, bias, out, T, R, D, x_row, x_col, w_row, w_col, row_tiles, EXACT: tl.constexpr, BIAS: tl.constexpr,
           M: tl.constexpr, N: tl.constexpr, SEGMENT: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Program = (tile of experts, tile of rows), all segments."""
    pid = tl.program_id(0)
    row = pid % row_tiles * M + tl.arange(0, M)
    expert = pid // row_tiles * N + tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, D, SEGMENT):
        total = total + _segment(x, w, row, expert, start, T, R, D, x_row, x_col, w_row, w_col, EXACT, M, N, SEGMENT,
                                 BLOCK_D)  # fmt: skip
    if BIAS:
        total = total + to_f32(tl.load(bias + expert, mask=expert < R, other=0))[None, :]
    there = (row < T)[:, None] & (expert < R)[None, :]
    tl.store(out + offset64(row, R)[:, None] + expert[None, :], total, mask=there)


def router(
    x: Float[Tensor, "T D"], w: Float[Tensor, "R D"], bias: Float[Tensor, " R"] | None = None
) -> Float32[Tensor, "T R"]:
    """x @ w^T + bias (Triton). fp32, fp16 or bf16 each, any strides. LabError when D, R or devices disagree."""
    out = _output(x, w, bias)
    if not out.numel():
        return out
    backend.serve("router", x=x, w=w, bias=bias)
    (t, d), r, segments = x.shape, len(w), -(-x.shape[1] // SEGMENT)
    spread = t <= SPREAD_ROWS and segments > 1
    m, n, warps = SMALL_TILE if t <= SMALL_ROWS else LARGE_TILE
    rows, experts, exact = -(-t // m), -(-r // n), x.dtype == w.dtype != torch.float32
    bias_or_any = out if bias is None else bias.contiguous()
    sizes, tile = (t, r, d, *x.stride(), *w.stride()), (m, n, SEGMENT, BLOCK_D)
    if spread:
        parts = torch.empty(segments, t, r, dtype=torch.float32, device=x.device)
        backend.launch(
            _segments,
            (rows * experts * segments,),
            *(x, w, parts, *sizes, rows, experts, exact, *tile),
            device=x.device,
            num_warps=warps,
        )
        backend.launch(
            _add_segments,
            (-(-t * r // 128),),
            *(parts, bias_or_any, out, t * r, r, segments, bias is not None, 128),
            device=x.device,
            num_warps=4,
        )
    else:
        backend.launch(
            _whole,
            (rows * experts,),
            *(x, w, bias_or_any, out, *sizes, rows, exact, bias is not None, *tile),
            device=x.device,
            num_warps=warps,
        )
    return out


def router_ref(
    x: Float[Tensor, "T D"], w: Float[Tensor, "R D"], bias: Float[Tensor, " R"] | None = None
) -> Float32[Tensor, "T R"]:
    """The same in torch, in float64, rounded once."""
    out = _output(x, w, bias)
    product = x.double() @ w.double().T
    return out.copy_(product if bias is None else product + bias.double())


def _output(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    expect("router", "x", x, FLOATS, ["T", "D"])
    expect("router", "w", w, FLOATS, ["R", x.shape[1]])
    if bias is not None:
        expect("router", "bias", bias, FLOATS, [len(w)])
    if not x.shape[1]:
        raise LabError(f"router: D must be positive, got x of shape {list(x.shape)}.")
    return torch.empty(len(x), len(w), dtype=torch.float32, device=x.device)
