"""From picks and their plan to what a grouped launch needs, on the device: chunks by arena slot, and one small header.

T tokens, K slots a token, P = T * K <= 1024 pairs, E experts, S arena slots. `slot_of` [E] says which arena slot holds
an expert (-1: none), `owner` [S] which expert a slot holds: both must agree, so a table that is out of date shows as
such instead of computing with another expert's weights. One program; reads about 40 bytes a pair, writes 24 bytes a
pair for the launch and a header of 16 P + 24 bytes, all that a host has to read back to know what happened.
Chunks come by ascending expert, at most `chunk_rows` rows each, padded with entries that mean nothing; so do chunks of
experts that are not at hand. Integers throughout: kernel and reference agree exactly. Knows nothing about weights.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from moe_lab._types import Float32, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous

MOST_PAIRS = 1024
FIELDS = ("missing", "outside", "stale", "invalid", "affected", "chunks")
FINE, SKIPPED, MISSING, OUTSIDE, STALE = range(5)
"""A pair's state: computed; no expert's pair; its expert in no slot; a slot beyond the arena; a slot of another."""
_FINE, _SKIPPED, _MISSING, _OUTSIDE, _STALE = (tl.constexpr(i) for i in range(5))


@runtime_checkable
class Planned(Protocol):
    """What is read of a plan: see `plan.Plan`."""

    @property
    def counts(self) -> Tensor: ...

    @property
    def offsets(self) -> Tensor: ...

    @property
    def token(self) -> Tensor: ...

    @property
    def slot(self) -> Tensor: ...

    @property
    def weight(self) -> Tensor: ...

    @property
    def invalid(self) -> Tensor: ...


class SlotTable(NamedTuple):
    """chunks int32 [C, 3] (arena slot, first pair, rows; (-1, 0, 0) where nothing is to be done). In the plan's order
    token int32, weight fp32 and row int32, the row of y that the pair writes (all 0 for a pair without a place).
    header int32 [len(FIELDS) + 4 P]: the counts of `FIELDS`, then of every pair by token and rank its id, its weight's
    bits, its arena slot and its state."""

    chunks: Tensor
    token: Tensor
    weight: Tensor
    row: Tensor
    header: Tensor


@jit
def _state(id, there, slot_of, owner, S, E: tl.constexpr):
    """(arena slot, state) of pairs by their expert id."""
    real = there & (id >= 0) & (id < E)
    slot = tl.load(slot_of + id, mask=real, other=-1)
    inside = real & (slot >= 0) & (slot < S)
    held = tl.load(owner + slot, mask=inside, other=-1)
    state = tl.where(inside & (held != id), _STALE, _FINE)
    state = tl.where(slot >= S, _OUTSIDE, tl.where(slot < 0, _MISSING, state))
    return slot, tl.where(real, state, _SKIPPED)


@jit
def _slot_table(ids, weights, counts, offsets, planned_token, planned_slot, planned_weight, invalid, affected, slot_of,
                owner, chunks, token, weight, row, header, P, S, chunk_rows, y_slots, everyone, E: tl.constexpr,
                K: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr):  # fmt: skip
    """One program; lane = pair, first in the plan's order (chunks), then by token and rank (header)."""
    p = tl.arange(0, PAIRS)
    there, planned = p < P, p < tl.load(offsets + E)
    t = tl.load(planned_token + p, mask=planned, other=0)
    k = tl.load(planned_slot + p, mask=planned, other=0)
    tl.store(token + p, t, mask=there)
    tl.store(weight + p, tl.load(planned_weight + p, mask=planned, other=0), mask=there)
    tl.store(row + p, t * y_slots + k, mask=there)
    id = tl.load(ids + t * K + k, mask=planned, other=-1)
    slot, state = _state(id, planned, slot_of, owner, S, E)
    inside = p - tl.load(offsets + id, mask=planned, other=0)
    left = tl.load(counts + id, mask=planned, other=0) - inside
    begins = (planned & (inside % chunk_rows == 0)).to(tl.int32)
    n = tl.sum(begins, 0)
    at = chunks + 3 * (tl.cumsum(begins, 0) - begins)
    starts, empty = begins == 1, (p >= n) & there
    tl.store(at, tl.where(state == _FINE, slot, -1), mask=starts)
    tl.store(at + 1, p, mask=starts)
    tl.store(at + 2, tl.minimum(left, chunk_rows), mask=starts)
    tl.store(chunks + 3 * p, -1, mask=empty)
    tl.store(chunks + 3 * p + 1, 0, mask=empty)
    tl.store(chunks + 3 * p + 2, 0, mask=empty)
    # the group of all tokens, behind the pairs (everyone = 0: there is none)
    tl.store(token + P + p, p, mask=p < everyone)
    tl.store(weight + P + p, 1.0, mask=p < everyone)
    tl.store(row + P + p, p * y_slots + y_slots - 1, mask=p < everyone)
    begins = (p < everyone) & (p % chunk_rows == 0)
    at = chunks + 3 * (P + p // chunk_rows)
    tl.store(at, S, mask=begins)
    tl.store(at + 1, P + p, mask=begins)
    tl.store(at + 2, tl.minimum(everyone - p, chunk_rows), mask=begins)
    id = tl.load(ids + p, mask=there, other=-1)
    slot, state = _state(id, there, slot_of, owner, S, E)
    of_pair = header + FIELDS + p
    tl.store(of_pair, id, mask=there)
    tl.store(of_pair + P, tl.load(weights + p, mask=there, other=0).to(tl.int32, bitcast=True), mask=there)
    tl.store(of_pair + 2 * P, slot, mask=there)
    tl.store(of_pair + 3 * P, state, mask=there)
    tl.store(header, tl.sum((state == _MISSING).to(tl.int32), 0))
    tl.store(header + 1, tl.sum((state == _OUTSIDE).to(tl.int32), 0))
    tl.store(header + 2, tl.sum((state == _STALE).to(tl.int32), 0))
    tl.store(header + 3, tl.load(invalid))
    tl.store(header + 4, tl.load(affected))
    tl.store(header + 5, n)


def slot_table(
    ids: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    plan: Planned,
    affected: Int32[Tensor, ""],
    slot_of: Int32[Tensor, " E"],
    owner: Int32[Tensor, " S"],
    chunk_rows: int = 8,
    *,
    everyone: bool = False,
    out: SlotTable | None = None,
) -> SlotTable:
    """Chunks and header of one call (Triton). LabError for shapes that disagree, chunk_rows < 1, more than 1024 pairs.

    `plan` is that of these ids over E experts. `everyone`: behind the pairs comes one more group, slot S over all
    tokens with weight 1, and y has K + 1 rows a token, the last of them its own. No value is looked at on the host:
    captured in a graph, the same launch serves every routing.
    """
    out = _prepare(ids, weights, plan, affected, slot_of, owner, chunk_rows, everyone, out)
    pairs, e = ids.numel(), len(slot_of)
    if not pairs:
        out.header.zero_()
        return out
    named = {"ids": ids, "weights": weights, "plan": plan.counts, "slot_of": slot_of, "owner": owner}
    backend.serve("slot_table", **named, chunks=out.chunks, header=out.header)
    lanes = backend.next_power_of_2(pairs)
    backend.launch(
        _slot_table,
        (1,),
        *(ids, weights, plan.counts, plan.offsets, plan.token, plan.slot, plan.weight, plan.invalid, affected),
        *(slot_of, owner, *out, pairs, len(owner), chunk_rows, ids.shape[1] + everyone, len(ids) if everyone else 0),
        *(e, ids.shape[1], lanes, len(FIELDS)),
        device=ids.device,
        num_warps=max(1, min(8, lanes // 64)),
    )
    return out


def slot_table_ref(
    ids: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    plan: Planned,
    affected: Int32[Tensor, ""],
    slot_of: Int32[Tensor, " E"],
    owner: Int32[Tensor, " S"],
    chunk_rows: int = 8,
    *,
    everyone: bool = False,
    out: SlotTable | None = None,
) -> SlotTable:
    """The same in torch, exactly."""
    out = _prepare(ids, weights, plan, affected, slot_of, owner, chunk_rows, everyone, out)
    e, s, flat = len(slot_of), len(owner), ids.reshape(-1).long()
    real = (flat >= 0) & (flat < e)
    slot = torch.where(real, slot_of[flat.clamp(0, e - 1)], -1).long()
    held = owner[slot.clamp(0, s - 1)]
    state = torch.where(held == flat, FINE, STALE)
    state = torch.where(slot < 0, MISSING, torch.where(slot >= s, OUTSIDE, state))
    state = torch.where(real, state, SKIPPED)
    table, first = [], 0
    for expert, n in enumerate(plan.counts.tolist()):
        if n:
            pair = int(plan.token[first]) * ids.shape[1] + int(plan.slot[first])
            at = int(slot[pair]) if int(state[pair]) == FINE else -1
            assert int(flat[pair]) == expert
            table += [(at, first + i, min(chunk_rows, n - i)) for i in range(0, n, chunk_rows)]
            first += n
    chunks = len(table)
    table += [(-1, 0, 0)] * (len(flat) - len(table))
    if everyone:
        table += [(s, len(flat) + i, min(chunk_rows, len(ids) - i)) for i in range(0, len(ids), chunk_rows)]
    out.chunks.copy_(torch.tensor(table, dtype=torch.int32).view(-1, 3))
    planned, y_slots = torch.arange(len(flat), device=ids.device) < plan.offsets[-1], ids.shape[1] + everyone
    t = torch.arange(len(ids) if everyone else 0, device=ids.device)
    out.token.copy_(torch.cat([torch.where(planned, plan.token, 0), t]))
    out.weight.copy_(torch.cat([torch.where(planned, plan.weight, 0), torch.ones_like(t)]))
    own = torch.where(planned, plan.token * y_slots + plan.slot, 0)
    out.row.copy_(torch.cat([own, t * y_slots + y_slots - 1]))
    counts = [int((state == which).sum()) for which in (MISSING, OUTSIDE, STALE)]
    head = torch.tensor([*counts, int(plan.invalid), int(affected), chunks], dtype=torch.int32, device=ids.device)
    bits = weights.reshape(-1).view(torch.int32)
    out.header.copy_(torch.cat([head, flat.to(torch.int32), bits, slot.to(torch.int32), state.to(torch.int32)]))
    return out


def empty_table(tokens: int, k: int, chunk_rows: int, everyone: bool, device: torch.device) -> SlotTable:
    """Buffers of a table, not yet written."""
    pairs, more = tokens * k, tokens if everyone else 0
    sizes = (3 * (pairs + -(-more // chunk_rows)), pairs + more, pairs + more, pairs + more, len(FIELDS) + 4 * pairs)
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=device)  # one allocation a decode step instead of five
    chunks, token, weight, row, header = ints.split(sizes)
    return SlotTable(chunks.view(-1, 3), token, weight.view(torch.float32), row, header)


def _prepare(ids: Tensor, weights: Tensor, plan: Planned, affected: Tensor, slot_of: Tensor, owner: Tensor,
             chunk_rows: int, everyone: bool, out: SlotTable | None) -> SlotTable:  # fmt: skip
    """The output, once everything that shapes and dtypes can tell holds."""
    op, ints, pairs = "slot_table", [torch.int32], ids.numel()
    expect(op, "ids", ids, ints, ["T", "K"])
    expect(op, "weights", weights, [torch.float32], ids.shape)
    expect(op, "affected", affected, ints, [])
    expect(op, "slot_of", slot_of, ints, ["E"])
    expect(op, "owner", owner, ints, ["S"])
    expect(op, "plan.counts", plan.counts, ints, [len(slot_of)])
    expect(op, "plan.token", plan.token, ints, [pairs])
    for name, t in (("ids", ids), ("weights", weights), ("slot_of", slot_of), ("owner", owner)):
        expect_contiguous(op, name, t)
    if pairs > MOST_PAIRS:
        raise LabError(f"{op}: T*K={pairs} pairs, at most {MOST_PAIRS} are served.")
    if chunk_rows < 1 or not len(slot_of) or not len(owner):
        raise LabError(
            f"{op}: chunk_rows={chunk_rows}, E={len(slot_of)} experts, S={len(owner)} slots; wanted at least 1 of each."
        )
    made = empty_table(ids.shape[0], ids.shape[1], chunk_rows, everyone, ids.device)
    for name, mine, theirs in zip(SlotTable._fields, made, out or (), strict=False):
        expect(op, f"out.{name}", theirs, [mine.dtype], mine.shape)
        expect_contiguous(op, f"out.{name}", theirs)
    return out or made
