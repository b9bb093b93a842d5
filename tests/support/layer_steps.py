"""A layer's gemv path taken apart: each step by the public launchers, and as the CPU's torch path computes it.

T tokens, K picks a token, P (token, slot) pairs in the schedule's order, D model width, F expert width. The kernels add
fp32 products in the order of their lanes, the torch path block after block. Hidden rows are quantised in between, so
a value near a tie may get another code there; the steps after it are then compared on the same codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import moe_lab as lab
from moe_lab.arms.integer import integer_matmul
from moe_lab.arms.schedule import Group, batched_schedule
from moe_lab.arms.stack import ExpertStack
from moe_lab.formats import QuantRows, quantize_q8_1
from moe_lab.layer import MoELayer
from moe_lab.routing import plan
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.gemv.lane_rows import LaneRows, quantize_lanes, to_lanes, to_plain
from moe_lab_kernels.rows import activation

CHUNK = 8


@dataclass(frozen=True)
class Pairs:
    """Row of x, slot of y and expert group of each pair: the routed experts' (slot None: the shared expert's)."""

    token: torch.Tensor
    slot: torch.Tensor | None
    groups: Sequence[Group]


@dataclass(frozen=True)
class Made:
    """gate, up and h fp32 [P, F], h quantised, down fp32 [P, D]."""

    gate: torch.Tensor
    up: torch.Tensor
    h: torch.Tensor
    rows: Sequence[torch.Tensor]
    down: torch.Tensor


def pairs_of(layer: MoELayer, routing: lab.Routing | None, tokens: int) -> Pairs:
    """The pairs of these picks, or of the shared expert."""
    if routing is None:
        return Pairs(torch.arange(tokens), None, [Group(0, 0, tokens)])
    schedule = batched_schedule(plan(routing, layer.spec.num_experts))
    return Pairs(schedule.token.cpu(), schedule.slot.cpu(), schedule.steps[0])


def by_kernels(stack: ExpertStack, x: torch.Tensor, pairs: Pairs) -> Made:
    """Every step by its launcher, where x lives."""
    own = torch.arange(len(pairs.token))
    rows = quantize_lanes(x, stack.gate.format)
    gate, up = (kernel_product(stack, part, rows, pairs.token, pairs) for part in ("gate", "up"))
    h = activation.swiglu(gate, up)
    hidden = quantize_lanes(h, stack.down.format)
    return Made(gate, up, h, to_plain(hidden)[:2], kernel_product(stack, "down", hidden, own, pairs))


def kernel_product(
    stack: ExpertStack, part: str, rows: LaneRows, row_of: torch.Tensor, pairs: Pairs, *, by=gemv.gemv
) -> torch.Tensor:
    """One projection of all pairs; `by`: the launcher or its reference."""
    q, where = stack.part(part), rows.codes.device
    starts = [(g, i) for g in pairs.groups for i in range(0, g.rows, CHUNK)]
    chunks = [(stack.slot_of[g.expert], g.first + i, min(CHUNK, g.rows - i)) for g, i in starts]
    table = torch.tensor(chunks, dtype=torch.int32, device=where)
    out = torch.empty(len(row_of), q.shape[1], device=where)
    return by(rows, row_of.to(where, torch.int32), q.data, table, q.format, out)


def by_torch(stack: ExpertStack, x: torch.Tensor, pairs: Pairs) -> Made:
    """As the CPU's torch path goes from x on."""
    rows = quantize_q8_1(x)
    gate, up = (torch_product(stack, part, rows[pairs.token], pairs) for part in ("gate", "up"))
    h = activation.swiglu_ref(gate, up)
    hidden = quantize_q8_1(h)
    return Made(gate, up, h, (hidden.codes, hidden.scale), torch_product(stack, "down", hidden, pairs))


def torch_product(stack: ExpertStack, part: str, rows: QuantRows, pairs: Pairs) -> torch.Tensor:
    """One projection of all pairs from a quantised row each."""
    spans = [(g.expert, slice(g.first, g.first + g.rows)) for g in pairs.groups]
    return torch.cat([integer_matmul(rows[span], stack.integers(part, expert)) for expert, span in spans])


def torch_rows(like: torch.Tensor, rows: Sequence[torch.Tensor]) -> QuantRows:
    """Codes and scales that a kernel made, as the torch path holds them; `like` [P, F] gives the width."""
    codes, scale = (t.cpu() for t in rows)
    return replace(quantize_q8_1(torch.zeros(1, like.shape[1])), codes=codes, scale=scale, total=None)


def lane_rows_of(stack: ExpertStack, rows: Sequence[torch.Tensor]) -> LaneRows:
    """Codes and scales in value order as the down projection's kernel reads them."""
    codes, scale = rows
    return to_lanes((codes, scale, torch.zeros_like(scale)), stack.down.format)


def tokens_with_equal_rows(a: Made, b: Made, pairs: Pairs, tokens: int) -> torch.Tensor:
    """bool [T]: all hidden codes and scales of a token's pairs are the same in both."""
    same = torch.ones(len(pairs.token), dtype=torch.bool)
    for one, other in zip(a.rows, b.rows, strict=True):
        same &= (one.cpu() == other.cpu()).all(-1)
    kept = torch.ones(tokens, dtype=torch.bool)
    kept[pairs.token[~same]] = False
    return kept
