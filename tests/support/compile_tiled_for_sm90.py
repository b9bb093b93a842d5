"""Compile the GEMV on tiles, as its launchers would call it, for a Hopper GPU: see `sm90`."""

import json
import re

import torch

from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.tiled import mlp as tiled_mlp
from moe_lab_kernels.gemv.tiled import sum_rows, tiled
from moe_lab_kernels.launch.ahead import aim
from moe_lab_kernels.storage.row_tiles import TILE_FORMATS, tile_bytes
from tests.support.sm90 import compiled, facts

D, F = 2048, 768


def tiles(format: str, n: int, kd: int) -> torch.Tensor:
    return torch.zeros(2, n // 16, tile_bytes(format, kd), dtype=torch.uint8)


def product(format: str, max_rows: int) -> None:
    rows, i = sum_rows.sum_rows((8, D), torch.device("cpu")), torch.zeros(8, dtype=torch.int32)
    w, chunks = tiles(format, F, D), torch.zeros(8, 3, dtype=torch.int32)
    out = torch.zeros(8, F, dtype=torch.bfloat16)
    tiled.gemv_tiled(rows, i, w, chunks, format, out, w2=w, out2=out, max_rows=max_rows)


def mlp(format: str, down: str, max_rows: int) -> None:
    x, i = torch.zeros(8, D, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int32)
    weights = tiles(format, F, D), tiles(format, F, D), tiles(down, D, F)
    chunks = torch.zeros(8, 3, dtype=torch.int32)
    tiled_mlp.gemv_tiled_mlp(x, i, Experts(*weights, format, down), chunks, x.clone(), i, max_rows=max_rows)


def variants():
    """(name, call): every format's step for one row and for two, and the one grid of a layer."""
    for format in TILE_FORMATS:
        yield f"product-{format}", lambda format=format: product(format, 8)
    yield "mlp-q2_k+q3_k-rows1", lambda: mlp("q2_k", "q3_k", 1)
    yield "mlp-q2_k+q3_k-rows8", lambda: mlp("q2_k", "q3_k", 8)


def lanes_of_products(ttgir: str) -> list[str]:
    """threadsPerWarp of every tensor that an `mma` instruction is laid over."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{.*?threadsPerWarp = \[([\d, ]+)\]", ttgir, re.M))
    found = set()
    for line in ttgir.splitlines():
        if "mma.sync" in line:
            found |= {layouts.get(name, name) for name in re.findall(r"(#\w+)>", line)}
    return sorted(found)


def main() -> None:
    """Prints variant -> facts of the products; of a layer's two launches, the second's."""
    aim()
    out = {}
    for name, call in variants():
        last = compiled(call)[-1]
        wide = len(re.findall(r"ld\.global\.nc\.v4\.b32", last.asm["ptx"]))
        out[name] = {**facts(last), "lanes": lanes_of_products(last.asm["ttgir"]), "wide_loads": wide}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
