"""Each eviction policy: what it keeps, by hand; what all must keep to, by property."""

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.simulate import simulate
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.policies.ranking import Ranking
from moe_lab.stream.policies.recency import BLOCK, Recency
from moe_lab.stream.policy import POLICIES, LFUDecay, Policy, Predicted, Static, make_policy, policy_name
from moe_lab.stream.slots import SlotTable
from tests.support.expert_files import write_experts
from tests.support.traces import trace_of

EVERY = pytest.mark.parametrize("name", POLICIES)


def keep(name: str, slots: int, *picks: int, **options) -> set[int]:
    """The experts resident after one-expert requests."""
    table = SlotTable(range(slots), make_policy(name, **options))
    for pick in picks:
        serve(table, [(0, pick)])
    return {expert for _, expert in table.resident}


def serve(table: SlotTable, keys: list[tuple[int, int]]) -> list[tuple[int, int]] | None:
    missing = table.take(keys)
    if missing is not None:
        for key in keys:
            table.put_back(key)
    return missing


class TestByHand:
    @pytest.mark.parametrize(
        ("name", "picks", "kept"),
        [
            ("lru", (1, 2, 3, 1, 4), {1, 3, 4}),
            ("lfu", (1, 1, 2, 2, 3, 4), {1, 2, 4}),  # 3 was asked for once
            ("lfu", (1, 2, 3, 4), {2, 3, 4}),  # equals: the longest unused leaves
            ("lfu", (1, 1, 1, 2, 3, 4, 3), {1, 4, 3}),  # 3 came back as new: its old count left with it
            ("lfuda", (1, 1, 2, 3, 4), {1, 3, 4}),  # 2 (value 1) left: new ones start at 2
            ("lfuda", (1, 1, 2, 3, 4, 5, 6), {4, 5, 6}),  # so 1 (value 2) is as low as those, and older
            ("static", (1, 1, 1, 2, 2, 3, 4), {1, 2, 4}),
            ("s3fifo", (1, 2, 3, 4), {2, 3, 4}),
        ],
        ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else str(value),
    )
    def test_what_stays_in_three_slots(self, name: str, picks: tuple[int, ...], kept: set[int]):
        assert keep(name, 3, *picks) == kept

    def test_s3fifo_moves_on_what_was_asked_for_again(self):
        assert 1 in keep("s3fifo", 3, 1, 1, 1, *range(10, 20))  # twice after the first: the main queue keeps it
        assert 1 not in keep("s3fifo", 3, 1, 1, *range(10, 20))

    def test_s3fifo_remembers_whom_it_weeded_out(self):
        table = SlotTable(range(3), policy := make_policy("s3fifo"))
        for pick in (1, 2, 3, 4, 1):  # 4 weeds 1 out, 1 comes back as a ghost
            serve(table, [(0, pick)])
        assert list(policy._main) == [(0, 1)]

    def test_s3fifo_makes_no_ghost_of_a_failed_read(self):
        table = SlotTable(range(3), policy := make_policy("s3fifo"))
        table.take([(0, 1)])
        table.forget((0, 1))
        assert not policy._ghosts

    def test_decayed_counts_forget_yesterdays_favourite(self):
        old = [7] * 40
        assert 7 in keep("lfu", 2, *old, *[1, 2] * 20)
        assert 7 not in keep("lfu_decay", 2, *old, *[1, 2] * 20, half_life=5.0)

    def test_decayed_counts_are_the_sum_they_say(self):
        policy = LFUDecay(half_life=3.0)
        times = [1, 2, 5, 9]
        for now in range(1, 10):
            policy.on_request([(0, 4)] if now in times else [(0, 5)])
            (policy.on_hit if now != 1 else policy.on_insert)((0, 4) if now in times else (0, 5))
        assert 2 ** policy._weight[(0, 4)] == pytest.approx(sum(2 ** (t / 3) for t in times), rel=1e-12)

    def test_decayed_counts_live_through_a_year_of_tokens(self):
        policy = LFUDecay(half_life=1.0)
        policy._requests[0] = 10**9
        policy.on_request([(0, 1)])
        policy.on_insert((0, 1))
        policy.on_hit((0, 1))
        assert policy._weight[(0, 1)] == 10**9 + 2

    def test_static_knows_a_trace(self):
        trace = trace_of([[[2, 3], [0, 1]], [[2, 1], [0, 1]], [[2, 3], [0, 2]]], 4)
        table = SlotTable(range(3), Static.of(trace))
        for pick in (0, 1, 2, 3, 0, 1):
            serve(table, [(0, pick)])
        assert {expert for _, expert in table.resident} == {2, 3, 1}

    def test_static_settles_after_what_it_learns_from(self):
        policy = Static(learn=3)
        table = SlotTable(range(2), policy)
        for pick in (1, 1, 1, 2, 2, 2, 2, 2, 3):
            serve(table, [(0, pick)])
        assert {expert for _, expert in table.resident} == {1, 3}
        assert policy._counts == {(0, 1): 3}

    def test_predicted_learns_who_follows_whom(self):
        policy = Predicted(memory=0.5)
        for pick in (1, 2, 3) * 30:
            policy.on_request([(0, pick)])
        for last, following in ((1, 2), (2, 3), (3, 1)):
            assert int(policy.predict(0, [last]).argmax()) == following

    def test_predicted_takes_a_predictor_of_ones_own(self):
        class Knows(Predicted):
            def predict(self, layer, experts):
                return np.arange(16.0)  # the higher the number, the sooner

        table = SlotTable(range(2), Knows())
        for pick in (9, 3, 5):
            serve(table, [(0, pick)])
        assert {expert for _, expert in table.resident} == {9, 5}


class TestCyclicWorkingSet:
    """Seeds: a working set 0.5 % larger than the cache makes LRU evict exactly the next one needed."""

    def test_a_random_victim_among_the_oldest_eighth_misses_three_times_less(self):
        slots, keys = 400, 402
        trace = np.array([*range(keys)] * 5).reshape(-1, 1, 1)
        table = simulate(trace, slots, ["lru", "random_oldest", "belady"]).set_index("policy").misses - keys
        assert table["lru"] == 4 * keys
        assert table["belady"] < table["random_oldest"] < table["lru"] / 3

    def test_the_live_cache_misses_as_the_simulator_says_and_three_times_less(self, tmp_path: Path):
        slots, keys, rounds = 200, 201, 4
        shapes = ((1, 2), (1, 2), (2, 1))
        source = write_experts(tmp_path / "x.bin", layers=(0,), experts=keys, shapes=lambda _: shapes)
        trace = np.array([*range(keys)] * rounds).reshape(-1, 1, 1)
        simulated = simulate(trace, slots, ["lru", "random_oldest"]).set_index("policy").misses
        counted = {}
        for policy in ("lru", "random_oldest"):
            with ExpertCache(slots=slots, policy=policy) as cache:
                cache.bind(source, "cpu")
                for expert in trace.ravel().tolist():
                    cache.lease(source, 0, [expert]).release()
                counted[policy] = cache.misses
        assert counted == simulated.to_dict()
        assert counted["lru"] == keys * rounds
        assert 3 * (counted["random_oldest"] - keys) < counted["lru"] - keys

    def test_a_wider_share_of_the_oldest_misses_less_on_it(self):
        trace = np.array([*range(402)] * 4).reshape(-1, 1, 1)
        policies = [make_policy("random_oldest", percent=p) for p in (1, 8, 50)]
        misses = simulate(trace, 400, policies).misses.tolist()
        assert misses == sorted(misses, reverse=True)

    def test_in_small_caches_it_is_lru(self):
        rng = np.random.default_rng(0)
        trace = rng.integers(0, 20, (300, 1, 1))
        table = simulate(trace, 12, ["lru", "random_oldest"]).set_index("policy").misses
        assert table["lru"] == table["random_oldest"]


class TestProperties:
    @EVERY
    @settings(deadline=None, max_examples=40)
    @given(data=st.data(), slots=st.integers(1, 6))
    def test_never_evicts_what_is_held_and_never_outgrows_its_slots(self, name: str, data: st.DataObject, slots: int):
        """Requests that stay open while others come, reads that fail, and releases in any order."""
        table = SlotTable(range(slots), make_policy(name))
        held: list[list[tuple[int, int]]] = []
        for _ in range(data.draw(st.integers(1, 40))):
            step = data.draw(st.sampled_from(["take", "take", "take", "release", "fail"]))
            if step == "take":
                experts = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=slots, unique=True))
                layer = data.draw(st.integers(0, 1))
                pinned = {key for keys in held for key in keys}
                free = [(layer, e) for e in sorted(experts) if (layer, e) not in pinned]
                if free and table.take(free) is not None:
                    assert all(key in table.resident for key in free)
                    held.append(free)
            elif held and step == "release":
                for key in held.pop(data.draw(st.integers(0, len(held) - 1))):
                    table.put_back(key)
            elif held:
                table.forget(held[-1].pop())
                held = [keys for keys in held if keys]
            assert all(key in table.resident for keys in held for key in keys)
            assert len(table.free) + len(table.resident) == slots
            assert len(set(table.resident.values()) | set(table.free)) == slots

    @EVERY
    @settings(deadline=None, max_examples=20)
    @given(
        ids=st.lists(st.lists(st.integers(0, 11), min_size=6, max_size=6), min_size=1, max_size=40),
        slots=st.integers(2, 24),
        per_layer=st.booleans(),
    )
    def test_same_requests_same_victims_and_no_better_than_the_optimum(
        self, name: str, ids: list[list[int]], slots: int, per_layer: bool
    ):
        trace = np.array(ids).reshape(-1, 2, 3)
        first, again = (simulate(trace, slots, [name, "belady_bypass"], per_layer=per_layer) for _ in range(2))
        assert first.equals(again)
        assert (first.hits + first.misses == first.requests).all()
        misses = first.groupby("policy").misses.sum()
        assert misses["belady_bypass"] <= misses[name]

    @EVERY
    def test_a_cache_for_all_reads_each_once(self, name: str):
        trace = np.random.default_rng(1).integers(0, 9, (80, 2, 3))
        distinct = len({(i, e) for i in (0, 1) for e in trace[:, i].ravel().tolist()})
        assert simulate(trace, 18, [name]).misses.sum() == distinct

    @EVERY
    def test_a_miss_in_a_large_cache_takes_no_longer(self, name: str):
        """Misses alone, one key at a time: the time of one at 10 slots and at 2,000."""
        seconds = {}
        for slots in (10, 2000):
            best = []
            for _ in range(2):
                table = SlotTable(range(slots), make_policy(name))
                for expert in range(slots):
                    serve(table, [(expert % 40, expert // 40)])
                begin = time.process_time()
                for expert in range(slots, slots + 500):
                    serve(table, [(expert % 40, expert // 40)])
                best.append(time.process_time() - begin)
            seconds[slots] = min(best)
        assert seconds[2000] < 3 * seconds[10], seconds


class TestFactory:
    @EVERY
    def test_every_name_makes_its_policy(self, name: str):
        policy = make_policy(name)
        assert isinstance(policy, Policy)
        assert policy_name(policy) == policy_name(type(policy)) == name

    def test_options_show_in_the_label(self):
        policy = make_policy("random_oldest", percent=5, seed=3)
        assert policy_name(policy) == "random_oldest(percent=5, seed=3)"
        assert (policy.percent, policy.seed) == (5, 3)

    @pytest.mark.parametrize(
        ("name", "options", "told"),
        [
            ("lru", {"percent": 5}, "'lru' has no option 'percent'; it has no options"),
            ("random_oldest", {"share": 5}, "has no option 'share'; it has percent, seed"),
            ("random_oldest", {"percent": 0}, "percent is 0"),
            ("random_oldest", {"percent": float("nan")}, "percent is nan"),
            ("lfu_decay", {"half_life": 0}, "half_life is 0"),
            ("lfu_decay", {"half_life": float("inf")}, "half_life is inf"),
            ("static", {"learn": 0}, "learn .* is 0"),
            ("predicted", {"memory": 1.0}, "memory=1.0"),
            ("predicted", {"among": 0}, "among .* is 0"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
    )
    def test_options_that_cannot_be_are_refused(self, name: str, options: dict, told: str):
        with pytest.raises(LabError, match=told):
            make_policy(name, **options)

    def test_options_belong_to_names(self):
        with pytest.raises(LabTypeError, match=r"options \(percent\) go with a policy's name"):
            make_policy(Static(), percent=5)

    def test_a_request_hook_that_cannot_be_called_is_refused(self):
        class Odd(Static):
            def on_request(self):
                pass

        with pytest.raises(LabTypeError, match="on_request"):
            make_policy(Odd())


class TestStructures:
    @settings(deadline=None, max_examples=30)
    @given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=200), block=st.integers(1, 5))
    def test_recency_is_a_list_sorted_by_last_use(self, steps: list[tuple[bool, int]], block: int):
        recency, order = Recency(block), []
        for touch, expert in steps:
            key = (0, expert)
            order = [one for one in order if one != key]
            if touch:
                order.append(key)
                recency.touch(key)
            else:
                recency.drop(key)
            assert list(recency) == order
            assert len(recency) == len(order)
            for rank in (0, 1, len(order) // 2, len(order)):
                assert list(recency.since(rank)) == order[rank:]

    def test_recency_keeps_no_more_blocks_than_its_keys_need(self):
        recency = Recency()
        for use in range(100 * BLOCK):
            recency.touch((0, use % 300))
        assert len(recency._blocks) <= 12

    def test_ranking_passes_over_what_is_no_candidate_and_keeps_it(self):
        ranking = Ranking()
        for expert in range(5):
            ranking.put((0, expert), expert)
        assert ranking.lowest({(0, 3), (0, 4)}) == (0, 3)
        assert ranking.lowest({(0, e) for e in range(5)}) == (0, 0)
        with pytest.raises(LabError, match="none of the 1 candidates"):
            ranking.lowest({(9, 9)})
        assert ranking.lowest({(0, 1)}) == (0, 1)
