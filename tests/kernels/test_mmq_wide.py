"""The int8 product on opened weights, in Triton's interpreter: weights taken apart, their places, the bits."""

from dataclasses import replace

import pytest
import torch

from moe_lab.bench.weights import make_layer
from moe_lab.bench.workloads import LayerShape
from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import Routing
from moe_lab_kernels.backend import count_launches
from moe_lab_kernels.grouped.operands import Scatter
from moe_lab_kernels.grouped.tiles import Tile, WorkList
from moe_lab_kernels.mmq import mmq
from moe_lab_kernels.mmq.opened import FORMS, opened_bytes, room_for
from moe_lab_kernels.mmq.opened import open_weights as launch
from moe_lab_kernels.mmq.opened_ref import open_weight_ref
from moe_lab_kernels.mmq.places import AT_ONCE, places, places_ref
from moe_lab_kernels.mmq.wide import WideTile
from tests.support.kernel_cases import same_bits
from tests.support.mmq_cases import KINDS, MmqCase, mmq_case

pytestmark = pytest.mark.usefixtures("interpreter")
TILE = WideTile(128, 16, 4, 1)
LISTS = {
    "ragged": ([[2, 0, 5], [2, 5, 3], [0, 8, 1], [-1, 0, 0]], 4),
    "a slot in two pieces": ([[1, 0, 5], [3, 5, 3], [1, 8, 1]], 4),
    "slots that are none and tiles without rows": ([[9, 0, 5], [3, 5, 0], [-7, 0, 2], [0, 8, 1]], 4),
    "nothing": ([[-1, 0, 0]], 2),
    "many": ([[7 * i % 3000, i, 1] for i in range(AT_ONCE + 90)], 3000),
}


def wide(case: MmqCase, weights: int = 1, **how) -> torch.Tensor:
    """The product with room for so many opened weights at a time."""
    folded = case.rows.layout == "q8_k"
    room = torch.full((weights * opened_bytes(case.gate, folded) + 7,), 0x7B, dtype=torch.uint8)

    def op(*args, **given):
        mmq.mmq_product(*args, **given, scratch=room[: weights * opened_bytes(case.gate, folded)])

    out = replace(case, tile=TILE).product(op, **how)
    assert out.intact()
    assert (room[-7:] == 0x7B).all()
    return out.view


@pytest.mark.parametrize(("tiles", "slots"), LISTS.values(), ids=LISTS)
def test_used_slots_have_places_in_order(tiles: list[list[int]], slots: int) -> None:
    work = WorkList(torch.tensor(tiles, dtype=torch.int32), 16)
    got, want = places(work, slots), places_ref(work, slots)
    assert torch.equal(got.of_slot, want.of_slot)
    assert torch.equal(got.slots, want.slots)
    assert (got.of_slot >= 0).sum() == (got.slots >= 0).sum()


@pytest.mark.parametrize(("format", "folded"), FORMS, ids=lambda v: v if isinstance(v, str) else "x")
def test_opened_weights_are_the_references(format: str, folded: bool) -> None:
    kind = next(k for k in KINDS if k.startswith(format) and k.endswith("q8_k") == folded)
    case = mmq_case(kind, 9, 256 if kind[3] == "k" else 320, [1, 0, 2])
    w, at = case.gate, places_ref(case.work, 3)
    room = room_for(torch.full((2 * opened_bytes(w, folded),), 0x7B, dtype=torch.uint8), w, folded)
    launch(w, folded, at, 1, room)
    want = open_weight_ref(w, 2, folded)
    assert torch.equal(room.codes[0], want.codes)
    assert same_bits(room.scale[0].contiguous(), want.scale.contiguous())
    assert same_bits(room.low[0].float().contiguous(), want.low.float().contiguous())
    assert (room.codes[1] == 0x7B).all()


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_the_references(kind: str) -> None:
    case = mmq_case(kind, 20, 256, [0, 5], tokens=16)
    want = case.product(mmq.mmq_product_ref).view
    assert want.isfinite().all()
    assert same_bits(wide(case), want)


@pytest.mark.parametrize("weights", [1, 3])
def test_bits_do_not_depend_on_how_many_weights_are_open(weights: int) -> None:
    case = mmq_case("q8_0-d4", 33, 32, [2, 0, 9, 1, 20], tokens=16)
    assert same_bits(wide(case, weights, dtype="bf16"), case.product(mmq.mmq_product_ref, dtype="bf16").view)


def test_scattered_rows() -> None:
    case = mmq_case("q8_0-d4", 24, 64, [3, 0, 20])
    order = torch.randperm(23, generator=torch.Generator().manual_seed(3)).int()
    assert same_bits(wide(case, to=Scatter(order // 2, order % 2, 2))[order.long()], wide(case))


def test_rows_that_do_not_exist_are_zero_and_pairs_in_no_tile_keep_what_was_there() -> None:
    case = mmq_case("q8_0-d4", 24, 64, [6])
    case.row_of[2] = 99
    case.row_of[4] = -1
    out = torch.full((6, 24), -5.0)
    work = WorkList(torch.tensor([[0, 1, 4], [7, 5, 1], [-1, 0, 0]], dtype=torch.int32), 16)
    mmq.mmq_product(case.rows, case.row_of, case.gate, work, out, tile=TILE)
    assert (out[[0, 5]] == -5).all()
    assert (out[[2, 4]] == 0).all()
    assert (out[[1, 3]] != -5).all()


def test_many_rows_an_expert_go_the_wide_way() -> None:
    """And few of a format that is slow to take apart."""
    few, many = mmq_case("q8_0-d4", 24, 64, [3, 0, 20]), mmq_case("q8_0-d4", 24, 64, [130, 140])
    slow = mmq_case("mxfp4-d4", 24, 64, [3])
    for case, kernel in ((few, "_mmq"), (replace(few, tokens=128), "_mmq"), (replace(many, tokens=128), "_wide"),
                         (slow, "_wide")):  # fmt: skip
        with count_launches() as count:
            got = case.product().view
        assert count.by_kernel[kernel] == 1
        assert same_bits(got, case.product(mmq.mmq_product_ref).view)


@pytest.mark.parametrize("tile", [mmq.TILE_INTERPRETER, TILE], ids=["raw", "opened"])
def test_a_scale_past_2_to_the_104_is_nan(tile: Tile | WideTile) -> None:
    case = replace(mmq_case("mxfp4-d4", 8, 64, [3]), tile=tile)
    case.gate.data[0, 1, 0], case.gate.data[0, 2, 17] = 255, 232  # E of a block: 2^127, 2^104
    case.gate.data[0, 3, 0] = 231
    got = case.product().view
    assert got[:, 1:3].isnan().all()
    assert got[:, 3].isfinite().all()
    assert torch.equal(got.nan_to_num(), case.product(mmq.mmq_product_ref).view.nan_to_num())


@pytest.mark.wrong_types
def test_scratch_that_does_not_do_is_refused() -> None:
    case = mmq_case("q8_0-d4", 24, 64, [3])
    args = (case.rows, case.row_of, case.gate, case.work, torch.empty(3, 24))
    room = torch.empty(opened_bytes(case.gate, False) + 16, dtype=torch.uint8)
    for scratch, says in ((room[:64], "scratch of 64 bytes; wanted"), (room[1:], "multiple of 16")):
        with pytest.raises(LabError, match=says):
            mmq.mmq_product(*args, tile=TILE, scratch=scratch)
    with pytest.raises(LabTypeError, match="scratch must be"):
        mmq.mmq_product(*args, tile=TILE, scratch=room.float())


def test_an_arm_opens_its_weights_in_the_workspace() -> None:
    layer = make_layer(LayerShape("wide", 32, 32, 2, 1), "q8_0")
    x = torch.randn(260, 32, generator=torch.Generator().manual_seed(1))
    with count_launches() as count:
        whole = layer(x, "mmq")
    assert count.by_kernel["_wide"] == 3
    picks = Routing(whole.routing.ids[:20], whole.routing.weights[:20])
    assert torch.equal(layer(x[:20], "mmq", routing=picks).out, whole.out[:20])
