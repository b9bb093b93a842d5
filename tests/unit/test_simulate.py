"""The cache simulator: counts by hand, against an exhaustive optimum, and the rules of its table."""

import threading
from collections import Counter
from collections.abc import Collection
from functools import cache
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.simulate import COLUMNS, Belady, simulate
from moe_lab.stream.policy import LRU, Key
from moe_lab.stream.slots import SlotTable
from moe_lab.trace import NO_PICK, RoutingTrace


def one_layer(*picks: int) -> np.ndarray:
    """A trace of one layer and K = 1."""
    return np.array(picks).reshape(-1, 1, 1)


def counts(table: pd.DataFrame) -> dict[str, tuple[int, int]]:
    """policy -> (hits, misses) over all layers."""
    return {str(name): (int(g.hits.sum()), int(g.misses.sum())) for name, g in table.groupby("policy")}


def fewest_misses(groups: tuple[frozenset[int], ...], slots: int) -> int:
    """The optimum by trying every victim: small traces only."""

    @cache
    def best(i: int, resident: frozenset[int]) -> int:
        if i == len(groups):
            return 0
        missing = groups[i] - resident
        leave = max(0, len(resident) + len(missing) - slots)
        choices = combinations(sorted(resident - groups[i]), leave)
        return len(missing) + min(best(i + 1, (resident - frozenset(gone)) | missing) for gone in choices)

    return best(0, frozenset())


class TestCounts:
    def test_by_hand(self):
        #     1 miss, 2 miss, 3 miss, 1 hit, 4 evicts (lru: 2, belady: 3 or 2), 2, 1
        trace = one_layer(1, 2, 3, 1, 4, 2, 1)
        assert counts(simulate(trace, 3)) == {"lru": (2, 5), "belady": (3, 4)}

    def test_the_cyclic_working_set_that_lru_cannot_hold(self):
        trace = one_layer(*[0, 1, 2, 3] * 25)
        table = counts(simulate(trace, 3))
        assert table["lru"] == (0, 100)
        assert table["belady"][1] == 4 + 96 // 3  # one miss every third request is the best three slots can do

    def test_a_group_is_one_request_that_must_fit_at_once(self):
        trace = np.array([[[0, 1, 2]], [[0, 1, 3]], [[2, 3, 0]]])
        (row,) = simulate(trace, 3, ["lru"]).itertuples(index=False)
        assert (row.requests, row.hits, row.misses, row.hit_rate) == (9, 4, 5, 4 / 9)

    def test_fewer_slots_than_picks_go_in_waves(self):
        trace = np.array([[[0, 1, 2]], [[0, 1, 2]]])
        assert counts(simulate(trace, 2, ["lru"])) == {"lru": (1, 5)}  # [0, 1], [2], then 1 is still there
        assert counts(simulate(trace, 1, ["lru"])) == {"lru": (0, 6)}

    def test_layers_share_the_slots_unless_split(self):
        trace = np.array([[[0], [layer_one]] for layer_one in (0, 1, 2, 0, 1, 2)])
        shared = simulate(trace, 2, ["lru"]).set_index("layer").hits
        split = simulate(trace, 2, ["lru"], per_layer=True).set_index("layer").hits
        assert shared.tolist() == [5, 0]  # layer 0's one expert is always the most recent but one
        assert split.tolist() == [5, 0]
        wide = simulate(trace, 6, ["lru"], per_layer=True).set_index("layer").hits
        assert wide.tolist() == [5, 3]

    def test_tokens_of_a_step_are_asked_for_together(self):
        trace = np.array([[[0, 1]], [[1, 2]], [[0, 1]], [[1, 2]]])
        (row,) = simulate(trace, 3, ["lru"], step_tokens=2).itertuples(index=False)
        assert (row.requests, row.hits) == (6, 3)

    def test_duplicates_and_missing_picks_are_not_requests(self):
        trace = np.array([[[3, 3, -1]], [[-1, -1, -1]], [[3, 0, 3]]])
        (row,) = simulate(trace, 2, ["lru"]).itertuples(index=False)
        assert (row.requests, row.hits, row.misses) == (3, 1, 2)

    def test_a_routing_trace_brings_its_layers_and_skips_zero_experts(self):
        ids = np.array([[[0, 5], [1, NO_PICK]], [[0, 4], [1, 2]]], np.uint16)  # E = 4: 4 and 5 have no weights
        trace = RoutingTrace(ids=ids, weights=np.ones(ids.shape, np.float16), layers=(3, 7), num_experts=4, width=6)
        table = simulate(trace, 4, ["lru"]).set_index("layer")
        assert table.requests.to_dict() == {3: 2, 7: 3}
        assert table.hits.to_dict() == {3: 1, 7: 1}


class TestBelady:
    @settings(deadline=None, max_examples=150)
    @given(
        slots=st.integers(1, 4),
        groups=st.lists(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=9),
    )
    def test_nothing_does_better(self, slots: int, groups: list[frozenset[int]]):
        groups = [group for group in groups if len(group) <= slots]
        width = max((len(group) for group in groups), default=1)
        trace = np.full((len(groups), 1, width), -1)
        for row, group in zip(trace, groups, strict=True):
            row[0, : len(group)] = sorted(group)
        assert simulate(trace, slots, ["belady"]).misses.sum() == fewest_misses(tuple(groups), slots)

    def test_its_memory_follows_the_cache_and_not_the_trace(self):
        requests = [[(0, i % 7)] for i in range(20_000)]
        policy = Belady(requests)
        table = SlotTable(range(7), policy)
        for keys in requests:
            assert table.take(keys) is not None
            table.put_back(keys[0])
        assert len(policy._ranking._heap) <= 64 + 4 * 7 + 1

    def test_a_request_of_another_trace_is_refused(self):
        table = SlotTable(range(2), Belady([[(0, 1)]]))
        with pytest.raises(LabError, match="built for another trace"):
            table.take([(0, 2)])

    @settings(deadline=None, max_examples=40)
    @given(
        ids=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=30),
        capacity=st.integers(1, 12),
        per_layer=st.booleans(),
    )
    def test_conservation_and_order(self, ids: list[list[int]], capacity: int, per_layer: bool):
        trace = np.array(ids).reshape(-1, 2, 2)
        if per_layer and capacity < 2:
            capacity = 2
        table = simulate(trace, capacity, ["lru", "belady"], per_layer=per_layer, expert_bytes=10)
        assert (table.hits + table.misses == table.requests).all()
        assert (table.bytes_read == 10 * table.misses).all()
        misses = table.groupby("policy").misses.sum()
        assert misses["belady"] <= misses["lru"]
        distinct = len({(i % 2, e) for i, row in enumerate(trace.reshape(-1, 2)) for e in row.tolist()})
        assert misses["belady"] >= distinct


class TestTable:
    def test_columns_and_order_of_rows(self):
        trace = np.zeros((3, 2, 1), int)
        table = simulate(trace, [2, 4], ["lru", "belady"])
        assert tuple(table.columns) == COLUMNS
        assert table[["capacity_slots", "policy", "layer"]].to_numpy().tolist() == [
            [slots, policy, layer] for slots in (2, 4) for policy in ("lru", "belady") for layer in (0, 1)
        ]

    def test_bytes_need_the_experts_size(self):
        trace = np.array([[[0], [1]], [[2], [1]]])
        assert simulate(trace, 4, ["lru"]).bytes_read.isna().all()
        assert simulate(trace, 4, ["lru"], expert_bytes={0: 100, 1: 7}).bytes_read.tolist() == [200, 7]

    def test_no_tokens_no_requests(self):
        table = simulate(np.zeros((0, 2, 4), int), 3)
        assert table.requests.tolist() == [0] * 4
        assert table.hit_rate.isna().all()

    def test_the_users_policy_runs_beside_the_others(self):
        class Newest(LRU):
            name = "newest"

            def victim(self, candidates: Collection[Key]) -> Key:
                return next(key for key in reversed(self._order) if key in candidates)

        trace = one_layer(*[0, 1, 2, 3] * 25)
        mine = Newest()
        for form in (mine, Newest):  # as an object and as a class
            table = counts(simulate(trace, 3, ["lru", form, "belady"]))
            assert table["newest"][1] == table["belady"][1]
        for twice in ([mine, Newest], ["lru", "lru"], ["belady", "belady"]):
            with pytest.raises(LabError, match="is named twice"):
                simulate(trace, 3, twice)
        assert not mine._order  # the object itself was only a pattern


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"capacity": 0}, "capacity is 0"),
        ({"capacity": [4, -1]}, r"capacity\[1\] is -1"),
        ({"capacity": []}, "capacity is empty"),
        ({"capacity": 1, "per_layer": True}, "slots=1 over 2 layers"),
        ({"capacity": 2, "step_tokens": 0}, "step_tokens is 0"),
        ({"capacity": 2, "policies": ["lru", "mru"]}, r"'mru'; wanted lru, .*belady"),
        ({"capacity": 2, "trace": np.zeros((3, 2), int)}, r"\[T, L, K\], got int64 of shape \(3, 2\)"),
        ({"capacity": 2, "trace": np.zeros((3, 2, 1))}, "float64"),
        ({"capacity": 2, "trace": np.zeros((3, 0, 1), int)}, "no layers"),
    ],
    ids=["no-slot", "negative", "none", "split", "step", "policy", "two-axes", "floats", "no-layers"],
)
def test_what_cannot_be_simulated_is_refused_with_its_numbers(how: dict, told: str):
    with pytest.raises(LabError, match=told):
        simulate(**{"trace": np.zeros((3, 2, 1), int), **how})


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            (2, "lru"),
            r"policies is 'lru' \(str\); wanted several in a list, as in lab.simulate\(trace, 24, \['lru'\]\)",
        ),
        ((["lru"], 2), "policies is 2 .*; wanted several in a list"),
        (("lru", ["lru"]), "capacity is 'lru'"),
        ((2, ["random_oldest:8%"]), r"options come with an object: .*policy_of\('random_oldest:8%'\)"),
    ],
    ids=["one-policy", "turned-round", "no-capacity", "as-a-command-writes-it"],
)
def test_arguments_in_another_form_are_refused_with_the_right_one(given: tuple, told: str):
    with pytest.raises(LabError, match=told):
        simulate(np.zeros((3, 2, 1), int), *given)


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("trace", "told"),
    [("data/trace.parquet", r"RoutingTrace.load\(..\) reads one"), ([[1], [1, 2]], "a list; wanted a RoutingTrace")],
    ids=["path", "ragged"],
)
def test_what_is_no_trace_is_refused(trace: object, told: str):
    with pytest.raises(LabTypeError, match=told):
        simulate(trace, 2)  # type: ignore[arg-type]


def test_an_object_that_is_no_policy_is_refused():
    with pytest.raises(LabTypeError, match="on_hit"):
        simulate(np.zeros((1, 1, 1), int), 1, [object()])


def test_a_capacity_given_twice_is_simulated_once():
    assert simulate(one_layer(1, 2, 1), [3, 2, 3], ["lru"]).capacity_slots.tolist() == [3, 2]


class WithLock(LRU):
    name = "with_lock"

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class Counts(Counter):
    """What copying calls is Counts(items), which this __init__ does not take."""

    name = "counts"

    def __init__(self) -> None:
        super().__init__()

    def on_hit(self, key: Key) -> None:
        self[key] += 1

    on_insert = on_evict = on_hit

    def victim(self, candidates: Collection[Key]) -> Key:
        return min(candidates, key=self.__getitem__)


@pytest.mark.parametrize("kind", [WithLock, Counts])
def test_an_object_that_cannot_be_copied_is_refused_and_its_class_is_not(kind: type):
    with pytest.raises(LabTypeError, match=f"'{kind.name}' cannot be copied .*pass its class") as caught:  # type: ignore[attr-defined]
        simulate(one_layer(1, 2, 1), 2, [kind()])
    assert isinstance(caught.value.__cause__, TypeError)
    assert simulate(one_layer(1, 2, 1), 2, [kind]).hits.tolist() == [1]


@pytest.mark.parametrize("hook", ["on_request", "on_hit", "on_insert", "on_evict", "victim"])
def test_what_a_policy_raises_comes_with_its_name(hook: str):
    def explode(self: object, given: object) -> None:
        raise ZeroDivisionError("user bug")

    mine = type("Mine", (LRU,), {"name": "mine", hook: explode})
    with pytest.raises(LabError, match="'mine' raised ZeroDivisionError: user bug") as caught:
        simulate(one_layer(1, 1, 2), 1, [mine])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "given", [type("Mine", (LRU,), {}), type("Other", (Counts,), {"name": "lru"})], ids=["subclass", "own"]
)
def test_the_name_of_a_lab_policy_is_taken(given: type):
    for policy in (given, given()):
        with pytest.raises(LabError, match="is the lab's own; give yours another name, such as 'my_lru'"):
            simulate(one_layer(1), 1, [policy])
