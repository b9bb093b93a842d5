"""Top-k in one launch: ids and weights are the bits of the torch reference, whatever the logits hold."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.routing import route
from moe_lab.spec import RouterSpec
from moe_lab_kernels import backend
from moe_lab_kernels.route import topk
from tests.support.kernel_cases import same_bits
from tests.support.routing_cases import INF, NAN, ROUTERS, differs, guarded_outputs, logits, vectors

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy speaks where the kernel meets inf - inf
]
KINDS = ("normal", "ties", "saturated", "underflow", "broken")


@pytest.mark.parametrize("name", ROUTERS)
def test_bits_of_the_reference(name: str) -> None:
    spec = ROUTERS[name][0]
    rows = torch.cat([logits(6, spec.width, kind=kind) for kind in KINDS])
    assert differs(rows, spec, **vectors(name)) is None


@pytest.mark.parametrize("t", [0, 1, 7, 8, 9, 37, 199], ids="T{}".format)
def test_any_number_of_rows(t: int) -> None:
    spec = RouterSpec(60, 4, normalize=True)
    assert differs(logits(t, 60, kind="broken"), spec) is None


@pytest.mark.parametrize("name", ["R128-K8-normalised", "R256-K8-top2-groups-bias"])
def test_a_row_alone_has_the_bits_it_has_in_a_batch(name: str) -> None:
    """One row takes the shorter comparison of keys, several rows the full one."""
    spec, z, more = ROUTERS[name][0], logits(5, ROUTERS[name][0].width, kind="ties"), vectors(name)
    batch = topk.topk(z, spec, **more)
    for row in (0, 3):
        alone = topk.topk(z[row : row + 1], spec, **more)
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, batch, strict=True))


@pytest.mark.parametrize("kind", ["normal", "ties", "broken"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_logits(dtype: torch.dtype, kind: str) -> None:
    """Against the reference in the same dtype, and against the same values as fp32: the dtype is storage alone. Of
    "broken" rows this wide nearly all hold +inf, so that their weights say little."""
    spec, z = RouterSpec(160, 6, normalize=True), logits(9, 160, kind=kind).to(dtype)
    assert differs(z, spec) is None
    assert all(same_bits(a, b) for a, b in zip(topk.topk(z, spec), topk.topk(z.float(), spec), strict=True))


def test_strided_logits() -> None:
    wide = logits(14, 120)
    assert differs(wide[::2, ::2], RouterSpec(60, 4)) is None
    assert differs(logits(60, 9).T, RouterSpec(60, 4)) is None


def test_every_output_is_written_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, z = RouterSpec(60, 6), logits(9, 60, kind="broken")
    with guarded_outputs(monkeypatch):
        ids, weights, affected = topk.topk(z, spec)
    want = route(z, spec, backend="torch")
    assert torch.equal(ids, want.ids)
    assert torch.equal(weights, want.weights)
    assert int(affected.sum()) == int(want.affected_rows)


def test_one_launch() -> None:
    with backend.count_launches() as count:
        topk.topk(logits(9, 60), RouterSpec(60, 4))
    assert count.launches == 1


def test_route_takes_the_kernel_and_says_what_torch_says() -> None:
    spec, z = RouterSpec(60, 4), logits(4, 60, kind="broken")
    with backend.count_launches() as count:
        got = route(z, spec)
    assert count.launches == 1
    want = route(z, spec, backend="torch")
    assert torch.equal(got.ids, want.ids)
    assert int(got.affected_rows) == int(want.affected_rows)
    assert got.affected_rows.dtype == torch.int32
    assert got.affected_rows.ndim == 0
    for choice in ("torch", "triton"):
        with pytest.raises(LabError, match=r"row 0 of the logits holds NaN"):
            route(z, spec, checked=True, backend=choice)


def test_float64_logits_stay_with_torch_unless_the_kernel_is_asked_for() -> None:
    z = logits(2, 8).double()
    with backend.count_launches() as count:
        route(z, RouterSpec(8, 2))
    assert count.launches == 0
    with pytest.raises(LabTypeError, match=r"logits.*float64"):
        route(z, RouterSpec(8, 2), backend="triton")


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (RouterSpec(8, 2, hash_routing=True), "hash routing"),
        (RouterSpec(8, 2, weights_from="sparsemixer"), "sparsemixer"),
        (RouterSpec(1025, 2), "R=1025"),
        (RouterSpec(64, 17), "K=17"),
        (RouterSpec(1023, 2, n_group=33, topk_group=3, group_score="max"), None),
    ],
    ids=["hash", "sparsemixer", "wide", "many-picks", "odd-groups"],
)
def test_routers_that_are_not_served_are_refused_by_name(spec: RouterSpec, why: str | None) -> None:
    z = torch.zeros(1, spec.width)
    if why is None:
        assert differs(z, spec) is None
        return
    with pytest.raises(LabError, match=why):
        topk.topk(z, spec)


def test_wrong_input_is_refused_with_its_numbers() -> None:
    spec = RouterSpec(4, 2, zero_experts=2)
    with pytest.raises(LabError, match=r"\[T, 6\].*\[1, 4\]"):
        topk.topk(torch.zeros(1, 4), spec)
    with pytest.raises(LabError, match=r"correction_bias.*\[6\].*\[4\]"):
        topk.topk(torch.zeros(1, 6), spec, correction_bias=torch.zeros(4))
    with pytest.raises(LabError, match="backend is 'cuda'"):
        route(torch.zeros(1, 6), spec, backend="cuda")


SPECIAL = (NAN, INF, -INF, 0.0, -0.0, 1.0, -110.0, -800.0, 88.0, 36.5, 40.0, 3e38, -3e38, 1e-40)


@st.composite
def routers(draw) -> tuple[RouterSpec, torch.Tensor, dict[str, torch.Tensor]]:
    groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    width = groups * draw(st.sampled_from([2, 5, 8, 20]))
    keep = draw(st.integers(1, groups))
    k = draw(st.integers(1, min(16, width if groups == 1 else keep * width // groups)))
    zero = draw(st.integers(0, width - 1)) if draw(st.booleans()) else 0
    score = draw(st.sampled_from(["softmax", "sigmoid", "sqrt_softplus", "none"]))
    weights = draw(st.sampled_from(["score", "softmax_topk", "sigmoid_topk"]))
    # a sum of raw logits may cancel, and then its order shows
    normalize = (score, weights) != ("none", "score") and draw(st.booleans())
    spec = RouterSpec(
        width - zero, k, score=score, weights_from=weights, normalize=normalize,
        norm_eps=draw(st.sampled_from([0.0, 1e-20, 1e-6])), norm_kind=draw(st.sampled_from(["add", "max"])),
        scale=draw(st.sampled_from([1.0, 2.826])), scale_on=draw(st.sampled_from(["weights", "output"])),
        n_group=groups, topk_group=keep, group_score=draw(st.sampled_from(["top2_sum", "max"])),
        group_fill=draw(st.sampled_from([-INF, 0.0])), zero_experts=zero,
        temperature=draw(st.sampled_from([1.0, 0.7])),
    )  # fmt: skip
    t, seed = draw(st.integers(1, 5)), draw(st.integers(0, 2**20))
    z = logits(t, width, seed, draw(st.sampled_from(KINDS)))
    for _ in range(draw(st.integers(0, 6))):
        z[draw(st.integers(0, t - 1)), draw(st.integers(0, width - 1))] = draw(st.sampled_from(SPECIAL))
    given = {}
    if draw(st.booleans()):
        given["correction_bias"] = logits(1, width, seed + 1, draw(st.sampled_from(["normal", "ties"])))[0]
    if draw(st.booleans()):
        given["per_expert_scale"] = logits(1, width - zero, seed + 2)[0]
    return spec, z, given


@settings(max_examples=25, deadline=None)
@given(case=routers())
def test_random_routers(case: tuple[RouterSpec, torch.Tensor, dict[str, torch.Tensor]]) -> None:
    spec, z, more = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert differs(z, spec, **more) is None
        ids = topk.topk(z, spec, **more)[0]
    assert all(len(set(row)) == spec.top_k and 0 <= min(row) <= max(row) < spec.width for row in ids.tolist())


def test_softcap_keeps_small_logits_apart() -> None:
    """tanh through exp loses what lies below 1e-16 unless it is written for it."""
    z = torch.tensor([[1e-20, 2e-20, -1e-30, 0.0, 3.0, -3.0, 700.0, -math.inf]])
    assert differs(z, RouterSpec(8, 8, score="none", weights_from="softmax_topk", softcap=30.0)) is None


@pytest.mark.parametrize("score", ["softmax", "sqrt_softplus"])
def test_scores_below_the_smallest_normal_number_tie_at_zero(score: str) -> None:
    """exp(-720) is subnormal, which devices round differently: it counts as 0, so -730 at id 1 ties with -720 at 2."""
    z = torch.tensor([[0.0, -730.0, -720.0, -700.0]])
    spec = RouterSpec(4, 4, score=score)
    assert topk.topk(z, spec)[0].tolist() == [[0, 3, 1, 2]]
    assert route(z, spec, backend="torch").ids.tolist() == [[0, 3, 1, 2]]
