"""The decode kernels on a GPU: every format has its reference's bits, in both orders and in every fused form."""

from dataclasses import replace

import pytest
import torch

from moe_lab.bench import gemv_layer as gl
from moe_lab.bench.workloads import LayerShape
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv, lane_rows
from moe_lab_kernels.gemv.tiles import FOUR_SHORT, FOUR_WIDE, Tile
from moe_lab_kernels.rows import quantize_rows
from moe_lab_kernels.storage.blocks import BLOCKS, GEMV_FORMATS
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


PAIRS = ["q2_k+q3_k", "q4_k+q6_k", "q5_k+q5_k", "q8_0+q8_0", "q4_0+q4_0", "mxfp4+mxfp4", "nvfp4+nvfp4"]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("tokens", [1, 8])
def test_layers_have_the_same_bits_in_both_forms(pair: str, tokens: int) -> None:
    """One input a case: another largest chunk is another kernel, and compiling one takes seconds."""
    shape = LayerShape("test", 768, 256, 16, 6)
    w = gl.make_weights(shape, 3, "cuda", *pair.split("+"))
    nmse, wrong = gl.check(shape, w, tokens, 1, "cuda")
    assert not wrong
    assert nmse <= tol("gemv/layer") or "q4_0" in pair  # its raw sums cost ten times the others' error
    for seed in range(100):
        c = drawn(shape, tokens, seed)
        want = gl.layer_apart(c, w)
        c.poison()
        assert torch.equal(gl.layer(c, w), want), seed


def drawn(shape: LayerShape, tokens: int, seed: int = 1) -> gl.Call:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, shape.experts, generator=draw).topk(shape.top_k).indices.int()
    c = gl.make_call(shape, ids, torch.rand(tokens, shape.top_k, generator=draw), "cuda")
    return replace(c, max_rows=1 if tokens == 1 else 8)  # two kernels to compile, not four


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_programs_that_wait_for_each_other_give_the_same_bits_100_times(tokens: int) -> None:
    """More programs than the GPU holds at once, so those of down start while chunks behind theirs are being made: where
    scales of two chunks share a line of the L1 cache (F / 32 = 24 halves a row), a stale one would show."""
    shape = LayerShape("test", 2048, 768, 128, 8)
    w = gl.make_weights(shape, 3, "cuda")
    for seed in range(4):
        c = drawn(shape, tokens, seed)
        want = gl.layer_apart(c, w)
        y = c.y.clone()
        for repeat in range(25):
            c.poison()
            assert torch.equal(gl.layer(c, w), want), (seed, repeat)
            assert torch.equal(c.y, y), (seed, repeat)


@pytest.mark.parametrize(
    "tiles",
    [(Tile(16, sums=4, registers=96, shared=2),) * 2, (Tile(4, sums=4, shared=1), Tile(32, sums=8, shared=2))],
    ids=["16-rows", "4-and-32-rows"],
)
def test_no_tile_shows(tiles: tuple[Tile, Tile]) -> None:
    shape = LayerShape("test", 2048, 768, 128, 8)
    w = gl.make_weights(shape, 3, "cuda")
    for tokens in (4, 8):
        c = drawn(shape, tokens)
        want = gl.layer_apart(c, w)
        for repeat in range(25):
            c.poison()
            assert torch.equal(gl.layer(c, w, *tiles), want), (tokens, repeat)


@pytest.mark.parametrize("pair", ["mxfp4+mxfp4", "q4_k+q4_k"])
@pytest.mark.parametrize("tile", [FOUR_SHORT, FOUR_WIDE, Tile(64, warps=8, sums=64, registers=128, shared=2)], ids=str)
def test_programs_of_several_warps_have_the_bits_of_one(pair: str, tile: Tile) -> None:
    """Each warp folds its own rows. Planes of these formats have raw blocks' bits."""
    shape = LayerShape("test", 2304 if "mx" in pair else 2048, 768, 32, 6)
    w = gl.with_planes(gl.make_weights(shape, 3, "cuda", *pair.split("+")), shape)
    for tokens in (1, 4, 8):
        c = drawn(shape, tokens)
        want = gl.layer_apart(c, w)
        for repeat in range(25):
            c.poison()
            assert torch.equal(gl.layer_planar(c, w, tile, tile), want), (tokens, repeat)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_graph_replays_the_eager_bits(tokens: int) -> None:
    shape = LayerShape("test", 768, 256, 16, 6)
    w, c = gl.make_weights(shape, 3, "cuda"), drawn(shape, tokens)
    want, graph = gl.layer_apart(c, w), torch.cuda.CUDAGraph()
    gl.layer(c, w)
    with torch.cuda.graph(graph):
        outs = [gl.layer(c, w) for _ in range(4)]
    for _ in range(100):
        c.poison()
        graph.replay()
        assert all(torch.equal(out, want) for out in outs)


NANS = ["x", "an infinity in x", "codes and scales of gate", "codes and scales of down"]


@pytest.mark.parametrize("form", ["together", "planar", "tiled"])
@pytest.mark.parametrize("where", NANS)
def test_no_value_is_taken_for_one_that_is_not_there(form: str, where: str) -> None:
    """All bits set is every format's NaN and the mark of a product on its way: programs that wait for it would never
    end."""
    shape = LayerShape("test", 2048, 768, 16, 6)
    w, c = gl.make_weights(shape, 3, "cuda"), drawn(shape, 2)
    if where == "x":
        c.x[1].view(torch.int16).fill_(-1)
    elif where.endswith("x"):
        c.x[1, 7] = float("inf")
    else:
        (w.gate if where.endswith("gate") else w.down)[int(c.ids[1, 0])] = 0xFF
    w = gl.with_tiles(gl.with_planes(w, shape), shape)
    out = gl.LAYERS[form](c, w)
    assert out[1].isnan().all()
    assert int(c.ids[1, 0]) in c.ids[0].tolist() or out[0].isfinite().all()


def test_two_streams_at_once_do_not_meet() -> None:
    """Two launches with programs that wait, side by side on one GPU: both end, each with its own bits."""
    shape = LayerShape("test", 2048, 768, 128, 8)
    w, calls = gl.make_weights(shape, 3, "cuda"), [drawn(shape, 8, seed) for seed in range(2)]
    wants = [gl.layer_apart(c, w) for c in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = []
        for c, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(gl.layer(c, w))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True))
