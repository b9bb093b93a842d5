"""Gated activations: h = act(gate) * up, in fp32 with one rounding to gate's dtype.

P rows of F values. Reads 2 * P * F elements, writes P * F. `limit` L > 0 clamps before the activation: gate to at most
L (upper side only), up to -L..L. swiglu: act(g) = g / (1 + exp(-g)). geglu: the tanh form of GELU, written as
g * sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), the same function without the 1 + tanh that cancels for negative g.
Knows nothing about experts, routing weights or quantisation. fp32 exp differs between devices in its last bits, so the
reference is met within the tolerance table's activation rows, not bit for bit.
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
BLOCK_CUDA, BLOCK_INTERPRETER = 512, 4096


@jit
def _gated(gate, up, out, F, tiles, limit, gate_row_stride, gate_stride, up_row_stride, up_stride, INNER: tl.constexpr,
           CUBE: tl.constexpr, GELU: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Program = (row, tile of F)."""
    pid = tl.program_id(0)
    row, tile = pid // tiles, pid % tiles
    f = tile * BLOCK + tl.arange(0, BLOCK)
    there = f < F
    g = to_f32(tl.load(gate + offset64(row, gate_row_stride) + offset64(f, gate_stride), mask=there, other=0))
    u = to_f32(tl.load(up + offset64(row, up_row_stride) + offset64(f, up_stride), mask=there, other=0))
    if LIMIT:
        # written with comparisons so that a NaN passes through
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    z = INNER * (g + CUBE * (g * g * g)) if GELU else g
    h = tl.div_rn(g, 1.0 + tl.exp(-z)) * u
    tl.store(out + offset64(row, F) + f, round_to(h, out.dtype.element_ty), mask=there)


def swiglu(gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None) -> Float[Tensor, "P F"]:
    """silu(gate) * up (Triton). Any strides. LabError when shapes, dtypes or devices differ or limit <= 0."""
    return _launch("swiglu", gate, up, limit, gelu=False)


def geglu(gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None) -> Float[Tensor, "P F"]:
    """gelu_tanh(gate) * up (Triton). As `swiglu`."""
    return _launch("geglu", gate, up, limit, gelu=True)


def swiglu_ref(
    gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None
) -> Float[Tensor, "P F"]:
    """The same as `swiglu` in torch."""
    g, u = _clamped("swiglu", gate, up, limit)
    return (torch.nn.functional.silu(g) * u).to(gate.dtype)


def geglu_ref(
    gate: Float[Tensor, "P F"], up: Float[Tensor, "P F"], *, limit: float | None = None
) -> Float[Tensor, "P F"]:
    """The same as `geglu` in torch."""
    g, u = _clamped("geglu", gate, up, limit)
    return (g * torch.sigmoid(GELU_INNER * (g + GELU_CUBE * g**3)) * u).to(gate.dtype)


def _launch(op: str, gate: Tensor, up: Tensor, limit: float | None, *, gelu: bool) -> Tensor:
    _check(op, gate, up, limit)
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
        *(gate, up, out, f, tiles, 0.0 if limit is None else limit, *gate.stride(), *up.stride()),
        *(GELU_INNER, GELU_CUBE, gelu, limit is not None, block),
        device=gate.device,
        num_warps=4,
    )
    return out


def _clamped(op: str, gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    _check(op, gate, up, limit)
    g, u = gate.float(), up.float()
    return (g, u) if limit is None else (g.clamp(max=limit), u.clamp(-limit, limit))


def _check(op: str, gate: Tensor, up: Tensor, limit: float | None) -> None:
    expect(op, "gate", gate, FLOATS, ["P", "F"])
    expect(op, "up", up, [gate.dtype], gate.shape)
    if limit is not None and not limit > 0:
        raise LabError(f"{op}: limit={limit}; it must be > 0, or None for no clamp.")
