"""Next-layer prediction: what is guessed, when a layer makes no guess; guesses change no bit and no request."""

import dataclasses
from pathlib import Path

import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError, LabTypeError
from moe_lab.execution.options import Options
from moe_lab.routing import route
from moe_lab.spec import RouterSpec
from moe_lab.stream.events import EventLog, Kind
from moe_lab.stream.prediction import HASHED, MOST_TOKENS, REASONS, Guess, Successor, Widths, ranking, why_not
from tests.support.faulty_disk import until
from tests.support.small_stack import D, E, K, SmallStack

ROUTERS = {
    "softmax": RouterSpec(24, 4, normalize=True),
    "sigmoid-groups": RouterSpec(24, 4, score="sigmoid", n_group=4, topk_group=2, group_fill=0.0, scale=2.5),
    "topk-softmax": RouterSpec(24, 4, score="none", weights_from="softmax_topk"),
    "sparsemixer": RouterSpec(24, 2, score="none", weights_from="sparsemixer"),
    "zero-experts": RouterSpec(18, 4, zero_experts=6),
    "scaled-output": RouterSpec(24, 4, scale=3.0, scale_on="output", norm_kind="max"),
}


class TestRanking:
    @pytest.mark.parametrize("name", ROUTERS)
    def test_the_first_of_the_guessed_are_the_routers_own_picks(self, name: str):
        spec = ROUTERS[name]
        logits = torch.randn(40, spec.width, generator=torch.Generator().manual_seed(3))
        biased = spec.weights_from != "sparsemixer"
        bias = torch.randn(spec.width, generator=torch.Generator().manual_seed(4)) * 0.1 if biased else None
        own = route(logits, spec, correction_bias=bias).ids
        wide = route(logits, ranking(spec, spec.top_k + 5), correction_bias=bias).ids
        assert wide.shape == (40, spec.top_k + 5)
        first = 1 if name == "sparsemixer" else spec.top_k  # its second pick is ranked among what its first one leaves
        assert torch.equal(wide[:, :first], own[:, :first])
        assert all(len(set(row)) == len(row) for row in wide.tolist())

    def test_no_more_than_the_router_may_pick_from(self):
        assert ranking(ROUTERS["softmax"], 99).top_k == 24
        assert ranking(ROUTERS["sigmoid-groups"], 99).top_k == 12


class TestOptions:
    def test_a_number_a_sequence_or_a_mapping(self):
        assert Options().prefetch == 0
        assert Options(prefetch=6).prefetch == 6
        assert dict(Options(prefetch=[0, 4, 8]).prefetch) == {0: 0, 1: 4, 2: 8}  # type: ignore[arg-type]
        by_layer = Options(prefetch={3: 8, 1: 2}).prefetch
        assert isinstance(by_layer, Widths)
        assert (by_layer[3], by_layer[1], by_layer[2], len(by_layer)) == (8, 2, 0, 2)

    def test_options_stay_hashable_and_comparable(self):
        one, same = Options(prefetch={1: 2}), Options(prefetch={1: 2})
        assert one == same
        assert len({one, same, Options(prefetch={1: 3}), Options(prefetch=[0, 2])}) == 3
        assert dataclasses.replace(one, shared="side").prefetch == {1: 2}

    @pytest.mark.wrong_types
    @pytest.mark.parametrize(
        ("given", "error"),
        [(-1, LabError), (True, LabTypeError), (2.5, LabTypeError), ("4", LabTypeError), ({1: -2}, LabError),
         ({"4": 4}, LabTypeError), ({-1: 4}, LabError),
         ([1.5], LabTypeError), (None, LabTypeError)], ids=str,
    )  # fmt: skip
    def test_what_is_no_width_is_refused(self, given, error):
        with pytest.raises(error, match="prefetch"):
            Options(prefetch=given)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> SmallStack:
    return SmallStack(tmp_path_factory.mktemp("stack"))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, D, generator=torch.Generator().manual_seed(8))


class TestGuess:
    def test_distinct_experts_of_all_tokens_likeliest_first(self, stack: SmallStack, x: torch.Tensor):
        after = stack.resident[1]
        ids = route(x.double() @ after.router.double().T, ranking(stack.spec.router, 5)).ids
        want = list(dict.fromkeys(ids.T.flatten().tolist()))
        assert Guess(x, Successor.of(after), 5).read() == want

    def test_zero_computation_experts_are_left_out(self, tmp_path: Path, x: torch.Tensor):
        stack = SmallStack(tmp_path, layers=2, zero_experts=6)
        guessed = Guess(x.repeat(4, 1) + torch.randn(8, D), Successor.of(stack.resident[1]), E + 6).read()
        assert sorted(guessed) == list(range(E))

    def test_the_next_router_is_loaded_once_and_only_when_asked_for(self, stack: SmallStack, x: torch.Tensor):
        loads = []

        def load():
            loads.append(1)
            return stack.spec, stack.resident[1].router_weights

        successor = Successor(1, load)
        assert why_not(successor, 0, 1, True) is not None
        assert loads == []
        for _ in range(3):
            Guess(x, successor, 4)
        assert loads == [1]


class TestLayer:
    def test_guesses_are_read_ahead_and_found(self, stack: SmallStack, x: torch.Tensor):
        with lab.ExpertCache(36, threads=4) as cache:
            layers = stack.streamed(cache)
            y = layers[0](x, "gemv", options=Options(prefetch=4))
            t = y.timing
            assert t.no_prefetch is None
            assert t.predicted == tuple(Guess(x, layers[0].successor, 4).read())  # type: ignore[arg-type]
            assert t.prefetched == len(t.predicted)
            until(lambda: cache.read_ahead == len(t.predicted))
            after = layers[1](x, "gemv", options=Options(prefetch=4))  # the same rows: every pick was guessed
            assert (after.timing.misses, after.timing.bytes_read) == (0, 0)
            assert after.timing.hits == len(set(after.routing.ids.flatten().tolist()))
            assert layers[0](x, "gemv", options=Options(prefetch=4)).timing.prefetched == 0  # all there by now

    def test_a_wrong_guess_is_not_read_once_the_picks_are_known(self, stack: SmallStack, x: torch.Tensor):
        with lab.ExpertCache(36, threads=1) as cache:
            layers = stack.streamed(cache)
            assert cache._pool is not None
            cache._pool.background = 0  # nothing begins: everything guessed stands in line
            guessed = layers[0](x, "gemv", options=Options(prefetch=6)).timing.predicted
            assert [e for _, e in cache._line.waiting()] == list(guessed)
            layers[1](-x, "gemv")
            assert cache._line.waiting() == []
            assert cache.read_ahead == 0

    @pytest.mark.parametrize(
        ("arm", "routing"), [("gemv", "host"), ("gemv", "device"), ("reference", "host"), ("mmq", "host")]
    )
    def test_bits_and_requests_are_those_without_prefetch(self, stack: SmallStack, x: torch.Tensor, arm, routing):
        seen = []
        for prefetch in (0, 5):
            with lab.ExpertCache(7, threads=2) as cache:
                options = Options(prefetch=prefetch, routing=routing)
                calls = [layer(x, arm, options=options) for layer in stack.streamed(cache)]
            seen.append([(y.out.tolist(), y.timing.hits + y.timing.misses) for y in calls])
        assert seen[0] == seen[1]

    def test_a_layer_that_cannot_guess_says_why(self, stack: SmallStack, x: torch.Tensor):
        def reason(layer, rows: torch.Tensor, prefetch) -> str | None:
            return layer(rows, "gemv", options=Options(prefetch=prefetch)).timing.no_prefetch

        log = EventLog()
        with lab.ExpertCache(36) as cache:
            layers = stack.streamed(cache)
            cache.record(log)
            assert reason(layers[0], x, 0) is None
            assert reason(layers[0], x, 4) is None
            assert reason(layers[2], x, 4) == "it is the last MoE layer"
            assert reason(layers[0], x, {2: 4}) == "the next layer's width is 0"
            assert reason(layers[0], x.repeat(5, 1), 4) == f"more than T={MOST_TOKENS} tokens"
            layers[0].successor = None
            assert reason(layers[0], x, 4) == "the next layer is not known"
            assert reason(stack.resident[0], x, 4) == "its experts are not streamed"
            told = log.table()
            assert [REASONS[v] for v in told[told["kind"] == Kind.INELIGIBLE]["value"].tolist()] == [
                "it is the last MoE layer", "the next layer's width is 0", "more than T=8 tokens",
                "the next layer is not known",
            ]  # fmt: skip

    def test_a_layer_before_one_that_routes_by_hash_cannot_guess(self, stack: SmallStack):
        hashed = dataclasses.replace(stack.spec, router=dataclasses.replace(stack.spec.router, hash_routing=True))
        assert why_not(Successor(1, lambda: (hashed, stack.resident[1].router_weights)), 4, 1, True) == HASHED

    def test_no_tokens_no_guess(self, stack: SmallStack, x: torch.Tensor):
        with lab.ExpertCache(4) as cache:
            t = stack.streamed(cache)[0](x[:0], "gemv", options=Options(prefetch=4)).timing
            assert (t.predicted, t.prefetched, t.no_prefetch) == ((), 0, None)

    def test_a_checkpoint_links_its_layers_by_their_routers_alone(self):
        with lab.open(lab.sample()) as ckpt, lab.ExpertCache(4) as cache:
            first, second, *_, last = ckpt.moe_layers
            layer = ckpt.layer(first, cache=cache)
            assert layer.successor is not None
            assert layer.successor.number == second
            assert layer.successor._loaded is None
            spec, router = layer.successor.router()
            assert spec == ckpt.layer_spec(second)
            assert torch.equal(router.weight, ckpt.layer(second, cache=cache).router)
            assert ckpt.layer(last, cache=cache).successor.load is None  # type: ignore[union-attr]
            assert ckpt.layer(first).successor is None


def test_picks_of_the_next_layer_are_mostly_among_the_guessed():
    """On the shipped model's own activations a guess of 2 K experts holds most of what the next layer then picks."""
    from moe_lab.activations import Inputs

    with lab.open(lab.sample()) as ckpt:
        inputs, found, asked = Inputs(lab.sample(), 256, 64), 0, 0
        for here, after in zip(ckpt.moe_layers[2:], ckpt.moe_layers[3:], strict=False):
            layer = ckpt.layer(after)
            picks = layer.route(inputs.layer(after)).ids
            rows = inputs.layer(here)
            for t in range(len(rows)):
                guessed = set(Guess(rows[t : t + 1], Successor.of(layer), 2 * picks.shape[1]).read())
                found += len(guessed & set(picks[t].tolist()))
                asked += picks.shape[1]
    assert found / asked > 0.6, found / asked
    assert K < E
