"""Group (token, slot) pairs by expert: counts, offsets and the pairs in stable order, entirely on the device.

T tokens, K slots a token, P = T * K pairs, E experts. Reads the ids (twice in the large form), writes 12 bytes a pair.
Nothing depends on values on the host, so a call can be captured in a CUDA graph. Pairs come by ascending expert, and in
(token, slot) order inside one. Id -1 is skipped, ids E..width-1 (zero-computation experts) are left out, every other id
is left out and counted in `invalid`.
Small form (P <= SMALL_PAIRS): one launch; a pair's place is the number of pairs before it, found by comparing it with
all, and programs share nothing. Large form: three launches (a histogram a tile, their running sums down each expert,
placing). Integers throughout: both forms, the interpreter and the reference agree exactly.
Knows nothing about scores or weights of experts.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Float32, Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous

SMALL_PAIRS = 2048
MOST_EXPERTS = 1024
# Small form: pairs or experts a program takes (one a lane); the STEP pairs they are compared with at a time lie across
# its warps, so that the counts meet only once, at the end.
BLOCK, BLOCK_INTERPRETER, STEP = 32, 512, 64
# Large form: pairs a tile, programs at most; rows and columns that a program of the running sums takes at a time.
TILE, MOST_PROGRAMS, LARGE_WARPS = 256, 512, 8
SCAN_TILES, SCAN_EXPERTS = 128, 16


class Plan(NamedTuple):
    """counts int32 [E]; offsets int32 [E + 1]; token, slot int32 and weight fp32 [P], undefined past offsets[E];
    invalid int32 0-d."""

    counts: Tensor
    offsets: Tensor
    token: Tensor
    slot: Tensor
    weight: Tensor
    invalid: Tensor


@jit
def plan_key(ids, there, E: tl.constexpr):
    """The expert, or E for what has no place in the plan."""
    return tl.where(there & (ids >= 0) & (ids < E), ids, E)


@jit
def is_invalid(ids, there, WIDTH: tl.constexpr):
    """1 where an id is neither -1 nor below the router's width."""
    return (there & ((ids < -1) | (ids >= WIDTH))).to(tl.int32)


@jit
def place(token, slot, weight, at, p, w, mask, K: tl.constexpr):
    """Pair p goes to place `at`."""
    tl.store(token + at, p // K, mask=mask)
    tl.store(slot + at, p % K, mask=mask)
    tl.store(weight + at, w, mask=mask)


@jit
def _small(ids, weights, counts, offsets, token, slot, weight, invalid, P, expert_tiles, E: tl.constexpr,
           K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Program = a block of experts (the first expert_tiles programs) or a block of pairs; each reads all ids."""
    pid = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    p = (pid - expert_tiles) * BLOCK + lane
    mine = (p >= 0) & (p < P)
    # an expert program compares every pair with its experts, a pair program with its pairs
    value = tl.where(pid < expert_tiles, pid * BLOCK + lane, plan_key(tl.load(ids + p, mask=mine, other=-1), mine, E))
    w = tl.load(weights + p, mask=mine, other=0)
    # low half: pairs of a smaller expert; high half: of the same expert (and before p, for a pair)
    seen, wrong = tl.zeros((STEP, BLOCK), tl.int32), tl.zeros((STEP,), tl.int32)
    for start in range(0, P, STEP):
        q = start + tl.arange(0, STEP)
        of_q = tl.load(ids + q, mask=q < P, other=-1)
        key = plan_key(of_q, q < P, E)[:, None]
        same = (key == value[None, :]) & ((q[:, None] < p[None, :]) | (pid < expert_tiles))
        seen += (key < value[None, :]).to(tl.int32) + (same.to(tl.int32) << 16)
        wrong += is_invalid(of_q, q < P, WIDTH)
    total = tl.sum(seen, 0)
    below, equal = total & 0xFFFF, total >> 16
    if pid < expert_tiles:
        tl.store(counts + value, equal, mask=value < E)
        tl.store(offsets + value, below, mask=value < E)
        tl.store(offsets + value + 1, below + equal, mask=value == E - 1)
        if pid == 0:
            tl.store(invalid, tl.sum(wrong, 0))
    else:
        place(token, slot, weight, below + equal, p, w, mine & (value < E), K)


@jit
def _histograms(ids, before, P, steps, E: tl.constexpr, WIDTH: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr):
    """Program = steps tiles of pairs: how many of each expert they hold, and in column E + 1 the invalid ids."""
    pid = tl.program_id(0)
    count = tl.zeros((BINS,), tl.int32)
    for step in range(steps):
        p = (pid * steps + step) * TILE + tl.arange(0, TILE)
        there = p < P
        id = tl.load(ids + p, mask=there, other=-1)
        count += tl.histogram(plan_key(id, there, E) + is_invalid(id, there, WIDTH), BINS)
    column = tl.arange(0, BINS)
    tl.store(before + pid * (E + 2) + column, count, mask=column < E + 2)


@jit
def _running_sums(before, counts, invalid, tiles, E: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr):
    """Program = a few columns: a tile's count becomes the count of the tiles before it; the last sum is the total."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)
        at = before + tile[:, None] * (E + 2) + column[None, :]
        there = (tile < tiles)[:, None] & (column < E + 2)[None, :]
        n = tl.load(at, mask=there, other=0)
        tl.store(at, tl.cumsum(n, 0) - n + total[None, :], mask=there)
        total += tl.sum(n, 0)
    tl.store(counts + column, total, mask=column < E)
    tl.store(invalid + column * 0, total, mask=column == E + 1)


@jit
def _placing(ids, weights, before, counts, offsets, token, slot, weight, P, steps, E: tl.constexpr, BINS: tl.constexpr,
             K: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Program = steps tiles of pairs: expert's offset + earlier pairs' count + rank among the tile's own."""
    pid = tl.program_id(0)
    expert = tl.arange(0, BINS)
    real = expert < E
    count = tl.load(counts + expert, mask=real, other=0)
    start = tl.cumsum(count, 0) - count
    base = start + tl.load(before + pid * (E + 2) + expert, mask=real, other=0)
    tl.store(offsets + expert, start, mask=real & (pid == 0))
    tl.store(offsets + expert + 1, start + count, mask=(expert == E - 1) & (pid == 0))
    for step in range(steps):
        first = (pid * steps + step) * TILE
        p = first + tl.arange(0, TILE)
        there = p < P
        key = plan_key(tl.load(ids + p, mask=there, other=-1), there, E)
        w = tl.load(weights + p, mask=there, other=0)
        rank = tl.zeros((TILE,), tl.int32)
        for part in range(0, TILE, STEP):
            q = first + part + tl.arange(0, STEP)
            key_q = plan_key(tl.load(ids + q, mask=q < P, other=-1), q < P, E)
            rank += tl.sum(((key_q[:, None] == key[None, :]) & (q[:, None] < p[None, :])).to(tl.int32), 0)
        place(token, slot, weight, tl.gather(base, key, 0) + rank, p, w, key < E, K)
        if step + 1 < steps:
            base += tl.histogram(key, BINS)


def plan(
    ids: Int32[Tensor, "T K"], weights: Float32[Tensor, "T K"], num_experts: int, width: int | None = None
) -> Plan:
    """Group the pairs by expert (Triton). `width` R: ids from E to R - 1 are zero-computation experts (E by default).

    LabError for E outside 1..1024, R < E, strides, or P past 2^31; T = 0 gives an empty plan and launches no kernel.
    """
    width = check_plan("plan", ids, weights, num_experts, width)
    if num_experts > MOST_EXPERTS:
        raise LabError(f"plan: E={num_experts} experts, at most {MOST_EXPERTS} are served; plan_ref takes any number.")
    pairs = ids.numel()
    out = empty_plan(pairs, num_experts, ids.device)
    if not pairs:
        return Plan(*(t.zero_() for t in out))
    on = backend.serve("plan", ids=ids, weights=weights)
    if pairs <= SMALL_PAIRS:
        _launch_small(ids, weights, out, num_experts, width, BLOCK if on == "cuda" else BLOCK_INTERPRETER)
    else:
        _launch_large(ids, weights, out, num_experts, width)
    return out


def _launch_small(ids: Tensor, weights: Tensor, out: Plan, e: int, width: int, block: int) -> None:
    pairs, experts = ids.numel(), -(-e // block)
    step = min(STEP, backend.next_power_of_2(pairs))
    backend.launch(
        _small,
        (experts + -(-pairs // block),),
        *(ids, weights, *out, pairs, experts, e, ids.shape[1], width, block, step),
        device=ids.device,
        num_warps=max(1, step // 8),
    )


def _launch_large(ids: Tensor, weights: Tensor, out: Plan, e: int, width: int) -> None:
    pairs = ids.numel()
    steps = -(-pairs // (TILE * MOST_PROGRAMS))
    programs = -(-pairs // (TILE * steps))
    before = torch.empty(programs, e + 2, dtype=torch.int32, device=ids.device)
    bins = max(32, backend.next_power_of_2(e + 2))
    how = {"device": ids.device, "num_warps": LARGE_WARPS}
    backend.launch(_histograms, (programs,), ids, before, pairs, steps, e, width, bins, TILE, **how)
    backend.launch(
        _running_sums,
        (-(-(e + 2) // SCAN_EXPERTS),),
        *(before, out.counts, out.invalid, programs, e, SCAN_TILES, SCAN_EXPERTS),
        **how,
    )
    backend.launch(
        _placing,
        (programs,),
        *(ids, weights, before, out.counts, out.offsets, out.token, out.slot, out.weight, pairs, steps),
        *(e, bins, ids.shape[1], TILE, STEP),
        **how,
    )


def plan_ref(
    ids: Int32[Tensor, "T K"], weights: Float32[Tensor, "T K"], num_experts: int, width: int | None = None
) -> Plan:
    """The same in torch, exactly."""
    width = check_plan("plan", ids, weights, num_experts, width)
    k, flat = max(ids.shape[1], 1), ids.reshape(-1)
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = torch.sort(key, stable=True).indices
    experts = torch.arange(num_experts + 1, device=ids.device)
    offsets = torch.searchsorted(key[order], experts.to(key.dtype)).to(torch.int32)
    wrong = ((flat < -1) | (flat >= width)).sum(dtype=torch.int32)
    token, slot = (order // k).to(torch.int32), (order % k).to(torch.int32)
    return Plan(offsets.diff(), offsets, token, slot, weights.reshape(-1)[order], wrong)


def check_plan(op: str, ids: Tensor, weights: Tensor, num_experts: int, width: int | None) -> int:
    """What the host can tell; the router's width."""
    width = num_experts if width is None else width
    expect(op, "ids", ids, [torch.int32], ["T", "K"])
    expect(op, "weights", weights, [torch.float32], ids.shape)
    for name, t in (("ids", ids), ("weights", weights)):
        expect_contiguous(op, name, t)
    if not 1 <= num_experts <= width:
        raise LabError(f"{op}: E={num_experts} experts, router width R={width}; wanted 1 <= E <= R.")
    if ids.numel() + TILE >= 2**31:
        raise LabError(f"{op}: T*K={ids.numel()} pairs do not fit 32 bits.")
    return width


def empty_plan(pairs: int, e: int, device: torch.device) -> Plan:
    """Buffers of a plan, not yet written."""
    ints = {"dtype": torch.int32, "device": device}
    return Plan(
        counts=torch.empty(e, **ints),
        offsets=torch.empty(e + 1, **ints),
        token=torch.empty(pairs, **ints),
        slot=torch.empty(pairs, **ints),
        weight=torch.empty(pairs, dtype=torch.float32, device=device),
        invalid=torch.empty((), **ints),
    )
