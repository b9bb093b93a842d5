"""A row's bits are its own: they depend on no other row, no chunk size, no tile, no batch."""

from dataclasses import replace

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels.gemv import gemv
from tests.support.kernel_cases import alone, gemv_case, same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
FORMATS = ("q2_k", "q3_k", "q8_0")


@pytest.mark.parametrize("format", FORMATS)
def test_one_to_eight_rows_a_chunk(format: str) -> None:
    """The same rows in chunks of 1, 2, .., 8: each row of each run equals the row computed alone."""
    case = gemv_case(format, 8, 256, [8], slots=1)
    single = torch.cat([alone(case, p).run().view for p in range(8)])
    for rows in range(2, 9) if format == "q2_k" else (3, 5, 8):
        chunks = [[0, first, min(rows, 8 - first)] for first in range(0, 8, rows)]
        got = replace(case, chunks=torch.tensor(chunks, dtype=torch.int32)).run().view
        assert same_bits(got, single), f"chunks of {rows} rows"


@pytest.mark.parametrize("tile", [gemv.Tile(4, sums=8), gemv.Tile(16), gemv.Tile(32, sums=64)], ids=str)
def test_the_tile_does_not_show(tile: gemv.Tile) -> None:
    case = gemv_case("q2_k", 21, 256, [2, 1], slots=2)
    assert same_bits(replace(case, extra={"tile": tile}).run().view, case.run().view)


def test_a_smaller_program_for_few_rows_does_not_show() -> None:
    case = gemv_case("q3_k", 20, 256, [1, 3], slots=2)
    for most in (1, 2):
        assert same_bits(replace(case, extra={"max_rows": most}).run().view, case.run().view), most


def test_neighbours_may_hold_anything() -> None:
    """NaN scales in one row of a chunk leave the other rows' bits alone."""
    case = gemv_case("q2_k", 20, 256, [4], slots=1, x_rows=4)
    case.row_of.copy_(torch.arange(4))
    before = case.run().view
    case.rows[1][2] = float("nan")
    after = case.run().view
    assert after[2].isnan().all()
    assert same_bits(after[[0, 1, 3]], before[[0, 1, 3]])


def test_order_and_company_of_chunks_do_not_show() -> None:
    case = gemv_case("q8_0", 24, 96, [3, 8, 1, 5])
    shuffled = case.chunks[torch.tensor([2, 0, 3, 1])].contiguous()
    assert same_bits(replace(case, chunks=shuffled).run().view, case.run().view)


@pytest.mark.parametrize("bad", [{"rows": 6}, {"rows": 0}, {"rows": 8, "sums": 2}, {"rows": 8, "sums": 24}], ids=str)
def test_a_tile_that_cannot_be_cut_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(LabError, match=r"Tile.*power of two"):
        gemv.Tile(**bad)
    with pytest.raises(LabError, match=r"Tile.shared is 8; at most 4"):
        gemv.Tile(8, shared=8)
