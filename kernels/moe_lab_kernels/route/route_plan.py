"""Routing and planning of a few tokens in one launch: what one decode step needs, in the time of one small kernel.

T <= 8 tokens, R scores, K picks, E experts. One program does the work of `topk` and of `plan`'s small form on the picks
it still holds in registers; same device code, so the bits are those of the two launches. Several rows want a warp each
(R <= 128, rows aligned): wider ones, cut across warps, took 22 us on an H200 where the two launches take 7.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.route import topk
from moe_lab_kernels.route.plan import MOST_EXPERTS, Plan, empty_plan, place, plan_key
from moe_lab_kernels.route.router_settings import REFERENCE, Router, check, contiguous, settings, warps_of
from moe_lab_kernels.route.router_settings import unserved as unserved_router

MOST_TOKENS = 8


class Routed(NamedTuple):
    """ids int32 [T, K], weights fp32 [T, K], affected int32 [T], and the plan of the picks."""

    ids: Tensor
    weights: Tensor
    affected: Tensor
    plan: Plan


@jit
def _route_plan(logits, bias, expert_scale, out_ids, out_weights, out_affected, counts, offsets, token, slot, weight,
                invalid, T, row_stride, stride, R: tl.constexpr, E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
                C: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
                KEEP: tl.constexpr, TOP2: tl.constexpr, FILL: tl.constexpr, BIAS: tl.constexpr, SCORE: tl.constexpr,
                FROM: tl.constexpr, TEMPERATURE: tl.constexpr, SOFTCAP: tl.constexpr, NORM: tl.constexpr,
                EPS: tl.constexpr, SCALE: tl.constexpr, PER_EXPERT: tl.constexpr, EXPERTS: tl.constexpr):  # fmt: skip
    """One program. EXPERTS: how many experts are counted at a time."""
    row = tl.arange(0, ROWS)
    ids, w, affected = topk.choose(  # pyright: ignore[reportGeneralTypeIssues]
        logits, bias, expert_scale, row, T, row_stride, stride, R, E, K, K_PAD, C, ROWS, L, GROUPS, GROUP, KEEP, TOP2,
        FILL, BIAS, SCORE, FROM, TEMPERATURE, SOFTCAP, NORM, EPS, SCALE, PER_EXPERT)  # fmt: skip
    k = tl.arange(0, K_PAD)[None, :]
    pair, there = row[:, None] * K + k, (k < K) & (row < T)[:, None]
    tl.store(out_ids + pair, ids, mask=there)
    tl.store(out_weights + pair, w, mask=there)
    tl.store(out_affected + row, affected, mask=row < T)
    # what is masked out above sorts last as expert E; pairs keep their order without being renumbered
    P: tl.constexpr = ROWS * K_PAD
    key = tl.reshape(plan_key(ids, there, E), (P,))
    at, w = tl.arange(0, P), tl.reshape(w, (P,))
    # a pair a row: the sum stays within a warp (T=8: 4.9 us on an H200; summed over rows, across warps, 5.15)
    before = (key[None, :] < key[:, None]) | ((key[None, :] == key[:, None]) & (at[None, :] < at[:, None]))
    rank = tl.sum(before.to(tl.int32), 1)
    place(token, slot, weight, rank, at // K_PAD * K + at % K_PAD, w, key < E, K)
    for start in tl.static_range(0, E, EXPERTS):  # pyright: ignore[reportGeneralTypeIssues]
        expert = start + tl.arange(0, EXPERTS)
        seen = (key[:, None] < expert[None, :]).to(tl.int32) + ((key[:, None] == expert[None, :]).to(tl.int32) << 16)
        total = tl.sum(seen, 0)
        below, equal = total & 0xFFFF, total >> 16
        tl.store(counts + expert, equal, mask=expert < E)
        tl.store(offsets + expert, below, mask=expert < E)
        tl.store(offsets + expert + 1, below + equal, mask=expert == E - 1)
    tl.store(invalid, 0)


def unserved(logits: Tensor, spec: Router) -> str | None:
    """Why one launch cannot do it, or is slower than two; None where it can."""
    t, r = logits.shape
    if not 1 <= t <= MOST_TOKENS:
        return f"T={t} is outside 1..{MOST_TOKENS}"
    why = unserved_router(spec)
    if why is None and t > 1 and settings(logits, spec, False, False)["C"] > 1:
        return f"T={t} rows of R={r} do not fit a warp each (one row, or R <= 128 and aligned to 64 bytes, would)"
    return why


def route_plan(
    logits: Float[Tensor, "T R"],
    spec: Router,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
) -> Routed:
    """`topk` and `plan` of its picks in one launch (Triton). LabError where `unserved`; otherwise as those two."""
    check("route_plan", logits, spec, correction_bias, per_expert_scale)
    why = unserved(logits, spec)
    if why:
        raise LabError(f"route_plan: {why}. topk.topk and plan.plan take it.")
    t, k, e = len(logits), spec.top_k, spec.num_experts
    given = {"correction_bias": correction_bias, "per_expert_scale": per_expert_scale}
    backend.serve("route_plan", REFERENCE + " and plan_ref", logits=logits, **given)
    ids, weights = (torch.empty(t, k, dtype=d, device=logits.device) for d in (torch.int32, torch.float32))
    affected = torch.empty(t, dtype=torch.int32, device=logits.device)
    out = empty_plan(t * k, e, logits.device)
    constants = settings(logits, spec, correction_bias is not None, per_expert_scale is not None)
    rows = backend.next_power_of_2(t)
    backend.launch(
        _route_plan,
        (1,),
        *(logits, *contiguous(logits, given), ids, weights, affected, *out, t, *logits.stride()),
        **constants,
        ROWS=rows,
        EXPERTS=min(256, backend.next_power_of_2(min(e, MOST_EXPERTS))),
        device=logits.device,
        num_warps=max(rows, warps_of(constants["C"] * constants["L"])),
    )
    return Routed(ids, weights, affected, out)
