"""A decode step's routing in one launch: picks, their weights, chunks by arena slot and the header.

T <= 8 tokens, R scores, K picks, E experts, S arena slots. One program does the work of `topk` and of `slot_table` on
the picks it still holds in registers; same device code, so the bits are those of the two launches. It serves the
routers that `route_plan` serves, for the same reasons.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moe_lab._types import Float, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.route import topk
from moe_lab_kernels.route.route_plan import unserved
from moe_lab_kernels.route.router_settings import REFERENCE, Router, check, contiguous, settings
from moe_lab_kernels.route.router_settings import warps_of as warps_of_row
from moe_lab_kernels.slots import slot_table as table
from moe_lab_kernels.slots.slot_table import SlotTable, tabulate


class RoutedTable(NamedTuple):
    """ids int32 [T, K], weights fp32 [T, K] and the launch table of the picks; the count of affected rows is in its
    header."""

    ids: Tensor
    weights: Tensor
    table: SlotTable


@jit
def _route_table(logits, bias, expert_scale, out_ids, out_weights, slot_of, owner, chunks, token, weight, row, header,
                 T, row_stride, stride, S, base, chunk_rows, y_slots, everyone, R: tl.constexpr, E: tl.constexpr,
                 K: tl.constexpr, K_PAD: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
                 GROUPS: tl.constexpr, GROUP: tl.constexpr, KEEP: tl.constexpr, TOP2: tl.constexpr, FILL: tl.constexpr,
                 BIAS: tl.constexpr, SCORE: tl.constexpr, FROM: tl.constexpr, TEMPERATURE: tl.constexpr,
                 SOFTCAP: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr,
                 PER_EXPERT: tl.constexpr):  # fmt: skip
    """One program."""
    t = tl.arange(0, ROWS)
    ids, w, affected = topk.choose(
        logits, bias, expert_scale, t, T, row_stride, stride, R, E, K, K_PAD, C, ROWS, L, GROUPS, GROUP, KEEP, TOP2,
        FILL, BIAS, SCORE, FROM, TEMPERATURE, SOFTCAP, NORM, EPS, SCALE, PER_EXPERT)  # fmt: skip
    k = tl.arange(0, K_PAD)[None, :]
    pair, there = t[:, None] * K + k, (k < K) & (t < T)[:, None]
    tl.store(out_ids + pair, ids, mask=there)
    tl.store(out_weights + pair, w, mask=there)
    odd = tl.sum(tl.where(t < T, affected, 0), 0)
    tabulate(ids, w, odd, 0, T, slot_of, owner, chunks, token, weight, row, header, S, base, chunk_rows, y_slots,
             everyone, E, K, K_PAD, ROWS)  # fmt: skip


def route_table(
    logits: Float[Tensor, "T R"],
    spec: Router,
    slot_of: Int32[Tensor, " E"],
    owner: Int32[Tensor, " S"],
    chunk_rows: int = 8,
    *,
    correction_bias: Float[Tensor, " R"] | None = None,
    per_expert_scale: Float[Tensor, " E"] | None = None,
    everyone: bool = False,
    base: int = 0,
) -> RoutedTable:
    """`topk`, and `slot_table` of its picks, in one launch (Triton). LabError where `route_plan.unserved`; otherwise as
    those two."""
    op = "route_table"
    check(op, logits, spec, correction_bias, per_expert_scale)
    why = unserved(logits, spec)
    if why:
        raise LabError(f"{op}: {why}. topk.topk and slot_table.slot_table take it.")
    t, k = logits.shape[0], spec.top_k
    out = table.room(op, t, k, slot_of, owner, chunk_rows, everyone)
    given = {"correction_bias": correction_bias, "per_expert_scale": per_expert_scale}
    backend.serve(op, REFERENCE + " and slot_table_ref", logits=logits, slot_of=slot_of, owner=owner, **given)
    ids, weights = (torch.empty(t, k, dtype=d, device=logits.device) for d in (torch.int32, torch.float32))
    constants = settings(logits, spec, correction_bias is not None, per_expert_scale is not None)
    rows = backend.next_power_of_2(t)
    backend.launch(
        _route_table,
        (1,),
        *(logits, *contiguous(logits, given), ids, weights, slot_of, owner, *out, t, *logits.stride()),
        *table.settings(owner, base, chunk_rows, t, k, everyone),
        **constants,
        ROWS=rows,
        device=logits.device,
        num_warps=max(rows, warps_of_row(constants["C"] * constants["L"])),
    )
    return RoutedTable(ids, weights, out)
