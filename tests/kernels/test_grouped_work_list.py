"""The grouped GEMM's work list: the reference's numbers, every pair once, no more tiles than the bound."""

import pytest
import torch

from moe_lab.errors import LabError
from moe_lab_kernels import backend
from moe_lab_kernels.grouped import tiles as gt
from tests.support.kernel_cases import same_bits

pytestmark = pytest.mark.usefixtures("interpreter")
COUNTS = {
    "empty-experts": [0, 3, 0, 200, 0],
    "one-takes-all": [0, 0, 1600, 0],
    "exact-tiles": [16, 32, 64],
    "E60": [(7 * e) % 41 for e in range(60)],
    "E1": [5],
    "nothing": [0, 0],
}


def offsets_of(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0).int(), (1, 0))


@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_every_pair_is_in_one_tile(counts: list[int], tokens: int) -> None:
    c = torch.tensor(counts, dtype=torch.int32)
    pairs = sum(counts) + 3  # pairs that the plan has left out
    work = gt.work_list(c, offsets_of(c), pairs, tokens)
    assert same_bits(work.tiles, gt.work_list_ref(c, offsets_of(c), pairs, tokens).tiles)
    covered = [(slot, p) for slot, first, n in work.tiles.tolist() for p in range(first, first + n)]
    assert covered == [(e, p) for p, e in enumerate(torch.repeat_interleave(torch.arange(len(c)), c.long()).tolist())]
    assert work.tiles[:, 2].max() <= tokens


def test_slots_stand_for_experts() -> None:
    c, slot_of = torch.tensor([3, 0, 40], dtype=torch.int32), torch.tensor([7, -1, 2], dtype=torch.int32)
    work = gt.work_list(c, offsets_of(c), 43, 16, slot_of)
    assert work.tiles.tolist() == [[7, 0, 3], [2, 3, 16], [2, 19, 16], [2, 35, 8], [-1, 0, 0]][: len(work.tiles)]


@pytest.mark.parametrize(
    ("pairs", "experts", "tokens"), [(0, 8, 16), (1, 8, 16), (8, 8, 16), (500, 8, 16), (70, 3, 32)]
)
def test_no_split_needs_more_tiles_than_the_bound(pairs: int, experts: int, tokens: int) -> None:
    """The worst split gives one pair to each expert but one, or a tile and one pair."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(50):
        weights = torch.rand(experts, generator=draw) ** 4
        counts = (
            torch.multinomial(weights, pairs, replacement=True, generator=draw).bincount(minlength=experts)
            if pairs
            else torch.zeros(experts)
        )
        assert int((-(-counts // tokens)).sum()) <= gt.most_tiles(pairs, experts, tokens)


def test_short_lists_of_gate_and_up_are_cut_finer() -> None:
    """96 pieces leave a third of 132 multiprocessors idle; down's tall tiles stay."""
    plain, tall = gt.Tile(64, 8, 2, 1, 128, 1), gt.Tile(128, 8, 2)
    assert gt.for_few(plain, 96, 132) == gt.Tile(32, 4, 2, 1, None, 1)
    assert gt.for_few(plain, 132, 132) == plain
    assert gt.for_few(tall, 96, 132) == tall


def test_no_pairs_launch_nothing() -> None:
    c = torch.zeros(4, dtype=torch.int32)
    with backend.count_launches() as count:
        assert gt.work_list(c, offsets_of(c), 0, 16).tiles.shape == (0, 3)
    assert count.launches == 0


def test_refusals() -> None:
    c = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(LabError, match="in tiles of 24; a tile holds one of"):
        gt.work_list(c, offsets_of(c), 4, 24)
    with pytest.raises(LabError, match=r"offsets must have shape \[5\], got \[4\]"):
        gt.work_list(c, c, 4, 16)
