"""The fixed workloads: what every benchmark times must not drift."""

import pytest
import torch

from moe_lab.bench.runner import time_calls
from moe_lab.bench.workloads import SHAPES, experts_hit, layer_bytes, rotations, routings
from moe_lab.errors import LabError

QWEN = SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize("tokens", [1, 4, 128])
@pytest.mark.parametrize("popularity", ["uniform", "zipf"])
def test_picks_are_distinct_in_range_and_weighted(tokens: int, popularity: str) -> None:
    picks = routings(QWEN, tokens, popularity)
    assert len(picks) == rotations(tokens, QWEN)
    for ids, weights in picks:
        assert (ids.shape, weights.shape) == ((tokens, 8), (tokens, 8))
        assert ids.dtype == torch.int32
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 128
        assert all(row.unique().numel() == 8 for row in ids)
        assert torch.allclose(weights.sum(1), torch.ones(tokens))


def test_a_lone_tokens_rotation_walks_through_disjoint_experts() -> None:
    picks = torch.cat([ids for ids, _ in routings(QWEN, 1)])
    assert picks.shape == (16, 8)
    assert picks.unique().numel() == 128


def test_the_same_seed_draws_the_same_picks() -> None:
    first, again, other = (routings(QWEN, 4, seed=s) for s in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=True))


def test_zipf_crowds_the_popular_experts() -> None:
    uniform, zipf = (experts_hit(routings(QWEN, 128, kind)) for kind in ("uniform", "zipf"))
    assert zipf < uniform <= 128


@pytest.mark.parametrize(("tokens", "want"), [(1, 16), (8, 8), (32, 4), (128, 4), (512, 2), (8192, 1)])
def test_rotations_shrink_as_a_call_grows(tokens: int, want: int) -> None:
    assert rotations(tokens, QWEN) == want


def test_bytes_of_a_known_layer() -> None:
    """One token, 8 experts of 3 * 2048 * 768 weights at 84, 84 and 110 bytes for 256, and 2 * 2048 bf16 values."""
    want = 8 * 2048 * 768 * (2 * 84 + 110) / 256 + 2 * 2048 * 2
    assert layer_bytes(QWEN, 1, 8, 84 / 256, 110 / 256) == want


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("factor", [2, 3, 8, 1000])
def test_a_shrunk_shape_refuses_the_formats_that_the_whole_one_refuses(name: str, factor: int) -> None:
    whole, small = SHAPES[name], SHAPES[name].shrunk(factor)
    assert small.name == f"{name} 1/{factor}"
    assert small.top_k == whole.top_k <= small.experts <= whole.experts
    for before, after in ((whole.d_model, small.d_model), (whole.d_expert, small.d_expert)):
        assert 0 < after <= max(256, before)
        assert after % 32 == 0
        assert (after % 256 == 0) == (before % 256 == 0)
    assert whole.shrunk(1) is whole
    with pytest.raises(LabError, match="factor of 1 or more, got 0"):
        whole.shrunk(0)


@pytest.mark.wrong_types
def test_an_unknown_popularity_is_refused() -> None:
    with pytest.raises(LabError, match="popularity is 'flat'; it must be uniform or zipf"):
        routings(QWEN, 1, "flat")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_clock_says_that_it_needs_a_gpu() -> None:
    with pytest.raises(LabError, match="needs a CUDA device"):
        time_calls([lambda: None])
