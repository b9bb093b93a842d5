"""Compile the int8 grouped product, as its launchers would call it, for a Hopper GPU: see `sm90`."""

import json
import sys
from functools import partial

import torch

from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.tiles import WorkList
from moe_lab_kernels.launch.ahead import aim
from moe_lab_kernels.mmq import mmq, wide
from moe_lab_kernels.mmq.operands import MmqRows
from moe_lab_kernels.rows import arithmetic
from moe_lab_kernels.rows.hidden import Gate
from moe_lab_kernels.storage import blocks
from tests.support.sm90 import compiled, facts


def variants():
    """(name, kind, gated, rows a tile, a wide tile or None): each way of taking codes apart, once."""
    for kind, tokens in (("q2_k-d2s6", 64), ("q3_k-d4", 16), ("q5_k-ds4", 16), ("q4_0-ds4", 16), ("q3_k-q8_k", 64)):
        yield f"{kind}-{tokens}", kind, False, tokens, None
    yield "q2_k-q8_k-gated-16", "q2_k-q8_k", True, 16, None
    for kind in ("q2_k-d2s6", "nvfp4-d4"):
        yield f"{kind}-gated-16", kind, True, 16, None
    for kind in ("q2_k-d2s6", "q4_k-ds4", "q6_k-d4", "nvfp4-d4", "q4_k-q8_k", "q3_k-q8_k"):
        format, layout = kind.split("-")
        yield f"wide-{kind}", kind, False, 128, wide.wide_tile(format, layout == "q8_k", 128, "cuda")
    yield "wide-mxfp4-d4-16", "mxfp4-d4", False, 16, wide.wide_tile("mxfp4", False, 16, "cuda")


def call(kind: str, gated: bool, tokens: int, tile: wide.WideTile | None = None) -> None:
    """64 pairs times weights [2, 256, 2048]."""
    format, name = kind.split("-")
    layout, block, kd = arithmetic.LAYOUTS[name], blocks.BLOCKS[format], 2048
    codes = torch.zeros(64, kd, dtype=torch.int8)
    scale = torch.zeros(64, kd // layout.block, dtype=layout.scale_storage)
    total = None
    if layout.adds != "none":
        total = torch.zeros(64, kd // layout.sum_group // 8 * layout.sums_kept, dtype=layout.sum_storage)
    rows = MmqRows(codes, scale, total, name)
    w = Weight(torch.zeros(2, 256, kd // block.values * block.bytes, dtype=torch.uint8), format, kd)
    row, work = torch.zeros(64, dtype=torch.int32), WorkList(torch.zeros(4, 3, dtype=torch.int32), tokens)
    out = torch.zeros(64, 256, dtype=torch.bfloat16)
    if gated:
        mmq.mmq_gate_up(rows, row, w, w._replace(data=w.data.clone()), work, out, how=Gate(limit=7.0))
    else:
        mmq.mmq_product(rows, row, w, work, out, to=Scatter(row, row, 1), tile=tile)


def main() -> None:
    """Prints variant -> facts of the product, and under `sides` or `open` those of the launch before it."""
    aim()
    out = {}
    for name, *how in variants():
        if not sys.argv[1:] or name in sys.argv[1:]:
            *_, before, product = compiled(partial(call, *how))
            out[name], out[f"{'sides' if how[-1] is None else 'open'}-{name}"] = facts(product), facts(before)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
