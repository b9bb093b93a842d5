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
    """tiles int32 [tiles, 3]: (slot, first pair, rows <= tokens); `tokens` is one of TOKENS. `expert` int32 [tiles], of
    any stride: whose biases a tile has (None: slots are experts)."""

    tiles: Tensor
    tokens: int
    expert: Tensor | None = None


class Tile(NamedTuple):
    """How a program of the GEMM is cut: `rows` weight rows (gated: of each matrix; in all a multiple of 64, so that the
    instruction is one), `warps` (a multiple of four), `stages` steps in flight; `group` tiles of tokens share a walk
    over the weight rows; `registers`: a thread's cap. `staged`: weights are decoded by whole words and multiplied out
    of shared memory (`staged.STAGED`), 16 rows a warp, and the words of so many steps (1 or 2) are on their way.
    `resident`: 0 for a program a piece of work, else a persistent grid of so many programs a multiprocessor."""

    rows: int
    warps: int
    stages: int
    group: int = 8
    registers: int | None = None
    staged: int = 0
    resident: int = 0


# Measured on an H200 (triton 3.6), microseconds of gate + up and of down; (rows, warps, stages):
#   bf16, qwen3-30b-a3b, T = 1, tiles of 16: (64, 4, 5) 16.7 and 9.0, (64, 4, 4) 17.9 and 9.2, (128, 8, 5) 18.6 gated
#   T = 512, tiles of 64: (64, 4, 3) 205 gated, (64, 4, 4) 215, (128, 8, 4) 223, (128, 4, 4) 242; down within 2 %
#   T = 2048, tiles of 128: (64, 4, 3) 300, (128, 8, 4) 304, (64, 8, 3) 306; down (128, 4, 3) 161, (128, 8, 3) 162
#   deepseek-v3-like, T = 32 and 512: every tile of 16 or 32 rows within 3 %, as the bandwidth binds
#   persistent grids lose everywhere: T = 512 205 and 110, with one program a multiprocessor 296 and 140, with two 220
#   and 115; T = 2048 300 and 164, 470 and 238, 332 and 174; mxfp4_oss with three, T = 32: 131 and 63, 141 and 81
GATED_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(64, 4, 3, 1), 128: Tile(64, 4, 3)}
PLAIN_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(128, 4, 4), 128: Tile(128, 4, 3)}
# Decoded in registers: eight warps hold gate and up in half the registers of four (q6_k 122 for 220).
DECODED_GATED_TILES = {16: Tile(64, 8, 3, 1), 32: Tile(64, 8, 3, 1), 64: Tile(64, 8, 3, 1), 128: Tile(64, 8, 3)}
DECODED_TILES = {16: Tile(64, 4, 3, 1), 32: Tile(64, 4, 3, 1), 64: Tile(64, 4, 3, 1), 128: Tile(128, 8, 3)}


def _staged_tile(format: str, gated: bool, tokens: int) -> Tile:
    """Decoded by whole words (`staged`); us of gate + up with four warps, eight, eight and words two steps ahead:
    q2_k, qwen3, T = 32: 181, 142, 139; 512: 301, 247, 242; 2048: 570, 419, 506; mixtral-8x7b, T = 128: 679, 567, 534
    mxfp4_oss, qwen3, T = 512: 220, 206, 207; 2048: 404, 360, 500; deepseek, T = 512: 2576, 2526, -; with scales read
    as words qwen3, T = 32: 172, 124, 129; mixtral: 449, 316, 330 (four warps store 16 bits at a time)
    and of down with four and eight:
    q3_k, qwen3, T = 32: 121, 134; 512: 176, 231; 2048: 369, 455; mxfp4_oss: 63, 65; 101, 107; 241, 261; deepseek,
    T = 512, tiles of 32: 1370, 1282; q6_k, qwen3, T = 512: 183, 279 (in registers 288); 2048: 377, 504 (518); T = 32:
    133 (179)
    A thread has one unit of its words: 64 rows of both matrices in eight warps, or of one in four."""
    group = 8 if tokens == 128 else 1
    if gated:
        # two programs a multiprocessor; of q3_k and q4_k 128 registers would spill
        most = 128 if tokens == 128 and format in ("q2_k", "mxfp4_oss") else None
        return Tile(64, 8, 2, group, most, 2 if format == "q2_k" and tokens < 128 else 1)
    wide = not gated and format == "mxfp4_oss" and tokens == 32
    return Tile(128 if wide else 64, 8 if wide else 4, 2, group, None, 1)


STAGED_TILES = {
    (format, gated, tokens): _staged_tile(format, gated, tokens)
    for format in ("q2_k", "q3_k", "q4_k", "q6_k", "mxfp4_oss")
    for gated in (True, False)
    for tokens in TOKENS
}
# e4m3 rows and weights; us of whole layers, tiles of 64 with hidden rows quantised where they arise (128, 8, 3), by
# themselves (64, 8, 3) at 128 registers, (64, 4, 3); tiles of 128 (64, 8, 3) and (32, 4, 3):
#   qwen3-30b-a3b, T = 512: 294, 247, 246, 415, 483; 2048: 541, 467, 449, 570, 645; 8192: 1622, 1431, 1350, 1672, 1802
#   deepseek-v3-like, T = 2048: 4593, 4249, 4018, 5484, 6915; 8192: 12342, 12276, 11526, 12851, 15475
# A thread's sums wait for its chain of 128 values: small programs, two or more a multiprocessor, fill the time.
MOST_FP8_TOKENS = 64
FP8_APART_FROM = 64  # rows a tile from which on hidden rows are quantised by a launch of their own
FP8_GATED_TILES = {16: Tile(128, 8, 4, 1), 32: Tile(128, 8, 4, 1), 64: Tile(64, 4, 3), 128: Tile(64, 8, 3)}
# a program holds the 128 hidden values that share a scale
FP8_QUANTISED_TILES = {16: Tile(128, 8, 4, 1), 32: Tile(128, 8, 4, 1), 64: Tile(128, 8, 3), 128: Tile(128, 16, 2)}
FP8_PLAIN_TILES = {16: Tile(64, 4, 5, 1), 32: Tile(64, 4, 5, 1), 64: Tile(64, 4, 3), 128: Tile(128, 8, 3)}


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


def tokens_for(pairs: int, experts: int, most: int = TOKENS[-1]) -> int:
    """Rows a tile: about as many as an expert has on average, so that one read of its weights serves them all, and at
    most `most`."""
    mean = -(-pairs // max(1, experts))
    return min(most, max(TOKENS[0], backend.next_power_of_2(mean + mean // 4)))


def tile_for(format: str, tokens: int, gated: bool, on: str, staged: bool = False) -> Tile:
    """The measured tile on a GPU, with whole words decoded where that is quicker and these weights can be `staged`; the
    interpreter pays for programs, so it takes tall ones."""
    if on == "interpreter":
        return Tile(256, 4, 1)
    if format in ("bf16", "f16"):
        return (GATED_TILES if gated else PLAIN_TILES)[tokens]
    tile = STAGED_TILES.get((format, gated, tokens)) if staged else None
    return tile or (DECODED_GATED_TILES if gated else DECODED_TILES)[tokens]


def for_few(tile: Tile, pieces: int, processors: int) -> Tile:
    """A tile of gate and up, or one of half its rows where so many pieces would leave multiprocessors without work; in
    all still the 64 rows of one instruction."""
    few = tile.rows == 64 and pieces < processors
    return tile._replace(rows=32, warps=4, registers=None) if few else tile


def fp8_tile_for(tokens: int, gated: bool, quantised: bool, on: str) -> Tile:
    """The same for rows and weights in e4m3."""
    if on == "interpreter":
        return Tile(128, 4, 1)
    return (FP8_QUANTISED_TILES if quantised else FP8_GATED_TILES if gated else FP8_PLAIN_TILES)[tokens]


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
