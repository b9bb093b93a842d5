"""The expert cache: right bytes, counted right, whatever the capacity."""

import gc
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_lab.errors import LabError, LabTypeError
from moe_lab.simulate import simulate
from moe_lab.stream import arena, room
from moe_lab.stream.cache import ExpertCache
from moe_lab.stream.policy import LRU, Key
from moe_lab.stream.source import ExpertSource
from tests.support.expert_files import SHAPES, CountingReads, held, wanted, write_experts

E, K = 8, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ExpertSource:
    """Two layers of 8 experts; layer 1's are wider."""
    path = tmp_path_factory.mktemp("experts") / "x.bin"
    return write_experts(path, shapes=lambda layer: SHAPES if layer == 0 else ((9, 11), (9, 11), (12, 7)))


def bound(source: ExpertSource, **how) -> ExpertCache:
    cache = ExpertCache(**how)
    cache.bind(source, "cpu")
    return cache


def requests(steps: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """(layer, K experts) as a token-by-token run asks for them."""
    rng = np.random.default_rng(seed)
    return [(layer, rng.choice(E, K, replace=False).tolist()) for _ in range(steps) for layer in (0, 1)]


class TestBytes:
    @pytest.mark.parametrize("slots", [1, K - 1, K, E, 2 * E], ids="slots{}".format)
    @pytest.mark.parametrize("threads", [1, 4], ids="threads{}".format)
    def test_every_wave_shows_the_files_bytes(self, source: ExpertSource, slots: int, threads: int):
        with bound(source, slots=slots, threads=threads) as cache:
            for layer, experts in requests(20):
                for wave in cache.waves(experts):
                    with cache.lease(source, layer, wave) as lease:
                        assert held(lease) == wanted(source, layer, wave)

    def test_slots_follow_the_order_asked_for_and_duplicates_share_one(self, source: ExpertSource):
        with bound(source, slots=3) as cache, cache.lease(source, 1, [5, 2, 5, 7, 2]) as lease:
            assert held(lease) == wanted(source, 1, [5, 2, 5, 7, 2])
            assert lease.slots.dtype == torch.int32
            assert lease.slots[0] == lease.slots[2] != lease.slots[1]
            assert (lease.hits, lease.misses, cache.misses) == (0, 3, 3)

    def test_views_are_the_arena_itself_with_a_row_a_slot(self, source: ExpertSource):
        with bound(source, slots=4) as cache, cache.lease(source, 0, [1]) as lease:
            gate, up, down = source.parts(0)
            assert lease.views("gate").shape == (4, gate.shape[0], gate.row_bytes)
            assert lease.views(down).shape == (4, down.shape[0], down.row_bytes)
            assert lease.views("up").stride(0) == source.slot_bytes
            assert lease.views("up").data_ptr() - lease.views("gate").data_ptr() == up.slot_offset
            assert lease.views("gate").data_ptr() % 256 == 0

    def test_held_bytes_stay_while_others_come_and_go(self, source: ExpertSource):
        with bound(source, slots=3) as cache, cache.lease(source, 0, [4, 6]) as kept:
            for expert in range(E):
                with cache.lease(source, 1, [expert]) as passing:
                    assert held(passing) == wanted(source, 1, [expert])
            assert held(kept) == wanted(source, 0, [4, 6])

    def test_no_experts_no_reads(self, source: ExpertSource):
        with bound(source, slots=1) as cache:
            with cache.lease(source, 0, []) as lease:
                assert lease.slots.shape == (0,)
                assert lease.views("gate").shape[0] == 1
            assert (cache.hits, cache.misses, cache.bytes_read) == (0, 0, 0)
            assert cache.waves([]) == []


class TestCounters:
    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
    @given(
        slots=st.integers(1, 17),
        calls=st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, E - 1), max_size=12)), max_size=15),
    )
    def test_conservation(self, source: ExpertSource, slots: int, calls: list[tuple[int, list[int]]]):
        asked = 0
        with bound(source, slots=slots) as cache:
            for layer, experts in calls:
                for wave in cache.waves(experts):
                    with cache.lease(source, layer, wave) as lease:
                        assert lease.hits + lease.misses == len(wave)
                        assert lease.bytes_read == lease.misses * source.expert_nbytes(layer)
                        asked += len(wave)
                table = cache._partitions[0].table
                assert len(table.free) + len(table.resident) == slots
                assert set(table.idle) == set(table.resident)
            assert asked == sum(len(set(experts)) for _, experts in calls)
            assert cache.hits + cache.misses == asked

    @pytest.mark.parametrize("per_layer", [False, True], ids=["global", "per-layer"])
    @pytest.mark.parametrize("slots", [2, 3, 4, 7, 8, 16], ids="slots{}".format)
    def test_the_simulator_counts_the_same(self, source: ExpertSource, slots: int, per_layer: bool):
        ids = np.array([picks for _, picks in requests(60, seed=slots)]).reshape(60, 2, K)
        sizes = {layer: source.expert_nbytes(layer) for layer in source.layers}
        with bound(source, slots=slots, per_layer=per_layer) as cache:
            counts = {0: [0, 0, 0], 1: [0, 0, 0]}
            for token in ids:
                for layer, picks in enumerate(token.tolist()):
                    ordered = sorted(picks)
                    room = cache.slots_for(layer)
                    for wave in [ordered[i : i + room] for i in range(0, K, room)]:
                        with cache.lease(source, layer, wave) as lease:
                            for i, n in enumerate((lease.hits, lease.misses, lease.bytes_read)):
                                counts[layer][i] += n
        table = simulate(ids, slots, ["lru"], per_layer=per_layer, expert_bytes=sizes).set_index("layer")
        assert {n: table.loc[n, ["hits", "misses", "bytes_read"]].tolist() for n in (0, 1)} == counts

    def test_a_call_reads_each_expert_once(self, tmp_path: Path):
        reads = CountingReads()
        source = write_experts(tmp_path / "x.bin", read_call=reads)
        with bound(source, slots=2) as cache:
            for wave in cache.waves([0, 1, 2, 3, 4, 5] * 7):
                cache.lease(source, 0, wave).release()
        assert sorted(reads.calls) == sorted(
            (s.file_offset, s.nbytes) for expert in range(6) for s in source.segments(0, expert)
        )

    def test_wait_is_counted_only_when_blocked(self, source: ExpertSource):
        with bound(source, slots=4) as cache:
            cache.lease(source, 0, [1, 2]).release()
            again = cache.lease(source, 0, [1, 2])
            assert again.wait_ms == 0.0
            again.release()


class TestPolicies:
    def test_the_users_object_decides(self, source: ExpertSource):
        class KeepsExpertZero(LRU):
            name = "keeps-zero"

            def victim(self, candidates: Collection[Key]) -> Key:
                return next(key for key in self._order if key in candidates and key[1] != 0)

        mine = KeepsExpertZero()
        with bound(source, slots=2, policy=mine) as cache:
            for experts in ([0], [1], [2], [3], [4]):
                cache.lease(source, 0, experts).release()
            with cache.lease(source, 0, [0]) as lease:
                assert lease.hits == 1
            assert cache.policy == "keeps-zero"
            assert list(mine._order) == [(0, 4), (0, 0)]

    def test_per_layer_slots_protect_a_layer_from_the_others(self, source: ExpertSource):
        hits = {}
        for per_layer in (False, True):
            with bound(source, slots=4, per_layer=per_layer) as cache:
                cache.lease(source, 0, [0, 1]).release()
                for expert in range(E):
                    cache.lease(source, 1, [expert]).release()
                cache.lease(source, 0, [0, 1]).release()
                hits[per_layer] = cache.hits
                assert cache.slots_for(0) == (2 if per_layer else 4)
        assert hits == {False: 0, True: 2}

    def test_policies_are_the_object_itself_or_its_copies_layer_by_layer(self, source: ExpertSource):
        class Mine(LRU):
            name = "mine"

        for per_layer in (False, True):
            mine = Mine()
            with ExpertCache(slots=4, policy=mine, per_layer=per_layer) as cache:
                assert cache.policies == {}
                cache.bind(source, "cpu")
                cache.lease(source, 0, [0]).release()
                cache.lease(source, 1, [1]).release()
                kept = [list(vars(cache.policies[layer])["_order"]) for layer in (0, 1)]
                assert kept == ([[(0, 0)], [(1, 1)]] if per_layer else [[(0, 0), (1, 1)]] * 2)
                assert list(mine._order) == ([] if per_layer else kept[0])

    def test_a_policy_that_raises_leaves_a_usable_cache(self, source: ExpertSource):
        class Sometimes(LRU):
            name = "sometimes"
            broken = True

            def victim(self, candidates: Collection[Key]) -> Key:
                if self.broken:
                    raise RuntimeError("user bug")
                return super().victim(candidates)

        mine = Sometimes()
        with bound(source, slots=2, policy=mine) as cache:
            cache.lease(source, 0, [0, 1]).release()
            with pytest.raises(LabError, match="'sometimes' raised RuntimeError: user bug"):
                cache.lease(source, 0, [1, 2])
            mine.broken = False
            for experts in ([1, 2], [3, 4], [0, 1]):
                with cache.lease(source, 0, experts) as lease:
                    assert held(lease) == wanted(source, 0, experts)


class TestLimits:
    @pytest.mark.parametrize(
        ("how", "told"),
        [
            ({}, "either slots or gib"),
            ({"slots": 2, "gib": 1.0}, "either slots or gib"),
            ({"slots": 0}, "slots=0"),
            ({"gib": 0.0}, "gib=0.0"),
            ({"gib": float("nan")}, "gib=nan"),
            ({"slots": 2, "threads": 0}, r"threads=0 .* 1\.\.64"),
            ({"slots": 2, "policy": "mru"}, "'mru'; wanted lru"),
        ],
        ids=["neither", "both", "no-slot", "no-gib", "nan-gib", "no-thread", "unknown-policy"],
    )
    def test_options_that_cannot_work_are_refused_at_once(self, how: dict, told: str):
        with pytest.raises(LabError, match=told):
            ExpertCache(**how)

    @pytest.mark.wrong_types
    @pytest.mark.parametrize(
        ("ask", "told"),
        [
            (lambda cache, source: cache.bind("x.gguf", "cpu"), "source is 'x.gguf' .*; wanted where the experts come"),
            (lambda cache, source: cache.waves(3), "experts is 3 .*; wanted several"),
            (lambda cache, source: cache.prefetch(source, 0, "12"), "experts is '12' .*; wanted several"),
            (lambda cache, source: cache.lease(source, 0, [1], timeout_s=None), "timeout_s is None; wanted a number"),
            (lambda cache, source: cache.record(3), "log is 3 .*; wanted an EventLog, or None"),
        ],
        ids=["source", "waves", "prefetch", "timeout", "log"],
    )
    def test_wrong_types_are_refused_by_name(self, source: ExpertSource, ask, told: str):
        with bound(source, slots=2) as cache, pytest.raises(LabTypeError, match=told):
            ask(cache, source)

    @pytest.mark.wrong_types
    def test_slots_is_a_whole_number(self):
        with pytest.raises(LabTypeError, match="float"):
            ExpertCache(slots=2.5)  # type: ignore[arg-type]

    def test_gib_becomes_as_many_slots_as_fit(self, source: ExpertSource):
        with bound(source, gib=5.5 * source.slot_bytes / 2**30) as cache:
            assert cache.slots == 5
        with bound(source, gib=1.0) as cache:
            assert cache.slots == 2 * E  # no more than there are experts

    def test_gib_below_one_expert_is_refused_with_both_sizes(self, source: ExpertSource):
        with pytest.raises(LabError, match=f"one expert of .* takes {source.slot_bytes:,}"):
            bound(source, gib=0.5 * source.slot_bytes / 2**30)

    def test_more_experts_at_once_than_slots_is_refused_with_both_numbers(self, source: ExpertSource):
        with bound(source, slots=2) as cache, pytest.raises(LabError, match=r"asks for 3 .* has 2 slots"):
            cache.lease(source, 0, [1, 2, 3])

    def test_an_unknown_expert_is_refused_before_anything_is_evicted(self, source: ExpertSource):
        with bound(source, slots=1) as cache:
            cache.lease(source, 0, [3]).release()
            with pytest.raises(LabError, match="no expert 8"):
                cache.lease(source, 0, [8])
            with cache.lease(source, 0, [3]) as lease:
                assert lease.hits == 1

    def test_memory_that_cannot_be_had_is_told_before_it_is_taken(
        self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(arena, "available_host_bytes", lambda: 100)  # less than one slot
        cache = ExpertCache(slots=5)
        told = f"slots=5 .* wants {5 * source.slot_bytes:,} bytes, but only 100 bytes of host memory .* least, slots=1,"
        with pytest.raises(LabError, match=told):
            cache.bind(source, "cpu")
        monkeypatch.undo()
        cache.bind(source, "cpu")  # all or nothing: the failed try left nothing behind
        cache.lease(source, 0, [1]).release()
        cache.close()

    def test_an_allocator_that_refuses_is_named_with_the_size(
        self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch
    ):
        def refuse(*_, **__):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr(room, "host_block", refuse)
        with pytest.raises(LabError, match=f"wants {4 * source.slot_bytes:,} bytes"):
            ExpertCache(slots=4).bind(source, "cpu")


class TestBinding:
    def test_use_before_bind_says_what_to_call(self, source: ExpertSource):
        cache = ExpertCache(slots=2)
        with pytest.raises(LabError, match=r"cache\.bind"):
            cache.lease(source, 0, [1])

    def test_binding_again_to_the_same_is_nothing(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            threads = threading.active_count()
            cache.bind(source, torch.device("cpu"))
            assert threading.active_count() == threads

    def test_a_second_source_is_refused_naming_both(self, source: ExpertSource, tmp_path: Path):
        other = write_experts(tmp_path / "other.bin")
        with bound(source, slots=2) as cache:
            for use in (lambda: cache.bind(other, "cpu"), lambda: cache.lease(other, 0, [1])):
                with pytest.raises(LabError, match=r"x\.bin.*other\.bin"):
                    use()

    def test_a_second_device_is_refused(self, source: ExpertSource, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("moe_lab.stream.cache.resolve_device", torch.device)  # as if cuda:1 were there
        with bound(source, slots=2) as cache, pytest.raises(LabError, match="is on cpu, not on cuda:1"):
            cache.bind(source, "cuda:1")

    def test_other_devices_are_refused(self, source: ExpertSource):
        with pytest.raises(LabError, match="device 'meta' is not served"):
            ExpertCache(slots=2).bind(source, "meta")


class TestEnding:
    def test_an_ended_lease_shows_nothing(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            with cache.lease(source, 0, [1]) as lease:
                pass
            lease.release()
            with pytest.raises(LabError, match="has ended"):
                lease.views("gate")

    def test_a_lease_that_was_dropped_gives_its_slots_back(self, source: ExpertSource):
        with bound(source, slots=1) as cache:
            cache.lease(source, 0, [1])  # never released
            gc.collect()
            cache.lease(source, 0, [2], timeout_s=0.1).release()

    def test_a_closed_cache_says_so_and_keeps_its_counters(self, source: ExpertSource):
        with bound(source, slots=2) as cache:
            cache.lease(source, 0, [1, 2]).release()
        cache.close()
        for use in (
            lambda: cache.lease(source, 0, [1]),
            lambda: cache.bind(source, "cpu"),
            lambda: cache.waves([1]),
        ):
            with pytest.raises(LabError, match="closed"):
                use()
        assert (cache.hits, cache.misses, cache.slots) == (0, 2, 2)

    def test_closing_under_an_open_lease_keeps_its_bytes(self, source: ExpertSource):
        cache = bound(source, slots=2)
        lease = cache.lease(source, 0, [1])
        cache.close()
        assert held(lease) == wanted(source, 0, [1])
        lease.release()

    def test_repr_tells_size_policy_and_counters(self, source: ExpertSource):
        assert repr(ExpertCache(gib=0.5)) == "ExpertCache(gib=0.5, policy='lru', hits=0, misses=0)"
        with bound(source, slots=2) as cache:
            cache.lease(source, 0, [1]).release()
            assert repr(cache) == "ExpertCache(slots=2, policy='lru', hits=0, misses=1, io=dropped)"
