"""Weights in tiles of 16 rows: the same bytes, and products with their reference's bits, whatever the chunk and cut."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab.tolerances import tol
from moe_lab_kernels.gemv import gemv
from moe_lab_kernels.gemv.mlp_call import Experts
from moe_lab_kernels.gemv.q8_rows import Words
from moe_lab_kernels.gemv.tiled import mlp as tiled_mlp
from moe_lab_kernels.gemv.tiled import sum_rows, tiled
from moe_lab_kernels.gemv.tiled.tiles import TileCut
from moe_lab_kernels.rows import activation, quantize_rows
from moe_lab_kernels.slots.pointer_table import PointerTable
from moe_lab_kernels.storage.blocks import BLOCKS
from moe_lab_kernels.storage.row_tiles import TILE_FORMATS, from_tiles, steps_of, tile_bytes, to_tiles
from tests.support.kernel_cases import DTYPES, Guarded, nmse, same_bits, weights

S = 3
# three rows that share a slot, one alone; a slot that is none, one that is not there, no rows. Pair 4 is in no chunk.
CHUNKS = torch.tensor([[1, 0, 3], [2, 3, 1], [-1, 4, 1], [5, 4, 1], [2, 0, 0]]).int()
ROW_OF = torch.tensor([0, 2, 1, 2, 0], dtype=torch.int32)
OUT_ROW = torch.tensor([1, 2, 4, 3, 0], dtype=torch.int32)
DEPTHS = [256, 704, 768, 1280]


def x_of(kd: int, rows: int = 3) -> torch.Tensor:
    draw = torch.Generator().manual_seed(kd)
    return torch.randn(rows, kd, generator=draw) * torch.exp(torch.randn(rows, 1, generator=draw))


def product(op, rows, w, format: str, n: int, *, dtype=torch.float32, chunks=CHUNKS, **more) -> torch.Tensor:
    out = Guarded((len(ROW_OF), n), dtype, "cpu")
    op(rows, ROW_OF, w, chunks, format, out.view, **more)
    assert out.intact()
    return out.view


@pytest.mark.parametrize("format", TILE_FORMATS)
@pytest.mark.parametrize("kd", DEPTHS, ids="K{}".format)
def test_tiles_hold_the_bytes_of_their_rows(format: str, kd: int) -> None:
    if kd % BLOCKS[format].values:
        pytest.skip(f"{kd} is not whole blocks of {format}")
    draw = torch.Generator().manual_seed(0)
    width = kd // BLOCKS[format].values * BLOCKS[format].bytes
    raw = torch.randint(256, (2, 48, width), generator=draw, dtype=torch.uint8)
    tiles = to_tiles(raw, format, kd)
    assert tiles.shape == (2, 3, tile_bytes(format, kd))
    assert torch.equal(from_tiles(tiles, format, kd), raw)
    if kd % 128 == 0:
        assert torch.equal(tiles.flatten(1).sort().values, raw.flatten(1).sort().values), "a byte was added or lost"


@pytest.mark.parametrize(
    ("format", "n", "kd", "why"),
    [("q2_k", 24, 512, "16 rows"), ("q8_0", 16, 96, "128 values"), ("mxfp4", 16, 512, "has no tiles")],
    ids=["N-24", "short-row", "format"],
)
def test_what_has_no_tiles_is_refused(format: str, n: int, kd: int, why: str) -> None:
    raw = torch.zeros(1, n, kd // BLOCKS[format].values * BLOCKS[format].bytes, dtype=torch.uint8)
    with pytest.raises(LabError, match=why):
        to_tiles(raw, format, kd)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_q8_1_with_their_sums(dtype: str) -> None:
    x = x_of(704).to(DTYPES[dtype])
    words, want_words = torch.ones(2, 700, dtype=torch.int32)
    got = sum_rows.quantize_sums(x, clear=Words(words, 690))
    want = sum_rows.quantize_sums_ref(x, clear=Words(want_words, 690))
    assert torch.equal(words, want_words)
    assert words.sum() == 10
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert all(same_bits(a, b) for a, b in zip(got[:3], quantize_rows.quantize_q8_1_ref(x), strict=True))
    sums = got.codes.int().unflatten(-1, (-1, 2, 16)).sum(-1)
    assert torch.equal(got.sums << 16 >> 16, sums[..., 0].int())
    assert torch.equal(got.sums >> 16, sums[..., 1].int())


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("format", TILE_FORMATS)
def test_bits_of_the_reference(format: str) -> None:
    """Four parts of a row and an idle place in the last turn; of small blocks, a last step that starts early."""
    kd = 2816 if BLOCKS[format].values == 256 else 1344
    raw, rows = weights(format, S, 48, kd), sum_rows.quantize_sums_ref(x_of(kd))
    tiles = to_tiles(raw, format, kd)
    got = product(tiled.gemv_tiled, rows, tiles, format, 48)
    assert same_bits(got, product(tiled.gemv_tiled_ref, rows, tiles, format, 48))
    assert got[:4].isfinite().all()
    assert got[4].isnan().all(), "a pair in no chunk was written"
    # the integers are those of gemv; only the order of fp32 additions differs
    assert nmse(got[:4], product(gemv.gemv_ref, rows[:3], raw, format, 48)[:4]) <= tol("gemv/emulation")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("cut", "max_rows"),
    [(TileCut(2, 1, shared=1), 8), (TileCut(4, 1, shared=2), 8), (None, 1)],
    ids=["2-tiles", "4-tiles", "said-to-hold-1"],
)
def test_no_cut_shows(cut: TileCut | None, max_rows: int) -> None:
    format, kd = "q2_k", 512
    tiles, rows = to_tiles(weights(format, S, 48, kd), format, kd), sum_rows.quantize_sums_ref(x_of(kd))
    want = product(tiled.gemv_tiled_ref, rows, tiles, format, 48)
    assert same_bits(product(tiled.gemv_tiled, rows, tiles, format, 48, cut=cut, max_rows=max_rows), want)


@pytest.mark.usefixtures("interpreter")
def test_a_row_alone_has_its_bits_in_a_chunk_and_from_addresses() -> None:
    format, kd = "q4_0", 160
    tiles, rows = to_tiles(weights(format, S, 48, kd), format, kd), sum_rows.quantize_sums_ref(x_of(kd))
    want = product(tiled.gemv_tiled_ref, rows, tiles, format, 48)
    one_by_one = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 2, 1], [2, 3, 1]]).int()
    assert same_bits(product(tiled.gemv_tiled, rows, tiles, format, 48, chunks=one_by_one), want)
    table = PointerTable.of([tiles[:1], tiles[1:].clone()])
    assert same_bits(product(tiled.gemv_tiled, rows, table, format, 48), want)
    scattered = product(tiled.gemv_tiled, rows, tiles, format, 48, out_row=OUT_ROW)
    assert same_bits(scattered[OUT_ROW[:4].long()], want[:4])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("formats", [("q8_0", "q4_0")], ids="+".join)
def test_experts_in_one_grid_have_the_bits_of_the_launches_they_replace(formats: tuple[str, str]) -> None:
    d, f = 256, 160
    gate, up, down = (
        to_tiles(weights(fmt, S, n, kd, seed), fmt, kd)
        for seed, (fmt, n, kd) in enumerate(((formats[0], f, d), (formats[0], f, d), (formats[1], d, f)))
    )
    x, p = x_of(d), len(ROW_OF)
    y = Guarded((p, d), torch.bfloat16, "cpu")
    own, more = Experts(gate, up, down, *formats), {"max_rows": 4}
    tiled_mlp.gemv_tiled_mlp(x, ROW_OF, own, CHUNKS, y.view, OUT_ROW, **more)
    assert y.intact()
    g, u = (torch.full((p, f), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    tiled.gemv_tiled(sum_rows.quantize_sums(x), ROW_OF, gate, CHUNKS, formats[0], g, w2=up, out2=u, **more)
    h = sum_rows.quantize_sums(activation.swiglu(g, u))
    want = torch.full((p, d), float("nan"), dtype=torch.bfloat16)
    tiled.gemv_tiled(h, torch.arange(p).int(), down, CHUNKS, formats[1], want, out_row=OUT_ROW, **more)
    assert same_bits(y.view, want)
    ref = torch.full((p, d), float("nan"), dtype=torch.bfloat16)
    tiled_mlp.gemv_tiled_mlp_ref(x, ROW_OF, own, CHUNKS, ref, OUT_ROW, **more)
    assert nmse(y.view[1:].float(), ref[1:].float()) <= tol("gemv/layer")
    assert y.view[0].isnan().all(), "a pair in no chunk was written"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"w": torch.zeros(S, 3, 100, dtype=torch.uint8)}, "w"),
        ({"rows": sum_rows.sum_rows((3, 512), torch.device("cpu"))}, "w"),
        ({"max_rows": 3}, "max_rows=3"),
        ({"out2": torch.zeros(5, 48)}, "come together"),
    ],
    ids=["tile-bytes", "row-width", "max-rows", "out2-alone"],
)
def test_wrong_operands_are_refused_by_name(change: dict, why: str) -> None:
    kd = 256
    given = {
        "rows": sum_rows.sum_rows((3, kd), torch.device("cpu")),
        "row_of": ROW_OF,
        "w": torch.zeros(S, 3, tile_bytes("q8_0", kd), dtype=torch.uint8),
        "chunks": CHUNKS,
        "format": "q8_0",
        "out": torch.zeros(5, 48),
    }
    assert steps_of("q8_0", kd) == 2
    with pytest.raises(LabError, match=why):
        tiled.gemv_tiled_ref(**{**given, **change})
