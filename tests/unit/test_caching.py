"""Questions about caches: distances and curves against brute force, controls, the cost model, purchases."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_lab as lab
from moe_lab import caching
from moe_lab.caching.cost import FetchCost
from moe_lab.caching.distances import stack_distances
from moe_lab.simulate import simulate
from moe_lab.stream.calibration import Calibration, CopyPoint, DiskCell, DiskSurface, mount_of
from moe_lab.trace import NO_PICK
from tests.support.frames import cache_timings
from tests.support.traces import random_trace, trace_of

TRACE = random_trace(tokens=160, layers=2, experts=10, top_k=3)


def by_hand(groups: list[list[int]]) -> list[float]:
    """Stack distances from a list, most recent last."""
    order: list[int] = []
    found = []
    for group in groups:
        found += [float(len(order) - 1 - order.index(e)) if e in order else np.inf for e in group]
        order = [e for e in order if e not in group] + group
    return found


class TestDistances:
    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.lists(st.integers(0, 12), min_size=0, max_size=5, unique=True), max_size=40))
    def test_equal_a_lists(self, groups: list[list[int]]):
        groups = [sorted(group) for group in groups]
        found = stack_distances([[(0, e) for e in group] for group in groups])
        assert found.tolist() == by_hand(groups)

    def test_other_layers_push_down_too(self):
        requests = [[(0, 1)], [(1, 1)], [(0, 2)], [(0, 1)]]
        assert stack_distances(requests).tolist() == [np.inf, np.inf, np.inf, 2.0]

    def test_bins_hold_every_request_once_and_end_at_one(self):
        table = caching.stack_distance(caching.controls(TRACE), per_layer=False)
        for (_, layer), rows in table.groupby(["order", "layer"]):
            asked = simulate(TRACE, 1, ["lru"]).set_index("layer").requests[layer]
            assert rows.requests.sum() == asked
            assert rows.share_within.iloc[-1] == pytest.approx(1)
            assert rows.share_within.is_monotonic_increasing

    def test_share_within_is_the_lrus_hit_rate(self):
        table = caching.stack_distance(TRACE).set_index(["layer", "distance_to"]).share_within
        for slots in (4, 8):  # distances 0..3, 0..7; no token asks for more than 3 at once
            hits = simulate(TRACE, 2 * slots, ["lru"], per_layer=True).set_index("layer").hit_rate
            assert [table[n, slots - 1] for n in (0, 1)] == pytest.approx(hits.tolist())


class TestMissRatio:
    @settings(deadline=None, max_examples=25)
    @given(
        ids=st.lists(st.lists(st.integers(-1, 6), min_size=6, max_size=6), min_size=1, max_size=25),
        per_layer=st.booleans(),
        step_tokens=st.integers(1, 3),
    )
    def test_the_lrus_curve_of_one_pass_is_the_simulated_one(
        self, ids: list[list[int]], per_layer: bool, step_tokens: int
    ):
        trace = np.array(ids).reshape(-1, 2, 3)
        sizes = list(range(2, 15))
        curve = caching.miss_ratio(trace, sizes, ["lru"], per_layer=per_layer, step_tokens=step_tokens)
        table = simulate(trace, sizes, ["lru"], per_layer=per_layer, step_tokens=step_tokens)
        assert curve.misses.tolist() == table.groupby("capacity_slots").misses.sum().tolist()

    @settings(deadline=None, max_examples=25)
    @given(ids=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), min_size=1, max_size=30))
    def test_a_bigger_lru_never_misses_more(self, ids: list[list[int]]):
        curve = caching.miss_ratio(np.array(ids).reshape(-1, 1, 3), [3, 4, 5, 6, 7], ["lru", "belady"])
        for _, rows in curve.groupby("policy"):
            assert rows.misses.is_monotonic_decreasing

    def test_default_grid_and_orders(self):
        curve = caching.miss_ratio({"text": TRACE, "shuffled": lab.analysis.shuffled(TRACE)}, per_layer=True)
        lru, belady = (curve[(curve.policy == p) & (curve.order == "text")] for p in ("lru", "belady"))
        assert lru.capacity_slots.tolist() == list(range(2, 21, 2))
        assert set(belady.capacity_slots) <= set(lru.capacity_slots)
        assert (curve.capacity_share == curve.capacity_slots / 20).all()
        assert (curve.miss_ratio == curve.misses / curve.requests).all()
        assert curve.order.unique().tolist() == ["text", "shuffled"]


class TestControls:
    def test_each_keeps_what_it_says(self):
        domains = np.array(["a"] * 80 + ["b"] * 80)
        found = caching.controls(replace(TRACE, domains=domains), seed=3)
        assert list(found) == ["text", "shuffled within domains", "shuffled", "popularity", "uniform"]
        for name, one in found.items():
            assert one.ids.shape == TRACE.ids.shape
            hot = [lab.analysis.occupancy(one, n) for n in one.layers]
            assert all((h.sum(axis=1) == 3).all() for h in hot), name
        counts = {name: lab.analysis.occupancy(one, 0).sum(axis=0) for name, one in found.items()}
        assert (counts["shuffled"] == counts["text"]).all()
        first = lab.analysis.occupancy(found["shuffled within domains"], 0)[:80].sum(axis=0)
        assert (first == lab.analysis.occupancy(TRACE, 0)[:80].sum(axis=0)).all()

    def test_drawn_ones_have_the_popularity_asked_for(self):
        trace = random_trace(tokens=4000, layers=1, experts=10, top_k=1)
        counts = {name: lab.analysis.occupancy(one, 0).sum(axis=0) for name, one in caching.controls(trace).items()}
        sigma = np.sqrt(2 * counts["text"])
        assert (np.abs(counts["popularity"] - counts["text"]) < 5 * sigma).all()
        assert (np.abs(counts["uniform"] - 400) < 5 * np.sqrt(400)).all()

    def test_seeded_and_without_order(self):
        first, again, other = (caching.uniform(TRACE, seed=seed).ids for seed in (1, 1, 2))
        assert (first == again).all()
        assert (first != other).any()

    def test_skipped_slots_stay_skipped(self):
        trace = trace_of([[[0, -1]], [[-1, -1]], [[1, 2]]], 4)
        for drawn in (caching.uniform(trace), caching.by_popularity(trace)):
            assert lab.analysis.occupancy(drawn, 0).sum(axis=1).tolist() == [1, 0, 2]

    def test_previous_token_is_a_forecast(self):
        trace = trace_of([[[0, 1]], [[1, 2]], [[3, 0]]], 4)
        forecast = caching.previous_token(trace)
        assert forecast.ids[:, 0].tolist() == [[NO_PICK, NO_PICK], [0, 1], [1, 2]]
        assert caching.agreement(trace, forecast) == 1 / 6
        assert caching.agreement(trace, trace) == 1
        with pytest.raises(lab.LabError, match="tokens and layers"):
            caching.agreement(trace, forecast.part(0, 2))


class TestStudy:
    def test_gap_closed_by_hand(self):
        table = caching.study(TRACE, 8, ["lfu", "lfu_decay"]).set_index("policy")
        lru, best = table.hits["lru"], table.hits["belady"]
        assert table.gap_closed["lru"] == 0
        assert table.gap_closed["belady"] == 1
        assert table.gap_closed["lfu"] == (table.hits["lfu"] - lru) / (best - lru)
        assert table.capacity_share["lfu"] == 8 / 20

    def test_controls_run_under_lru_and_the_optimum_alone(self):
        table = caching.study({"text": TRACE, "uniform": caching.uniform(TRACE)}, [4, 8], ["static"])
        assert table[table.order == "uniform"].policy.tolist() == ["lru", "belady"] * 2
        assert set(table[table.order == "text"].policy) == {"static", "lru", "belady"}


class TestCost:
    def test_finds_the_numbers_that_made_the_record(self):
        cost = caching.Cost.fit(cache_timings(start_ms=0.4, ms_per_byte=2e-7, idle_ms=0.1))
        assert (cost.fetch.start_ms, cost.fetch.ms_per_byte, cost.fetch.idle_ms) == pytest.approx((0.4, 2e-7, 0.1))
        assert cost.layers[3].compute_ms == pytest.approx(0.9)
        assert cost.layers[0].expert_bytes == 12e6

    def test_single_slow_reads_move_nothing(self):
        calm = cache_timings()
        stalled = calm.assign(fetch_ms=calm.fetch_ms.where(np.arange(len(calm)) % 17 != 0, 500.0))
        a, b = (caching.Cost.fit(df).fetch for df in (calm, stalled))
        assert (b.start_ms, b.ms_per_byte) == pytest.approx((a.start_ms, a.ms_per_byte))

    def test_a_calibrated_disk_takes_its_share_of_the_slope(self):
        timings = cache_timings(ms_per_byte=2.5e-7)  # 4 GB/s in all
        fetch = caching.Cost.fit(timings, disk_gb_per_s=5, copy_gb_per_s=50).fetch
        assert fetch.disk_ms_per_byte == pytest.approx(2e-7)
        assert fetch.copy_ms_per_byte == pytest.approx(2e-8)
        assert fetch.host_ms_per_byte == pytest.approx(0.5e-7)
        cached = caching.Cost.fit(timings, disk_gb_per_s=1).fetch  # faster than the disk: from the page cache
        assert cached.disk_ms_per_byte == pytest.approx(2.5e-7)
        assert cached.host_ms_per_byte == 0

    def test_disk_and_copy_go_side_by_side(self):
        fetch = FetchCost(0.1, 1.0, 3e-6, 2e-6, 1e-6)
        assert fetch.ms(np.array([0, 1e6])).tolist() == pytest.approx([0.1, 1 + 4])

    def test_one_size_alone_gives_a_line_through_zero(self):
        timings = cache_timings()
        one = timings[timings.misses == 2]
        fetch = caching.Cost.fit(one).fetch
        assert fetch.ms(np.array([24e6])) == pytest.approx(one.fetch_ms.median())
        assert fetch.start_ms == 0

    def test_held_out_calls_are_foretold(self):
        table = caching.held_out(cache_timings(noise=0.05)).set_index("layer")
        assert table.index.tolist() == [0, 1, 2, 3, "all"]
        assert (table.error.abs() < 0.05).all()
        assert 0 < table.spread["all"] < 0.1
        assert table.calls["all"] == table.calls[[0, 1, 2, 3]].sum()

    def test_a_model_that_is_wrong_shows(self):
        """Reads whose time does not follow their bytes: the line cannot foretell them."""
        timings = cache_timings()
        odd = timings.assign(fetch_ms=np.where(timings.misses == 2, 50.0, timings.fetch_ms))
        assert caching.held_out(odd).set_index("layer").spread["all"] > 0.2

    @pytest.mark.parametrize(
        ("how", "told"),
        [
            (lambda: caching.Cost.fit(cache_timings().drop(columns="fetch_ms")), "lack fetch_ms"),
            (lambda: caching.Cost.fit(cache_timings().query("misses == 0")), "smaller cache"),
            (lambda: caching.Cost.fit(cache_timings()).scaled(disk=0), "disk=0"),
            (lambda: caching.Cost.fit(cache_timings(), disk_gb_per_s=-1), "-1 GB/s"),
            (lambda: caching.bounds(random_trace(layers=6), caching.Cost.fit(cache_timings()), 8), r"not \[4, 5\]"),
        ],
        ids=["column", "no-misses", "factor", "speed", "layer"],
    )
    def test_what_cannot_be_modelled_is_refused(self, how, told: str):
        with pytest.raises(lab.LabError, match=told):
            how()


class TestSpeeds:
    def calibration(self, path: Path) -> Calibration:
        cells = tuple(DiskCell(n, 2**20, "direct", 0.5 * n, 0.4 * n, 0.6 * n, 0.05, 5) for n in (1, 4))
        copies = (CopyPoint(10**6, True, 0.1, 0.1, 0.1, 5), CopyPoint(10**7, True, 0.2, 0.2, 0.2, 5))
        return Calibration("here", {mount_of(path): DiskSurface(mount_of(path), "ext4", "", cells)}, {"gpu": copies})

    def test_the_disks_best_and_the_copys_at_the_experts_size(self, tmp_path: Path):
        found = caching.speeds(tmp_path, device="gpu", expert_bytes=10**7, calibration=self.calibration(tmp_path))
        assert found == {"disk_gb_per_s": 2.0, "copy_gb_per_s": pytest.approx(50)}
        assert caching.Cost.fit(cache_timings(ms_per_byte=6e-7), **found).fetch.disk_ms_per_byte == 5e-7

    def test_what_was_not_measured_is_not_guessed(self, tmp_path: Path):
        known = self.calibration(tmp_path)
        with pytest.raises(lab.LabError, match="moe-lab calibrate"):
            caching.speeds(tmp_path, calibration=Calibration("elsewhere"))
        with pytest.raises(lab.LabError, match=r"'tpu' were not calibrated \(there are: gpu\)"):
            caching.speeds(tmp_path, device="tpu", expert_bytes=1, calibration=known)
        with pytest.raises(lab.LabError, match="wants expert_bytes"):
            caching.speeds(tmp_path, device="gpu", calibration=known)


class TestWhatIf:
    COST = caching.Cost.fit(cache_timings(layers=2, start_ms=0.4, ms_per_byte=2e-7))

    def test_a_step_is_the_sum_of_its_layers(self):
        table = caching.what_if(TRACE, self.COST, 8, "lru", [])
        (row,) = table.to_dict("records")
        counts = caching.steps(TRACE, 8, "lru")
        fetch = self.COST.fetch.ms(counts.misses.to_numpy() * 12e6).sum() / 160
        assert row["fetch_ms"] == pytest.approx(fetch)
        assert row["misses_per_step"] == pytest.approx(counts.misses.sum() / 160)
        assert row["ms_per_step"] == pytest.approx(row["fetch_ms"] + row["rest_ms"])

    def test_purchases_by_their_own_arithmetic(self):
        table = caching.what_if(TRACE, self.COST, 8, "lru").set_index("change")
        today = table.loc["today"]
        misses = caching.steps(TRACE, 8, "lru").misses
        slope = misses.sum() * 12e6 * 2e-7 / 160
        assert table.fetch_ms["disk x2"] == pytest.approx(today.fetch_ms - slope / 2)
        assert table.capacity_slots.to_dict() == {
            "today": 8, "disk x2": 8, "slots +50%": 12, "experts 25% smaller": 10, "second GPU": 16,
        }  # fmt: skip
        assert table.misses_per_step["slots +50%"] == caching.steps(TRACE, 12, "lru").misses.sum() / 160
        assert table.bytes_per_step["experts 25% smaller"] == pytest.approx(
            9e6 * caching.steps(TRACE, 10, "lru").misses.sum() / 160
        )
        assert (table.speedup == today.ms_per_step / table.ms_per_step).all()
        assert table.assumes.str.len().min() > 5

    def test_bounds_stand_in_the_order_that_must_hold(self):
        table = caching.bounds(TRACE, self.COST, 8, "lfu_decay").set_index("bound").ms_per_step
        assert table["all resident"] <= table["infinite"] <= table["belady_bypass"] <= table["no cache"]
        assert table["belady_bypass"] <= table["belady"] <= table["lfu_decay"]
        assert table["all resident"] <= table["lfu_decay, perfect prefetch"] <= table["lfu_decay"]

    def test_reads_hide_behind_computation_and_no_further(self):
        slow = self.COST.scaled(compute=1e-3)
        fast = self.COST.scaled(compute=1e6)
        name = "lru, perfect prefetch"
        hidden = caching.bounds(TRACE, slow, 8).set_index("bound").loc[name]
        bare = caching.bounds(TRACE, fast, 8).set_index("bound")
        assert hidden.fetch_ms == pytest.approx(2 * self.COST.fetch.idle_ms)
        assert bare.ms_per_step[name] > 0.9 * bare.fetch_ms["lru"]

    def test_an_empty_trace_has_no_step(self):
        with pytest.raises(lab.LabError, match="no token"):
            caching.bounds(np.zeros((0, 2, 1), int), self.COST, 4)


def test_frames_are_tidy() -> None:
    for table in (caching.study(TRACE, 8), caching.miss_ratio(TRACE), caching.stack_distance(TRACE)):
        assert isinstance(table, pd.DataFrame)
        assert table.index.tolist() == list(range(len(table)))
