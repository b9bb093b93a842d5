"""x @ W^T under any choice of arithmetic, in torch: what ggml's arms compute, and what one other choice would change.

T rows of Kd values, N weight rows in a quantised format. `arithmetic_of` gives an arm's choices, complete;
`dataclasses.replace` switches one; `emulate` computes with them. Per group of values under one sub-block scale

    term = code part - minimum part,   code part = (dot * A) * dy, minimum part = Mn * S

dot: exact integers; A, Mn: products of a super-block's floats with a sub-block's scale and minimum, rounded as
`product_dtype` says (with "integer" the scale multiplies the dot, (dy * (sc * dot)) * d); dy: the stored activation
scale; S: a stored sum, or dy times the sum of codes. Sources: kquants 2.4 and 2.5, from which (a) to (g) come.
Every step is rounded to fp32, except with order "exact", where terms and their sum are float64 with one rounding, and
"super_blocks", where that holds for each 256 values.
Slow beside a kernel, and not meant to be one: orders and splits of Kd that no kernel of the lab has are computed here.
"""

from dataclasses import fields, replace
from typing import Literal, get_args

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab.errors import LabError
from moe_lab.formats import QuantRows, QuantTensor, quantize_activations
from moe_lab_kernels.mmq.operands import HAS_MINIMA, MMQ_LAYOUTS, layout_for
from moe_lab_kernels.rows.arithmetic import DTYPES, LAYOUTS, Arithmetic
from moe_lab_kernels.storage.unpack import Unpacked, unpack_ref

IntegerArm = Literal["gemv", "mmq", "cpu"]
MOST_TERMS = 1 << 25  # at once: 128 MB of fp32
SUPER_BLOCK = 256
# blocks of 256 values that ggml's 128 threads take side by side (kquants 3.3); 32-value blocks are walked alike
THREAD_BLOCKS = 8


def arithmetic_of(format: str, arm: IntegerArm) -> Arithmetic:
    """Every choice that ggml makes for a format: its decode arm ("gemv"), prefill arm ("mmq") or CPU arm ("cpu").

    `order` is the lab's own, "blocks". LabError for other formats and arms.
    """
    layout_for(format)
    if arm not in get_args(IntegerArm):
        raise LabError(f"arm {arm!r} has no integer arithmetic; wanted one of {', '.join(get_args(IntegerArm))}.")
    minima = format in HAS_MINIMA
    name = MMQ_LAYOUTS[format]
    if arm == "gemv":
        name = "q8_1"
    elif arm == "cpu":
        name = "q8_k" if format.endswith("_k") else "q8_0"
    own = of_layout(name)
    keep_codes = {"sum": "quantised", "safe_sum": True}
    if arm == "mmq":
        product = "fp16" if minima else "fp32" if format == "q3_k" else "integer"
        return replace(own, product_dtype=product, **({} if minima else {"sum": "none", "safe_sum": False}))
    raw = format == "q4_0" and arm == "gemv"
    sums = keep_codes if minima else {"sum": "raw" if raw else "none", "safe_sum": False}
    return replace(own, product_dtype="integer", **sums)


def of_layout(name: str) -> Arithmetic:
    """An activation layout's choices; those of a product as the decode arm has them. LabError for fp8 and unknowns."""
    if name not in LAYOUTS or name == "fp8":
        known = ", ".join(n for n in LAYOUTS if n != "fp8")
        raise LabError(f"no layout of int8 activations is called {name!r}; known: {known}.")
    layout = LAYOUTS[name]
    shared = [f.name for f in fields(Arithmetic) if hasattr(layout, f.name)]
    own = {choice: getattr(layout, choice) for choice in shared}
    return Arithmetic(**own, product_dtype="integer", order="blocks", k_split=1)


def completed(arithmetic: Arithmetic, base: Arithmetic) -> Arithmetic:
    """`arithmetic` with `base`'s choice where it makes none; sums of codes give way to a sum that is asked for."""
    given = {f.name: v for f in fields(arithmetic) if (v := getattr(arithmetic, f.name)) is not None}
    if given.get("safe_sum"):
        given["sum"] = "quantised"
    elif "sum" in given:
        given.setdefault("safe_sum", False)
    return replace(base, **given)


def quantize_for(x: Float[Tensor, "T Kd"], format: str, arithmetic: Arithmetic) -> QuantRows:
    """The rows that `emulate` multiplies: a sum for each minimum of the format, the other choices as told.

    Raw sums of 32 values add in the decode arm's order where codes are x / d, else in the prefill arm's.
    """
    made = completed(arithmetic, arithmetic_of(format, "gemv"))
    assert made.rounding is not None
    wide = "q8_1" if made.rounding.startswith("divide") else "ds4"
    base = "d2s6" if format == "q2_k" else wide  # whose sums cover sixteen values
    if _is_q8_k(made):  # has the numbers of any other layout with its choices, but codes and scale of the other sign
        base = "q8_k"
    return quantize_activations(x, base, replace(made, product_dtype=None, order=None, k_split=None))


def _is_q8_k(made: Arithmetic) -> bool:
    own = LAYOUTS["q8_k"]
    same = all(getattr(made, c) == getattr(own, c) for c in ("block", "scale_dtype", "rounding"))
    return same and (made.safe_sum or made.sum == "none")


def emulate(x: Float[Tensor, "T Kd"], q: QuantTensor, arithmetic: Arithmetic) -> Float32[Tensor, "T N"]:
    """x @ q^T with the given choices (None: the decode arm's), on x's device.

    A row's bits depend on its own values alone. LabError for shapes that disagree, and for formats and choices that
    have no arithmetic here.
    """
    layout_for(q.format)
    if x.ndim != 2 or len(q.shape) != 2 or x.shape[1] != q.shape[1]:
        raise LabError(f"emulate multiplies x [T, Kd] and q [N, Kd], got {list(x.shape)} and {list(q.shape)}.")
    return emulate_rows(quantize_for(x, q.format, arithmetic), q, arithmetic)


def emulate_rows(rows: QuantRows, q: QuantTensor, arithmetic: Arithmetic) -> Float32[Tensor, "T N"]:
    """The same from rows that `quantize_for` has made with the same choices."""
    made = completed(arithmetic, arithmetic_of(q.format, "gemv"))
    if q.format in HAS_MINIMA and made.sum == "none":
        raise LabError(f"{q.format} has minima: its products need sums, but sum is 'none'.")
    groups = q.shape[1] // _group_of(q.format)
    out = torch.empty(len(rows), q.shape[0], device=q.device)
    if not out.numel():
        return out
    wide = max(1, min(q.shape[0], MOST_TERMS // groups))
    tall = max(1, MOST_TERMS // (groups * wide))
    for n in range(0, q.shape[0], wide):
        w = unpack_ref(q.data[n : n + wide], q.format)
        for t in range(0, len(rows), tall):
            terms = _terms(w, rows[t : t + tall], q.format, made)
            out[t : t + tall, n : n + wide] = _added(terms, made, _group_of(q.format)).float()
    return out


def _group_of(format: str) -> int:
    """Values under one sub-block scale, or one scale."""
    return 16 if format in ("q2_k", "q3_k", "q6_k", "nvfp4") else 32


def _terms(w: Unpacked, rows: QuantRows, format: str, made: Arithmetic) -> Tensor:
    """[groups, T, N]: fp32, or float64 with order "exact"."""
    group = _group_of(format)
    kd = w.codes.shape[-2] * w.codes.shape[-1]
    codes = w.codes.flatten(-2).float().unflatten(1, (-1, group))
    unsigned = format == "q4_0" and made.sum != "none" and not made.safe_sum
    if unsigned:
        codes = codes + 8
    x = rows.codes[:, :kd].float().unflatten(1, (-1, group)).transpose(0, 1)
    dots = torch.bmm(x, codes.permute(1, 2, 0))
    real = dots.double if made.order in ("exact", "super_blocks") else dots.float
    dots, dtype = real(), real().dtype
    dy = rows.scale.to(dtype).repeat_interleave(rows.layout.block // group, 1)[:, : kd // group].T[..., None]
    per_block = w.codes.shape[-1] // group
    d = w.d.expand(*w.d.shape[:-1], per_block).flatten(-2).T[:, None].to(dtype)
    sc = None if w.scales is None else w.scales.flatten(-2).T[:, None].to(dtype)
    terms = _code_part(dots, dy, d, sc, made.product_dtype)
    if w.dmin is not None or unsigned:
        sums = _sums(rows, x, dy, dtype)[: kd // group]
        if unsigned:
            return terms - d * (8 * sums)
        assert w.dmin is not None
        assert w.mins is not None
        dmin = w.dmin.expand(*w.dmin.shape[:-1], per_block).flatten(-2).T[:, None].to(dtype)
        mins = w.mins.flatten(-2).T[:, None].to(dtype)
        if made.product_dtype in ("integer", "int8"):
            terms = terms - dmin * (mins * sums)
        else:
            terms = terms - _rounded(dmin * mins, made.product_dtype) * sums
    return terms


def _code_part(dots: Tensor, dy: Tensor, d: Tensor, sc: Tensor | None, product: str | None) -> Tensor:
    if sc is None:
        return dots * d * dy
    if product in ("integer", "int8"):
        return dots * sc * dy * d
    return dots * _rounded(d * sc, product) * dy


def _rounded(v: Tensor, name: str | None) -> Tensor:
    assert name is not None
    return v.to(DTYPES[name]).to(v.dtype)


def _sums(rows: QuantRows, x: Tensor, dy: Tensor, dtype: torch.dtype) -> Tensor:
    """[groups, T, 1]: what a minimum multiplies."""
    of_codes = x.sum(-1, keepdim=True).to(dtype) * dy
    if rows.total is None or not rows.total.is_floating_point():
        return of_codes
    total = rows.total.to(dtype)
    if rows.layout.sums_kept == 8:
        return total.T[..., None]
    kept = torch.nn.functional.pad(total.unflatten(1, (-1, rows.layout.sums_kept)), (0, 8 - rows.layout.sums_kept))
    last = torch.arange(len(x), device=x.device) % 8 >= rows.layout.sums_kept
    return torch.where(last[:, None, None], of_codes, kept.flatten(1).T[: len(x), :, None])


def _added(terms: Tensor, made: Arithmetic, group: int) -> Tensor:
    """[T, N]: runs of whole super-blocks, each added in the order asked for, then the runs in sequence."""
    assert made.k_split is not None
    per_block = max(1, SUPER_BLOCK // group)
    blocks = -(-len(terms) // per_block)
    run = -(-blocks // min(made.k_split, blocks)) * per_block
    return _in_sequence([_run(part, made.order, per_block) for part in terms.split(run)])


def _run(terms: Tensor, order: str | None, per_block: int) -> Tensor:
    if order == "exact":
        return terms.sum(0)
    if order == "blocks":
        return _in_sequence(terms)
    if order == "super_blocks":
        return _in_sequence([block.sum(0).float() for block in terms.split(per_block)])
    if order == "mmq":
        return _in_sequence([_in_sequence(block) for block in terms.split(per_block)])
    if order == "mmvq":
        threads = min(THREAD_BLOCKS * per_block, _power_of_2(len(terms)))
        padded = torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, -len(terms) % threads))
        return _halves(_in_sequence(padded.unflatten(0, (-1, threads))))
    return _halves(torch.nn.functional.pad(terms, (0, 0, 0, 0, 0, _power_of_2(len(terms)) - len(terms))))


def _in_sequence(parts: "Tensor | list[Tensor]") -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _halves(v: Tensor) -> Tensor:
    """First half plus second half until one is left."""
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    return v[0]


def _power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
