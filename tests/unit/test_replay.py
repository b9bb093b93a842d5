"""lab.replay on the shipped model: rows, clocks that add up, counters that are the simulator's, bits that stay."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.caching import previous_token
from moe_lab.errors import LabError
from moe_lab.replay import COLUMNS, Recording, overhead, run, summary, timeline, to_perfetto, waterfall
from moe_lab.replay.levels import _turn
from moe_lab.replay.rows import DEVICE_PARTS, HOST_PARTS
from moe_lab.replay.story import length_ms
from moe_lab.simulate import steps
from moe_lab.stream.faults import FaultyReads
from moe_lab.stream.policy import POLICIES
from moe_lab.system.devices import record
from moe_lab.timing import EventPool
from moe_lab.tolerances import tol
from tests.support.fake_cuda import FakeEvent, FakeStream

ROOT = Path(__file__).resolve().parents[2]
LAYERS, SLOTS = [1, 2], 12
PARTS = (*HOST_PARTS, "route_gpu_ms", "h2d_ms", "routed_gpu_ms", "shared_gpu_ms")


@pytest.fixture(scope="module")
def ckpt():
    with lab.open(lab.sample()) as opened:
        yield opened


@pytest.fixture(scope="module")
def trace() -> lab.RoutingTrace:
    """Around a change of subject."""
    return lab.RoutingTrace.load(ROOT / "data" / "trace.parquet", tokens=(8189, 8194))


@pytest.fixture(scope="module")
def recorded(ckpt) -> Recording:
    with lab.ExpertCache(slots=SLOTS) as cache:
        return run(ckpt, tokens=6, layers=LAYERS, cache=cache, digest=True)


def watched(ckpt, trace, slots=SLOTS, how=None, **more) -> Recording:
    with lab.ExpertCache(slots=slots, **(how or {})) as cache:
        return run(ckpt, trace, layers=LAYERS, cache=cache, arm="reference", digest=True, **more)


def test_a_row_a_step_and_layer(recorded: Recording):
    table = recorded.table
    assert tuple(table.columns) == COLUMNS
    assert table[["step", "layer"]].to_numpy().tolist() == [[s, n] for s in range(6) for n in LAYERS]
    assert len(recorded.step_ms) == 6
    assert set(table.io_mode) == {"dropped"}
    assert (table.cpu_ms > 0).all()


def test_the_calls_add_up_to_the_steps(recorded: Recording):
    found = recorded.table.groupby("step")[["wall_ms", "between_ms"]].sum()
    assert (recorded.table.between_ms >= 0).all()
    assert found.sum(axis=1).to_numpy() == pytest.approx(recorded.step_ms, rel=1e-6)
    assert np.median(found.wall_ms / recorded.step_ms) > 0.9  # the driver's own work is small


@pytest.mark.parametrize("arm", ["reference", "gemv", "per_token", "table", "grouped"])
def test_the_parts_add_up_to_the_wall_in_every_arm(ckpt, arm: str):
    with lab.ExpertCache(slots=SLOTS) as cache:
        table = lab.replay(ckpt, tokens=2, layers=LAYERS, cache=cache, arm=arm)
    _adds_up(table)
    assert set(table.arm) == {arm}


@pytest.mark.parametrize(
    "options",
    [lab.Options(shared="side"), lab.Options(prefetch=4), lab.Options(routing="device", verify_routing=True)],
    ids=["side", "prefetch", "device-routing"],
)
def test_the_parts_add_up_whatever_the_options(ckpt, options: lab.Options):
    with lab.ExpertCache(slots=SLOTS) as cache:
        _adds_up(lab.replay(ckpt, tokens=3, layers=LAYERS, cache=cache, options=options))


def test_the_parts_add_up_where_everything_is_resident(ckpt):
    table = lab.replay(ckpt, tokens=2, layers=LAYERS)
    _adds_up(table)
    assert not table[["plan_ms", "demand_wait_ms", "hits", "misses", "bytes_read"]].to_numpy()[:, 1:].any()


def _adds_up(table) -> None:
    within = tol("replay/sum")
    assert (table[list(PARTS)] >= -within * table[["wall_ms"]].to_numpy()).all(axis=None)
    assert (table[list(PARTS)].sum(axis=1) / table.wall_ms - 1).abs().max() < within
    classic = table[["route_ms", "fetch_ms", "compute_ms", "other_ms", "launch_ms", "t_host_block_ms"]].sum(axis=1)
    assert (classic / table.wall_ms - 1).abs().max() < within


@pytest.mark.parametrize("policy", POLICIES)
def test_counters_are_the_simulators(ckpt, trace, policy: str):
    table = watched(ckpt, trace, how={"policy": policy}).table
    named = {n: trace.layer(n) for n in LAYERS}
    weights = {n: trace.weights[:, trace.layers.index(n)] for n in LAYERS}
    part = lab.RoutingTrace.from_layers(named, weights, num_experts=32, width=32)
    expected = steps(part, SLOTS, policy)
    columns = ["step", "layer", "hits", "misses"]
    assert table[columns].to_numpy().tolist() == expected[columns].to_numpy().tolist()
    assert (table.bytes_demand == table.misses * ckpt.expert_source.expert_nbytes(1)).all()
    assert (table.bytes_read == table.bytes_demand).all()


def test_one_trace_one_answer(ckpt, trace):
    first, second = (watched(ckpt, trace.part(0, 3), how={"policy": "random_oldest"}) for _ in range(2))
    counters = ["hits", "misses", "late_hits", "bytes_demand", "bytes_prefetch"]
    assert first.table[counters].equals(second.table[counters])
    assert first.digest == second.digest


@pytest.mark.parametrize("level", [0, 2, "S"], ids=str)
def test_watching_changes_no_bit(ckpt, level):
    how = {"tokens": 2, "layers": LAYERS, "arm": "reference", "digest": True}
    plain = run(ckpt, **how)
    with lab.ExpertCache(slots=SLOTS) as cache:
        other = run(ckpt, cache=cache, level=level, **how)
        assert cache.events is None
    assert other.digest == plain.digest
    table = other.table
    assert (table.hits + table.misses == 4).all()
    if level == 0:
        assert table[[*HOST_PARTS, *DEVICE_PARTS]].isna().all(axis=None)
        assert (table.wall_ms > 0).all()
    else:
        _adds_up(table)


def test_a_slow_disk_shows_in_the_wait_and_nowhere_else(ckpt):
    slow = ckpt.reading_through(FaultyReads(delay_s=0.2))
    with lab.ExpertCache(slots=SLOTS) as cache:
        found = run(slow, tokens=1, layers=LAYERS, cache=cache)
    table, stalls = found.table, found.stalls
    assert (table.demand_wait_ms > 150).all()
    assert (table.plan_ms < 100).all()
    _adds_up(table)
    assert stalls.wait_ms.sum() == pytest.approx(table.demand_wait_ms.sum(), rel=tol("replay/sum"))
    assert len(stalls) == table.misses.sum()  # each expert that was absent, once
    assert stalls.cause.isin(["never predicted", "evicted too early", "slow disk", "host late"]).all()


def test_every_read_ends_once_and_every_byte_is_told(ckpt):
    with lab.ExpertCache(slots=SLOTS) as cache:
        found = run(ckpt, tokens=4, layers=LAYERS, cache=cache, options=lab.Options(prefetch=3))
        cache.close()
        nbytes = cache.bytes_read + cache.bytes_dropped
    reads = found.story.reads.values()
    ended = [(bool(read.ready_ns), read.failed, read.dropped) for read in reads]
    assert all(sum(one) <= 1 for one in ended)
    assert all(any(one) for read, one in zip(reads, ended, strict=True) if not read.ahead)
    assert sum(read.nbytes for read in reads) == nbytes
    assert all(r.queued_ns <= r.started_ns <= r.done_ns <= r.ready_ns for r in reads if r.ready_ns)
    requests = found.story.requests.values()
    assert all(request.asked_ns <= request.granted_ns <= request.ended_ns for request in requests)
    assert len({use.read for request in requests for use in request.uses} - set(found.story.reads)) == 0


def test_waits_are_the_unions_of_what_the_caller_was_blocked(recorded: Recording):
    by_call = recorded.story.requests_of()
    table = recorded.table.set_index(["step", "layer"])
    for key, requests in by_call.items():
        alone = sum(length_ms(request.waits) for request in requests)
        assert table.demand_wait_ms[key] == pytest.approx(alone)


def test_a_perfect_forecast_is_billed_to_the_layer_it_was_read_for(ckpt, trace):
    none, perfect = watched(ckpt, trace), watched(ckpt, trace, forecast=trace)
    guess = watched(ckpt, trace, forecast=previous_token(trace))
    by_layer = perfect.table.groupby("layer")[["bytes_prefetch", "bytes_wasted", "misses"]].sum()
    assert by_layer.bytes_prefetch[1] == 0
    assert by_layer.bytes_prefetch[2] > 0
    assert by_layer.bytes_wasted.sum() == 0
    assert by_layer.misses[2] <= none.table.groupby("layer").misses.sum()[2]
    (row,) = summary(perfect.story).to_dict("records")
    assert (row["layer"], row["recall"], row["useless"] + row["harmful"]) == (2, 1.0, 0)
    assert summary(guess.story).recall.iloc[0] < 1
    assert len({r.digest for r in (none, perfect, guess)}) == 1


def test_every_read_ahead_is_in_the_table_and_in_the_ledger(ckpt):
    with lab.ExpertCache(slots=SLOTS) as cache:
        found = run(ckpt, tokens=6, layers=LAYERS, cache=cache, options=lab.Options(prefetch=6))
        read_ahead, nbytes = cache.read_ahead, cache.bytes_read
    table, ledger = found.table, found.ledger
    fates = ["prefetch_useful", "prefetch_late", "prefetch_useless", "prefetch_harmful"]
    assert table[fates].sum().sum() == table.prefetch_issued.sum() == (ledger.fate != "dropped").sum()
    assert read_ahead <= table.prefetch_issued.sum() <= read_ahead + table.late_hits.sum() + 2
    assert table.bytes_read.sum() == nbytes
    assert table.prefetch_issued[table.layer == 1].sum() == 0
    assert summary(found.story).named.tolist() == [6.0]  # each guess in its own step, however long it stood in line


def test_batches_come_in_waves_and_still_add_up(ckpt, trace):
    found = watched(ckpt, trace, slots=6, step_tokens=4)
    table = found.table
    assert len(table) == 2 * len(LAYERS)
    assert (table.hits + table.misses > 6).any()
    assert max(len(r) for r in found.story.requests_of().values()) > 1
    _adds_up(table)


def test_the_waterfall_stands_on_the_walls(recorded: Recording):
    rows = waterfall(recorded)
    parts, lines = (rows[rows.kind == kind].set_index("what").ms_per_step for kind in ("part", "line"))
    assert parts.sum() == pytest.approx(np.mean(recorded.step_ms))
    assert lines["measured"] == pytest.approx(np.mean(recorded.step_ms))
    assert (lines <= lines["measured"] + 1e-9).all()
    assert lines["all at hand"] <= lines["optimal policy, bypass"] <= lines["optimal policy"]


def test_the_timeline_and_its_file(recorded: Recording, tmp_path: Path):
    table = timeline(recorded, 1, 2)
    assert set(table.step) == {1, 2}
    assert (table.end_ms >= table.begin_ms).all()
    rows = table.set_index("span")
    reads = table[table.what == "read"]
    assert len(reads) == recorded.table[recorded.table.step.isin([1, 2])].misses.sum()
    assert (rows.loc[reads.after, "what"] == "fetch").all()
    waited = table[(table.what == "compute") & (table.after >= 0)]
    assert len(waited)
    assert (rows.loc[waited.after, "end_ms"].to_numpy() <= waited.begin_ms.to_numpy() + 1e-6).all()
    events = json.loads(to_perfetto(recorded, tmp_path / "t.json", 1, 2).read_text())["traceEvents"]
    by_phase = {ph: [e for e in events if e["ph"] == ph] for ph in "XbesfM"}
    assert len(by_phase["b"]) == len(by_phase["e"]) == len(reads)
    assert len(by_phase["s"]) == len(by_phase["f"]) == (table.after >= 0).sum()
    assert {e["args"]["name"] for e in by_phase["M"]} == set(table.lane)
    for track in {e["tid"] for e in by_phase["X"]}:
        _nests(sorted((e["ts"], e["ts"] + e["dur"]) for e in by_phase["X"] if e["tid"] == track))


def _nests(spans: list[tuple[float, float]]) -> None:
    """Slices of one track lie side by side or inside one another."""
    open_until: list[float] = []
    for begin, end in spans:
        while open_until and open_until[-1] <= begin + 1e-6:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-6
        open_until.append(end)


def test_a_profile_goes_beside_the_timeline(ckpt, tmp_path: Path):
    found, plain = (run(ckpt, tokens=1, layers=LAYERS[:1], arm="reference", level=n, digest=True) for n in (3, 1))
    assert found.digest == plain.digest
    to_perfetto(found, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.torch.json").read_text())["traceEvents"]


def test_overhead_compares_levels_on_equal_work(ckpt):
    rows = overhead(ckpt, levels=(0, 1, "S"), slots=SLOTS, squares=1, tokens=4, layers=LAYERS[:1]).set_index("level")
    assert rows.pairs.tolist() == [4, 4, 4]
    assert rows.overhead["0"] == rows.low["0"] == rows.high["0"] == 0
    assert rows.low["1"] <= rows.overhead["1"] <= rows.high["1"]
    assert 0 == rows.accounted["0"] < rows.accounted["1"] < 0.05
    assert rows.events_per_step["0"] == 0 < rows.events_per_step["1"]
    with pytest.raises(LabError, match="level 0"):
        overhead(ckpt, levels=(1, 2), slots=SLOTS)


def test_too_few_events_are_said(ckpt):
    said = r"did not fit its log.*raise most_events \(16\)"
    with lab.ExpertCache(slots=SLOTS) as cache, pytest.warns(UserWarning, match=said):
        found = run(ckpt, tokens=4, layers=LAYERS, cache=cache, most_events=16)
    assert found.story.lost > 0
    assert "events lost" in repr(found)


def test_level_0_says_what_it_does_not_know(ckpt):
    with lab.ExpertCache(slots=SLOTS) as cache:
        found = run(ckpt, tokens=2, layers=LAYERS, cache=cache, level=0, options=lab.Options(prefetch=4))
        assert cache.bytes_read > 0
    assert found.table[["bytes_read", "prefetch_issued", "late_hits", "compute_ms"]].isna().all(axis=None)
    for asked in (waterfall, lambda it: lab.plot.replay(it.table), lambda it: lab.caching.Cost.fit(it.table)):
        with pytest.raises(LabError, match="level 0 records no"):
            asked(found)


def test_reading_ahead_moves_no_bound_above_the_wall(ckpt, trace):
    rows = waterfall(watched(ckpt, trace, forecast=trace)).set_index("what").ms_per_step
    assert (rows[["optimal policy", "optimal policy, bypass", "all at hand"]] <= rows["measured"] * (1 + 1e-9)).all()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"level": 4}, "wanted 0, 1, 2, 3, 'S'"), ({"level": True}, "level=True; wanted 0"),
        ({"level": 1.0}, "level=1.0; wanted 0"), ({"seed": "x"}, "seed is 'x' .*; wanted a whole number"),
        ({"seed": -1}, "seed is -1; wanted 0"),
        ({"forecast": [1]}, "forecast is a list; wanted a RoutingTrace"),
        ({"cache": 4}, "cache is 4 .*; wanted an ExpertCache, or None"), ({"layers": [9]}, "layer 9 is not in both"),
        ({"layers": [3, 3]}, "names a layer twice"),
        ({"tokens": 0}, "nothing"), ({"log": 3}, "log is 3 .*; wanted an EventLog"),
        ({"options": {}}, "options is a dict; wanted moe_lab.Options"),
        ({"options": lab.Options(prefetch={99: 4})}, "layer 99, which is no MoE layer of the model; it has 0"),
        ({"step_tokens": 0}, "step_tokens"), ({"most_events": 0}, "most_events"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused(ckpt, wrong: dict, message: str):
    with pytest.raises(LabError, match=message):
        run(ckpt, **{"tokens": 2, **wrong})


def test_an_option_that_is_none_is_named_by_the_function_that_was_called(ckpt):
    with pytest.raises(LabError, match=r"lab\.replay takes no 'foo'; it takes arm, cache, options, level"):
        lab.replay(ckpt, foo=1)


def test_a_trace_of_another_model_is_refused(ckpt, trace):
    with pytest.raises(LabError, match=r"R=64 experts, layer 1 of lab-42m\.gguf has R=32"):
        run(ckpt, replace(trace, width=64), layers=LAYERS)
    with pytest.raises(LabError, match="the forecast has 3 tokens"):
        run(ckpt, trace, layers=LAYERS, forecast=trace.part(0, 3))
    with pytest.raises(LabError, match=r"the forecast names experts among R=64, layer 1 routes among R=32"):
        run(ckpt, trace, layers=LAYERS, forecast=replace(trace, width=64))
    with pytest.raises(LabError, match="resident: give a cache"):
        run(ckpt, trace, layers=LAYERS, forecast=trace)


@pytest.mark.wrong_types
@pytest.mark.parametrize("wrong", ["cache", "level", "speed"])
def test_overhead_names_what_it_does_not_take(ckpt, wrong: str):
    with pytest.raises(LabError, match=f"overhead takes no '{wrong}'; it makes a cache of `slots` of its own"):
        overhead(ckpt, slots=4, **{wrong: None})


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_every_token_has_every_level_once_a_square_and_none_always_comes_behind_the_same(levels: int):
    tokens, squares = 7, 2
    turns = [[_turn(step, number, levels) for step in range(tokens)] for number in range(squares * levels)]
    for square in range(squares):
        rounds = turns[square * levels : (square + 1) * levels]
        assert all(sorted(one[step] for one in rounds) == list(range(levels)) for step in range(tokens))
    behind = {(one[step], one[step + 1]) for one in turns for step in range(tokens - 1)}
    assert behind == {(a, (a + way) % levels) for a in range(levels) for way in (1, -1)}


def test_an_event_is_recorded_whether_it_is_torchs_own_or_not(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    class Base:
        def record(self, stream: object) -> None:
            seen.append(f"base {stream}")

    class Own(Base):
        def record(self, stream: object) -> None:
            seen.append(f"own {stream}")
            super().record(stream)

    monkeypatch.setattr(torch._C, "_CudaEventBase", Base, raising=False)
    event, other = Own(), FakeEvent()
    assert record(event, "s") is event
    assert seen == ["base s"]
    stream = FakeStream(1)
    assert record(other, stream) is other
    assert len(stream.queue) == 1


def test_a_pool_makes_events_before_the_step_and_hands_each_out_once(monkeypatch: pytest.MonkeyPatch):
    made: list[FakeEvent] = []

    def new(**how: bool) -> FakeEvent:
        made.append(FakeEvent())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", new)
    pool, stream = EventPool(), FakeStream(1)
    pool.fill(3, stream)
    pool.fill(3, stream)
    assert len(made) == len(stream.queue) == 3  # recorded: that is when an event comes into being
    taken = [pool.take() for _ in range(4)]
    assert len(made) == len(set(map(id, taken))) == 4


def test_the_function_in_the_packages_place_has_what_is_in_the_package():
    assert lab.replay.run is run  # type: ignore[attr-defined]
    assert lab.replay.summary is summary  # type: ignore[attr-defined]
    assert lab.simulate.steps is steps  # type: ignore[attr-defined]
