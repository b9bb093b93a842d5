"""Decode with any weight format and every formula: products on rows as they come, on e4m3 rows, or on q8_1 rows.

Each product takes activations of a *kind*: q8_1 for the formats that ggml's decode arithmetic knows, "bf16" (rows as
they come, whatever their dtype: the upper bound of accuracy) for all others, or what `ArmContext.activation` says;
"fp8" (e4m3, a scale for each 128 values) is for fp8_block, whose models run so. What the plain q8_1 path lacks is here:
expert biases, the routing weight on the input or on the hidden rows, clamps after the activation or gpt-oss's.
On the CPU, products of rows as they come are in float64, rounded once to fp32 (so the rows beside one do not matter).
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from moe_lab._types import Float, Float32, Tensor
from moe_lab.arms.base import ArmContext, lacks_kernel
from moe_lab.arms.by_layout import kernels_for
from moe_lab.arms.formula import gate_of, hidden_rows, weighed_rows
from moe_lab.arms.formula import lacks_formula as lacks_hidden_rows
from moe_lab.arms.fused import FusedStack
from moe_lab.arms.grouped import weight_of
from moe_lab.arms.integer import RAW_SUM_OFFSET, integer_matmul
from moe_lab.arms.lists import numbers
from moe_lab.arms.schedule import Group
from moe_lab.arms.stack import ExpertStack
from moe_lab.errors import LabError
from moe_lab.formats import QuantTensor, quantize_activations, quantize_q8_1
from moe_lab.spec import MoESpec
from moe_lab_kernels.backend import backend_of
from moe_lab_kernels.gemv import chunk_bias
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float import operands as fo
from moe_lab_kernels.gemv_float import tensor, tensor_ref
from moe_lab_kernels.gemv_float.steps import WALKS
from moe_lab_kernels.grouped.operands import Weight, alike
from moe_lab_kernels.rows import quantize_fp8
from moe_lab_kernels.storage.blocks import GEMV_FORMATS

KINDS = ("q8_1", "bf16", "fp8")
MULTIPLE = 8  # of values a row: what one load of a lane holds


@cache
def meets(format: str, kind: str) -> str | None:
    """None when activations of this kind meet weights of the format, else why not."""
    fits = {"q8_1": not has_float_products([format]), "bf16": format in WALKS, "fp8": format == "fp8_block"}
    if kind not in fits:
        return f"there are no {kind!r} activations; known: {', '.join(KINDS)}"
    others = ", ".join(repr(k) for k in KINDS if fits[k])
    return None if fits[kind] else f"{format} weights meet no {kind} activations, but {others}"


@cache
def kind_of(format: str, wanted: str | None) -> str:
    """What the activations of a product with this format become. LabError for a kind that it cannot meet."""
    kind = wanted or ("bf16" if has_float_products([format]) else "q8_1")
    why = meets(format, kind)
    if why is not None:
        raise LabError(f"arm gemv: {why}.")
    return kind


def has_float_products(formats: Sequence[str]) -> bool:
    """Whether one of the formats is multiplied with rows as they come unless something else is asked for."""
    return any(f in WALKS and f not in GEMV_FORMATS for f in formats)


def lacks_formula(spec: MoESpec) -> str | None:
    """None when the decode arms compute the spec's experts, else what they lack."""
    lacks = lacks_hidden_rows(spec)
    if lacks is not None:
        return lacks
    odd = [f"{name}={n}" for name, n in (("D", spec.d_routed), ("F", spec.d_expert)) if n % MULTIPLE]
    return f"rows of {' and '.join(odd)} values, only of multiples of {MULTIPLE}" if odd else None


def is_plain(stack: ExpertStack, ctx: ArmContext) -> bool:
    """Whether the q8_1 path serves: all three products on q8_1 rows, nothing special in the formula."""
    kinds = {kind_of(q.format, ctx.activation) for q in stack.parts.values()}
    spec = ctx.spec
    return kinds == {"q8_1"} and not spec.expert_bias and spec.weight_place == "output" and lacks_kernel(spec) is None


class PairWork(NamedTuple):
    """What a submission of P pairs is given: rows x [T, D]; token, out_row int [P], the row of x that a pair takes and
    the row of `out` that it goes to; `table` int32 [C, 3] of chunks of at most `most_rows` rows, on the device, perhaps
    padded; `weight` fp32 [P], the router's; `bias_of` int32 [C]: each chunk's expert (None: its slot)."""

    x: Tensor
    token: Tensor
    table: Tensor
    most_rows: int
    out: Tensor
    out_row: Tensor
    weight: Tensor | None = None
    bias_of: Tensor | None = None


def kernel_mlp(work: PairWork, stack: ExpertStack, ctx: ArmContext) -> Tensor:
    """Down rows of every pair through the Triton kernels, written to out[out_row]. What belongs to pairs in no chunk is
    undefined. Nothing is read back."""
    x, token, table, most_rows, out, out_row, weight, bias_of = work
    spec, device, count = ctx.spec, x.device, len(token)
    most = 1 << max(0, most_rows - 1).bit_length()
    own = numbers(count, device)
    into, to = fo.Pairs(token.to(torch.int32), table, most), fo.Pairs(own, table, most, out_row.to(torch.int32))
    own_rows = weighed_rows(x, token, weight, spec)
    if own_rows is not None:
        x, into = own_rows, into._replace(row_of=own)
    gate, up = stack.gate, stack.up
    kinds = [kind_of(q.format, ctx.activation) for q in (gate, up)]
    biases = [_bias(stack, part, bias_of) for part in ("gate", "up", "down")]
    g, u, d = (slots_of(stack, part) for part in ("gate", "up", "down"))
    if "q8_1" not in kinds and alike(g, u) is None:
        hidden = ctx.empty("hidden", (count, gate.shape[1]), ctx.store_dtype, device)
        how = gate_of(spec, weight)
        rows = _float_rows(x, kinds[0])
        gate_bias, up_bias, _ = biases
        gf.gemv_float_gated(rows, into, g, u, hidden, how=how, gate_bias=gate_bias, up_bias=up_bias, early="launch")
    else:
        own_gate, own_up = (ctx.empty(n, (count, gate.shape[1]), ctx.store_dtype, device) for n in ("gate", "up"))
        _project(x, into, g, kinds[0], biases[0], own_gate, "launch")
        _project(x, into, u, kinds[1], biases[1], own_up, "launch")
        hidden = hidden_rows(own_gate, own_up, weight, ctx)
    # what down reads before it waits, weights and tables, is older than the launch that makes its rows
    _project(hidden, to, d, kind_of(d.format, ctx.activation), biases[2], out, "weights")
    return out


def torch_mlp(
    x: Tensor,
    token: Tensor,
    stack: ExpertStack,
    groups: Sequence[Group],
    ctx: ArmContext,
    weight: Tensor | None = None,
) -> Tensor:
    """The same in torch: down rows [P, D] of the stored dtype, pairs in order; `groups` follow each other from 0 on."""
    spec = ctx.spec
    made: dict[str, Tensor] = {}

    def project(part: str, rows: Tensor, of: Tensor) -> Tensor:
        """Rows of[first : first + n] of each group, each distinct row quantised once."""
        format, done = stack.part(part).format, []
        kind, offset = kind_of(format, ctx.activation), RAW_SUM_OFFSET.get(format, 0)
        coded = quantize_q8_1(rows) if kind == "q8_1" else None
        values = _float_values(rows, kind) if coded is None else None
        for g in groups:
            own = of[g.first : g.first + g.rows]
            if coded is not None:
                product = integer_matmul(coded[own], stack.integers(part, g.expert), offset)
            else:
                assert values is not None
                product = (values[own] @ stack.values(part, g.expert).double().T).float()
            bias = stack.bias(part, g.expert)
            done.append(product if bias is None else product + bias.float())
        ctx.work.products += len(done)
        return ctx.store(torch.cat(done))

    every = torch.arange(len(token), device=x.device)
    own_rows = weighed_rows(x, token, weight, spec)
    rows, of = (x, token.long()) if own_rows is None else (own_rows, every)
    for part in ("gate", "up"):
        made[part] = project(part, rows, of)
    hidden = hidden_rows(made["gate"], made["up"], weight, ctx)
    return project("down", hidden, every)


def float_matmul(
    x: Float[Tensor, "T Kd"], q: QuantTensor, activation: str = "bf16", *, chunk_rows: int | None = None
) -> Float32[Tensor, "T N"]:
    """x q^T in fp32 with rows as they come ("bf16", whatever their dtype) or as e4m3 ("fp8", for fp8_block): the
    kernel where one serves x (rows in chunks of at most `chunk_rows`, the bits do not depend on it), float64 rounded
    once in torch. A resident matrix of 4-bit integers meets bf16 rows on the tensor cores, 16 at a time, in sums of
    another order than a layer's experts, which meet a row or two each, take. LabError for a format or width that it
    does not take."""
    kind = kind_of(q.format, activation)
    if kind == "q8_1":
        raise LabError("float_matmul takes activation 'bf16' or 'fp8'.")
    if backend_of(x) == "torch":
        return (_float_values(x, kind) @ q.dequantize().double().T).float()
    w = weight_of(q.stacked())
    on_tensor_cores = x.dtype == torch.bfloat16 and len(x) > 0 and tensor_ref.refusal(w.format, w.kd) is None
    chunk_rows = chunk_rows or (16 if on_tensor_cores else 8)
    first = torch.arange(0, len(x), chunk_rows, dtype=torch.int32, device=x.device)
    table = torch.stack([torch.zeros_like(first), first, (len(x) - first).clamp(max=chunk_rows)], 1).contiguous()
    out = torch.empty(len(x), q.shape[-2], dtype=torch.float32, device=x.device)
    most = 1 << max(0, min(chunk_rows, len(x)) - 1).bit_length()
    pairs = fo.Pairs(torch.arange(len(x), dtype=torch.int32, device=x.device), table, most)
    if on_tensor_cores:
        return tensor.gemv_tensor(x, pairs, w, out)
    return gf.gemv_float(_float_rows(x, kind), pairs, w, out)


def slots_of(stack: ExpertStack, part: str) -> Weight:
    """A part of all slots as the kernels take it: an arena, or addresses where the stack keeps tables of them."""
    return stack.by_address(part) if isinstance(stack, FusedStack) else weight_of(stack.part(part))


def _project(x: Tensor, pairs: fo.Pairs, w: Weight, kind: str, bias: fo.Bias | None, out: Tensor,
             early: gf.Early) -> None:  # fmt: skip
    """One product of every pair of every chunk, its bias added in fp32, rounded to out's dtype."""
    if kind != "q8_1":
        gf.gemv_float(_float_rows(x, kind), pairs, w, out, bias=bias, early=early)
        return
    use = kernels_for(w.layout)
    call = (use.quantize(x, w.format), pairs.row_of, w.data, pairs.chunks, w.format)
    if bias is None:
        use.product(*call, out, out_row=pairs.to, max_rows=pairs.max_rows)
        return
    sums = torch.empty(len(pairs.row_of), w.rows, dtype=torch.float32, device=x.device)
    use.product(*call, sums, max_rows=pairs.max_rows)
    chunk_bias.chunk_bias(sums, pairs.chunks, bias.values, out, row_of=bias.row_of, to=pairs.to, n_slots=len(w.data))


def _bias(stack: ExpertStack, part: str, bias_of: Tensor | None) -> fo.Bias | None:
    values = None if stack.biases is None else getattr(stack.biases, part)
    return None if values is None else fo.Bias(values, bias_of)


def _float_rows(x: Tensor, kind: str) -> fo.Rows:
    return fo.Rows(*quantize_fp8.quantize_fp8(x)) if kind == "fp8" else fo.Rows(x)


def _float_values(x: Tensor, kind: str) -> Tensor:
    """What the products read, in float64."""
    if kind == "bf16":
        return x.double()
    rows = quantize_activations(x, "fp8")
    values = rows.codes.double().unflatten(1, (rows.scale.shape[1], -1)) * rows.scale.double().unsqueeze(-1)
    return values.flatten(1)[:, : rows.width]
