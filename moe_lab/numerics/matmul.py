"""`lab.matmul`: one product x @ q^T through an arm's arithmetic, or through any other.

What an arm's kernel computes runs on that kernel (on the GPU and in the interpreter) or on its torch twin; every other
combination of activations and choices is emulated (`numerics.emulation`), on every device. Knows nothing of experts.
"""

from dataclasses import replace
from typing import Literal, get_args

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab.arms.gemv_float import float_matmul, meets
from moe_lab.checks import wants, wants_tensor
from moe_lab.errors import LabError, LabTypeError
from moe_lab.formats import QuantTensor, quantize_activations
from moe_lab.numerics.emulation import (
    IntegerArm,
    arithmetic_of,
    completed,
    emulate,
    emulate_rows,
    of_layout,
    quantize_for,
)
from moe_lab_kernels import backend
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.grouped import grouped_gemm
from moe_lab_kernels.grouped.operands import OPERANDS, Weight
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.grouped.tiles import WorkList, tokens_for
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq import ref as mmq_ref
from moe_lab_kernels.mmq.operands import FOLDED, HAS_MINIMA, MMQ_LAYOUTS, MmqRows
from moe_lab_kernels.rows.arithmetic import LAYOUTS, OF_PRODUCTS, Arithmetic
from moe_lab_kernels.storage.blocks import GEMV_FORMATS

MatmulArm = Literal["gemv", "mmq", "gemm"]
ACTIVATIONS = (*LAYOUTS, "bf16")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def matmul(
    x: Float[Tensor, "T Kd"],
    q: QuantTensor,
    arm: MatmulArm = "gemv",
    activation: str | None = None,
    arithmetic: Arithmetic | None = None,
) -> Float32[Tensor, "T N"]:
    """x @ q^T in fp32, as an arm computes it: x [T, Kd] fp32, fp16 or bf16, q [N, Kd] on the same device.

    `arm`: "gemv" (ggml's decode arithmetic; with "bf16", or with "fp8" for fp8_block, values against any format),
    "mmq" (its prefill arithmetic; with `activation="q8_k"` the folded form, its CPU's), "gemm" (values against values).
    `activation` rounds x first: q8_1, d4, ds4, d2s6, q8_k, q8_0, fp8, bf16;
    None is the arm's own layout, and for gemm x as it is. gemm's operands have x's dtype where that is bf16 or fp16,
    else fp32, and products are summed in float64 where no kernel sums them. `arithmetic` changes single choices.
    LabError for an unknown arm or activation, a format without integer arithmetic, and shapes or devices that disagree.
    """
    _check(x, q, arm, activation, arithmetic)
    if arm == "gemm":
        return _gemm(x, q, activation, arithmetic)
    if arm == "gemv" and activation is not None and _meets_floats(q.format, activation):
        return float_matmul(x.bfloat16() if activation == "bf16" else x, q, activation)
    made = _choices(q.format, arm, activation, arithmetic)
    if not x.shape[0] or not q.shape[0]:
        return torch.empty(x.shape[0], q.shape[0], device=x.device)
    if arm == "mmq" and made == arithmetic_of(q.format, "cpu") and q.format in FOLDED:
        return _mmq(x, q, "q8_k", None)
    if arm == "mmq" and _is_mmq(made, q.format):
        return _mmq(x, q, MMQ_LAYOUTS[q.format], replace(made, **dict.fromkeys(OF_PRODUCTS)))
    if arm == "gemv" and made == arithmetic_of(q.format, "gemv") and q.format in GEMV_FORMATS:
        return _gemv(x, q, made)
    return emulate(x, q, made)


def _meets_floats(format: str, activation: str) -> bool:
    """Whether gemv multiplies the format with activations that are no integers."""
    return activation in ("bf16", "fp8") and meets(format, activation) is None


def _choices(format: str, arm: IntegerArm, activation: str | None, arithmetic: Arithmetic | None) -> Arithmetic:
    """The arm's choices, those of another layout of activations over them, the caller's over all."""
    made = arithmetic_of(format, arm)
    table = "q8_1" if arm == "gemv" else MMQ_LAYOUTS[format]
    if activation is not None and activation != table:
        own = of_layout(activation)
        if own.sum == "none" and format in HAS_MINIMA:  # the kernels add codes up where a layout has no sums
            own = replace(own, sum="quantised", safe_sum=True)
        made = completed(replace(own, product_dtype=None, order=None, k_split=None), made)
        if activation == "q8_k":  # whose blocks leave integers only once
            made = replace(made, product_dtype="integer")
        if format not in HAS_MINIMA and format != "q4_0":
            made = replace(made, sum="none", safe_sum=False)
    return made if arithmetic is None else completed(arithmetic, made)


def _is_mmq(made: Arithmetic, format: str) -> bool:
    """Whether the mmq kernel has these choices: all but those that activations bring with them are its own."""
    own = arithmetic_of(format, "mmq")
    sums = made.sum == "none" if format == "q4_0" else made.sum != "none" or format not in HAS_MINIMA
    return sums and all(getattr(made, c) == getattr(own, c) for c in ("block", *OF_PRODUCTS))


def _mmq(x: Tensor, q: QuantTensor, layout: str, arithmetic: Arithmetic | None) -> Tensor:
    if layout == "ds4" and q.format == "q4_0":  # ggml stores sums that its product does not read
        arithmetic = None
    rows = quantize_activations(x, layout, arithmetic)
    operand = MmqRows(rows.codes, rows.scale, rows.total, layout)
    if backend.backend_of(x) == "torch":
        return mmq_ref.product_ref(q.data, operand, q.format)
    work = _tiles(len(x), tokens_for(len(x), 1), x.device)
    out = torch.empty(len(x), q.shape[0], device=x.device)
    return mmq.mmq_product(operand, None, Weight(q.stacked().data, q.format, q.shape[1]), work, out)


def _gemv(x: Tensor, q: QuantTensor, made: Arithmetic) -> Tensor:
    if backend.backend_of(x) == "torch":
        return emulate_rows(quantize_for(x, q.format, made), q, made)
    rows = quantize_activations(x, "q8_1")
    assert rows.total is not None
    most = gemv.MAX_CHUNK_ROWS
    chunks = [[0, i, min(most, len(x) - i)] for i in range(0, len(x), most)]
    table = torch.tensor(chunks, dtype=torch.int32, device=x.device)
    own, out = (
        torch.arange(len(x), dtype=torch.int32, device=x.device),
        torch.empty(len(x), q.shape[0], device=x.device),
    )
    return gemv.gemv((rows.codes, rows.scale, rows.total), own, q.data[None], table, q.format, out)


def _gemm(x: Tensor, q: QuantTensor, activation: str | None, arithmetic: Arithmetic | None) -> Tensor:
    asked = () if arithmetic is None else [c for c in OF_PRODUCTS if getattr(arithmetic, c) is not None]
    if asked or (arithmetic is not None and activation in (None, "bf16")):
        what = ", ".join(asked) or "choices of an int8 or fp8 activation"
        raise LabError(f"matmul: arm 'gemm' multiplies values and has no {what}; arms gemv and mmq have.")
    if activation == "bf16":
        x = x.bfloat16()
    elif activation is not None:
        x = quantize_activations(x, activation, arithmetic).dequantize()
    if x.dtype in OPERANDS and q.format in STEPS and backend.backend_of(x) != "torch" and len(x) and q.shape[0]:
        second = q.biases if q.biases is not None else q.global_scale
        parts = (None if t is None else t[None] for t in (q.data, q.scales, second))
        data, scales, second = parts
        assert data is not None
        data = data.view(x.dtype) if q.format in ("bf16", "f16") else data
        out = torch.empty(len(x), q.shape[0], device=x.device)
        w = Weight(data, q.format, q.shape[1], scales, second)
        return grouped_gemm.grouped_product(x, None, w, _tiles(len(x), tokens_for(len(x), 1), x.device), out)
    values = q.dequantize()
    values = values.to(x.dtype) if x.dtype in OPERANDS else values
    return (x.double() @ values.double().T).float()


def _tiles(rows: int, tokens: int, device: torch.device) -> WorkList:
    entries = [[0, i, min(tokens, rows - i)] for i in range(0, rows, tokens)]
    return WorkList(torch.tensor(entries, dtype=torch.int32, device=device).view(-1, 3), tokens)


def _check(x: Tensor, q: QuantTensor, arm: str, activation: str | None, arithmetic: Arithmetic | None) -> None:
    wants_tensor("x", x)
    wants("q", q, QuantTensor, "a QuantTensor")
    if arithmetic is not None:
        wants("arithmetic", arithmetic, Arithmetic, "a moe_lab.Arithmetic")
    if x.dtype not in FLOATS:
        raise LabTypeError(f"matmul: x is {x.dtype}; wanted float32, float16 or bfloat16.")
    if arm not in get_args(MatmulArm):
        raise LabError(f"matmul has no arm {arm!r}; it has {', '.join(get_args(MatmulArm))}.")
    if activation is not None and activation not in ACTIVATIONS:
        raise LabError(f"no activation is called {activation!r}; known: {', '.join(ACTIVATIONS)}.")
    if x.ndim != 2 or len(q.shape) != 2 or x.shape[1] != q.shape[1]:
        raise LabError(f"matmul wants x [T, Kd] and q [N, Kd], got {list(x.shape)} and {list(q.shape)}.")
    if x.device != q.device:
        raise LabError(f"matmul: x is on {x.device}, q on {q.device}; move one of them.")
    if arm == "gemv" and activation is not None and _meets_floats(q.format, activation):
        if arithmetic is not None:
            raise LabError(f"matmul: {activation} activations of arm 'gemv' have no choices; leave arithmetic out.")
        return
    if arm != "gemm" and q.format not in MMQ_LAYOUTS:
        served = ", ".join(MMQ_LAYOUTS)
        values = [kind for kind in ("bf16", "fp8") if arm == "gemv" and _meets_floats(q.format, kind)]
        with_values = f"with activation={' or '.join(map(repr, values))} it does, and " if values else ""
        raise LabError(
            f"matmul: arm {arm!r} multiplies {served}, not {q.format}; {with_values}arm 'gemm' multiplies every format."
        )
    if arm != "gemm" and activation in ("fp8", "bf16"):
        raise LabError(f"matmul: arm {arm!r} multiplies int8 codes, and {activation} has none; arm 'gemm' takes it.")
