"""Fused launches have the bits of the launches they replace: gate + up + activation + quantise, down + weighted sum."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels import activation, combine, gemv, gemv_combine, gemv_gated, lane_rows, quantize_rows
from moe_lab_kernels.tiles import CombineTile, GatedTile
from tests.support.kernel_cases import DTYPES, same_bits, weights

pytestmark = pytest.mark.usefixtures("interpreter")
D, F, S, T, K = 256, 64, 5, 3, 2
IDS = torch.tensor([[4, 1], [1, 3], [1, 4]], dtype=torch.int32)
CHUNKS = torch.tensor([[1, 0, 3], [3, 3, 1], [4, 4, 2], [-1, 0, 1], [5, 0, 1]], dtype=torch.int32)
ROW_OF = torch.tensor([0, 1, 2, 1, 0, 2], dtype=torch.int32)
OUT_ROW = torch.tensor([1, 2, 4, 3, 0, 5], dtype=torch.int32)


@pytest.fixture(scope="module")
def gate() -> torch.Tensor:
    return weights("q2_k", S, F, D)


@pytest.fixture(scope="module")
def up() -> torch.Tensor:
    return weights("q2_k", S, F, D, 1)


def rows(scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    return quantize_rows.quantize_q8_1_ref(scale * torch.randn(T, D, generator=torch.Generator().manual_seed(2)))


def apart(x, gate, up, store, act) -> tuple[torch.Tensor, ...]:
    g, u = (torch.full((T * K, F), float("nan"), dtype=store) for _ in range(2))
    gemv.gemv(x, ROW_OF, gate, CHUNKS, "q2_k", g, w2=up, out2=u)
    return quantize_rows.quantize_q8_1(act(g, u))


@pytest.mark.parametrize(
    ("store", "scale", "options"),
    [
        ("bf16", 1, {}),
        ("f32", 1, {"gelu": True}),
        ("f16", 9, {"limit": 2.0}),
        ("bf16", 9, {"limit": 2.0, "limit_mode": "after"}),
        ("bf16", 9, {"limit": 2.0, "limit_mode": "oai", "alpha": 1.702}),
        ("bf16", 9, {"gelu": True, "limit": 2.0}),
    ],
    ids=lambda v: "-".join(map(str, v.values())) if isinstance(v, dict) else None,
)
def test_hidden_rows_of_one_launch(gate, up, store, scale, options) -> None:
    x, dtype, rest = rows(scale), DTYPES[store], {k: v for k, v in options.items() if k != "gelu"}
    op = activation.geglu if options.get("gelu") else activation.swiglu
    want = apart(x, gate, up, dtype, lambda g, u: op(g, u, **rest))
    got = gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k", store=dtype, max_rows=4, **options)
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))


def test_hidden_rows_do_not_depend_on_tile_or_chunk(gate, up) -> None:
    x = rows()
    want = gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k")
    alone = torch.stack([torch.tensor([1, 1, 1, 3, 4, 4]), torch.arange(6), torch.ones(6)], 1).int()
    for chunks, tile, most in ((CHUNKS, GatedTile(1, shared=2), 4), (alone, None, 1)):
        got = gemv_gated.gemv_gated(x, ROW_OF, gate, up, chunks, "q2_k", max_rows=most, tile=tile)
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), tile


def test_hidden_rows_go_where_they_are_sent_in_the_next_products_order(gate, up) -> None:
    x = rows()
    want = gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k")
    room = lane_rows.lane_rows("test", (7, F), "mxfp4", None, x[0].device)
    for t in room[1:3]:
        t.fill_(float("nan"))
    gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k", out=room, out_row=OUT_ROW)
    assert all(same_bits(a[OUT_ROW.long()], b) for a, b in zip(lane_rows.to_plain(room), want, strict=True))
    assert room.scale[6].isnan().all()


def test_a_row_of_nans_stays_alone(gate, up) -> None:
    x = rows()
    want = gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k")
    x[1][0] = float("nan")
    got = gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k")
    clean = ROW_OF != 0
    assert all(same_bits(a[clean], b[clean]) for a, b in zip(got, want, strict=True))
    assert got.scale[~clean].isnan().all()


@pytest.mark.parametrize(("store", "shared"), [("bf16", False), ("f32", True)], ids=["bf16-routed", "f32-shared"])
def test_down_and_sum_in_one_launch(store: str, shared: bool) -> None:
    dtype, draw = DTYPES[store], torch.Generator().manual_seed(7)
    w, h = weights("q3_k", S, 40, 512), torch.randn(T * K, 512, generator=draw)
    x, weight = quantize_rows.quantize_q8_1_ref(h), torch.rand(T, K, generator=draw)
    ids = IDS.clone()
    ids[2, 0], ids[0, 1] = -1, S  # a pick that is none, a slot that is not there
    y = torch.zeros(T * K, 40, dtype=dtype)
    chunks = torch.stack([ids.flatten(), torch.arange(T * K), torch.ones(T * K)], 1).int()
    gemv.gemv(x, torch.arange(T * K).int(), w, chunks, "q3_k", y, max_rows=1)
    extra = (torch.randn(T, 40, generator=draw).to(dtype), torch.rand(T, generator=draw)) if shared else ()
    want = combine.combine(y.view(T, K, 40), weight, *extra, ids=torch.where(ids < S, ids, -1))
    got = gemv_combine.gemv_combine(x, w, ids, weight, "q3_k", *extra, store=dtype)
    assert same_bits(got, want)
    assert same_bits(gemv_combine.gemv_combine_ref(x, w, ids, weight, "q3_k", *extra, store=dtype), want)
    ordered = lane_rows.to_lanes(x, "q3_k")
    assert same_bits(gemv_combine.gemv_combine(ordered, w, ids, weight, "q3_k", *extra, store=dtype), want)


@pytest.mark.parametrize("k", [1, 3, 4, 6, 8])
def test_slots_are_added_in_rank_order(k: int) -> None:
    """Weights so different in size that another order would round differently."""
    draw = torch.Generator().manual_seed(k)
    w, h = weights("q8_0", 9, 24, 64), torch.randn(2 * k, 64, generator=draw)
    x, ids = quantize_rows.quantize_q8_1_ref(h), torch.randint(9, (2, k), generator=draw, dtype=torch.int32)
    weight = torch.rand(2, k, generator=draw) * 10.0 ** torch.randint(-3, 4, (2, k), generator=draw)
    want = gemv_combine.gemv_combine_ref(x, w, ids, weight, "q8_0", store=torch.float32)
    for tile in (None, CombineTile(8, together=1)):
        assert same_bits(gemv_combine.gemv_combine(x, w, ids, weight, "q8_0", store=torch.float32, tile=tile), want)


def test_empty_batches_and_misfits(gate, up) -> None:
    x, none = rows(), torch.zeros(0, dtype=torch.int32)
    got = gemv_gated.gemv_gated(x, none, gate, up, CHUNKS[:0], "q2_k")
    assert got.codes.shape == (0, F)
    w = weights("q8_0", S, 24, 64)
    empty = tuple(t[:0] for t in quantize_rows.quantize_q8_1_ref(torch.ones(1, 64)))
    assert gemv_combine.gemv_combine(empty, w, IDS[:0], torch.ones(0, K), "q8_0").shape == (0, 24)
    with pytest.raises(LabError, match=r"F must be a positive multiple of 32, got gate of shape \[5, 40, 84\]"):
        gemv_gated.gemv_gated(x, ROW_OF, gate[:, :40], up[:, :40], CHUNKS, "q2_k")
    with pytest.raises(LabError, match="limit_mode='oai' clamps, so it needs a limit"):
        gemv_gated.gemv_gated(x, ROW_OF, gate, up, CHUNKS, "q2_k", limit_mode="oai")
    with pytest.raises(LabError, match="rows of 3 pairs, but slots has T=3 tokens of K=2"):
        gemv_combine.gemv_combine(rows(), weights("q2_k", S, 24, D), IDS, torch.ones(T, K), "q2_k")
