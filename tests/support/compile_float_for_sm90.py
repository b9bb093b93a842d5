"""Compile the float GEMV, as its launchers would call it, for a Hopper GPU: see `compile_for_sm90`."""

import json
import re
import sys

import torch
from triton.runtime import driver

from moe_lab_kernels import backend
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float.operands import Gate, Pairs, Rows
from tests.support.compile_for_sm90 import Hopper, facts
from tests.support.float_cases import weight

ONE = ("bf16", "fp8_block", "mxfp4_oss", "nvfp4_modelopt", "int4_g64")
MANY = ("bf16", "mxfp4_oss", "int8_g64")


def variants():
    """(name, format, gated, most rows of a chunk)."""
    for format in ONE:
        yield f"{format}-gated-rows1", format, True, 1
    yield "bf16-down-rows1", "bf16", False, 1
    yield "mxfp4_oss-down-rows8", "mxfp4_oss", False, 8
    for format in MANY:
        yield f"{format}-gated-rows8", format, True, 8


def call(format: str, gated: bool, rows: int) -> None:
    """Eight rows times weights [2, 64, 2048]."""
    w = weight(format, 64, 2048)
    index, x = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 2048, dtype=torch.bfloat16)
    pairs, out = (
        Pairs(index, torch.zeros(3, 3, dtype=torch.int32), rows, index),
        torch.zeros(8, 64, dtype=torch.bfloat16),
    )
    if gated:
        gf.gemv_float_gated(Rows(x), pairs, w, w, out, how=Gate(limit=7.0, limit_mode="oai"), early="launch")
    else:
        gf.gemv_float(Rows(x), pairs, w, out, early="weights")


def main() -> None:
    driver.set_active(Hopper())
    compiled = []

    def compile_only(kernel, grid, *args, device, **meta):
        compiled.append(kernel.warmup(*args, grid=grid, enable_fp_fusion=False, **meta))

    backend.launch, backend.serve = compile_only, lambda op, *_, **tensors: "cuda"
    backend.has_early_start = lambda device: True
    out = {}
    for name, format, gated, rows in variants():
        call(format, gated, rows)
        ptx = compiled[-1].asm["ptx"]
        out[name] = facts(compiled[-1]) | {
            "loads": sorted(set(re.findall(r"\bld\.global\.([\w.:]+)", ptx))),
            "shared": len(re.findall(r"\bld\.shared", ptx)),
            "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
        }
    print(json.dumps(out))


if __name__ == "__main__":
    assert not backend.INTERPRETED, "unset TRITON_INTERPRET to compile"
    main()
    sys.exit(0)
