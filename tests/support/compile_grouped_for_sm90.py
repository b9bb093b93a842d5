"""Compile the grouped GEMM, as its launchers would call it, for a Hopper GPU: see `sm90`."""

import json
import sys
from functools import partial

import torch

from moe_lab_kernels.grouped import grouped_fp8, grouped_gemm
from moe_lab_kernels.grouped import tiles as grouped_gemm_tiles
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.launch.ahead import aim
from moe_lab_kernels.rows.hidden import Gate
from tests.support.grouped_cases import weight
from tests.support.sm90 import compiled, facts

DECODED = ("q3_k", "q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "mxfp4", "nvfp4", "fp8_block", "mxfp8",
           "nvfp4_modelopt", "mxfp4_oss", "int4_g64")  # fmt: skip


def variants():
    """(name, format, gated, rows a tile)."""
    for tokens in (16, 64, 128):
        yield f"bf16-gated-{tokens}", "bf16", True, tokens
        yield f"bf16-plain-{tokens}", "bf16", False, tokens
    yield "q2_k-gated-16", "q2_k", True, 16
    yield "q2_k-gated-128", "q2_k", True, 128
    for tokens in (16, 64):
        yield f"fp8-gated-{tokens}", "fp8", True, tokens
        yield f"fp8-plain-{tokens}", "fp8", False, tokens
    for format in DECODED:
        yield f"{format}-plain-16", format, False, 16


def call(format: str, gated: bool, tokens: int) -> None:
    """64 pairs times weights [2, 128, 2048]; "fp8" is fp8 on both sides, hidden rows quantised."""
    if format == "fp8":
        call_fp8(gated, tokens)
        return
    w = weight(format, 2, 128, 2048, 1)
    # poison moves a tensor off its allocation's start; an allocator's own tensors start at multiples of 16
    w = w._replace(data=w.data.clone())
    x, out = torch.zeros(64, 2048, dtype=torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16)
    row, work = (
        torch.zeros(64, dtype=torch.int32),
        grouped_gemm_tiles.WorkList(torch.zeros(4, 3, dtype=torch.int32), tokens),
    )
    if gated:
        grouped_gemm.grouped_gate_up(x, row, w, w._replace(data=w.data.clone()), work, out, how=Gate(limit=7.0))
    else:
        grouped_gemm.grouped_product(x, None, w, work, out, to=Scatter(row, row, 1))


def call_fp8(gated: bool, tokens: int) -> None:
    def rows(values: int) -> grouped_fp8.Fp8Rows:
        codes = torch.zeros(64, values, dtype=torch.uint8).view(torch.float8_e4m3fn)
        return grouped_fp8.Fp8Rows(codes, torch.zeros(64, values // 128))

    data = torch.zeros(2, 128, 2048, dtype=torch.uint8)
    w = Weight(data, "fp8_block", 2048, torch.zeros(2, 1, 16))
    row = torch.zeros(64, dtype=torch.int32)
    work = grouped_gemm_tiles.WorkList(torch.zeros(4, 3, dtype=torch.int32), tokens)
    if gated:
        grouped_fp8.fp8_gate_up(rows(2048), row, w, w._replace(data=data.clone()), work, rows(128), how=Gate(limit=7.0))
    else:
        out = torch.zeros(64, 128, dtype=torch.bfloat16)
        grouped_fp8.fp8_product(rows(2048), None, w, work, out, to=Scatter(row, row, 1))


def main() -> None:
    """Prints variant -> facts."""
    aim()
    out = {}
    for name, *how in variants():
        if not sys.argv[1:] or name in sys.argv[1:]:
            out[name] = facts(compiled(partial(call, *how))[-1])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
