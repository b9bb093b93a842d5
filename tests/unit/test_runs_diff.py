"""Two runs against each other: what is found, what is refused a verdict and why, and what the shell says of it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import moe_lab as lab
from moe_lab.cli import main
from moe_lab.runs import Comparison, Pair, Record, Run, Spread, Status, diff
from moe_lab.runs.bootstrap import ratio_interval
from moe_lab.tolerances import tol
from tests.support.saved_runs import ended, h200_run, passed, run


def pairs_by_arm(found: Comparison) -> dict[str, tuple[str, str]]:
    return {pair.record.arm: (str(pair.verdict), pair.reason) for pair in found.pairs}


def span(pair: Pair) -> tuple[float, float, float]:
    assert pair.low is not None
    assert pair.ratio is not None
    assert pair.high is not None
    return pair.low, pair.ratio, pair.high


def test_a_planted_slowdown_of_a_tenth_is_slower_with_an_interval() -> None:
    before = run(*(passed(t, draw=t) for t in (1, 4, 8)), passed(arm="reference"))
    after = run(*(passed(t, draw=100 + t, ms=1.1) for t in (1, 4, 8)), passed(arm="reference", draw=9))
    found = diff(before, after)
    slow = [pair for pair in found.pairs if pair.record.arm == "gemv"]
    assert [str(pair.verdict) for pair in found.pairs] == ["slower"] * 3 + ["same"]
    for pair in slow:
        low, ratio, high = span(pair)
        assert 1.02 < low < ratio < high < 1.2
        assert low < 1.1 < high
        assert "interval +" in pair.reason
    assert (str(found.verdict), found.ok) == ("slower", False)
    assert found.summary.startswith("slower: of 4 pairs 3 slower, 1 same")


def test_the_same_the_other_way_round_is_faster() -> None:
    found = diff(run(passed(ms=1.1, draw=1)), run(passed()))
    assert (str(found.verdict), found.ok) == ("faster", True)
    assert span(found.pairs[0])[2] < 1


def test_identical_runs_say_same(tmp_path: Path) -> None:
    made = run(passed(), passed(16, noise=0.2), *(ended(s, arm=f"arm {s}") for s in Status if s != "PASSED"))
    path = made.save(tmp_path)
    for found in (diff(made, made), diff(path, str(path))):
        assert (str(found.verdict), found.ok, found.differences) == ("same", True, ())
        assert {str(pair.verdict) for pair in found.pairs} == {"same"}
    assert pairs_by_arm(diff(run(ended(Status.OOM)), run(ended(Status.OOM))))["mine"] == ("same", "OOM in both")


@pytest.mark.parametrize("draw", range(8))
def test_two_sessions_of_the_same_code_say_same(draw: int) -> None:
    """1 % of noise and a drift of 1 % between the sessions, which is within the threshold."""
    assert str(diff(run(passed(draw=draw)), run(passed(draw=100 + draw, ms=1.01))).verdict) == "same"


def test_a_change_that_the_samples_do_not_settle_is_same_and_says_how_wide_it_is() -> None:
    pair = diff(run(passed(noise=0.5, n=9)), run(passed(noise=0.5, n=9, ms=1.1, draw=1))).pairs[0]
    assert str(pair.verdict) == "same"
    assert pair.reason.startswith("the interval holds 1: ")


def test_the_threshold_is_the_callers(tmp_path: Path) -> None:
    a, b = run(passed()), run(passed(ms=1.1, draw=1))
    assert str(diff(a, b, threshold=0.2).verdict) == "same"
    assert str(diff(run(passed()), run(passed(ms=1.01, draw=1, noise=0.001)), threshold=0).verdict) == "slower"
    for threshold in (-0.1, 1.0, math.nan, 2):
        with pytest.raises(lab.LabError, match="threshold"):
            diff(a, b, threshold=threshold)


def test_more_of_a_rate_is_faster() -> None:
    a, b = (run(passed(metric="bandwidth", unit="GB/s", ms=v, draw=i)) for i, v in enumerate((100.0, 110.0)))
    assert str(diff(a, b).verdict) == "faster"
    assert (str(diff(b, a).verdict), diff(b, a).ok) == ("slower", False)


BLOCKS = [
    ("device", "NVIDIA H200"), ("backend", "cuda"), ("driver", "580"), ("torch", "2.11"), ("triton", "3.6"),
    ("threads", "8"), ("seed", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_what_times_depend_on_blocks_and_is_named(name: str, value: str | int) -> None:
    other = {"seed": value} if name == "seed" else {"environment": {name: value}}
    before, after = run(passed(), passed(16)), run(passed(ms=2.0), ended(Status.OOM, 16, "gemv"), **other)
    found = diff(before, after)
    assert (str(found.verdict), found.ok) == ("incomparable", False)
    assert all(f"{name} " in pair.reason and f"against {value}" in pair.reason for pair in found.pairs)
    assert [(d.name, d.b, d.blocks) for d in found.differences] == [(name, str(value), True)]
    assert f"{name} " in found.summary
    allowed = diff(before, after, across=[name])
    assert [str(pair.verdict) for pair in allowed.pairs] == ["slower", "broken"]
    assert [d.blocks for d in allowed.differences] == [False]


def test_the_code_under_test_may_differ_and_is_listed() -> None:
    new = {"commit": "bbbbbbb", "dirty": "yes", "moe_lab": "0.2.0", "extra": "x"}
    found = diff(run(passed()), run(passed(), environment=new, options={"chunk_rows": 4}, workload="another name"))
    assert str(found.verdict) == "same"
    assert {d.name for d in found.differences} == {*new, "option chunk_rows", "workload"}
    assert not any(d.blocks for d in found.differences)


def test_an_h200_and_a_laptop_are_incomparable_and_every_difference_is_listed(tmp_path: Path) -> None:
    found = diff(run(passed()).save(tmp_path), h200_run().save(tmp_path))
    assert str(found.verdict) == "incomparable"
    listed = {d.name: (d.a, d.b) for d in found.differences}
    assert listed["device"] == ("A laptop", "NVIDIA H200")
    assert listed["threads"] == ("1", "not recorded")
    assert {"device", "backend", "driver", "torch", "triton", "commit"} <= {*listed}


def test_each_pair_names_all_that_stands_between_it() -> None:
    there = {"device": "NVIDIA H200", "backend": "cuda"}
    fast = passed(backend="cuda", method="graph-replay", ms=0.01)
    found = diff(run(passed()), run(fast, environment=there))
    assert found.pairs[0].reason == (
        "device A laptop against NVIDIA H200, backend torch against cuda, method host clock against graph-replay"
    )
    allowed = diff(run(passed()), run(fast, environment=there), across=["device", "backend", "method"])
    assert str(allowed.verdict) == "faster"


ALONE = [
    ("method", passed(method="events"), "method host clock against events"),
    ("backend", passed(backend="cuda"), "backend torch against cuda"),
    ("unit", passed(unit="us"), "unit ms against us"),
    ("workload", passed(case=replace(passed().case, workload="zipf")), "workload uniform against zipf"),
    ("percentiles", passed(spread=Spread(p20=1.0, p50=1.0, p80=1.0, n=60)), "B keeps percentiles alone"),
    ("samples", passed(n=4), "B has 4 samples; an interval needs 5"),
    ("zeros", passed(spread=Spread.of([0, 1, 1, 1, 1])), "its clock is too coarse"),
]


@pytest.mark.parametrize(("record", "why"), [(r, w) for _, r, w in ALONE], ids=[name for name, _, _ in ALONE])
def test_a_record_that_measures_something_else_is_incomparable_and_says_why(record: Record, why: str) -> None:
    found = diff(run(passed(), passed(arm="reference")), run(record, passed(arm="reference")))
    verdict, reason = pairs_by_arm(found)["gemv"]
    assert verdict == "incomparable"
    assert why in reason
    assert (str(found.verdict), found.ok) == ("same", False), "the other pair is judged all the same"
    assert found.summary.endswith("measured in A and not compared: layer qwen3-30b-a3b uniform T=8 warm gemv q2_k+q3_k")


def test_a_metric_that_is_no_speed_is_incomparable() -> None:
    found = diff(run(passed(metric="hit_rate", unit="share")), run(passed(metric="hit_rate", unit="share")))
    assert "neither a time nor a rate" in found.pairs[0].reason


def test_records_without_a_twin_are_kept_and_named() -> None:
    found = diff(run(passed(), passed(arm="old")), run(passed(arm="new"), passed(), passed(64)))
    assert [(p.record.arm, p.record.case.tokens, p.reason) for p in found.pairs if p.reason.startswith("only")] == [
        ("old", 8, "only in A"), ("new", 8, "only in B"), ("gemv", 64, "only in B"),
    ]  # fmt: skip
    assert str(found.verdict) == "same"
    assert str(diff(run(passed()), run(passed(arm="new"))).verdict) == "incomparable"
    assert str(diff(run(), run()).verdict) == "incomparable"


def test_a_measurement_that_stands_twice_is_not_guessed_at() -> None:
    found = diff(run(passed(), passed(draw=1)), run(passed()))
    assert [(str(p.verdict), p.reason) for p in found.pairs] == [
        ("incomparable", "A holds 2 records of this measurement")
    ]


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.PASSED])
def test_what_passed_and_no_longer_does_is_a_regression(status: Status) -> None:
    before, after = run(passed(), passed(16)), run(ended(status, arm="gemv", reason="it is off"), passed(16))
    found = diff(before, after)
    assert (str(found.verdict), found.ok) == ("broken", False)
    assert [str(pair.verdict) for pair in found.pairs] == ["broken", "same"]
    assert f"PASSED against {status} (it is off)" in {pair.reason for pair in found.pairs}
    assert "1 passed before and do" in found.summary
    assert diff(after, before).ok


def test_the_interval_is_seeded_and_covers_the_ratio() -> None:
    draw, hits, trials = np.random.default_rng(0), 0, 400
    for _ in range(trials):
        a, b = draw.lognormal(0, 0.1, 25), 1.1 * draw.lognormal(0, 0.1, 25)
        low, high = ratio_interval(a, b)
        hits += low <= 1.1 <= high
    assert abs(hits / trials - 0.95) <= tol("runs/coverage")
    assert ratio_interval(a, b) == ratio_interval(list(reversed(a)), b) != ratio_interval(a, b, seed=1)


def test_equal_runs_are_equal_however_many_records_they_hold() -> None:
    """5 % of noise, 20 samples: at 95 % a pair, nearly each of these comparisons calls some record slower."""
    said = []
    for draw in range(12):
        a, b = (
            run(*(passed(t, n=20, noise=0.05, draw=2 * (99 * draw + t) + side) for t in range(99))) for side in (0, 1)
        )
        said.append(str(diff(a, b).verdict))
    assert said.count("same") >= 11, said


def test_a_slowdown_of_one_among_many_is_found() -> None:
    before = run(*(passed(t, n=20, noise=0.02, draw=t) for t in range(200)))
    after = run(*(passed(t, n=20, noise=0.02, draw=999 + t, ms=1.1 if t == 77 else 1.0) for t in range(200)))
    found = diff(before, after)
    assert [pair.record.case.tokens for pair in found.pairs if str(pair.verdict) != "same"] == [77]
    assert found.share == pytest.approx(0.95 ** (1 / 200))
    low, ratio, high = span(found.pairs[77])
    assert 1 < low < ratio < high
    alone = span(diff(run(before.records[77]), run(after.records[77])).pairs[0])
    assert low < alone[0] < alone[2] < high, "the more are compared, the wider each interval"


def test_too_few_samples_for_so_many_pairs_are_no_verdict() -> None:
    """All of 5 samples lie above all of 5 others once in 252 times by chance alone."""

    def of(n: int, pairs: int) -> Comparison:
        return diff(*(run(*(passed(t, n=n, ms=ms) for t in range(pairs))) for ms in (1.0, 1.5)))

    assert (str(of(5, 6).verdict), str(of(8, 60).verdict)) == ("slower", "slower")
    few = of(5, 60)
    assert (str(few.verdict), few.ok) == ("incomparable", False)
    assert few.pairs[0].reason.startswith(
        "5 and 5 samples; an interval that holds beside those of all other pairs needs 7"
    )
    assert ratio_interval([1.0] * 5, [2.0] * 5, share=0.999) == (0.0, math.inf)


def test_nothing_compared_is_not_ok() -> None:
    for a, b in ((run(), run()), (run(), run(passed())), (run(passed()), run()), (run(passed()), run(passed(16)))):
        assert (str(diff(a, b).verdict), diff(a, b).ok) == ("incomparable", False)
        assert "not compared" in diff(a, b).summary or "nothing was compared" in diff(a, b).summary
    fixed = diff(run(ended(Status.OOM), passed()), run(passed(arm="mine"), passed()))
    assert (str(fixed.verdict), fixed.ok) == ("same", True), "what A could not time, B need not match"
    twice = diff(run(ended(Status.OOM, arm="gemv"), passed(), passed(16)), run(passed(), passed(16)))
    assert not twice.ok


def test_interval_matches_a_plain_bootstrap() -> None:
    """The shared ranks are a faster way to the same distribution."""
    draw = np.random.default_rng(1)
    a, b = draw.normal(10, 1, 21), draw.normal(11, 2, 30)
    ratios = [np.median(draw.choice(b, 30)) / np.median(draw.choice(a, 21)) for _ in range(4000)]
    assert ratio_interval(a, b) == pytest.approx(tuple(np.quantile(ratios, (0.025, 0.975))), rel=tol("runs/interval"))


def test_table_and_html() -> None:
    evil = passed(arm="<img src=x>")
    found = diff(run(passed(), evil), run(passed(ms=2.0), ended(Status.ERROR, arm=evil.arm, reason="<b>")))
    table = found.table
    assert list(table["verdict"]) == ["slower", "broken"]
    assert list(table["regression"]) == [True, True]
    assert table.loc[0, "ratio_low"] < table.loc[0, "ratio"] < table.loc[0, "ratio_high"]
    assert list(table["status_b"]) == ["PASSED", "ERROR"]
    html = found._repr_html_()
    assert "<img" not in html
    assert "<b>)" not in html
    assert "broken: of 2 pairs 1 slower, 1 broken" in html
    assert len(repr(found)) < 200
    assert found.summary in repr(found)


@pytest.mark.wrong_types
def test_diff_refuses_what_is_no_run() -> None:
    with pytest.raises(lab.LabTypeError, match="int"):
        diff(3, run())
    for across in (["weather"], "device"):
        with pytest.raises(lab.LabError, match="wanted names out of device"):
            diff(run(), run(), across=across)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    made = {
        "before": run(passed(), passed(16)),
        "after": run(passed(ms=1.1, draw=1), passed(16, draw=2), environment={"commit": "bbbbbbb"}),
        "elsewhere": run(passed(), passed(16), environment={"device": "NVIDIA H200"}),
        "one": run(passed()),
        "wrong": run(passed(), ended(Status.INCORRECT, 16, arm="gemv")),
    }
    return {name: str(one.save(tmp_path / name)) for name, one in made.items()}


@pytest.mark.parametrize(
    ("a", "b", "options", "code", "word"),
    [
        ("before", "after", (), 1, "slower: of 2 pairs 1 slower, 1 same"),
        ("after", "before", (), 0, "faster: of 2 pairs"),
        ("before", "before", (), 0, "same: of 2 pairs 2 same"),
        ("before", "after", ("--threshold", "0.3"), 0, "same: of 2 pairs"),
        ("before", "elsewhere", (), 1, "incomparable: of 2 pairs"),
        ("before", "elsewhere", (), 1, "device A laptop against NVIDIA H200"),
        ("before", "one", (), 1, "not compared: layer qwen3-30b-a3b uniform T=16 warm gemv q2_k+q3_k"),
        ("one", "before", (), 0, "same: of 2 pairs 1 same, 1 incomparable"),
        ("before", "wrong", (), 1, "broken: of 2 pairs 1 same, 1 broken; 1 passed before and do not now"),
        (
            "before",
            "after",
            (),
            1,
            "the 2 intervals hold at once at 95 % (each at 97.4679 %) for noise within these two",
        ),
        ("before", "elsewhere", ("--across", "device"), 0, "same: of 2 pairs"),
    ],
)
def test_shell(saved: dict[str, str], capsys, a: str, b: str, options: tuple[str, ...], code: int, word: str) -> None:
    assert main(["diff", saved[a], saved[b], *options]) == code
    out = capsys.readouterr()
    assert word in " ".join(out.out.split())
    assert out.err == ""


def test_shell_json(saved: dict[str, str], capsys) -> None:
    assert main(["diff", saved["before"], saved["after"], "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["command"], answer["ok"]) == ("diff", False)
    first = answer["rows"][0]
    assert (first["verdict"], first["tokens"], first["run_verdict"]) == ("slower", 8, "slower")
    assert 1 < first["ratio_low"] < first["ratio"] < first["ratio_high"]
    assert first["differences"] == "commit aaaaaaa against bbbbbbb"
    assert first["run_summary"].startswith("slower: of 2 pairs")
    assert first["run_a"] == Run.load(saved["before"]).label


@pytest.mark.parametrize(
    "arguments",
    [("before",), ("before", "nowhere.parquet"), ("before", "after", "--threshold", "-1"), ("before", __file__),
     ("before", "after", "--across", "weather"), ("before", "after", "--threshold", "much")],
    ids=lambda a: " ".join(Path(x).name for x in a),
)  # fmt: skip
def test_shell_bad_input_is_one_line_and_exit_2(saved: dict[str, str], capsys, arguments: tuple[str, ...]) -> None:
    assert main(["diff", *(saved.get(a, a) for a in arguments)]) == 2
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
