"""Combine expert outputs back into token order: out[t] = sum over k of w[t, k] * y[t, k], then the shared expert.

T tokens, K slots a token, D model width. Reads T * K * D elements (+ T * D of the shared expert), writes T * D. fp32
accumulator per token, one term after another: each product is rounded, then added (no fused multiply-add), slots in
rank order or in the given order, then shared_gate * shared, then one rounding. No atomics: the bits depend neither on
launch order nor on batch size, and the launcher, the interpreter and the reference agree bit for bit.
Knows nothing about experts: rows, weights and ids only. A slot whose id is no expert's is skipped, its row never read.
"""

import torch

from moe_lab._types import Float, Float32, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import FLOATS, expect
from moe_lab_kernels.primitives import let_the_next_kernel_start, offset64, round_to, to_f32, wait_for_the_kernel_before

BLOCK_CUDA, BLOCK_INTERPRETER = 256, 4096
MOST_IDS = 2**31 - 1


@jit
def _combine(y, w, ids, order, shared, shared_gate, out, D, tiles, width, y_t, y_k, y_d, w_t, w_k, ids_t, ids_k,
             order_t, order_k, shared_t, shared_d, gate_t, K: tl.constexpr, IDS: tl.constexpr, ORDER: tl.constexpr,
             SHARED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Program = (token, tile of D); tokens are on grid x because y and z stop at 65,535."""
    wait_for_the_kernel_before(PDL)
    let_the_next_kernel_start(PDL)
    pid = tl.program_id(0)
    t, tile = pid // tiles, pid % tiles
    d = tile * BLOCK + tl.arange(0, BLOCK)
    there = d < D
    row = y + offset64(t, y_t) + offset64(d, y_d)
    acc = tl.zeros((BLOCK,), tl.float32)
    zero = offset64(t, 0)
    for i in tl.static_range(K):
        k = zero + i
        if ORDER:
            k = zero + tl.load(order + offset64(t, order_t) + i * order_k)
        weight = tl.load(w + offset64(t, w_t) + k * w_k)
        if IDS:
            id = tl.load(ids + offset64(t, ids_t) + k * ids_k)
            taken = (id >= 0) & (id < width)
            value = to_f32(tl.load(row + k * y_k, mask=there & taken, other=0))
            acc = tl.where(taken, acc + value * weight, acc)
        else:
            acc = acc + to_f32(tl.load(row + k * y_k, mask=there, other=0)) * weight
    if SHARED:
        extra = to_f32(tl.load(shared + offset64(t, shared_t) + offset64(d, shared_d), mask=there, other=0))
        if GATED:
            extra = extra * tl.load(shared_gate + offset64(t, gate_t))
        acc = acc + extra
    tl.store(out + offset64(t, D) + d, round_to(acc, out.dtype.element_ty), mask=there)


def combine(
    y: Float[Tensor, "T K D"],
    w: Float32[Tensor, "T K"],
    shared: Float[Tensor, "T D"] | None = None,
    shared_gate: Float32[Tensor, " T"] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    ids: Int32[Tensor, "T K"] | None = None,
    width: int = MOST_IDS,
    order: Int32[Tensor, "T K"] | None = None,
    pdl: bool = False,
) -> Float[Tensor, "T D"]:
    """Weighted sum over each token's K expert outputs (Triton), plus shared_gate * shared where given.

    `shared_gate` is already squashed; None means 1. `out_dtype`: y's by default. `ids`: slots whose id is negative or
    not below `width` are skipped.
    `order`: each token's slots in the order of addition (a permutation of 0..K-1); None is rank order. Any strides.
    `pdl`: start while the kernel before still runs (needs compute capability 9.0). LabError when T, K, D or devices
    disagree.
    """
    out = _output(y, w, shared, shared_gate, out_dtype, ids, order)
    if not out.numel():
        return out
    on = backend.serve("combine", y=y, w=w, shared=shared, shared_gate=shared_gate, ids=ids, order=order)
    t, k, d = y.shape
    block = min(BLOCK_CUDA if on == "cuda" else BLOCK_INTERPRETER, backend.next_power_of_2(d))
    tiles = -(-d // block)
    optional = (ids, order, shared, shared_gate)
    absent = [(0,) * axes for axes in (2, 2, 2, 1)]
    strides = [zero if v is None else v.stride() for v, zero in zip(optional, absent, strict=True)]
    backend.launch(
        _combine,
        (t * tiles,),
        *(y, w, *(w if v is None else v for v in optional), out, d, tiles, width, *y.stride(), *w.stride()),
        *(step for steps in strides for step in steps),
        *(k, *(v is not None for v in optional), block, pdl and on == "cuda"),
        device=y.device,
        num_warps=2,
        **backend.early_start(pdl, on),
    )
    return out


def combine_ref(
    y: Float[Tensor, "T K D"],
    w: Float32[Tensor, "T K"],
    shared: Float[Tensor, "T D"] | None = None,
    shared_gate: Float32[Tensor, " T"] | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    ids: Int32[Tensor, "T K"] | None = None,
    width: int = MOST_IDS,
    order: Int32[Tensor, "T K"] | None = None,
    pdl: bool = False,
) -> Float[Tensor, "T D"]:
    """The same in torch, bit for bit."""
    out = _output(y, w, shared, shared_gate, out_dtype, ids, order)
    acc = torch.zeros(out.shape, dtype=torch.float32, device=y.device)
    token = torch.arange(len(y), device=y.device)
    for i in range(y.shape[1]):
        k = torch.full_like(token, i) if order is None else order[:, i].long()
        term = acc + y[token, k].float() * w[token, k, None]
        if ids is None:
            acc = term
        else:
            id = ids[token, k, None]
            acc = torch.where((id >= 0) & (id < width), term, acc)
    if shared is not None:
        acc = acc + (shared.float() if shared_gate is None else shared.float() * shared_gate[:, None])
    return out.copy_(acc)


def _output(
    y: Tensor,
    w: Tensor,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    out_dtype: torch.dtype | None,
    ids: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    """The empty output, once everything that shapes and dtypes can tell holds."""
    expect("combine", "y", y, FLOATS, ["T", "K", "D"])
    t, k, d = y.shape
    expect("combine", "w", w, [torch.float32], [t, k])
    for name, v, dtypes, shape in (
        ("shared", shared, FLOATS, [t, d]),
        ("shared_gate", shared_gate, [torch.float32], [t]),
        ("ids", ids, [torch.int32], [t, k]),
        ("order", order, [torch.int32], [t, k]),
    ):
        if v is not None:
            expect("combine", name, v, dtypes, shape)
    if shared_gate is not None and shared is None:
        raise LabError("combine: shared_gate was given without shared.")
    out = torch.empty(t, d, dtype=y.dtype if out_dtype is None else out_dtype, device=y.device)
    expect("combine", "out_dtype's output", out, FLOATS, [t, d])
    return out
