"""The numbers a model is judged by: cache hits, expert shares, leaked passages."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.recipe.gate import belady_hits, cache_rates, expert_shares, judge, lru_hits, overlap, table
from data.recipe.leakage import PASSAGE, SeenPassages


def best_hits_by_trying_everything(requests: list[int], slots: int) -> int:
    """Most hits of any cache that must take in what it misses, by trying every victim."""
    states = {frozenset(): 0}
    for expert in requests:
        following: dict[frozenset, int] = {}
        for held, hits in states.items():
            if expert in held:
                options = [(held, hits + 1)]
            elif len(held) < slots:
                options = [(held | {expert}, hits)]
            else:
                options = [((held - {victim}) | {expert}, hits) for victim in held]
            for state, score in options:
                following[state] = max(score, following.get(state, 0))
        states = following
    return max(states.values())


@given(st.lists(st.integers(0, 4), max_size=12), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_belady_is_the_best_possible(requests, slots):
    assert belady_hits(requests, slots) == best_hits_by_trying_everything(requests, slots)


@given(st.lists(st.integers(0, 7), max_size=60), st.integers(1, 8))
@settings(max_examples=80, deadline=None)
def test_lru_hits_what_was_among_the_last_distinct_requests(requests, slots):
    def hit(at: int) -> bool:
        recent = list(dict.fromkeys(reversed(requests[:at])))[:slots]
        return requests[at] in recent

    assert lru_hits(requests, slots) == sum(hit(at) for at in range(len(requests)))


def test_shuffling_removes_locality_and_keeps_load():
    runs = np.repeat(np.arange(32), 64).reshape(1, -1, 1)
    rates = cache_rates(runs, slots=8)
    assert rates["lru"][0] == pytest.approx(1 - 32 / 2048)
    assert rates["lru_shuffled"][0] == pytest.approx(8 / 32, abs=0.05)


def test_shares_and_overlap_of_a_known_routing():
    ids = np.array([[[0, 1], [1, 2], [1, 0]]])
    np.testing.assert_allclose(expert_shares(ids, 4), [[2 / 6, 3 / 6, 1 / 6, 0.0]])
    assert overlap(ids) == [0.5]


@pytest.mark.parametrize(("increase", "passes"), [(0.019, True), (0.021, False), (float("nan"), False)])
def test_the_loss_condition_is_an_upper_bound_that_nan_fails(increase, passes):
    ids = np.array(list(itertools.permutations(range(4), 2)))[None]
    verdict = judge(ids, np.arange(ids.shape[1]), 4, 0.9, increase)
    assert verdict["passed"]["loss_increase"] is passes
    assert ("FAIL loss_increase" in table(verdict)) is not passes


def test_leaked_share_counts_passages_seen_in_training():
    rng = np.random.default_rng(0)
    training = rng.integers(1, 4096, 4000).astype(np.uint16)
    fresh = rng.integers(1, 4096, 500).astype(np.uint16)
    seen = SeenPassages(training)
    assert seen.share(training[1000:1500]) == 1.0
    assert seen.share(fresh) == 0.0
    copied = np.concatenate([fresh[:250], training[:250]])
    assert seen.share(copied) == pytest.approx((250 - PASSAGE + 1) / (500 - PASSAGE + 1))
    assert seen.share(training[: PASSAGE - 1]) == 0.0
