"""The grouped GEMM on the GPU: close to float64, and a row's bits its own whatever the batch or the tile."""

from dataclasses import replace

import pytest
import torch

from moe_lab.tolerances import tol
from moe_lab_kernels.grouped import grouped_gemm
from moe_lab_kernels.grouped import tiles as grouped_gemm_tiles
from moe_lab_kernels.grouped.operands import Scatter, Weight
from moe_lab_kernels.grouped.steps import STEPS
from moe_lab_kernels.grouped.tiles import TOKENS, Tile
from moe_lab_kernels.route import plan
from moe_lab_kernels.rows import activation
from moe_lab_kernels.rows.hidden import Gate
from tests.support.grouped_cases import GroupedCase, grouped_case
from tests.support.kernel_cases import nmse, same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
RAGGED = {
    "empty-experts": [0, 3, 0, 5, 0],
    "one-takes-all": [0, 0, 300, 0],
    "T37": [1, 0, 17, 19],
    "T199": [199, 0, 70, 129],
}


def close(case: GroupedCase) -> None:
    got = case.product()
    assert got.intact()
    assert nmse(got.view.cpu(), case.exact().cpu()) <= tol("grouped/product")


@pytest.mark.parametrize("counts", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("tokens", TOKENS, ids="tile{}".format)
def test_ragged_groups(counts: list[int], tokens: int) -> None:
    close(grouped_case("bf16", 704, 320, counts, tokens=tokens, device="cuda"))


@pytest.mark.parametrize("kd", [8, 72, 704, 1408, 2880], ids="Kd{}".format)
def test_widths_that_fill_no_step(kd: int) -> None:
    close(grouped_case("bf16", 300, kd, [3, 0, 40], tokens=32, device="cuda"))


@pytest.mark.parametrize("format", STEPS)
def test_every_format_close_and_its_bits_independent_of_tile_and_batch(format: str) -> None:
    case = grouped_case(format, 200, 512, [2, 0, 150], tokens=16, device="cuda")
    close(case)
    whole, gated = case.product().view, case.gated().view
    assert nmse(gated, case.gated(grouped_gemm.grouped_gate_up_ref).view) <= tol("store/bf16")
    wide = replace(case, tokens=128)
    assert same_bits(wide.product().view, whole)
    assert same_bits(wide.gated().view, gated)
    assert same_bits(replace(case, tokens=64, tile=Tile(128, 8, 2, 2)).product().view, whole)
    for pair in (0, 1, 99, 151):
        assert same_bits(case.alone(pair).product().view, whole[pair : pair + 1]), pair


@pytest.mark.parametrize("kd", [96, 352], ids="Kd{}".format)
def test_mxfp4_rows_that_end_inside_a_step(kd: int) -> None:
    close(grouped_case("mxfp4_oss", 200, kd, [3, 0, 40], tokens=32, device="cuda"))


@pytest.mark.parametrize("format", ["f16", "bf16", "q2_k", "q3_k", "q8_0", "fp8_block"])
def test_fp16_rows(format: str) -> None:
    case = grouped_case(format, 200, 512, [2, 0, 21], dtype="f16", device="cuda")
    close(case)
    want = case.gated(grouped_gemm.grouped_gate_up_ref, "f16")
    assert nmse(case.gated(dtype="f16").view, want.view) <= tol("store/f16")


@pytest.mark.parametrize("options", [{}, {"limit": 0.5}, {"gelu": True}], ids=str)
@pytest.mark.parametrize("format", ["bf16", "q2_k"])
def test_fused_is_two_products_and_an_activation(format: str, options: dict) -> None:
    case = grouped_case(format, 200, 256, [3, 0, 50], device="cuda")
    gate, up = case.product(dtype="bf16").view, replace(case, gate=case.up).product(dtype="bf16").view
    op = activation.geglu if options.get("gelu") else activation.swiglu
    assert same_bits(case.gated(how=Gate(**options)).view, op(gate, up, limit=options.get("limit")))


@pytest.mark.parametrize("format", ["bf16", "q2_k", "q6_k", "mxfp4_oss"])
def test_no_grid_and_no_cut_changes_a_bit(format: str) -> None:
    """Persistent grids, four and eight warps that decode, words asked for further ahead; of gate and up also half the
    rows, as short lists have it, and twice the rows on sixteen warps."""
    case = grouped_case(format, 200, 512, [2, 0, 150], tokens=64, device="cuda")
    whole, gated = case.product().view, case.gated().view
    staged = format != "bf16"
    tiles = [Tile(64, 4, 2, resident=1), Tile(64, 4, 3, resident=3)]
    tiles += [Tile(64, 4, 2, 1, None, 2), Tile(64, 8, 2, 1, None, 1), Tile(64, 4, 2, 1, None, 1, 2)] if staged else []
    for tile in tiles:
        assert same_bits(replace(case, tile=tile).product().view, whole), tile
        assert same_bits(replace(case, tile=tile).gated().view, gated), tile
    for tile in (
        Tile(32, 4, 3, 1),
        Tile(64, 8, 3, 1),
        *([Tile(32, 4, 2, 1, None, 1), Tile(128, 16, 2, 1, None, 1)] if staged else []),
    ):
        assert same_bits(replace(case, tile=tile).gated().view, gated), tile


@pytest.mark.parametrize(
    "how",
    [Gate(limit=1.0, limit_mode="oai"), Gate(gelu=True), Gate(limit=0.5, limit_mode="after")],
    ids=["oai", "gelu", "after"],
)
@pytest.mark.parametrize("format", ["bf16", "mxfp4_oss", "q4_k"])
def test_biases_by_expert_and_weights_inside(format: str, how: Gate) -> None:
    draw = torch.Generator().manual_seed(7)
    case = replace(grouped_case(format, 200, 512, [2, 0, 50, 1], tokens=32, device="cuda"), expert=[5, 0, 3, 1])
    biases = tuple(torch.randn(6, 200, generator=draw).bfloat16().cuda() for _ in range(2))
    how = how._replace(weight=torch.rand(case.pairs, generator=draw).cuda())
    got, want = (case.gated(op, how=how, biases=biases) for op in
                 (grouped_gemm.grouped_gate_up, grouped_gemm.grouped_gate_up_ref))  # fmt: skip
    assert nmse(got.view, want.view) <= tol("store/bf16")
    assert nmse(want.view, case.gated(how=how).view) > 10 * tol("store/bf16")
    plain, ref = (case.product(op, bias=biases[0]) for op in
                  (grouped_gemm.grouped_product, grouped_gemm.grouped_product_ref))  # fmt: skip
    assert nmse(plain.view, ref.view) <= tol("grouped/product")


def test_work_list_of_a_plan() -> None:
    draw = torch.Generator().manual_seed(2)
    ids = torch.rand(700, 60, generator=draw).topk(6, 1).indices.int().cuda()
    p = plan.plan(ids, torch.rand(700, 6).cuda(), 60)
    for tokens in TOKENS:
        work = grouped_gemm_tiles.work_list(p.counts, p.offsets, ids.numel(), tokens)
        assert same_bits(work.tiles, grouped_gemm_tiles.work_list_ref(p.counts, p.offsets, ids.numel(), tokens).tiles)


def test_scattered_rows() -> None:
    case = grouped_case("bf16", 60, 64, [3, 0, 50], device="cuda")
    order = torch.randperm(53, generator=torch.Generator().manual_seed(3)).int().cuda()
    got = case.product(to=Scatter(order // 2, order % 2, 2))
    assert same_bits(got.view[order.long()], case.product().view)


def test_a_broken_row_stays_alone() -> None:
    case = grouped_case("q2_k", 60, 256, [3, 5], device="cuda")
    case.row_of[:] = torch.arange(8, dtype=torch.int32)
    whole = case.product().view.clone()
    case.x[2, 7] = float("nan")
    got = case.product().view
    assert got[2].isnan().all()
    assert same_bits(got[[0, 1, 3, 4, 5, 6, 7]], whole[[0, 1, 3, 4, 5, 6, 7]])


def test_offsets_past_32_bits() -> None:
    """Slot 8 of [9, 16384, 16384] starts at 2^31."""
    data = torch.zeros(9, 16384, 16384, dtype=torch.bfloat16, device="cuda")
    data[8, -1] = 1.0
    x = torch.ones(1, 16384, dtype=torch.bfloat16, device="cuda")
    work = grouped_gemm_tiles.WorkList(torch.tensor([[8, 0, 1]], dtype=torch.int32, device="cuda"), 16)
    out = torch.full((1, 16384), float("nan"), device="cuda")
    grouped_gemm.grouped_product(x, None, Weight(data, "bf16", 16384), work, out)
    assert out[0, -1] == 16384
    assert (out[0, :-1] == 0).all()
