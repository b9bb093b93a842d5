"""Gated activations: h = act(gate) * up, in fp32 with one rounding to gate's dtype.

P rows of F values. Reads 2 * P * F elements, writes P * F. swiglu: act(g) = g / (1 + exp(-g)). geglu: the tanh form
of GELU, written as g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), the same function without the 1 + tanh that cancels
for negative g. `limit` L > 0 clamps up to -L..L and, as `limit_mode` says,
    before   gate to at most L (upper side only), before the activation
    after    act(gate) to at most L
    oai      gate to at most L; h = g / (1 + exp(-alpha g)) * (up + 1)
Knows nothing about experts, routing weights or quantisation. fp32 exp differs between devices in its last bits, so the
reference is met within the tolerance table's activation rows, not bit for bit.

Measured on an H200 against the CPU, 203,776 hidden values of a trained layer: 16 % differ, by 5 ulp at most, which
moves no q8_1 code and no scale of theirs and 4 of 6,368 fp16 sums. exp in float64, or in fp32 by a polynomial that
adds and multiplies alone, has equal bits everywhere (4.1 million arguments) and the same time for 131,072 values; on
8 and 134 million in bf16 it takes 29 to 34 % and 21 to 27 % more. Nothing promised needs it, so the quick exp stays.
"""

import math

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import offset64, round_to, to_f32

GELU_INNER, GELU_CUBE = 2.0 * math.sqrt(2.0 / math.pi), 0.044715
LIMIT_MODES, OAI_ALPHA = ("before", "after", "oai"), 1.702
BLOCK_CUDA, BLOCK_INTERPRETER = 512, 4096


@jit
def gated_value(g, u, limit, alpha, INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr):
    """h in fp32 of gate and up in fp32: the one place where the compiled kernels compute it. LIMIT: "none", "before",
    "after", "oai". Comparisons rather than minima, so that a NaN passes through."""
    if LIMIT != "none":
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        if LIMIT != "after":
            g = tl.where(g > limit, limit, g)
    if LIMIT == "oai":
        out = tl.div_rn(g, 1.0 + tl.exp(-(alpha * g))) * (u + 1.0)
    else:
        z = INNER * (g + CUBE * (g * g * g)) if GELU else g
        act = tl.div_rn(g, 1.0 + tl.exp(-z))
        if LIMIT == "after":
            act = tl.where(act > limit, limit, act)
        out = act * u
    return out


@jit
def _gated(gate, up, out, F, tiles, limit, alpha, gate_row_stride, gate_stride, up_row_stride, up_stride,
           INNER: tl.constexpr, CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Program = (row, tile of F)."""
    pid = tl.program_id(0)
    row, tile = pid // tiles, pid % tiles
    f = tile * BLOCK + tl.arange(0, BLOCK)
    there = f < F
    g = to_f32(tl.load(gate + offset64(row, gate_row_stride) + offset64(f, gate_stride), mask=there, other=0))
    u = to_f32(tl.load(up + offset64(row, up_row_stride) + offset64(f, up_stride), mask=there, other=0))
    h = gated_value(g, u, limit, alpha, INNER, CUBE, GELU, LIMIT)
    tl.store(out + offset64(row, F) + f, round_to(h, out.dtype.element_ty), mask=there)


def swiglu(
    gate: Float[Tensor, "P F"],
    up: Float[Tensor, "P F"],
    *,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
) -> Float[Tensor, "P F"]:
    """silu(gate) * up (Triton). Any strides. LabError when shapes, dtypes or devices differ, limit <= 0, or limit_mode
    is none of before, after, oai (`alpha` belongs to oai alone)."""
    return _launch("swiglu", gate, up, limit, limit_mode, alpha, gelu=False)


def geglu(
    gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None, limit_mode: str = "before"
) -> Float[Tensor, "P F"]:
    """gelu_tanh(gate) * up (Triton). As `swiglu`, without oai."""
    return _launch("geglu", gate, up, limit, limit_mode, OAI_ALPHA, gelu=True)


def swiglu_ref(
    gate: Float[Tensor, "P F"],
    up: Float[Tensor, "P F"],
    *,
    limit: float | None = None,
    limit_mode: str = "before",
    alpha: float = OAI_ALPHA,
) -> Float[Tensor, "P F"]:
    """The same as `swiglu` in torch."""
    g, u, mode = _clamped("swiglu", gate, up, limit, limit_mode, gelu=False)
    if mode == "oai":
        return (g * torch.sigmoid(alpha * g) * (u + 1)).to(gate.dtype)
    return (_below(torch.nn.functional.silu(g), limit, mode) * u).to(gate.dtype)


def geglu_ref(
    gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None, limit_mode: str = "before"
) -> Float[Tensor, "P F"]:
    """The same as `geglu` in torch."""
    g, u, mode = _clamped("geglu", gate, up, limit, limit_mode, gelu=True)
    act = g * torch.sigmoid(GELU_INNER * (g + GELU_CUBE * g**3))
    return (_below(act, limit, mode) * u).to(gate.dtype)


def limit_of(op: str, limit: float | None, limit_mode: str, *, gelu: bool) -> str:
    """The kernels' LIMIT. LabError for a limit that is not positive, or a mode that `op` does not have."""
    if limit is not None and not limit > 0:
        raise LabError(f"{op}: limit={limit}; it must be > 0, or None for no clamp.")
    known = ("before", "after") if gelu else LIMIT_MODES
    if limit_mode not in known:
        raise LabError(f"{op}: limit_mode={limit_mode!r}; it must be one of {', '.join(known)}.")
    if limit_mode == "oai" and limit is None:
        raise LabError(f"{op}: limit_mode='oai' clamps, so it needs a limit.")
    return "none" if limit is None else limit_mode


def _launch(
    op: str, gate: Tensor, up: Tensor, limit: float | None, limit_mode: str, alpha: float, *, gelu: bool
) -> Tensor:
    mode = _check(op, gate, up, limit, limit_mode, gelu=gelu)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if not gate.numel():
        return out
    on = backend.serve(op, gate=gate, up=up)
    rows, f = gate.shape
    block = min(BLOCK_CUDA if on == "cuda" else BLOCK_INTERPRETER, backend.next_power_of_2(f))
    tiles = -(-f // block)
    backend.launch(
        _gated,
        (rows * tiles,),
        *(gate, up, out, f, tiles, 0.0 if limit is None else limit, alpha, *gate.stride(), *up.stride()),
        *(GELU_INNER, GELU_CUBE, gelu, mode, block),
        device=gate.device,
        num_warps=4,
    )
    return out


def _clamped(
    op: str, gate: Tensor, up: Tensor, limit: float | None, limit_mode: str, *, gelu: bool
) -> tuple[Tensor, Tensor, str]:
    mode = _check(op, gate, up, limit, limit_mode, gelu=gelu)
    g, u = gate.float(), up.float()
    if mode == "none" or limit is None:
        return g, u, mode
    return g if mode == "after" else g.clamp(max=limit), u.clamp(-limit, limit), mode


def _below(act: Tensor, limit: float | None, mode: str) -> Tensor:
    return act.clamp(max=limit) if mode == "after" else act


def _check(op: str, gate: Tensor, up: Tensor, limit: float | None, limit_mode: str, *, gelu: bool) -> str:
    expect(op, "gate", gate, FLOATS, ["P", "F"])
    expect(op, "up", up, [gate.dtype], gate.shape)
    return limit_of(op, limit, limit_mode, gelu=gelu)
