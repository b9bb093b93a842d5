"""Questions to a trace: against answers counted by hand or by plain loops."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_lab as lab
from moe_lab.analysis.coactivation import joint
from moe_lab.analysis.load import fit
from moe_lab.analysis.reuse import distances
from moe_lab.tolerances import tol
from tests.support.traces import random_trace, trace_of

A = lab.analysis
ONE_LAYER = trace_of([[[0, 1]], [[0, 2]], [[0, -1]], [[0, 5]]], 4, width=6)  # expert 5 computes nothing, 3 is idle


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**32 - 1)


def test_load_counts_experts_with_weights_alone() -> None:
    df = A.load(ONE_LAYER)
    assert df["assignments"].tolist() == [4, 1, 1, 0]
    assert df["rank"].tolist() == [1, 2, 3, 4]
    assert df["load_ratio"].tolist() == pytest.approx([8 / 3, 2 / 3, 2 / 3, 0])
    assert df["share"].sum() == pytest.approx(1)


def test_balance_by_hand() -> None:
    row = A.balance(ONE_LAYER).iloc[0]
    entropy = -(4 / 6 * np.log2(4 / 6) + 2 / 6 * np.log2(1 / 6))
    assert row.to_dict() == pytest.approx(
        {"layer": 0, "tokens": 4, "assignments": 6, "max_over_mean": 8 / 3, "idle_share": 0.25,
         "top_quarter_share": 4 / 6, "entropy_bits": entropy, "entropy_share": entropy / 2,
         "experts_in_use": 2**entropy, "zero_share": 1 / 7}
    )  # fmt: skip


def test_top_quarter_rounds_up() -> None:
    assert A.balance(trace_of([[[0]], [[1]], [[0]], [[2]], [[0]]], 5)).top_quarter_share[0] == pytest.approx(4 / 5)


@pytest.mark.parametrize(("model", "law"), [("zipf", lambda r: r**-0.8), ("exponential", lambda r: np.exp(-0.3 * r))])
def test_fit_finds_the_law_that_made_the_counts(model: str, law) -> None:
    ranked = np.round(1e9 * law(np.arange(1.0, 33))).astype(int)
    exponent, p = fit(ranked, model)
    assert exponent == pytest.approx(0.8 if model == "zipf" else 0.3, abs=1e-6)
    assert p == pytest.approx(ranked / ranked.sum(), rel=1e-5)


def test_fit_is_the_likelihoods_maximum() -> None:
    ranked = np.sort(np.random.default_rng(3).poisson(50, 20))[::-1]

    def likelihood(s: float) -> float:
        p = np.arange(1.0, 21) ** -s
        return float(ranked @ np.log(p / p.sum()))

    best = fit(ranked, "zipf")[0]
    assert all(likelihood(best) > likelihood(best + step) for step in (-0.01, 0.01))


def test_skew_of_an_even_and_of_an_empty_layer() -> None:
    even = A.skew(trace_of([[[0, 1]], [[2, 3]]], 4))
    assert even["exponent"].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert even["explained"].isna().all()
    assert A.skew(trace_of([[[-1, -1]]], 4))["exponent"].isna().all()


@settings(max_examples=40, deadline=None)
@given(seed=seeds(), experts=st.integers(2, 7), data=st.data())
def test_joint_equals_the_sum_over_all_subsets(seed: int, experts: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, experts))
    w = np.random.default_rng(seed).lognormal(0, 1.5, experts)
    sets = list(combinations(range(experts), k))
    p = np.array([w[list(s)].prod() for s in sets])
    hot = np.array([[e in s for e in range(experts)] for s in sets], dtype=float)
    want = (hot * (p / p.sum())[:, None]).T @ hot
    inclusion = np.diag(want).copy()
    np.fill_diagonal(want, 0)
    assert np.abs(joint(inclusion, k) - want).max() < tol("analysis/pairs")


def test_joint_with_experts_always_or_never_picked() -> None:
    pairs = joint(np.array([1.0, 0.0, 0.5, 0.5]), 2)
    assert pairs[0].tolist() == pytest.approx([0, 0, 0.5, 0.5])
    assert pairs[2, 3] == 0


def test_even_popularity_has_the_stated_neutral_raw_lift() -> None:
    e, k = 6, 3
    df = A.coactivation(trace_of([[s] for s in combinations(range(e), k)], e))
    assert df["lift"].tolist() == pytest.approx([1] * 15)
    assert df["lift_raw"].tolist() == pytest.approx([e * (k - 1) / (k * (e - 1))] * 15)


def test_together_is_counted_in_any_slot_order() -> None:
    df = A.coactivation(trace_of([[[2, 0]], [[0, 2]], [[1, 0]]], 3)).set_index(["expert_a", "expert_b"])
    assert df["together"].to_dict() == {(0, 1): 1, (0, 2): 2, (1, 2): 0}
    assert df["expected"].sum() == pytest.approx(3)  # each token fills one pair


def test_domains_explain_pairs_that_share_nothing_else() -> None:
    """Each domain draws 2 of its own 3 experts evenly: lift within it is 1, but across domains it is not."""
    picks = [list(s) for s in combinations(range(3), 2)] + [list(s) for s in combinations(range(3, 6), 2)]
    trace = trace_of([[s] for s in picks], 6, domains=np.array(["a"] * 3 + ["b"] * 3))
    within = A.coactivation(trace, within="domain")
    assert within["lift"].dropna().tolist() == pytest.approx([1] * 6)
    assert A.coactivation(trace)["lift"].max() > 1.5


def test_tokens_with_fewer_picks_expect_fewer_pairs() -> None:
    df = A.coactivation(trace_of([[[0, 1]], [[2, -1]], [[2, 2]], [[-1, -1]]], 3))
    assert df["expected"].sum() == pytest.approx(1)


@settings(max_examples=40, deadline=None)
@given(seed=seeds(), tokens=st.integers(1, 40))
def test_distances_equal_a_plain_search(seed: int, tokens: int) -> None:
    hot = A.occupancy(random_trace(tokens, 1, 6, 2, seed), 0)
    want = []
    for e in range(6):
        seen = np.flatnonzero(hot[:, e])
        want += [np.inf if i == 0 else float(seen[i] - seen[i - 1]) for i in range(len(seen))]
    assert distances(hot).tolist() == want


def test_reuse_bins_hold_every_pick_once_and_end_with_first_picks() -> None:
    df = A.reuse(trace_of([[[0]], [[0]], [[1]], [[1]], [[0]], [[2]]], 3))
    text = df[df["order"] == "text"]
    assert text["picks"].tolist() == [2, 0, 1, 0, 3]  # distances 1, 2, 3-4, 5-8, never before
    assert text["share_within"].tolist() == pytest.approx([2 / 6, 2 / 6, 3 / 6, 3 / 6, 1])
    assert df.groupby("order")["picks"].sum().tolist() == [6, 6]


def test_shuffles_keep_what_they_promise() -> None:
    domains = np.array(["a"] * 50 + ["b"] * 70 + ["a"] * 30)
    trace = random_trace(150, domains=domains, token_ids=np.arange(150))
    for within in (False, True):
        mixed = A.shuffled(trace, 3, within_domain=within)
        assert sorted(mixed.token_ids) == list(range(150))
        assert np.array_equal(mixed.ids, trace.ids[mixed.token_ids])
        assert not np.array_equal(mixed.ids, trace.ids)
        assert np.array_equal(mixed.domains, domains) is within
    assert np.array_equal(A.shuffled(trace, 3).ids, A.shuffled(trace, 3).ids)


@settings(max_examples=30, deadline=None)
@given(seed=seeds(), tokens=st.integers(1, 50), m=st.integers(1, 50))
def test_union_equals_sets(seed: int, tokens: int, m: int) -> None:
    trace = random_trace(tokens, 1, 6, 2, seed)
    if m > tokens:
        with pytest.raises(lab.LabError, match="fits the trace"):
            A.union(trace, [m])
        return
    row = A.union(trace, [m]).iloc[0]
    sizes = [len({*trace.ids[i * m : (i + 1) * m].ravel().tolist()}) for i in range(tokens // m)]
    assert row["distinct_mean"] == pytest.approx(np.mean(sizes))
    assert (row["blocks"], row["most"]) == (tokens // m, min(2 * m, 6))


def test_independence_is_exact_for_one_token_and_for_one_expert_each() -> None:
    df = A.union(random_trace(64), (1, 4))
    assert df[df["tokens"] == 1][["distinct_mean", "independent"]].to_numpy() == pytest.approx(2)
    coin = A.union(trace_of([[[0]], [[1]]] * 8, 2), (2,)).iloc[0]
    assert coin[["distinct_mean", "independent"]].tolist() == [2, 1.5]  # 2 (1 - 1/4)


def test_zero_experts_and_skips_are_no_union() -> None:
    assert A.union(ONE_LAYER, (4,)).distinct_mean[0] == 3


def test_layers_are_named_by_their_numbers() -> None:
    trace = random_trace(20, layers=2, top_k=2)
    renamed = lab.RoutingTrace(ids=trace.ids, weights=trace.weights, layers=(3, 9), num_experts=8, width=8)
    assert A.balance(renamed)["layer"].tolist() == [3, 9]
    assert A.reuse(renamed, layers=[9])["layer"].unique().tolist() == [9]


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: A.load(random_trace(5), layers=[7]), "no layer 7"),
        (lambda: A.balance(trace_of(np.zeros((0, 1, 2), int), 2)), "no token"),
        (lambda: A.coactivation(random_trace(5, top_k=1)), "K=1"),
        (lambda: A.coactivation(random_trace(5), within="domain"), "domains"),
        pytest.param(
            lambda: A.coactivation(random_trace(5), within="layer"), "'all' or 'domain'", marks=pytest.mark.wrong_types
        ),
        (lambda: A.shuffled(random_trace(5), within_domain=True), "domains"),
        (lambda: A.union(random_trace(5), (0, 2)), "at least 1"),
        (lambda: A.tokens_of(random_trace(5), slice(5, 9)), "no tokens"),
        (lambda: A.tokens_of(random_trace(5), np.array([7])), "out of bounds"),
    ],
    ids=["layer", "empty", "K1", "no-domains", "within", "shuffle", "size", "slice", "index"],
)
def test_what_cannot_be_answered_is_refused(ask, says: str) -> None:
    with pytest.raises(lab.LabError, match=says):
        ask()
