"""The decode kernels on tiles, on a GPU: bits of their reference, alone and in chunks, in one grid, in graphs."""

from dataclasses import replace

import pytest
import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.workloads import LayerShape
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.gemv.tiled import sum_rows, tiled
from moe_lab_kernels.gemv.tiled.tiles import TileCut
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.row_tiles import TILE_FORMATS, to_tiles
from tests.support.kernel_cases import nmse, same_bits, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
CHUNKS = [[1, 0, 8], [0, 8, 1], [2, 9, 3], [1, 12, 2]]
QWEN = LayerShape("test", 2048, 768, 128, 8)


def product(op, rows, w, format: str, n: int, chunks=CHUNKS, **more) -> torch.Tensor:
    out = torch.full((14, n), float("nan"), device="cuda")
    row_of = (torch.arange(14, device="cuda") * 5 % 9).int()
    return op(rows, row_of, w, torch.tensor(chunks, dtype=torch.int32, device="cuda"), format, out, **more)


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("kd", [256, 704, 768, 2304, 2880, 7168], ids="K{}".format)
def test_bits_of_the_reference_whatever_the_chunk_and_the_cut(format: str, kd: int) -> None:
    if kd % BLOCKS[format].values:
        pytest.skip(f"{kd} is not whole blocks of {format}")
    n, raw = 704, weights(format, 3, 704, kd).cuda()
    draw = torch.Generator().manual_seed(5)
    x = (torch.randn(9, kd, generator=draw) * torch.exp(torch.randn(9, 1, generator=draw))).bfloat16().cuda()
    rows, tiles = sum_rows.quantize_sums(x), to_tiles(raw, format, kd)
    assert all(same_bits(a, b) for a, b in zip(rows, sum_rows.quantize_sums_ref(x), strict=True))
    want = product(tiled.gemv_tiled_ref, rows, tiles, format, n)
    assert want.isfinite().all()
    alone = [[s, first + i, 1] for s, first, count in CHUNKS for i in range(count)]
    for repeat in range(3):
        assert same_bits(product(tiled.gemv_tiled, rows, tiles, format, n), want), repeat
        assert same_bits(product(tiled.gemv_tiled, rows, tiles, format, n, alone, max_rows=1), want), repeat
    if kd == 7168:
        for cut in (TileCut(1, 1, shared=1), TileCut(4, 4, shared=4)):
            assert same_bits(product(tiled.gemv_tiled, rows, tiles, format, n, cut=cut), want), cut
        assert nmse(want.cpu(), product(gemv.gemv_ref, rows[:3], raw, format, n).cpu()) <= tol("gemv/emulation")


@pytest.mark.parametrize("pair", ["q2_k+q3_k", "q4_k+q6_k", "q5_k+q5_k", "q8_0+q8_0", "q4_0+q4_0"])
@pytest.mark.parametrize("tokens", [1, 8])
def test_layers_have_the_bits_of_their_products(pair: str, tokens: int) -> None:
    shape = LayerShape("test", 2048, 768, 16, 6)
    w = gl.with_tiles(gl.make_weights(shape, 3, "cuda", *pair.split("+")), shape)
    assert gl.check_form("tiled", shape, w, tokens, 1, "cuda") == []


@pytest.mark.parametrize("tokens", [1, 8])
def test_programs_that_wait_for_each_other_give_the_same_bits_100_times(tokens: int) -> None:
    """More programs than the GPU holds at once, as in `test_gemv_gpu`, eager and in a graph."""
    w = gl.with_tiles(gl.make_weights(QWEN, 3, "cuda"), QWEN)
    draw = torch.Generator().manual_seed(2)
    ids = torch.rand(tokens, QWEN.experts, generator=draw).topk(QWEN.top_k).indices.int()
    c = gl.make_call(QWEN, ids, torch.rand(tokens, QWEN.top_k, generator=draw), "cuda")
    c = replace(c, max_rows=1 if tokens == 1 else 8)
    want = gl.layer_tiled(c, w).clone()
    assert gl.alone(c, w, gl.layer_tiled, QWEN)
    for repeat in range(50):
        c.poison()
        assert torch.equal(gl.layer_tiled(c, w), want), repeat
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gl.layer_tiled(c, w) for _ in range(2)]
    for _ in range(50):
        c.poison()
        graph.replay()
        assert all(torch.equal(out, want) for out in outs)
