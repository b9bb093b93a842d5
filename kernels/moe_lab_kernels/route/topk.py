"""From router logits to K expert ids and weights a token, in one launch.

T tokens, R scores a token (E experts + zero-computation experts), K picks. Reads T * R logits and K of them again,
writes T * K * 8 + T * 4 bytes; about 40 float64 operations a logit and K reductions over a row. A warp takes a row.
Score, + correction bias (choosing only), group limit, top-K by value descending and then id ascending, weights,
normalisation, scale: float64 throughout, rounded once to fp32. The reference is `moe_lab.route(backend="torch")`: ids
and weights are the same bits. A NaN logit counts as -inf and weighs 0; rows with a NaN or +inf are flagged.
Knows nothing about experts, files or families; hash tables and the sparse mixer stay on the torch path.
"""

import torch

from moe_lab._types import Float, Tensor
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.primitives import INTERPRET, offset64, to_f32
from moe_lab_kernels.route.router_settings import REFERENCE, Router, check, contiguous, settings, warps_of
from moe_lab_kernels.route.score import (
    HIGHEST,
    LOWEST,
    capped_logit,
    first_largest,
    largest_f32,
    number,
    safe_divide,
    score_of,
    sigmoid,
    softmax_term,
    sort_key,
)

ROWS_CUDA, ROWS_INTERPRETER = 1, 64


@jit
def _for_tile(v, ROWS: tl.constexpr):
    """[ROWS] against [C, ROWS, L]. One row's value becomes a scalar: a tensor of one drags its layout along. (Scalars
    are of another type in the interpreter, where the logical operators refuse them.)"""
    out = tl.max(v, 0) if ROWS == 1 and not INTERPRET else v[None, :, None]
    return out


@jit
def _for_slots(v, ROWS: tl.constexpr):
    """[ROWS] against [ROWS, K_PAD]; as `_for_tile`."""
    out = tl.max(v, 0) if ROWS == 1 and not INTERPRET else v[:, None]
    return out


@jit
def _group_limit(c, inside, C: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, GROUPS: tl.constexpr,
                 GROUP: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr, FILL: tl.constexpr):  # fmt: skip
    """Choice scores [C, ROWS, L], groups GROUP columns apart: all but the KEEP best groups' become FILL."""
    PER: tl.constexpr = L // GROUP
    split = tl.reshape(tl.where(inside, c, -float("inf")), (C, ROWS, PER, GROUP))
    score = tl.max(split, 3)
    if TOP2:
        at = tl.arange(0, GROUP)[None, None, None, :]
        first = tl.min(tl.where(split == score[:, :, :, None], at, HIGHEST), 3)
        score = score + tl.max(tl.where(at == first[:, :, :, None], -float("inf"), split), 3)
    group = tl.arange(0, C)[:, None, None] * PER + tl.arange(0, PER)[None, None, :]
    high, low = sort_key(score)
    high = tl.where(group < GROUPS, high, LOWEST)
    kept = tl.zeros((C, ROWS, PER), tl.int32)
    for _ in range(KEEP):
        best = _for_tile(first_largest(high, low, group, ROWS), ROWS)
        kept, high = tl.where(group == best, 1, kept), tl.where(group == best, LOWEST, high)
    split = tl.where(kept[:, :, :, None] > 0, split, number(FILL))
    return tl.reshape(split, (C, ROWS, L))


@jit
def _weigh(value, top, total, picked, ids, expert_scale, ROWS: tl.constexpr, E: tl.constexpr, SCORE: tl.constexpr,
           FROM: tl.constexpr, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr, NORM: tl.constexpr,
           EPS: tl.constexpr, SCALE: tl.constexpr, PER_EXPERT: tl.constexpr):  # fmt: skip
    """Weights fp32 [ROWS, K_PAD] of the picked logits `value`; anything past K (a 0 there would divide slowly)."""
    nan = value != value
    raw = tl.where(nan, -float("inf"), value).to(tl.float64)
    z = tl.where(nan, -float("inf"), capped_logit(raw, TEMPERATURE, SOFTCAP))
    if FROM == "softmax_topk":
        z = tl.where(picked, z, -float("inf"))
        e = softmax_term(z, _for_slots(tl.max(z, 1), ROWS))
        w = safe_divide(e, _for_slots(tl.sum(e, 1), ROWS))
    elif FROM == "sigmoid_topk":
        w = sigmoid(z)
    else:
        w = tl.where(nan, 0.0, score_of(z, _for_slots(top, ROWS), _for_slots(total, ROWS), SCORE))
    if NORM != "none":
        if FROM == "score" and (SCORE == "sqrt_softplus" or SCORE == "none"):  # the others are finite
            infinite = tl.where(picked & (w == float("inf")), 1.0, 0.0).to(tl.float64)
            some = _for_slots(tl.max(infinite, 1), ROWS) > 0.0
            w = tl.where(some, infinite, tl.where(w == -float("inf"), 0.0, w))
        norm = _for_slots(tl.sum(tl.where(picked, w, 0.0), 1), ROWS)
        norm = norm + number(EPS) if NORM == "add" else tl.where(norm < number(EPS), number(EPS), norm)
        w = safe_divide(w, norm)
    if SCALE != 1.0:
        w = w * number(SCALE)
    if PER_EXPERT:
        real = picked & (ids < E)
        w = tl.where(real, w * to_f32(tl.load(expert_scale + ids, mask=real, other=0)).to(tl.float64), w)
    return w.to(tl.float32)


@jit
def choose(logits, bias, expert_scale, row, T, row_stride, stride, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
           K_PAD: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, GROUPS: tl.constexpr,
           GROUP: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr, FILL: tl.constexpr, BIAS: tl.constexpr,
           SCORE: tl.constexpr, FROM: tl.constexpr, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr,
           NORM: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, PER_EXPERT: tl.constexpr):  # fmt: skip
    """Rows `row` [ROWS] -> ids int32 [ROWS, K_PAD], weights fp32 [ROWS, K_PAD], affected int32 [ROWS].

    A row lies as [C, L] so that a warp can hold it whole: reductions then need neither shared memory nor barriers.
    Rows past T repeat the last one (rows of zeros divide slowly).
    """
    column = tl.arange(0, C)[:, None, None] * L + tl.arange(0, L)[None, None, :]
    if GROUPS == 1:
        expert, inside = column, column < R
    else:
        expert = column // GROUP * (R // GROUPS) + column % GROUP
        inside = (column % GROUP < R // GROUPS) & (column // GROUP < GROUPS)
    start = logits + offset64(tl.minimum(row, T - 1), row_stride)
    at = start[None, :, None] + offset64(expert, stride)
    value = to_f32(tl.load(at, mask=tl.broadcast_to(inside, at.shape), other=0))
    nan = value != value
    odd = inside & (nan | (value == float("inf")))
    affected = tl.max(tl.max(odd.to(tl.int32), 2), 0)
    value = tl.where(nan, -float("inf"), value)
    z = tl.where(nan, -float("inf"), capped_logit(value.to(tl.float64), TEMPERATURE, SOFTCAP))
    top = tl.zeros((ROWS,), tl.float64)
    total = top
    if SCORE == "softmax":
        largest = largest_f32(tl.where(inside, value, -float("inf")))
        top = capped_logit(largest.to(tl.float64), TEMPERATURE, SOFTCAP)
        e = softmax_term(z, _for_tile(top, ROWS))
        total = tl.sum(tl.sum(tl.where(inside, e, 0.0), 0), 1)
    c = score_of(z, _for_tile(top, ROWS), _for_tile(total, ROWS), SCORE)
    if BIAS:
        c = c + to_f32(tl.load(bias + expert, mask=inside, other=0)).to(tl.float64)
    c = tl.where(nan | (c != c), -float("inf"), c)
    if GROUPS > 1:
        c = _group_limit(c, inside, C, ROWS, L, GROUPS, GROUP, KEEP, TOP2, FILL)
    high, low = sort_key(c)
    high = tl.where(inside, high, LOWEST)
    slot = tl.arange(0, K_PAD)[None, :]
    ids = tl.zeros((ROWS, K_PAD), tl.int32)
    for k in range(K):
        best = first_largest(high, low, expert, ROWS)
        ids = tl.where(slot == k, _for_slots(best, ROWS), ids)
        high = tl.where(expert == _for_tile(best, ROWS), LOWEST, high)
    picked = slot < K
    value = to_f32(tl.load(start[:, None] + offset64(ids, stride), mask=picked, other=0))
    w = _weigh(value, top, total, picked, ids, expert_scale, ROWS, E, SCORE, FROM, TEMPERATURE, SOFTCAP, NORM, EPS,
               SCALE, PER_EXPERT)  # fmt: skip
    return ids, w, affected


@jit
def _topk(logits, bias, expert_scale, out_ids, out_weights, out_affected, T, row_stride, stride, R: tl.constexpr,
          E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
          L: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr,
          FILL: tl.constexpr, BIAS: tl.constexpr, SCORE: tl.constexpr, FROM: tl.constexpr, TEMPERATURE: tl.constexpr,
          SOFTCAP: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
          PER_EXPERT: tl.constexpr):  # fmt: skip
    """Program = ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    ids, w, affected = choose(  # pyright: ignore[reportGeneralTypeIssues]
        logits, bias, expert_scale, row, T, row_stride, stride, R, E, K, K_PAD, C, ROWS, L, GROUPS, GROUP, KEEP, TOP2,
        FILL, BIAS, SCORE, FROM, TEMPERATURE, SOFTCAP, NORM, EPS, SCALE, PER_EXPERT)  # fmt: skip
    slot = tl.arange(0, K_PAD)[None, :]
    at, there = offset64(row, K)[:, None] + slot, (slot < K) & (row < T)[:, None]
    tl.store(out_ids + at, ids, mask=there)
    tl.store(out_weights + at, w, mask=there)
    tl.store(out_affected + row, affected, mask=row < T)


def topk(
    logits: Float[Tensor, "T R"],
    spec: Router,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """ids int32 [T, K], weights fp32 [T, K], affected int32 [T] (1: the row holds a NaN or +inf) (Triton).

    Logits fp32, fp16 or bf16, any strides. LabError for a router the kernel does not serve and widths that disagree.
    """
    check("topk", logits, spec, correction_bias, per_expert_scale)
    t, k = len(logits), spec.top_k
    ids, weights = (torch.empty(t, k, dtype=d, device=logits.device) for d in (torch.int32, torch.float32))
    affected = torch.empty(t, dtype=torch.int32, device=logits.device)
    if not t:
        return ids, weights, affected
    given = {"correction_bias": correction_bias, "per_expert_scale": per_expert_scale}
    on = backend.serve("topk", REFERENCE, logits=logits, **given)
    rows = ROWS_CUDA if on == "cuda" else min(ROWS_INTERPRETER, backend.next_power_of_2(t))
    constants = settings(logits, spec, correction_bias is not None, per_expert_scale is not None)
    backend.launch(
        _topk,
        (-(-t // rows),),
        *(logits, *contiguous(logits, given), ids, weights, affected, t, *logits.stride()),
        **constants,
        ROWS=rows,
        device=logits.device,
        num_warps=warps_of(constants["C"] * constants["L"]),
    )
    return ids, weights, affected
