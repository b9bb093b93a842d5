"""The decode kernels on a GPU: every format has its reference's bits, in both orders and in every fused form."""

import pytest
import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.workloads import LayerShape
from moe_lab.tolerances import tol
from moe_lab_kernels import gemv, lane_rows, quantize_rows
from moe_lab_kernels.blocks import BLOCKS, GEMV_FORMATS
from moe_lab_kernels.tiles import CombineTile, GatedTile
from tests.support.kernel_cases import same_bits, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"),
]
CHUNKS = [[1, 0, 8], [0, 8, 1], [2, 9, 3], [1, 12, 2]]


def rows_of(kd: int, rows: int = 9) -> torch.Tensor:
    draw = torch.Generator().manual_seed(5)
    return (torch.randn(rows, kd, generator=draw) * torch.exp(torch.randn(rows, 1, generator=draw))).bfloat16().cuda()


def run(op, rows, w, format, **options) -> torch.Tensor:
    out = torch.full((14, w.shape[1]), float("nan"), device="cuda")
    row_of = (torch.arange(14, device="cuda") * 5 % 9).int()
    return op(rows, row_of, w, torch.tensor(CHUNKS, dtype=torch.int32, device="cuda"), format, out, **options)


@pytest.mark.parametrize("format", GEMV_FORMATS)
@pytest.mark.parametrize("kd", [256, 704, 768, 2304, 2880, 7168], ids="K{}".format)
@pytest.mark.parametrize("n", [1, 100, 704], ids="N{}".format)
def test_gemv_has_the_bits_of_its_reference_in_both_orders(format: str, kd: int, n: int) -> None:
    if kd % BLOCKS[format].values:
        pytest.skip(f"{kd} is not whole blocks of {format}")
    w, x = weights(format, 3, n, kd).cuda(), rows_of(kd)
    plain = quantize_rows.quantize_q8_1(x)
    want = run(gemv.gemv_ref, plain, w, format)
    assert want.isfinite().all()
    ordered = lane_rows.quantize_lanes(x, format)
    assert all(same_bits(a, b) for a, b in zip(lane_rows.to_plain(ordered), plain, strict=True))
    for repeat in range(3):
        assert same_bits(run(gemv.gemv, plain, w, format), want), repeat
        assert same_bits(run(gemv.gemv, ordered, w, format), want), repeat


@pytest.mark.parametrize("pdl", [False, True], ids=["", "early-start"])
@pytest.mark.parametrize(
    "pair", ["q2_k+q3_k", "q4_k+q6_k", "q5_k+q5_k", "q8_0+q8_0", "q4_0+q4_0", "mxfp4+mxfp4", "nvfp4+nvfp4"]
)
@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_layers_have_the_same_bits_in_every_form(pair: str, tokens: int, pdl: bool) -> None:
    shape = LayerShape("test", 768, 256, 16, 6)
    w = gl.make_weights(shape, 3, "cuda", *pair.split("+"))
    for seed in range(3):
        nmse, wrong = gl.check(shape, w, tokens, seed, "cuda")
        assert not wrong
        assert nmse <= tol("gemv/layer") or "q4_0" in pair  # its raw sums cost ten times the others' error
    if pdl:
        ids = torch.rand(tokens, 16, generator=torch.Generator().manual_seed(1)).topk(6).indices.int()
        c = gl.make_call(shape, ids, torch.rand(tokens, 6), "cuda", w.down_format)
        first = gl.layer(c, w)
        for _ in range(100):
            c.poison()
            assert torch.equal(gl.layer_fused(c, w, pdl=True), first)


@pytest.mark.parametrize("tokens", [1, 8])
def test_no_tile_shows(tokens: int) -> None:
    shape = LayerShape("test", 2304, 512, 16, 6)
    w = gl.make_weights(shape, 3, "cuda")
    ids = torch.rand(tokens, 16, generator=torch.Generator().manual_seed(1)).topk(6).indices.int()
    c = gl.make_call(shape, ids, torch.rand(tokens, 6), "cuda")
    want = gl.layer(c, w)
    for gate in (GatedTile(1, 8, 1), GatedTile(1, 16, 2), GatedTile(2, 8, 4)):
        for sums in (CombineTile(4), CombineTile(16, together=1), CombineTile(8, together=2)):
            c.poison()
            gl.gated(c, w, gl.quantised(c, w), gate)
            assert torch.equal(gl.down_and_sum(c, w, sums), want), (gate, sums)


def test_a_graph_replays_the_eager_bits() -> None:
    shape = LayerShape("test", 768, 256, 16, 6)
    w = gl.make_weights(shape, 3, "cuda")
    ids = torch.rand(1, 16, generator=torch.Generator().manual_seed(1)).topk(6).indices.int()
    c = gl.make_call(shape, ids, torch.rand(1, 6), "cuda")
    for pdl in (False, True):
        want, graph = gl.layer_fused(c, w, pdl=pdl).clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gl.layer_fused(c, w, pdl=pdl)
        for _ in range(100):
            c.poison()
            graph.replay()
            assert torch.equal(out, want)
