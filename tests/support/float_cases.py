"""Inputs for the float GEMV's tests, the same for the interpreter and the GPU: every format, chunks of every size."""

from functools import cache

import torch

from moe_lab.arms.grouped import weight_of
from moe_lab.formats import quantize
from moe_lab_kernels.gemv_float.operands import Pairs, Rows, served
from moe_lab_kernels.gemv_float.steps import WALKS
from moe_lab_kernels.gemv_float.tiles import FloatTile
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.rows import quantize_fp8
from moe_lab_kernels.storage.blocks import BLOCKS
from tests.support.kernel_cases import Guarded
from tests.support.raw_blocks import plain_rows

WIDTHS = (256, 704, 2304, 2880)
# rows of the chunks that meet each width: together 1 to 9, a chunk of 9 being one of 8 and one of 1
CHUNKS = {256: (2, 3, 8, 1), 704: (1, 4), 2304: (5, 6), 2880: (7, 8)}
# one format for each way of decoding; every format meets the width 256
DECODERS = ("bf16", "fp8_block", "mxfp4_oss", "nvfp4_ct", "int4_g32", "int8_g64", "q3_k", "q8_0")


@cache
def weight(format: str, n: int, kd: int, slots: int = 2, seed: int = 0) -> Weight:
    """Genuinely quantised Gaussian weights; formats that are only decoded get random finite blocks."""
    draw = torch.Generator().manual_seed(seed)
    if format in BLOCKS and format in ("q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs"):
        raw = plain_rows(format, slots * n, kd // BLOCKS[format].values, seed)
        return Weight(raw.view(slots, n, -1), format, kd)
    return weight_of(quantize(torch.randn(slots, n, kd, generator=draw), format))


def cases(widths: tuple[int, ...] = WIDTHS) -> list[tuple[str, int]]:
    """(format, Kd) that go together: all formats at 256, `DECODERS` at the other widths."""
    return [(f, kd) for kd in widths for f in WALKS if served(f, kd) is None and (kd == 256 or f in DECODERS)]


def pairs_of(sizes: tuple[int, ...], rows: int, device: str = "cpu", slots: int = 2) -> Pairs:
    """Chunks of these sizes one after another, slots in turn, between entries that mean nothing; rows shuffled."""
    table, first = [[-1, 0, 0], [slots, 0, 3], [0, 0, 0]], 0
    for i, n in enumerate(sizes):
        table.append([i % slots, first, n])
        first += n
    row_of = torch.arange(first) * 7 % rows
    return Pairs(row_of.int().to(device), torch.tensor(table, dtype=torch.int32, device=device))


def rows_of(count: int, kd: int, dtype: torch.dtype, device: str = "cpu") -> Rows:
    """Gaussian activations; float8_e4m3fn makes quantised ones."""
    x = torch.randn(count, kd, generator=torch.Generator().manual_seed(kd)).to(device)
    if dtype == torch.float8_e4m3fn:
        return Rows(*quantize_fp8.quantize_fp8_ref(x))
    return Rows(x.to(dtype))


def on(w: Weight, device: str) -> Weight:
    """The weight on a device."""
    return w._replace(**{name: t.to(device) for name, t in w._asdict().items() if isinstance(t, torch.Tensor)})


def product(op, rows: Rows, pairs: Pairs, w: Weight, dtype: torch.dtype = torch.float32, **options) -> Guarded:
    """gemv_float or its reference into a guarded, poisoned output."""
    out = Guarded((len(pairs.row_of), w.data.shape[1]), dtype, str(w.data.device))
    op(rows, pairs, w, out.view, **options)
    return out


def hidden(op, rows: Rows, pairs: Pairs, gate: Weight, up: Weight, dtype: torch.dtype, **options) -> Guarded:
    """gemv_float_gated or its reference likewise."""
    out = Guarded((len(pairs.row_of), gate.data.shape[1]), dtype, str(gate.data.device))
    op(rows, pairs, gate, up, out.view, **options)
    return out


TILES = [FloatTile(2, 2), FloatTile(4, 8, 4), FloatTile(8, 4, 1), FloatTile(1, 1)]
