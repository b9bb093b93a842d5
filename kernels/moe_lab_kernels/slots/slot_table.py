"""From picks and a slot table to what a grouped launch needs, on the device: chunks by arena slot, and a small header.

T <= 8 tokens, K slots a token, P = T * K pairs, E experts, S arena slots. `slot_of` [E] says which arena slot holds an
expert (-1: none), `owner` [S] which expert a slot holds, counted from `base` on where layers share the slots. Both must
agree, so a table that is out of date shows as such instead of computing with another expert's weights. One program
compares every pair with every other, as `plan`'s small form does, and needs no plan; it reads about 16 bytes a pair and
writes 24 for the launch and a header of 16 P + 24 bytes, all that a host has to read back to know what happened.
Chunks come by ascending expert, at most `chunk_rows` rows each, padded with entries that mean nothing; so do chunks of
experts that are not at hand. Integers throughout: kernel and reference agree exactly. Knows nothing about weights.
"""
# pyright: reportGeneralTypeIssues=false

from typing import NamedTuple

import torch

from moe_lab._types import Float32, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous
from moe_lab_kernels.route.plan import plan_ref

MOST_TOKENS, MOST_PICKS = 8, 32
FIELDS = ("missing", "outside", "stale", "invalid", "affected", "chunks")
AFFECTED, CHUNKS = FIELDS.index("affected"), FIELDS.index("chunks")
FINE, SKIPPED, MISSING, OUTSIDE, STALE = range(5)
"""A pair's state: computed; no expert's pair; its expert in no slot; a slot beyond the arena; a slot of another."""
_FINE, _SKIPPED, _MISSING, _OUTSIDE, _STALE = (tl.constexpr(i) for i in range(5))
_FIELDS = tl.constexpr(len(FIELDS))


class SlotTable(NamedTuple):
    """chunks int32 [C, 3] (arena slot, first pair, rows; (-1, 0, 0) where nothing is to be done). By ascending expert
    and then by token and rank token int32, weight fp32 and row int32, the row of y that the pair writes (all 0 for a
    pair without a place). header int32 [len(FIELDS) + 4 P]: the counts of `FIELDS`, then of every pair by token and
    rank its id, its weight's bits, its arena slot and its state."""

    chunks: Tensor
    token: Tensor
    weight: Tensor
    row: Tensor
    header: Tensor


@jit
def _state(id, real, slot_of, owner, S, base):
    """(arena slot, state) of pairs by their expert id."""
    slot = tl.load(slot_of + id, mask=real, other=-1)
    inside = real & (slot >= 0) & (slot < S)
    held = tl.load(owner + slot, mask=inside, other=-1)
    state = tl.where(inside & (held != id + base), _STALE, _FINE)
    state = tl.where(slot >= S, _OUTSIDE, tl.where(slot < 0, _MISSING, state))
    return slot, tl.where(real, state, _SKIPPED)


@jit
def tabulate(ids, w, affected, invalid, T, slot_of, owner, chunks, token, weight, out_row, header, S, base, chunk_rows,
             y_slots, everyone, E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Everything from the picks ids, w [ROWS, K_PAD] of one program; `affected`, `invalid` are counts."""
    t = tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, K_PAD)[None, :]
    pair, there = t * K + k, (k < K) & (t < T)
    real = there & (ids >= 0) & (ids < E)
    slot, state = _state(ids, real, slot_of, owner, S, base)
    pairs = T * K
    tl.store(header + _FIELDS + pair, ids, mask=there)
    tl.store(header + _FIELDS + pairs + pair, w.to(tl.int32, bitcast=True), mask=there)
    tl.store(header + _FIELDS + 2 * pairs + pair, slot, mask=there)
    tl.store(header + _FIELDS + 3 * pairs + pair, state, mask=there)
    P: tl.constexpr = ROWS * K_PAD
    # what has no place sorts last as expert E; padded pairs keep their numbers, and so their order
    key = tl.reshape(tl.where(real, ids, E), (P,))
    slot, state, w = tl.reshape(slot, (P,)), tl.reshape(state, (P,)), tl.reshape(w, (P,))
    shown = tl.reshape(there, (P,))
    p = tl.arange(0, P)
    same = key[None, :] == key[:, None]
    earlier = same & (p[None, :] < p[:, None])
    before = (key[None, :] < key[:, None]) | earlier
    # two counts in one sum: pairs before this one, and of them those of its own expert
    seen = tl.sum(before.to(tl.int32) + (earlier.to(tl.int32) << 16), 1)
    rank, inside = seen & 0xFFFF, seen >> 16
    left = tl.sum(same.to(tl.int32), 1) - inside
    planned = key < E
    begins = planned & (inside % chunk_rows == 0)
    chunk = tl.sum((before & begins[None, :]).to(tl.int32), 1)
    n, placed = tl.sum(begins.to(tl.int32), 0), tl.sum(planned.to(tl.int32), 0)
    own = p // K_PAD
    tl.store(token + rank, own, mask=planned)
    tl.store(weight + rank, w, mask=planned)
    tl.store(out_row + rank, own * y_slots + p % K_PAD, mask=planned)
    tl.store(chunks + 3 * chunk, tl.where(state == _FINE, slot, -1), mask=begins)
    tl.store(chunks + 3 * chunk + 1, rank, mask=begins)
    tl.store(chunks + 3 * chunk + 2, tl.minimum(left, chunk_rows), mask=begins)
    none, empty = (p >= placed) & (p < pairs), (p >= n) & (p < pairs)
    tl.store(token + p, 0, mask=none)
    tl.store(weight + p, 0.0, mask=none)
    tl.store(out_row + p, 0, mask=none)
    tl.store(chunks + 3 * p, -1, mask=empty)
    tl.store(chunks + 3 * p + 1, 0, mask=empty)
    tl.store(chunks + 3 * p + 2, 0, mask=empty)
    # the group of all tokens, behind the pairs (everyone = 0: there is none)
    tl.store(token + pairs + p, p, mask=p < everyone)
    tl.store(weight + pairs + p, 1.0, mask=p < everyone)
    tl.store(out_row + pairs + p, p * y_slots + y_slots - 1, mask=p < everyone)
    begins = (p < everyone) & (p % chunk_rows == 0)
    at = chunks + 3 * (pairs + p // chunk_rows)
    tl.store(at, S, mask=begins)
    tl.store(at + 1, pairs + p, mask=begins)
    tl.store(at + 2, tl.minimum(everyone - p, chunk_rows), mask=begins)
    tl.store(header, tl.sum((shown & (state == _MISSING)).to(tl.int32), 0))
    tl.store(header + 1, tl.sum((shown & (state == _OUTSIDE)).to(tl.int32), 0))
    tl.store(header + 2, tl.sum((shown & (state == _STALE)).to(tl.int32), 0))
    tl.store(header + 3, invalid)
    tl.store(header + 4, affected)
    tl.store(header + 5, n)


@jit
def _slot_table(ids, weights, affected, n_affected, T, width, slot_of, owner, chunks, token, weight, row, header, S,
                base, chunk_rows, y_slots, everyone, E: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """One program."""
    t = tl.arange(0, ROWS)
    k = tl.arange(0, K_PAD)[None, :]
    pair, there = t[:, None] * K + k, (k < K) & (t < T)[:, None]
    id = tl.load(ids + pair, mask=there, other=-1)
    w = tl.load(weights + pair, mask=there, other=0)
    odd = tl.sum(tl.load(affected + t, mask=t < n_affected, other=0), 0)
    wrong = tl.sum(tl.sum((there & ((id < -1) | (id >= width))).to(tl.int32), 1), 0)
    tabulate(id, w, odd, wrong, T, slot_of, owner, chunks, token, weight, row, header, S, base, chunk_rows, y_slots,
             everyone, E, K, K_PAD, ROWS)  # fmt: skip


def slot_table(
    ids: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    affected: Int32[Tensor, "..."],
    slot_of: Int32[Tensor, " E"],
    owner: Int32[Tensor, " S"],
    chunk_rows: int = 8,
    *,
    width: int | None = None,
    everyone: bool = False,
    base: int = 0,
    out: SlotTable | None = None,
) -> SlotTable:
    """Chunks and header of one call (Triton). LabError for shapes that disagree, chunk_rows < 1, T > 8, K > 32.

    `affected`: a count, or a flag for each token. `width`: ids from it on are counted as invalid (None: E). `owner`
    names expert e as `base` + e. `everyone`: behind the pairs comes one more group, slot S over all tokens with weight
    1, and y has K + 1 rows a token, the last of them its own. No value is looked at on the host: captured in a graph,
    the same launch serves every routing.
    """
    out = prepare("slot_table", ids, weights, affected, slot_of, owner, chunk_rows, everyone, out)
    t, k = ids.shape
    if not t * k:
        out.header.zero_()
        return out
    named = {"ids": ids, "weights": weights, "affected": affected, "slot_of": slot_of, "owner": owner}
    backend.serve("slot_table", **named, chunks=out.chunks, header=out.header)
    rows, picks = backend.next_power_of_2(t), backend.next_power_of_2(k)
    backend.launch(
        _slot_table,
        (1,),
        *(ids, weights, affected, affected.numel(), t, width or slot_of.shape[0], slot_of, owner, *out),
        *settings(owner, base, chunk_rows, t, k, everyone),
        *(slot_of.shape[0], k, picks, rows),
        device=ids.device,
        num_warps=warps_of(rows * picks),
    )
    return out


def settings(owner: Tensor, base: int, chunk_rows: int, t: int, k: int, everyone: bool) -> tuple[int, ...]:
    """S, base, chunk_rows, y_slots, everyone of `tabulate`."""
    return owner.shape[0], base, chunk_rows, k + everyone, t if everyone else 0


def warps_of(pairs: int) -> int:
    """Warps for so many padded pairs, each compared with all."""
    return max(1, min(8, pairs // 16))


def slot_table_ref(
    ids: Int32[Tensor, "T K"],
    weights: Float32[Tensor, "T K"],
    affected: Int32[Tensor, "..."],
    slot_of: Int32[Tensor, " E"],
    owner: Int32[Tensor, " S"],
    chunk_rows: int = 8,
    *,
    width: int | None = None,
    everyone: bool = False,
    base: int = 0,
    out: SlotTable | None = None,
) -> SlotTable:
    """The same in torch, exactly."""
    out = prepare("slot_table", ids, weights, affected, slot_of, owner, chunk_rows, everyone, out)
    e, s, flat = len(slot_of), len(owner), ids.reshape(-1).long()
    plan = plan_ref(ids, weights, e, max(e, width or e))
    real = (flat >= 0) & (flat < e)
    slot = torch.where(real, slot_of[flat.clamp(0, e - 1)], -1).long()
    held = owner[slot.clamp(0, s - 1)]
    state = torch.where(held == flat + base, FINE, STALE)
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
    head = torch.tensor([*counts, int(plan.invalid), int(affected.sum()), chunks], dtype=torch.int32, device=ids.device)
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


def prepare(op: str, ids: Tensor, weights: Tensor, affected: Tensor, slot_of: Tensor, owner: Tensor, chunk_rows: int,
            everyone: bool, out: SlotTable | None) -> SlotTable:  # fmt: skip
    """The output, once everything that shapes and dtypes can tell holds."""
    ints = [torch.int32]
    expect(op, "ids", ids, ints, ["T", "K"])
    expect(op, "weights", weights, [torch.float32], ids.shape)
    expect(op, "affected", affected, ints, [ids.shape[0]] if affected.ndim else [])
    for name, t in (("ids", ids), ("weights", weights), ("affected", affected)):
        expect_contiguous(op, name, t)
    return room(op, ids.shape[0], ids.shape[1], slot_of, owner, chunk_rows, everyone, out)


def room(op: str, t: int, k: int, slot_of: Tensor, owner: Tensor, chunk_rows: int, everyone: bool,
         out: SlotTable | None = None) -> SlotTable:  # fmt: skip
    """Buffers for T and K, once table and chunk size fit; `out` if it is given and fits."""
    expect(op, "slot_of", slot_of, [torch.int32], ["E"])
    expect(op, "owner", owner, [torch.int32], ["S"])
    expect_contiguous(op, "slot_of", slot_of)
    expect_contiguous(op, "owner", owner)
    if t > MOST_TOKENS or k > MOST_PICKS:
        raise LabError(f"{op}: T={t} tokens of K={k} picks; at most {MOST_TOKENS} of {MOST_PICKS} are served.")
    if chunk_rows < 1 or not slot_of.shape[0] or not owner.shape[0]:
        raise LabError(
            f"{op}: chunk_rows={chunk_rows}, E={len(slot_of)} experts, S={len(owner)} slots; wanted at least 1 of each."
        )
    made = empty_table(t, k, chunk_rows, everyone, slot_of.device)
    for name, mine, theirs in zip(SlotTable._fields, made, out or (), strict=False):
        expect(op, f"out.{name}", theirs, [mine.dtype], mine.shape)
        expect_contiguous(op, f"out.{name}", theirs)
    return out or made
