"""Ledger and stall labels on stories written by hand, where every answer is known."""

import math
import threading

import numpy as np
import pandas as pd
import pytest

from moe_lab.errors import LabError, LabTypeError
from moe_lab.replay import ledger, stalls, summary, tell, timeline, waterfall, widths
from moe_lab.replay.depth import Depth
from moe_lab.replay.stalls import CAUSES
from moe_lab.replay.story import common, length_ms, merged
from moe_lab.stream.events import BEGUN, HIT, IN_LINE, LATE, MISS, EventLog, Kind
from tests.support.cache_stories import MS, Script, five_fates

SHARE = {0: range(4)}


def test_the_ring_keeps_the_newest_and_counts_the_rest():
    log = EventLog(most=4, clock=lambda: 7)
    for i in range(10):
        log.put(Kind.USED, layer=i)
    assert log.table()["layer"].tolist() == [6, 7, 8, 9]
    assert (len(log), log.lost) == (4, 6)
    assert set(log.table()["at_ns"]) == {7}
    log.clear()
    assert (len(log), log.lost) == (0, 0)
    with pytest.raises(LabError, match="most"):
        EventLog(most=0)


def test_threads_lose_and_mix_nothing():
    log = EventLog(most=1 << 14)

    def write(n: int) -> None:
        for i in range(1000):
            log.put(Kind.USED, layer=n, expert=i, request=n, read=i, value=n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    rows = log.table()
    assert len(rows) == 8000
    assert (rows["layer"] == rows["request"]).all()
    assert (rows["layer"] == rows["value"]).all()
    assert all(sorted(rows[rows["layer"] == n]["expert"]) == list(range(1000)) for n in range(8))


def test_intervals():
    assert merged([(5, 9), (0, 2), (1, 3), (9, 9), (4, 4)]) == [(0, 3), (5, 9)]
    assert common([(0, 10), (20, 30)], [(5, 25), (28, 40)]) == [(5, 10), (20, 25), (28, 30)]
    assert length_ms([(0, MS), (2 * MS, 4 * MS)]) == 3.0


def test_every_read_ahead_has_one_fate():
    rows = ledger(five_fates()).set_index("expert")
    assert rows.fate.to_dict() == {1: "timely", 2: "late", 3: "useless", 4: "harmful", 5: "dropped"}
    assert rows.slack_us[1] == 2000
    assert rows.late_us[2] == 3000
    assert math.isnan(rows.slack_us[3])
    assert rows.pushed_out_expert.to_dict() == {1: -1, 2: -1, 3: -1, 4: 9, 5: -1}
    assert rows.bytes.to_dict() == {1: 1000, 2: 1000, 3: 1000, 4: 1000, 5: 0}


def test_the_summary_of_a_layer():
    (row,) = summary(five_fates()).to_dict("records")
    assert (row["issued"], row["timely"], row["late"], row["useless"], row["harmful"], row["dropped"]) == (
        4,
        1,
        1,
        1,
        1,
        1,
    )
    assert row["bytes_per_useful_byte"] == 2.0
    assert row["named"] == 4
    assert row["recall"] == pytest.approx(2 / 3)  # 1, 2 and 9 were picked, 1 and 2 named


def test_what_it_pushed_out_was_wanted_only_after_it_had_gone_itself():
    s = Script()
    old = s.miss(0, 9, 0, 1)
    useless = s.read(4, 2, 2, 3, ahead=True, took=(9, old))
    s.miss(4, 7, 4, 5, took=(4, useless))
    s.miss(6, 9, 6, 7)
    assert ledger(s.story).fate.tolist() == ["useless"]


def cause_of(s: Script, expert: int) -> dict:
    rows = stalls(s.story, SHARE)
    assert set(rows.cause) <= set(CAUSES)
    assert (rows.groupby(["step", "layer", "expert", "latency_ms"], dropna=False).size() == 1).all()
    return rows[rows.expert == expert].to_dict("records")[-1]


def warm(reads: int = 6) -> Script:
    """A layer whose usual read takes 1 ms; the requests before it are far away."""
    s = Script()
    for i in range(reads):
        s.step(i)
        s.miss(10 * i, 20 + i, 10 * i, 10 * i + 1)
    s.step(reads)
    return s


def test_never_predicted():
    s = warm()
    s.miss(100, 1, 100, 101)
    found = cause_of(s, 1)
    assert found["cause"] == "never predicted"
    assert (found["wait_ms"], found["latency_ms"], found["read_ms"]) == (1, 1, 1)
    assert "first use" in found["counterfactual"]


def test_predicted_late_when_it_joins_a_read_under_way():
    s = warm()
    read = s.read(1, 99, 99, 101, ahead=True)
    request = s.ask(100)
    s.use(request, 100, 1, read, LATE)
    s.put(Kind.PROMOTED, 100, 1, request=request, read=read)
    s.grant(request, 101, (100, 101))
    found = cause_of(s, 1)
    assert (found["cause"], found["wait_ms"]) == ("predicted late", 1)
    assert "1.00 ms earlier" in found["counterfactual"]


def test_predicted_late_when_its_turn_had_not_come():
    s = warm()
    s.predict(1, IN_LINE, at=99)
    s.miss(100, 1, 100, 101)
    assert cause_of(s, 1)["cause"] == "predicted late"


def test_a_guess_whose_turn_comes_later_keeps_its_step():
    s = Script()
    s.predict(1, IN_LINE, at=1)
    s.predict(2, IN_LINE, at=1)
    s.step(1)
    s.predict(2, BEGUN, at=2)
    assert [(one.step, one.expert, one.fate) for one in s.story.predictions] == [(0, 1, IN_LINE), (0, 2, BEGUN)]


def test_evicted_between_prediction_and_use():
    s = warm()
    s.predict(1, BEGUN, at=99)
    s.miss(100, 1, 100, 101)
    assert cause_of(s, 1)["cause"] == "evicted too early"


def test_evicted_although_the_optimal_policy_would_have_kept_it():
    s = Script()
    for i, expert in enumerate([1, 2, 3, 4, 5]):
        s.step(i)
        s.miss(10 * i, expert, 10 * i, 10 * i + 1)
    s.step(5)
    s.miss(60, 1, 60, 61)  # LRU of 4 slots has lost it, Belady not
    found = cause_of(s, 1)
    assert found["cause"] == "evicted too early"
    assert "LRU would need 5" in found["counterfactual"]


def test_queued_behind_prefetch():
    s = warm()
    s.read(7, 99, 99, 103, ahead=True)
    s.miss(100, 1, 103, 104)
    found = cause_of(s, 1)
    assert (found["cause"], found["queue_ms"], found["wait_ms"]) == ("queued behind prefetch", 3, 4)


def test_slow_disk():
    s = warm()
    s.miss(100, 1, 100, 110)
    found = cause_of(s, 1)
    assert found["cause"] == "slow disk"
    assert "9.00 ms less" in found["counterfactual"]


def test_host_late():
    s = warm()
    request = s.ask(100)
    read = s.read(1, 100, 100, 101, request=request)
    s.use(request, 100, 1, read, MISS)
    s.grant(request, 105, (100, 105))
    assert cause_of(s, 1)["cause"] == "host late"


def test_slot_wait_is_a_row_of_its_own():
    s = warm()
    request = s.ask(100)
    read = s.read(1, 102, 102, 103, request=request)
    s.put(Kind.SLOT_WAIT, 102, request=request, value=100 * MS)
    s.use(request, 102, 1, read, MISS)
    s.grant(request, 103, (102, 103))
    rows = stalls(s.story, SHARE)
    mine = rows[rows.step == 6]
    assert mine.cause.tolist() == ["slot wait", "never predicted"]
    assert mine.wait_ms.tolist() == [2, 1]


def test_a_wait_is_shared_out_along_its_critical_path():
    s = warm()
    request = s.ask(100, 3)
    for expert, done in ((1, 101), (2, 104), (3, 103)):
        s.use(request, 100, expert, s.read(expert, 100, 100, done, request=request), MISS)
    s.use(request, 100, 25, -1, HIT)
    s.grant(request, 104, (100, 104))
    rows = stalls(s.story, SHARE)
    mine = rows[rows.step == 6].set_index("expert")
    assert mine.wait_ms.to_dict() == {1: 1, 3: 2, 2: 1}
    assert rows.wait_ms.sum() == 6 + 4


def test_events_from_before_the_log_are_left_out():
    log = EventLog()
    log.put(Kind.USED, 0, 1, request=3, read=2)
    log.put(Kind.GRANTED, 0, request=3)
    story = tell(log.table())
    assert story.requests == {}
    assert len(stalls(story, {})) == 0


def test_a_log_is_told_as_its_table_is():
    log = EventLog()
    log.put(Kind.ASKED, 0, request=3)
    assert tell(log) == tell(log.table())


class OfARecording:
    """What the readers of a story take besides: anything that has one, as a Recording does."""

    story, shares = five_fates(), SHARE


def test_a_recording_serves_where_its_story_does():
    for read in (ledger, summary):
        assert read(OfARecording()).equals(read(five_fates()))  # type: ignore[arg-type]
    assert stalls(OfARecording()).equals(stalls(five_fates(), SHARE))  # type: ignore[arg-type]


@pytest.mark.wrong_types
@pytest.mark.parametrize("given", [None, pd.DataFrame(), "x"], ids=["none", "table", "text"])
@pytest.mark.parametrize("reader", [ledger, summary, stalls, tell, timeline, waterfall], ids=lambda f: f.__name__)
def test_what_has_no_story_is_refused_by_name(reader, given: object):
    with pytest.raises(LabTypeError, match=f"what (replay.)?{reader.__name__} takes is .*; wanted an? (Rec|EventLog)"):
        reader(given)


def test_a_story_alone_has_no_shares():
    with pytest.raises(LabTypeError, match=r"shares .* is None; wanted the slots of each layer"):
        stalls(five_fates())


def test_the_queues_depth_is_weighed_by_time():
    s = Script()
    s.read(1, 1, 1, 11)
    s.read(2, 3, 3, 5)
    depth = Depth(s.story)
    assert depth.over(0, 20 * MS) == {"queue_depth_p50": 1.0, "queue_depth_max": 2}
    assert depth.over(3 * MS, 5 * MS) == {"queue_depth_p50": 2.0, "queue_depth_max": 2}
    assert np.isnan(depth.over(12 * MS, 20 * MS)["queue_depth_p50"])


def forecast() -> pd.DataFrame:
    """Two pairs, 2 and 4 reads ahead a token, of 1.5 misses a token: the wider one covers more and wastes more."""
    columns = ["layer", "next_layer", "predictor", "reads", "would_read", "read_precision", "miss_coverage"]
    rows = [
        (here, here + 1, "next router", reads, n, n and covered * 1.5 / n, covered)
        for here in (0, 1)
        for reads, n, covered in ((2, 1.0, 0.4), (4, 2.4, 0.8))
    ]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize(
    ("beside_ms", "waits", "break_even", "best"),
    [(100.0, [0.9, 0.3], 4, 4), (1.5, [0.9, 1.2], 4, 2), (0.0, [1.9, 2.7], 0, 0)],
    ids=["all-hidden", "some-hidden", "nothing-hidden"],
)
def test_widths_pay_only_where_reads_can_hide(beside_ms: float, waits: list[float], break_even: int, best: int):
    table = widths(forecast(), read_ms=1.0, beside_ms=beside_ms)
    for _, pair in table.groupby("layer"):
        assert pair.wait_ms.tolist() == pytest.approx(waits)
        assert pair.wait_ms_without.tolist() == pytest.approx([1.5, 1.5])
        assert set(pair.break_even) == {break_even}
        assert set(pair.best) == {best}
        assert pair.bytes_per_useful_byte.tolist() == pytest.approx([1 / 0.6, 2.4 / 1.2])


def test_widths_want_the_predictions_of_next_layer():
    with pytest.raises(LabError, match="would_read"):
        widths(forecast().drop(columns="would_read"), read_ms=1.0, beside_ms=1.0)
