"""The int8 grouped product on planes: weights opened to the bytes of raw blocks, products with their bits."""

import pytest
import torch

from moe_lab_kernels.mmq import mmq, opened, opened_planar
from moe_lab_kernels.mmq.places import Places
from tests.support.kernel_cases import same_bits
from tests.support.mmq_cases import mmq_case
from tests.support.planes import in_planes

pytestmark = pytest.mark.usefixtures("interpreter")
# 44 blocks of 32 values, or 22 of 64, end in the middle of a program's 256 values
WIDTHS = {"q8_0": 352, "q4_0": 352, "mxfp4": 352}


@pytest.mark.parametrize(("format", "folded"), [k for k in opened.FORMS if k[0] != "nvfp4"], ids=str)
def test_weights_are_opened_to_the_same_bytes(format: str, folded: bool) -> None:
    kind = f"{format}-{'q8_k' if folded else 'd4'}"
    w = mmq_case(kind, 20, WIDTHS.get(format, 512), [1, 1, 1]).gate
    rooms = [torch.full((2 * opened.opened_bytes(w, folded),), 0x7B, dtype=torch.uint8) for _ in range(2)]
    at = Places(torch.tensor([1, -1, 0]).int(), torch.tensor([2, 0]).int())
    opened.open_weights(w, folded, at, 0, opened.room_for(rooms[0], w, folded))
    lying = in_planes(w)
    assert opened.opened_bytes(lying, folded) == opened.opened_bytes(w, folded)
    opened_planar.open_planar(lying, folded, at, 0, opened.room_for(rooms[1], lying, folded))
    assert torch.equal(*rooms)


@pytest.mark.parametrize("kind", ["q2_k-d2s6", "q6_k-d4", "q4_k-q8_k", "nvfp4-d4"])
def test_products_have_raw_blocks_bits(kind: str) -> None:
    case = mmq_case(kind, 20, 320 if kind.startswith("nvfp4") else 256, [0, 3, 1])
    want = case.product()
    case.gate = in_planes(case.gate)
    got = case.product()
    assert got.intact()
    assert same_bits(got.view, want.view)
    assert same_bits(case.product(mmq.mmq_product_ref).view, want.view)


def test_hidden_rows_have_raw_blocks_bits() -> None:
    case = mmq_case("q8_0-d4", 20, 64, [2, 0, 3])
    want = mmq.mmq_hidden(case.rows, case.row_of, case.gate, case.up, case.work, torch.bfloat16)
    gate, up = in_planes(case.gate), in_planes(case.up)
    got = mmq.mmq_hidden(case.rows, case.row_of, gate, up, case.work, torch.bfloat16)
    assert same_bits(got, want)
