"""Compile the float GEMV, as its launchers would call it, for a Hopper GPU: see `sm90`.

python tests/support/compile_float_for_sm90.py           what the tests ask for, as JSON
python tests/support/compile_float_for_sm90.py --all     a table of every format in every tile that is used
"""

import json
import re
import sys
from collections.abc import Iterator
from functools import partial

import torch

from moe_lab_kernels import backend
from moe_lab_kernels.gemv_float import gemv_float as gf
from moe_lab_kernels.gemv_float import tensor, tiles
from moe_lab_kernels.gemv_float.operands import Gate, Pairs, Rows
from moe_lab_kernels.gemv_float.steps import WALKS
from moe_lab_kernels.grouped.operands import Weight
from moe_lab_kernels.launch.ahead import aim
from moe_lab_kernels.slots.pointer_table import PointerTable
from tests.support.compile_tiled_for_sm90 import lanes_of_products
from tests.support.float_cases import weight
from tests.support.sm90 import compiled as machine_code
from tests.support.sm90 import facts

# (gated, most rows of a chunk, tile)
USED = {
    "gated-rows1": (True, 1, tiles.GATE_ONE),
    "down-rows1": (False, 1, tiles.DOWN_ONE),
    "down-rows1-tall": (False, 1, tiles.DOWN_ONE_TALL),
    "gated-rows8": (True, 8, tiles.GATE_MANY),
    "down-rows8": (False, 8, tiles.DOWN_MANY),
    "down-rows8-full": (False, 8, tiles.DOWN_MANY_FULL),
}
# (most rows of a chunk, Kd) on the tensor cores: whole steps for all parts or not, four parts or eight
TENSOR = {"tensor8": (8, 2048), "tensor16": (16, 2048), "tensor8-odd": (8, 704), "tensor16-long": (16, 8192)}
# those nearest to their tile's registers, and one of each way of decoding
TESTED = {
    "bf16": ("gated-rows1", "down-rows1"),
    "fp8_block": ("gated-rows8",),
    "mxfp8": ("down-rows8-full",),
    "mxfp4_oss": ("gated-rows1", "down-rows8", "gated-rows8"),
    "nvfp4_modelopt": ("gated-rows1",),
    "int4_g64": ("down-rows1-tall", "gated-rows8", "gated-rows1-table", "tensor8", "tensor16-long"),
    "int4_g32": ("tensor8-odd",),
    "int4_g128": ("tensor16",),
    "int8_g64": ("down-rows8-full",),
}


def by_address(w: Weight) -> Weight:
    """The slots in a table."""
    parts = {name: getattr(w, name) for name in ("data", "scales", "second")}
    return w._replace(**{name: t if t is None or t.ndim != 3 else PointerTable.of([t]) for name, t in parts.items()})


def call(format: str, form: str) -> None:
    """Eight rows times weights [2, 64, 2048]."""
    if form in TENSOR:
        on_tensor_cores(format, *TENSOR[form])
        return
    w = weight(format, 64, 2048)
    if form.endswith("-table"):
        w = by_address(w)
    gated, most, tile = USED[form.removesuffix("-table")]
    index, x = torch.zeros(8, dtype=torch.int32), torch.zeros(8, 2048, dtype=torch.bfloat16)
    pairs = Pairs(index, torch.zeros(3, 3, dtype=torch.int32), most, index)
    out = torch.zeros(8, 64, dtype=torch.bfloat16)
    if gated:
        how = Gate(limit=7.0, limit_mode="oai")
        gf.gemv_float_gated(Rows(x), pairs, w, w, out, how=how, early="launch", tile=tile)
    else:
        gf.gemv_float(Rows(x), pairs, w, out, early="weights", tile=tile)


def on_tensor_cores(format: str, most: int, kd: int) -> None:
    """Sixteen rows; scales in bf16, by whole words where Kd allows."""
    w = weight(format, 64, kd)
    assert w.scales is not None
    assert isinstance(w.second, torch.Tensor)
    w = w._replace(scales=w.scales.bfloat16(), second=w.second.bfloat16())
    pairs = Pairs(torch.zeros(16, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32), most)
    tensor.gemv_tensor(torch.zeros(16, kd, dtype=torch.bfloat16), pairs, w, torch.zeros(16, 64))


def compiled(variants: list[tuple[str, str]]) -> Iterator[tuple[str, dict]]:
    """Each variant's name and facts."""
    aim()
    for format, form in variants:
        made = machine_code(partial(call, format, form))
        ptx = made[-1].asm["ptx"]
        yield (
            f"{format}-{form}",
            facts(made[-1])
            | {
                "loads": sorted(set(re.findall(r"\bld\.global\.([\w.:]+)", ptx))),
                "shared": len(re.findall(r"\bld\.shared", ptx)),
                "waits": len(re.findall(r"griddepcontrol\.wait", ptx)),
                "lanes": lanes_of_products(made[-1].asm["ttgir"]),
                "registers": int(re.search(r"\.maxnreg (\d+)", ptx)[1]),  # pyright: ignore[reportOptionalSubscript]
            },
        )


def main() -> None:
    if "--all" in sys.argv:
        tall = (tiles.DOWN_ONE_TALL, tiles.DOWN_MANY)
        used = [(f, form) for f in WALKS for form in USED if not (f in tiles.NO_TALL and USED[form][2] in tall)]
        used += [(f"int4_g{g}", form) for g in (32, 64, 128) for form in TENSOR if g < 128 or form != "tensor8-odd"]
        for name, known in compiled(used):
            print(
                f"{name:32s} cap {known['registers']:3d} stack {known['stack']:4d} shared {known['shared']}", flush=True
            )
        return
    print(json.dumps(dict(compiled([(format, form) for format, forms in TESTED.items() for form in forms]))))


if __name__ == "__main__":
    assert not backend.INTERPRETED, "unset TRITON_INTERPRET to compile"
    main()
    sys.exit(0)
