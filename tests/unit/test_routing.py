"""lab.route and lab.plan: the R rows of the fault table, and properties over random routers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import Routing, plan, route, scores
from moe_lab.spec import RouterSpec

NAN, INF = float("nan"), float("inf")


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float32)


def picks(logits: torch.Tensor, spec: RouterSpec, **more) -> tuple[list, list]:
    r = route(logits, spec, **more)
    return r.ids.tolist(), [[round(v, 6) for v in w] for w in r.weights.tolist()]


def test_r01_ties_go_to_the_lower_id() -> None:
    r = route(torch.zeros(1, 64), RouterSpec(64, 8, normalize=True))
    assert r.ids.tolist() == [list(range(8))]
    assert r.weights.tolist() == [[0.125] * 8]


def test_r02_all_nan_rows_keep_distinct_ids_and_touch_no_other_row() -> None:
    logits = torch.full((3, 8), NAN)
    logits[1] = torch.arange(8.0)
    r, alone = route(logits, RouterSpec(8, 4)), route(logits[1:2], RouterSpec(8, 4))
    for bad in (0, 2):
        assert len(set(r.ids[bad].tolist())) == 4
        assert r.ids[bad].min() >= 0
        assert r.ids[bad].max() < 8
        assert r.weights[bad].isfinite().all()
    assert torch.equal(r.ids[1:2], alone.ids)
    assert torch.equal(r.weights[1:2], alone.weights)
    assert int(r.affected_rows) == 2


def test_partly_nan_row_never_picks_nan_before_finite() -> None:
    r = route(row(NAN, 6, 8, 1), RouterSpec(4, 4))
    assert r.ids.tolist() == [[2, 1, 3, 0]]
    assert r.weights[0, 3] == 0
    assert r.weights[0].sum() == pytest.approx(1.0)


def test_r02_nan_ranks_below_scores_that_underflow_to_0() -> None:
    r = route(row(NAN, -800, -900, -1000), RouterSpec(4, 2, score="sigmoid"))
    assert r.ids.tolist() == [[1, 2]]
    assert r.weights.isfinite().all()


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus", "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_logits_are_storage_alone(dtype: torch.dtype, score: str) -> None:
    """The same values as fp32 have the same ids and weights, bit for bit, on whichever path `route` takes."""
    spec = RouterSpec(48, 6, score=score, weights_from="softmax_topk" if score == "none" else "score", normalize=True)
    logits = (3 * torch.randn(64, 48, generator=torch.Generator().manual_seed(2))).to(dtype)
    for backend in ("auto", "torch"):
        got, want = route(logits, spec, backend=backend), route(logits.float(), spec, backend=backend)
        assert torch.equal(got.ids, want.ids)
        assert torch.equal(got.weights, want.weights)


def test_r04_infinities() -> None:
    low = route(torch.full((1, 8), -INF), RouterSpec(8, 2))
    assert low.ids.tolist() == [[0, 1]]
    assert low.weights.isfinite().all()
    assert picks(row(INF, 0, 0, 0), RouterSpec(4, 2)) == ([[0, 1]], [[1.0, 0.0]])


def test_r05_k_equals_e_and_beyond() -> None:
    ids, weights = picks(row(0.1, 0.4, 0.2, 0.3), RouterSpec(4, 4))
    assert ids == [[1, 3, 2, 0]]
    assert sum(weights[0]) == pytest.approx(1.0, abs=1e-6)
    for k in (0, 5):
        with pytest.raises(LabError, match=rf"K={k}.*R=4"):
            RouterSpec(4, k)


def test_r07_no_renormalising_gives_probabilities_not_logits() -> None:
    assert picks(row(2, 1, 0, -1), RouterSpec(4, 2)) == ([[0, 1]], [[0.643914, 0.236883]])


@pytest.mark.parametrize(
    ("normalize", "weights"), [(False, [0.5, 0.880797]), (True, [0.362110, 0.637890])], ids=["raw", "normalised"]
)
def test_r08_the_bias_chooses_and_does_not_weigh(normalize: bool, weights: list[float]) -> None:
    spec = RouterSpec(4, 2, score="sigmoid", normalize=normalize)
    got = picks(row(0, 0, 2, -1), spec, correction_bias=torch.tensor([0.0, 3, 0, 0]))
    assert got[0] == [[1, 2]]
    assert got[1][0] == pytest.approx(weights, abs=1e-6)


def test_r10_a_dropped_group_never_wins() -> None:
    spec = RouterSpec(4, 2, score="sigmoid", n_group=2, topk_group=1)
    bias = torch.tensor([-0.6, -0.7, -1.0, -1.1])
    assert picks(torch.zeros(1, 4), spec, correction_bias=bias) == ([[0, 1]], [[0.5, 0.5]])


def test_r11_groups_of_one_cannot_sum_two() -> None:
    with pytest.raises(LabError, match=r"R=8.*n_group=8"):
        RouterSpec(8, 2, n_group=8, topk_group=4)


@pytest.mark.wrong_types
def test_r13_the_bias_is_as_wide_as_the_logits() -> None:
    with pytest.raises(LabError, match=r"\(4,\).*\[6\]"):
        route(torch.zeros(1, 6), RouterSpec(4, 2, zero_experts=2), correction_bias=torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_r16_r17_underflowing_sums_stay_finite(dtype: torch.dtype) -> None:
    spec = RouterSpec(16, 8, score="sigmoid", normalize=True, norm_eps=1e-20)
    logits = torch.full((2, 16), -110.0, dtype=dtype)
    logits[1] = torch.linspace(-2, 2, 16)
    r = route(logits, spec, correction_bias=torch.arange(16.0))
    assert r.weights.isfinite().all()
    assert torch.equal(r.weights[1:], route(logits[1:], spec, correction_bias=torch.arange(16.0)).weights)
    # sigmoid(-110) is 2e-48, far below the guard: a guard or sum kept in 16 bits is 0 and shows here
    assert torch.equal(r.weights, route(logits.float(), spec, correction_bias=torch.arange(16.0)).weights)


def test_r19_token_ids_outside_the_table() -> None:
    spec = RouterSpec(4, 2, hash_routing=True)
    table = torch.zeros(16, 2, dtype=torch.int64)
    with pytest.raises(LabError, match=r"token_ids\[1\] is 16"):
        route(torch.zeros(3, 4), spec, hash_table=table, token_ids=torch.tensor([3, 16, -1]))
    with pytest.raises(LabError, match="token_ids is missing"):
        route(torch.zeros(3, 4), spec, hash_table=table)


def test_r20_hash_layers_weigh_by_the_gate() -> None:
    spec = RouterSpec(4, 2, score="sqrt_softplus", normalize=True, scale=1.5, hash_routing=True)
    table, tokens = torch.tensor([[0, 3]]), torch.tensor([0])
    assert picks(row(0, 1, 2, 3), spec, hash_table=table, token_ids=tokens) == ([[0, 3]], [[0.484311, 1.015689]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_r22_id_dtypes_mean_the_same(dtype: torch.dtype) -> None:
    r = Routing(torch.tensor([[5, 2]], dtype=dtype), torch.tensor([[0.5, 0.5]]))
    assert r.ids.dtype == torch.int32
    assert r.ids.tolist() == [[5, 2]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_r22_other_id_dtypes_are_a_type_error(dtype: torch.dtype) -> None:
    with pytest.raises(LabTypeError, match=str(dtype).removeprefix("torch.")):
        Routing(torch.tensor([[5, 2]]).to(dtype), torch.tensor([[0.5, 0.5]]))


def test_checked_mode_names_the_first_row() -> None:
    logits = torch.zeros(4, 8)
    logits[2, 3] = NAN
    with pytest.raises(LabError, match=r"row 2 .*1 of 4"):
        route(logits, RouterSpec(8, 2), checked=True)


def test_sparsemixer_drops_experts_far_below_the_best() -> None:
    r = route(row(4.0, 3.99, 1.0, 0.0), RouterSpec(4, 2, weights_from="sparsemixer"))
    assert r.ids.tolist() == [[0, 1]]
    first = math.exp(4) / (math.exp(4) + math.exp(3.99))
    assert r.weights[0].tolist() == pytest.approx([first, 1.0], abs=1e-6)


def test_sparsemixer_never_picks_one_expert_twice() -> None:
    """One finite logit: what is left for the second round is -inf everywhere, the first pick's place included."""
    r = route(row(NAN, 5.0, -INF, NAN), RouterSpec(4, 2, weights_from="sparsemixer"))
    assert r.ids.tolist() == [[1, 0]]
    assert r.weights.tolist() == [[1.0, 0.0]]


def test_scale_on_output_leaves_the_weights_alone() -> None:
    base = route(row(2, 1, 0, -1), RouterSpec(4, 2)).weights
    assert torch.equal(route(row(2, 1, 0, -1), RouterSpec(4, 2, scale=6.0, scale_on="output")).weights, base)
    assert torch.allclose(route(row(2, 1, 0, -1), RouterSpec(4, 2, scale=6.0)).weights, 6 * base)


def test_plan_groups_pairs_stably_and_counts_them() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [-1, 0]], dtype=torch.int32)
    p = plan(Routing(ids, torch.arange(6.0).view(3, 2)), 4)
    assert p.counts.tolist() == [3, 0, 2, 0]
    assert p.offsets.tolist() == [0, 3, 3, 5, 5]
    assert list(zip(p.token.tolist()[:5], p.slot.tolist()[:5], strict=True)) == [(0, 1), (1, 0), (2, 1), (0, 0), (1, 1)]
    assert p.weight.tolist()[:5] == [1, 2, 5, 0, 3]
    assert int(p.invalid) == 0


@pytest.mark.parametrize("bad", [-2, 4, 99])
def test_plan_refuses_other_ids_on_the_host(bad: int) -> None:
    with pytest.raises(LabError, match=rf"\[1, 0\] is {bad}"):
        plan(Routing(torch.tensor([[0, 1], [bad, 1]]), torch.ones(2, 2)), 4)


def test_plan_leaves_zero_experts_out() -> None:
    r = Routing(torch.tensor([[5, 1]]), torch.tensor([[0.6, 0.4]]), width=6)
    assert plan(r, 4).counts.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("tokens", [0, 1, 7, 333])
def test_plan_is_a_permutation_of_all_pairs(tokens: int) -> None:
    r = route(torch.randn(tokens, 60, generator=torch.Generator().manual_seed(tokens)), RouterSpec(60, 6))
    p = plan(r, 60)
    assert int(p.counts.sum()) == tokens * 6
    assert sorted(zip(p.token.tolist(), p.slot.tolist(), strict=True)) == [
        (t, k) for t in range(tokens) for k in range(6)
    ]
    expert = r.ids[p.token.long(), p.slot.long()] if tokens else torch.zeros(0)
    assert torch.equal(expert, expert.sort(stable=True).values)


specs = st.builds(
    RouterSpec,
    num_experts=st.integers(4, 40),
    top_k=st.integers(1, 4),
    score=st.sampled_from(["softmax", "sigmoid", "sqrt_softplus"]),
    normalize=st.booleans(),
)
values = st.one_of(st.floats(-200, 200, width=32), st.sampled_from([NAN, INF, -INF, 0.0, 1.0]))


@settings(max_examples=60, deadline=None)
@given(specs, st.data())
def test_any_logits_give_distinct_ids_in_range_and_finite_weights(spec: RouterSpec, data) -> None:
    rows = data.draw(st.lists(st.lists(values, min_size=spec.width, max_size=spec.width), min_size=1, max_size=3))
    logits = torch.tensor(rows, dtype=torch.float32)
    r = route(logits, spec)
    assert all(len(set(ids)) == spec.top_k for ids in r.ids.tolist())
    assert r.ids.min() >= 0
    assert r.ids.max() < spec.width
    assert not r.weights.isnan().any()
    if spec.normalize or spec.score != "sqrt_softplus":
        assert r.weights.isfinite().all()
    nan_picked = logits.gather(1, r.ids.long()).isnan()
    assert (r.weights[nan_picked] == 0).all()


@pytest.mark.parametrize("score", ["sqrt_softplus", "none"])
def test_an_infinite_score_takes_the_whole_weight(score: str) -> None:
    """inf / inf would be NaN."""
    spec = RouterSpec(4, 3, score=score, normalize=True)
    r = route(torch.tensor([[INF, 1, 2, 0], [INF, 1, INF, 2], [1, -INF, -INF, -INF]]), spec)
    assert r.ids.tolist()[:2] == [[0, 2, 1], [0, 2, 3]]
    assert r.weights.tolist() == [[1, 0, 0], [0.5, 0.5, 0], [1, 0, 0]]


def test_on_a_device_tokens_outside_the_hash_table_are_skipped_and_counted() -> None:
    """What the device path does without a look from the host; the host refuses such input (R19)."""
    table = torch.tensor([[0, 3], [1, 9]])
    ids, unknown = scores.hashed(table, torch.tensor([0, 2, -1, 1]), 4)
    assert ids.tolist() == [[0, 3], [-1, -1], [-1, -1], [1, -1]]
    assert unknown.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda: route(torch.zeros(2, 5), RouterSpec(4, 2)),
        lambda: route(torch.zeros(2, 4, dtype=torch.int32), RouterSpec(4, 2)),
        lambda: RouterSpec(4, 2, score="tanh"),  # type: ignore[arg-type]
        lambda: RouterSpec(6, 2, n_group=4),
        lambda: RouterSpec(8, 5, n_group=4, topk_group=2),
        lambda: Routing(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3)),
    ],
    ids=["width", "dtype", "score", "groups_do_not_divide", "k_over_kept_groups", "shapes"],
)
@pytest.mark.wrong_types
def test_refusals(make) -> None:
    with pytest.raises(LabError):
        make()
