"""Weights decoded once for many rows: slots in 16 bits in bounded scratch memory, which the GEMM then reads as floats.

A decode step in the GEMM is taken again by every tile of tokens. From about a hundred rows an expert on it is cheaper
to write each weight once (2 bytes, read back from memory) than to make it twice. The values are those that the register
path multiplies, bit for bit, and the floats' kernel adds in the same order, so where a weight was decoded does not
show. Slots go through the scratch memory in waves; a wave's launches take the whole work list, of which tiles of
other slots end at once.
"""

from collections.abc import Iterator, Sequence

import torch

from moe_lab._types import Tensor
from moe_lab_kernels.dequantize.dequantize import dequantize
from moe_lab_kernels.dequantize.planar import dequantize_planar
from moe_lab_kernels.dequantize.scaled import dequantize_scaled
from moe_lab_kernels.grouped.operands import DENSE, Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.storage.blocks import BLOCKS

FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def can_decode(w: Weight) -> bool:
    """Whether runs of slots can be decoded at once: a quantised format whose raw blocks lie without gaps, or planes,
    which nothing else here multiplies."""
    return w.layout == "planar" or (w.format not in DENSE and (w.format not in BLOCKS or w.data.is_contiguous()))


def slots_a_wave(weights: Sequence[Weight], most_bytes: int) -> int:
    """Slots of all these matrices that fit into `most_bytes` of 16-bit values, spread evenly over the waves."""
    slots = len(weights[0].data)
    fit = max(1, most_bytes // max(1, sum(2 * w.rows * w.kd for w in weights)))
    return -(-slots // -(-slots // fit)) if slots else 0


def scratch_values(w: Weight, slots: int) -> int:
    """Values of that many slots."""
    return slots * w.rows * w.kd


def decode_slots(w: Weight, first: int, slots: int, scratch: Tensor) -> Weight:
    """Slots first .. first + slots - 1 (fewer at the end) in the dtype of `scratch` [values], which holds them."""
    data = w.data[first : first + slots]
    n = w.rows
    out = scratch[: scratch_values(w, len(data))].view(len(data), n, w.kd)
    if w.layout == "planar":
        dequantize_planar(data[:, 0], w.format, n, w.kd, scratch.dtype, out=out)
    elif w.format in BLOCKS:
        dequantize(data, w.format, scratch.dtype, out=out)
    else:
        scales, second = (None if t is None else t[first : first + slots] for t in (w.scales, w.second))
        assert scales is not None
        dequantize_scaled(data, scales, w.format, w.kd, second=second, out_dtype=scratch.dtype, out=out)
    return Weight(out, FORMATS[scratch.dtype], w.kd)


def waves(work: WorkList, slots: int, wave: int) -> Iterator[tuple[int, WorkList]]:
    """(first slot, the work list with slots counted from there) of each wave; others' slots lie outside of it. A tile
    keeps its expert."""
    expert = work.tiles[:, 0] if work.expert is None else work.expert
    for first in range(0, slots, wave):
        moved = work.tiles.clone()
        moved[:, 0].sub_(first)
        yield first, WorkList(moved, work.tokens, expert)
