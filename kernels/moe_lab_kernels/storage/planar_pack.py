"""Raw blocks to planes, quickly: how one program moves the pieces of a run of blocks (`planar_layout` says which).

A field piece of w bits and run R is groups of R bytes, value v of a group in byte v % R at bits w (v // R). Its plane
has a word for 32 / w consecutive values, which all lie at the same bits of neighbouring raw bytes:

    byte b of the word = sum over p < 8 / w of  field(raw byte 4 p + b) << (w p)

So an output byte takes 8 / w raw bytes, four apart, one shift for all of them. Loads are single bytes (blocks start
anywhere) that neighbouring lanes take side by side.
"""
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from moe_lab_kernels.backend import jit, next_power_of_2, tl
from moe_lab_kernels.storage.planar_layout import SIX, WORD, pieces_of, planes_of

FIELDS, BYTES, SIXES = 1, 2, 3  # kinds of pieces; 0 for none
_FIELDS, _BYTES, _SIXES = tl.constexpr(FIELDS), tl.constexpr(BYTES), tl.constexpr(SIXES)
MOST_PIECES = 5
NO_PIECE = (0, 0, 1, 8, 4)
BYTES_A_PROGRAM = 1024  # of its widest plane


def pieces_for(format: str) -> list[tuple[int, int, int, int, int]]:
    """(kind, first byte in a raw block, bytes there, width, run) of each piece, filled up with NO_PIECE. Fields with
    the run of a word lie in planes as in blocks: whole bytes."""
    out, at = [], 0
    for piece in pieces_of(format):
        whole = piece.width == 8 or piece.run == WORD
        kind = SIXES if piece is SIX else BYTES if whole else FIELDS
        out.append((kind, at, piece.bytes, piece.width, piece.run))
        at += piece.bytes
    return out + [NO_PIECE] * (MOST_PIECES - len(out))


@jit
def _fields(raw, plane, first, blocks, SIZE: tl.constexpr, AT: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
            R: tl.constexpr, B: tl.constexpr):  # fmt: skip
    """Blocks first .. first + B - 1: N bytes of each, from byte AT of SIZE, into N bytes a block of `plane`."""
    in_word: tl.constexpr = 32 // W
    in_group: tl.constexpr = R * 8 // W
    i = tl.arange(0, B * N)
    block, byte = i // N, i % N
    there = first + block < blocks
    value = byte // 4 * in_word
    inside = value % in_group
    source = raw + (first + block).to(tl.int64) * SIZE + (AT + value // in_group * R + inside % R + byte % 4)
    shift = inside // R * W
    out = tl.zeros((B * N,), tl.int32)
    for p in tl.static_range(8 // W):
        field = tl.load(source + 4 * p, mask=there, other=0).to(tl.int32) >> shift
        out |= (field & ((1 << W) - 1)) << (W * p)
    tl.store(plane + first.to(tl.int64) * N + i, out.to(tl.uint8), mask=there)


@jit
def _bytes(raw, plane, first, blocks, SIZE: tl.constexpr, AT: tl.constexpr, N: tl.constexpr, B: tl.constexpr):
    """The same for bytes that stay as they are."""
    i = tl.arange(0, B * N)
    block = i // N
    there = first + block < blocks
    source = raw + (first + block).to(tl.int64) * SIZE + (AT + i % N)
    tl.store(plane + first.to(tl.int64) * N + i, tl.load(source, mask=there, other=0), mask=there)


@jit
def _sixes(raw, scales, tops, first, blocks, SIZE: tl.constexpr, AT: tl.constexpr, B: tl.constexpr):
    """Eight 6-bit scales and eight minima in 12 bytes: low nibbles to 8 bytes a block, the top two bits to 4."""
    i = tl.arange(0, 4 * B)
    block, b = i // 4, i % 4
    there = first + block < blocks
    source = raw + (first + block).to(tl.int64) * SIZE + (AT + b)
    near = tl.load(source, mask=there, other=0).to(tl.int32)
    far = tl.load(source + 4, mask=there, other=0).to(tl.int32)
    rest = tl.load(source + 8, mask=there, other=0).to(tl.int32)
    at = (first + block).to(tl.int64) * 8 + b
    tl.store(scales + at, ((near & 15) | ((rest & 15) << 4)).to(tl.uint8), mask=there)
    tl.store(scales + at + 4, ((far & 15) | ((rest >> 4) << 4)).to(tl.uint8), mask=there)
    tl.store(tops + first.to(tl.int64) * 4 + i, ((near >> 4) | ((far >> 4) << 4)).to(tl.uint8), mask=there)


@jit
def _piece(raw, plane, tops, first, blocks, SIZE: tl.constexpr, KIND: tl.constexpr, AT: tl.constexpr, N: tl.constexpr,
           W: tl.constexpr, R: tl.constexpr, B: tl.constexpr):  # fmt: skip
    if KIND == _FIELDS:
        _fields(raw, plane, first, blocks, SIZE, AT, N, W, R, B)
    if KIND == _BYTES:
        _bytes(raw, plane, first, blocks, SIZE, AT, N, B)
    if KIND == _SIXES:
        _sixes(raw, plane, tops, first, blocks, SIZE, AT, B)


STARTS = [f"start{i}" for i in range(MOST_PIECES)]


@jit(do_not_specialize=["blocks", "raw_weight", "weight", "tops", *STARTS], do_not_specialize_on_alignment=["raw"])
def pack(raw, planes, blocks, raw_weight, weight, tops, start0, start1, start2, start3, start4, SIZE: tl.constexpr,
         B: tl.constexpr, K0: tl.constexpr, A0: tl.constexpr, N0: tl.constexpr, W0: tl.constexpr, R0: tl.constexpr,
         K1: tl.constexpr, A1: tl.constexpr, N1: tl.constexpr, W1: tl.constexpr, R1: tl.constexpr,
         K2: tl.constexpr, A2: tl.constexpr, N2: tl.constexpr, W2: tl.constexpr, R2: tl.constexpr,
         K3: tl.constexpr, A3: tl.constexpr, N3: tl.constexpr, W3: tl.constexpr, R3: tl.constexpr,
         K4: tl.constexpr, A4: tl.constexpr, N4: tl.constexpr, W4: tl.constexpr, R4: tl.constexpr):  # fmt: skip
    """Program = (B blocks, weight). start0..: where each piece's plane begins in a weight's buffer; tops: that plane's,
    which pieces of 6-bit scales fill as well."""
    first = tl.program_id(0) * B
    raw += tl.program_id(1).to(tl.int64) * raw_weight
    planes += tl.program_id(1).to(tl.int64) * tl.multiple_of(weight, 16)
    tops = tl.multiple_of(tops, 16)
    _piece(raw, planes + tl.multiple_of(start0, 16), planes + tops, first, blocks, SIZE, K0, A0, N0, W0, R0, B)
    _piece(raw, planes + tl.multiple_of(start1, 16), planes + tops, first, blocks, SIZE, K1, A1, N1, W1, R1, B)
    _piece(raw, planes + tl.multiple_of(start2, 16), planes + tops, first, blocks, SIZE, K2, A2, N2, W2, R2, B)
    _piece(raw, planes + tl.multiple_of(start3, 16), planes + tops, first, blocks, SIZE, K3, A3, N3, W3, R3, B)
    _piece(raw, planes + tl.multiple_of(start4, 16), planes + tops, first, blocks, SIZE, K4, A4, N4, W4, R4, B)


def starts_for(format: str, blocks: int) -> list[int]:
    """`pack`'s tops and starts."""
    planes = planes_of(format, blocks)[0]
    names = ["scales" if piece is SIX else piece.plane for piece in pieces_of(format)]
    starts = [planes[name].start for name in names]
    return [planes["tops"].start, *starts, *[0] * (MOST_PIECES - len(starts))]


def blocks_a_program(format: str, blocks: int, interpreted: bool) -> int:
    """A power of two; the interpreter's programs are large, as each costs it milliseconds."""
    widest = max(n for _, _, n, _, _ in pieces_for(format))
    if interpreted:
        return min(256, next_power_of_2(blocks))
    return BYTES_A_PROGRAM // next_power_of_2(widest)
