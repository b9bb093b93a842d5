"""Eviction policies and the slot table they drive."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.stream.policy import LRU, Key, Policy, make_policy, policy_factory, policy_name, policy_of
from moe_lab.stream.slots import SlotTable, distinct, split_slots, split_waves


def request(table: SlotTable, *experts: int) -> list[int] | None:
    """One request that is over at once; the experts it had to admit."""
    keys = [(0, e) for e in experts]
    missing = table.take(keys)
    if missing is None:
        return None
    for key in keys:
        table.put_back(key)
    return [expert for _, expert in missing]


def resident(table: SlotTable) -> set[int]:
    return {expert for _, expert in table.resident}


class FirstComeFirstGone:
    """A user's own policy, as the documentation says it must look."""

    def __init__(self) -> None:
        self.order: list[Key] = []

    def on_hit(self, key: Key) -> None:
        pass

    def on_insert(self, key: Key) -> None:
        self.order.append(key)

    def on_evict(self, key: Key) -> None:
        self.order.remove(key)

    def victim(self, candidates: Collection[Key]) -> Key:
        return next(key for key in self.order if key in candidates)


class TestLRU:
    def test_the_longest_unused_leaves(self):
        table = SlotTable(range(3), LRU())
        for expert in (1, 2, 3, 1, 4):
            request(table, expert)
        assert resident(table) == {1, 3, 4}

    def test_a_pinned_key_is_passed_over(self):
        table = SlotTable(range(2), LRU())
        table.take([(0, 1)])  # oldest, but held
        request(table, 2)
        request(table, 3)
        assert resident(table) == {1, 3}

    def test_hits_of_a_group_are_pinned_before_its_misses_choose_victims(self):
        table = SlotTable(range(3), LRU())
        request(table, 1, 2, 3)
        assert request(table, 1, 4, 5) == [4, 5]
        assert resident(table) == {1, 4, 5}

    @given(
        slots=st.integers(1, 6),
        groups=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), max_size=40),
    )
    def test_equals_a_list_sorted_by_last_use(self, slots: int, groups: list[list[int]]):
        table, order = SlotTable(range(slots), LRU()), []
        for group in groups:
            if len(group) > slots:
                continue
            missing = [e for e in group if e not in order]
            kept = [e for e in order if e not in group]
            order = kept[max(0, len(kept) + len(group) - slots) :] + group
            assert request(table, *group) == missing
            assert resident(table) == set(order)


class TestSlotTable:
    def test_a_group_without_room_changes_nothing(self):
        policy = FirstComeFirstGone()
        table = SlotTable(range(2), policy)
        table.take([(0, 1)])
        request(table, 2)
        before = dict(table.resident), dict(table.idle), list(table.free), list(policy.order)
        assert table.take([(0, 2), (0, 3)]) is None
        assert (dict(table.resident), dict(table.idle), list(table.free), list(policy.order)) == before

    def test_a_forgotten_key_gives_its_slot_back(self):
        table = SlotTable(range(1), LRU())
        table.take([(0, 1)])
        table.forget((0, 1))
        assert table.free == [0]
        assert request(table, 2) == [2]

    def test_lowest_slots_fill_first(self):
        table = SlotTable(range(3, 6), LRU())
        request(table, 7, 8)
        assert table.resident == {(0, 7): 3, (0, 8): 4}

    @pytest.mark.parametrize("hook", ["on_hit", "on_insert", "on_evict", "victim"])
    def test_a_policy_that_raises_costs_no_slot_after_repair(self, hook: str):
        class Broken(FirstComeFirstGone):
            armed = False

        def explode(*_):
            raise RuntimeError("user bug")

        policy = Broken()
        table = SlotTable(range(2), policy)
        request(table, 1, 2)
        original = getattr(policy, hook)
        setattr(policy, hook, explode)
        with pytest.raises(LabError, match=r"eviction policy 'Broken' raised RuntimeError: user bug") as caught:
            table.take([(0, 1), (0, 3)])
        assert isinstance(caught.value.__cause__, RuntimeError)
        setattr(policy, hook, original)
        whole = {key for key in table.resident if key != (0, 3)}  # what the cache still has entries for
        table.repair(whole, idle=whole)
        assert len(table.free) + len(table.resident) == 2
        assert set(table.idle) == set(table.resident)
        assert len(set(table.free) | set(table.resident.values())) == 2

    def test_a_victim_outside_the_candidates_is_refused_by_name(self):
        class Stubborn(LRU):
            name = "stubborn"

            def victim(self, candidates: Collection[Key]) -> Key:
                return (0, 99)

        table = SlotTable(range(1), Stubborn())
        request(table, 1)
        with pytest.raises(LabError, match=r"'stubborn' chose \(0, 99\)"):
            request(table, 2)


class TestNaming:
    def test_unknown_name_lists_what_exists(self):
        with pytest.raises(LabError, match=r"'mru'; wanted lru"):
            make_policy("mru")

    def test_for_a_name_with_options_it_says_who_reads_them(self):
        with pytest.raises(LabError, match=r"policy_of\('random_oldest:8%'\)"):
            make_policy("random_oldest:8%")
        assert policy_of("random_oldest:8%").percent == 8  # type: ignore[union-attr]

    def test_an_object_is_used_as_it_is(self):
        mine = FirstComeFirstGone()
        assert make_policy(mine) is mine

    def test_a_factory_copies_an_object_for_each_cache(self):
        mine = FirstComeFirstGone()
        first, second = policy_factory(mine)(), policy_factory(mine)()
        first.on_insert((0, 1))
        assert isinstance(second, FirstComeFirstGone)
        assert second.order == mine.order == []

    @pytest.mark.parametrize("given", [FirstComeFirstGone, lambda: FirstComeFirstGone()], ids=["class", "function"])
    def test_a_class_or_function_makes_fresh_ones(self, given):
        assert make_policy(given) is not make_policy(given)

    @pytest.mark.parametrize("given", [3, object(), dict], ids=["number", "object", "class-without-hooks"])
    def test_anything_else_is_refused_naming_the_hooks(self, given):
        with pytest.raises(
            LabTypeError, match=r"lacks on_hit\(key\), on_insert\(key\), on_evict\(key\), victim\(candidates\)"
        ):
            make_policy(given)

    def test_names_for_tables(self):
        assert policy_name("lru") == policy_name(LRU()) == policy_name(LRU) == "lru"
        assert policy_name(FirstComeFirstGone()) == policy_name(FirstComeFirstGone) == "FirstComeFirstGone"

    def test_lru_satisfies_the_protocol(self):
        assert isinstance(LRU(), Policy)


class TestSplitting:
    @given(experts=st.lists(st.integers(0, 20)), slots=st.integers(1, 8))
    def test_waves_hold_each_expert_once_in_order(self, experts: list[int], slots: int):
        waves = split_waves(distinct(experts), slots)
        assert [e for wave in waves for e in wave] == sorted(set(experts))
        assert all(1 <= len(wave) <= slots for wave in waves)

    @pytest.mark.parametrize(
        ("slots", "sizes"), [(6, [2, 2, 2]), (7, [3, 2, 2]), (8, [3, 3, 2]), (3, [1, 1, 1])], ids=str
    )
    def test_per_layer_shares_differ_by_one_at_most(self, slots: int, sizes: list[int]):
        shares = split_slots(slots, (4, 5, 9), per_layer=True)
        assert [len(share) for share in shares.values()] == sizes
        assert sorted(slot for share in shares.values() for slot in share) == list(range(slots))

    def test_per_layer_needs_a_slot_a_layer(self):
        with pytest.raises(LabError, match="slots=2 over 3 layers"):
            split_slots(2, (0, 1, 2), per_layer=True)

    def test_shared_slots_belong_to_all_layers(self):
        assert split_slots(4, (0, 1), per_layer=False) == {0: range(4), 1: range(4)}
