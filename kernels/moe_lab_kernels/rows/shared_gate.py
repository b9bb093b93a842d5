"""The gate of a shared expert: sigmoid(x . v) for each token, in one launch.

T tokens, D model width. Reads T * D elements and v, writes T fp32. Sum and sigmoid in float64, rounded once, so that no
order of addition shows: launcher, interpreter and reference agree. In torch the same is five launches, 10 us of a
decode step's 30. Knows nothing about the expert.
"""

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import offset64, to_f32
from moe_lab_kernels.route.score import sigmoid

BLOCK = 1024


@jit
def _shared_gate(x, v, out, D, x_t, x_d, v_d, BLOCK: tl.constexpr):
    """Program = token."""
    t = tl.program_id(0)
    row = x + offset64(t, x_t)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        value = to_f32(tl.load(row + offset64(d, x_d), mask=d < D, other=0)).to(tl.float64)
        weight = to_f32(tl.load(v + offset64(d, v_d), mask=d < D, other=0)).to(tl.float64)
        total += value * weight
    tl.store(out + t, sigmoid(tl.sum(total, 0)).to(tl.float32))


def shared_gate(x: Float[Tensor, "T D"], v: Float[Tensor, " D"]) -> Float32[Tensor, " T"]:
    """sigmoid(x . v) (Triton). fp32, fp16 or bf16 each, any strides. LabError when D or devices disagree."""
    out = _output(x, v)
    if not out.numel():
        return out
    backend.serve("shared_gate", x=x, v=v)
    t, d = x.shape
    block = min(BLOCK, backend.next_power_of_2(d))
    backend.launch(
        _shared_gate, (t,), x, v, out, d, *x.stride(), v.stride(0), block, device=x.device, num_warps=4
    )  # fmt: skip
    return out


def shared_gate_ref(x: Float[Tensor, "T D"], v: Float[Tensor, " D"]) -> Float32[Tensor, " T"]:
    """The same in torch."""
    return _output(x, v).copy_(torch.sigmoid(x.double() @ v.double()))


def _output(x: Tensor, v: Tensor) -> Tensor:
    expect("shared_gate", "x", x, FLOATS, ["T", "D"])
    expect("shared_gate", "v", v, FLOATS, [x.shape[1]])
    return torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
