"""The work list of the grouped GEMM: which rows a program takes, made on the device, and how wide its tile is.

A tile is (slot, first pair, rows <= n) of pairs sorted by expert; experts come in ascending order and each ends its
last tile short, so nothing is padded in memory. The list's length is an upper bound that the host knows (n tiles for
n experts at most, and one more for each full tile); entries behind the last tile have 0 rows and cost an early exit.
"""

from typing import NamedTuple

import torch

from moe_lab._types import Int32, Tensor
from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.backend import jit, tl
from moe_lab_kernels.checks import expect, expect_contiguous

ENTRIES = 32  # of the list, a program
# Below 16 columns the compiler takes another instruction, whose sums come in another order.
TOKENS = (16, 32, 64, 128)
CHUNK_ROWS = 8  # of a GEMV, whose chunks are tiles too


class WorkList(NamedTuple):
    """tiles int32 [tiles, 3]: (slot, first pair, rows <= tokens); `tokens` is one of TOKENS."""

    tiles: Tensor
    tokens: int


class Tile(NamedTuple):
    """How a program of the GEMM is cut: `rows` weight rows (a multiple of 64, so that the instruction is one), `warps`
    (a multiple of four), `stages` steps in flight; `group` tiles of tokens share a walk over the weight rows. `staged`:
    weights are decoded by whole words and multiplied out of shared memory (`staged.STAGED`), 16 rows a warp."""

    rows: int
    warps: int
    stages: int
    group: int = 8
    registers: int | None = None
    staged: bool = False


# Measured on an H200 (triton 3.6), microseconds of gate + up and of down; (rows, warps, stages):
#   bf16, qwen3-30b-a3b, T = 1, tiles of 16: (64, 4, 5) 16.7 and 9.0, (64, 4, 4) 17.9 and 9.2, (128, 8, 5) 18.6 gated
#   T = 512, tiles of 64: (64, 4, 3) 207 gated, (64, 4, 4) 215, (128, 8, 4) 223, (128, 4, 4) 242; down within 2 %
#   T = 2048, tiles of 128: (64, 4, 3) 301, (128, 8, 4) 304, (64, 8, 3) 306; down (128, 4, 3) 161, (128, 8, 3) 162
#   deepseek-v3-like, T = 32 and 512: every tile of 16 or 32 rows within 3 %, as the bandwidth binds
# Decoded formats follow q2_k and q3_k: 64 rows in 4 warps won up to 64 tokens; 8 warps hold 128 without spills.
GATED_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(64, 4, 3, 1), 128: Tile(64, 4, 3)}
PLAIN_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(128, 4, 4), 128: Tile(128, 4, 3)}
DECODED_TILES = {16: Tile(64, 4, 3, 1), 32: Tile(64, 4, 3, 1), 64: Tile(64, 4, 3, 1), 128: Tile(128, 8, 3)}
# Decoded by whole words (`staged`), us of qwen3's gate + up in q2_k and down in q3_k, registers beside it:
#   T = 32, tiles of 16: 143 and 117 (162 and 128); T = 512, tiles of 64: 240 and 172 (259 and 193)
#   a step's 128 values as one part: 154 and 115, 281 and 174; 128 rows in 8 warps: 239 and 126, T = 32
#   mxfp4_oss: 130 and 63 (183 and 93), 226 and 103 (257 and 127)
#   q4_k: 201 and 85 (260 and 105), 311 and 124 (385 and 162)
# 64 rows in 4 warps: a thread has one unit. (q4_k's gate and up for 128 tokens would spill.)
STAGED_TILES = {
    (format, gated, tokens): Tile(64, 4, 2, 8 if tokens == 128 else 1, None, True)
    for format in ("q2_k", "q3_k", "q4_k", "mxfp4_oss")
    for gated in (True, False)
    for tokens in TOKENS
    if (format, gated, tokens) != ("q4_k", True, 128)
}


@jit
def _work_list(counts, offsets, slot_of, out, n_tiles, E: tl.constexpr, BINS: tl.constexpr, TOKENS: tl.constexpr,
               SLOTS: tl.constexpr, ENTRIES: tl.constexpr):  # fmt: skip
    """Program = a few entries; each sums the tiles of all experts."""
    expert = tl.arange(0, BINS)
    count = tl.load(counts + expert, mask=expert < E, other=0)
    until = tl.cumsum((count + (TOKENS - 1)) // TOKENS, 0)
    i = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    mine = tl.sum((until[None, :] <= i[:, None]).to(tl.int32), 1)
    there = (i < n_tiles) & (mine < E)
    before = tl.max(tl.where(until[None, :] <= i[:, None], until[None, :], 0), 1)
    at = (i - before) * TOKENS
    n = tl.minimum(tl.load(counts + mine, mask=there, other=0) - at, TOKENS)
    first = tl.load(offsets + mine, mask=there, other=0) + at
    slot = mine
    if SLOTS:
        slot = tl.load(slot_of + mine, mask=there, other=-1)
    tl.store(out + 3 * i, tl.where(there, slot, -1), mask=i < n_tiles)
    tl.store(out + 3 * i + 1, tl.where(there, first, 0), mask=i < n_tiles)
    tl.store(out + 3 * i + 2, tl.where(there, n, 0), mask=i < n_tiles)


def tokens_for(pairs: int, experts: int) -> int:
    """Rows a tile: about as many as an expert has on average, so that one read of its weights serves them all."""
    mean = -(-pairs // max(1, experts))
    return min(TOKENS[-1], max(TOKENS[0], backend.next_power_of_2(mean + mean // 4)))


def tile_for(format: str, tokens: int, gated: bool, on: str, staged: bool = False) -> Tile:
    """The measured tile on a GPU, with whole words decoded where that is quicker and these weights can be `staged`; the
    interpreter pays for programs, so it takes tall ones."""
    if on == "interpreter":
        return Tile(256, 4, 1)
    if format in ("bf16", "f16"):
        return (GATED_TILES if gated else PLAIN_TILES)[tokens]
    tile = STAGED_TILES.get((format, gated, tokens)) if staged else None
    return tile or DECODED_TILES[tokens]


def most_tiles(pairs: int, experts: int, tokens: int) -> int:
    """Tiles that any split of `pairs` pairs among `experts` experts can need."""
    busy = min(pairs, experts)
    return busy + (pairs - busy) // tokens


def work_list(
    counts: Int32[Tensor, " E"],
    offsets: Int32[Tensor, " E1"],
    pairs: int,
    tokens: int,
    slot_of: Int32[Tensor, " E"] | None = None,
) -> WorkList:
    """(slot, first pair, rows) of every tile of at most `tokens` pairs, padded with (-1, 0, 0) (Triton).

    counts, offsets: a plan's, which holds at most `pairs` pairs. `slot_of`: where an expert's weights lie (its own
    number by default; -1 for nowhere). LabError when E or devices disagree.
    """
    out = _output(counts, offsets, pairs, tokens, slot_of)
    if not len(out):
        return WorkList(out, tokens)
    backend.serve("work_list", counts=counts, offsets=offsets, slot_of=slot_of)
    e = len(counts)
    backend.launch(
        _work_list,
        (-(-len(out) // ENTRIES),),
        *(counts, offsets, counts if slot_of is None else slot_of, out, len(out)),
        *(e, max(32, backend.next_power_of_2(e)), tokens, slot_of is not None, ENTRIES),
        device=counts.device,
        num_warps=4,
    )
    return WorkList(out, tokens)


def work_list_ref(
    counts: Int32[Tensor, " E"],
    offsets: Int32[Tensor, " E1"],
    pairs: int,
    tokens: int,
    slot_of: Int32[Tensor, " E"] | None = None,
) -> WorkList:
    """The same in torch, exactly."""
    out = _output(counts, offsets, pairs, tokens, slot_of)
    slots = range(len(counts)) if slot_of is None else slot_of.tolist()
    entries = [
        (slot, first + at, min(tokens, n - at))
        for slot, first, n in zip(slots, offsets.tolist(), counts.tolist(), strict=False)
        for at in range(0, n, tokens)
    ]
    entries += [(-1, 0, 0)] * (len(out) - len(entries))
    return WorkList(out.copy_(torch.tensor(entries, dtype=torch.int32).view(-1, 3)), tokens)


def _output(counts: Tensor, offsets: Tensor, pairs: int, tokens: int, slot_of: Tensor | None) -> Tensor:
    expect("work_list", "counts", counts, [torch.int32], ["E"])
    expect("work_list", "offsets", offsets, [torch.int32], [len(counts) + 1])
    expect_contiguous("work_list", "counts", counts)
    expect_contiguous("work_list", "offsets", offsets)
    if slot_of is not None:
        expect("work_list", "slot_of", slot_of, [torch.int32], [len(counts)])
        expect_contiguous("work_list", "slot_of", slot_of)
    if pairs < 0 or tokens not in (*range(1, CHUNK_ROWS + 1), *TOKENS):
        raise LabError(
            f"work_list: {pairs} pairs in tiles of {tokens}; a tile holds one of {TOKENS}, a GEMV's chunk up to "
            f"{CHUNK_ROWS}."
        )
    return torch.empty(most_tiles(pairs, len(counts), tokens), 3, dtype=torch.int32, device=counts.device)
