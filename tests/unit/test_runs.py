"""Runs: what a record may hold, what a file keeps, and what several runs look like as one frame."""

import json
import math
import multiprocessing
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import moe_lab as lab
from moe_lab.runs import Case, Record, Run, Spread, Status, measured
from moe_lab.runs.columns import COLUMNS
from tests.support.saved_runs import DATE, LAPTOP, ended, h200_run, passed, run

RECORDED = sorted((Path(__file__).resolve().parents[2] / "benchmarks" / "results").glob("*/*.parquet"))
EACH_RECORDED = pytest.mark.parametrize("path", RECORDED, ids=lambda path: f"{path.parent.name}-{path.stem}")
NOT_RUN = (Status.UNSUPPORTED, Status.OOM, Status.ERROR)
MORE = {
    "spread": Spread.of([1.0, 2.0]), "error": 0.1, "error_measure": "NMSE", "predicted": 1.0, "floor": 1.0,
    "method": "host clock", "reason": "because",
}  # fmt: skip
REFUSED = [
    *((passed(), {name: type(MORE[name])() if isinstance(MORE[name], str) else None}, name)
      for name in ("spread", "error", "error_measure", "method")),
    (passed(), {"reason": "because"}, "reason"),
    *((ended(Status.INCORRECT), {name: MORE[name]}, name) for name in ("spread", "predicted", "floor")),
    *((ended(Status.INCORRECT), {name: value}, name) for name, value in (("error", None), ("reason", ""))),
    *((ended(status), {name: value}, name) for status in NOT_RUN for name, value in MORE.items() if name != "reason"),
    *((ended(status), {"reason": ""}, "reason") for status in NOT_RUN),
    (passed(), {"error": math.nan}, "nan"),
    (passed(), {"error": -1.0}, "-1.0"),
    (passed(), {"floor": math.inf}, "inf"),
    (passed(), {"backend": ""}, "backend"),
    (passed(), {"status": "PASSED"}, "PASSED"),
    (passed(), {"arm": None}, "arm"),
    (passed(), {"spread": 1.0}, "float"),
]  # fmt: skip


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("record", "change", "word"), REFUSED, ids=[f"{r.status}-{next(iter(c))}-{w}" for r, c, w in REFUSED]
)
def test_status_decides_what_a_record_holds(record: Record, change: dict, word: str) -> None:
    with pytest.raises(lab.LabError, match=re.escape(word)):
        replace(record, **change)


def test_incorrect_may_be_any_amount_wrong() -> None:
    assert math.isnan(ended(Status.INCORRECT, error=math.nan).error)
    assert ended(Status.INCORRECT, error=math.inf).error == math.inf


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "spread",
    [
        {"p20": 2.0}, {"p80": 0.5}, {"p95": 1.0, "p80": 2.0}, {"p50": math.nan}, {"p20": -1.0}, {"n": 0}, {"n": 2.5},
        {"samples": (1.0,), "n": 2}, {"samples": (1.0, math.nan), "n": 2}, {"samples": (3.0, 4.0), "n": 2},
        {"samples": (-1.0, 4.0), "n": 2}, {"samples": ("a", "b"), "n": 2}, {"p50": None},
    ],
    ids=str,
)  # fmt: skip
def test_spread_refuses_what_no_clock_gives(spread: dict) -> None:
    with pytest.raises(lab.LabError):
        Spread(**({"p20": 1.0, "p50": 1.0, "p80": 1.0, "n": 3} | spread))


def test_spread_of_samples() -> None:
    spread = Spread.of(np.arange(101, dtype=np.float32))
    assert (spread.p20, spread.p50, spread.p80, spread.p95, spread.iqr, spread.n) == (20, 50, 80, 95, 50, 101)
    assert Spread.of([3.0]).p95 == 3.0
    with pytest.raises(lab.LabError, match="no samples"):
        Spread.of([])


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    "case", [{"tokens": -1}, {"tokens": 1.5}, {"experts": True}, {"workload": None}, {"model": 3}], ids=str
)
def test_case_refuses_sizes_that_are_none(case: dict) -> None:
    with pytest.raises(lab.LabError):
        Case(**({"workload": "uniform"} | case))


def test_case_label_names_the_model_or_its_shape() -> None:
    assert passed(tokens=8).case.label == "qwen3-30b-a3b uniform T=8 warm"
    assert Case(workload="zipf", d_model=np.int64(256), top_k=4).label == "D=256 K=4 zipf"


def everything() -> Run:
    """A run with every status, NaN beside None, empty and odd texts."""
    return run(
        passed(), passed(16, spread=Spread(p20=1.0, p50=2.0, p80=3.0, n=60)), passed(32, predicted=None, floor=None),
        ended(Status.INCORRECT, error=math.nan), ended(Status.INCORRECT, 16, error=math.inf),
        *(ended(status, arm=f"a {status}", reason=f"{status}\n<b>& µs\x00") for status in NOT_RUN),
        passed(case=Case(workload="", tokens=0), format="", metric="hit_rate", unit="share"),
        options={"arms": ["gemv", "mine"], "budget_s": 2.5, "deep": {"a": None}},
    )  # fmt: skip


def test_a_saved_run_comes_back_the_same(tmp_path: Path) -> None:
    made = everything()
    path = made.save(tmp_path / "not" / "there")
    back = Run.load(path)
    assert repr(back.records) == repr(made.records)  # NaN is not equal to itself; every other float prints in full
    for name in ("what", "workload", "options", "seed", "date", "environment", "label"):
        assert getattr(back, name) == getattr(made, name), name
    assert path.stem == made.label
    assert path.name.startswith("20260131T120000Z-bench-")
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing else is left in the folder"


def test_frame_is_tidy() -> None:
    frame = everything().frame
    assert list(frame.columns) == list(COLUMNS)
    assert list(frame["status"]) == [str(r.status) for r in everything().records]
    wrong = frame[frame["status"] != "PASSED"]
    assert wrong[["p20", "p50", "p80", "p95", "iqr", "n", "predicted", "floor"]].isna().all(axis=None)
    assert frame["tokens"].dtype == "Int64"
    assert frame.loc[0, "p50"] == passed().spread.p50


def test_nothing_overwrites_a_run(tmp_path: Path) -> None:
    made = run(passed())
    path = made.save(tmp_path)
    before = path.read_bytes()
    with pytest.raises(lab.LabError, match=f"{path.name}.*there already"):
        made.save(tmp_path)
    assert path.read_bytes() == before
    assert made.save(tmp_path / "other").name == path.name
    assert run(passed(draw=1)).save(tmp_path) != path, "other samples at the same second: another file"
    assert len(list(tmp_path.glob("*.parquet"))) == 2


def test_a_label_is_kept(tmp_path: Path) -> None:
    path = run(passed(), label="before \u00b5s").save(tmp_path)
    assert path.name == f"{run(passed()).label}.parquet", "a label names no file"
    assert Run.load(path).label == "before \u00b5s"
    assert list(lab.runs(path)["run"]) == ["before \u00b5s"]
    other = run(passed(16)).save(tmp_path)
    moved = other.rename(tmp_path / "after.parquet")
    assert Run.load(moved).label == "after"


def test_save_refuses_an_empty_run_and_a_files_name(tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match="holds no records"):
        run().save(tmp_path)
    with pytest.raises(lab.LabError, match=r"x\.parquet.*wanted a folder"):
        run(passed()).save(tmp_path / "x.parquet")
    with pytest.raises(lab.LabError, match="wanted a folder"):
        lab.bench("no such shape", save=tmp_path / "x.parquet")  # asked first, before anything is measured
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_stands_twice_is_saved_with_a_word(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 of its measurements stand more than once, first record layer of 'gemv'"):
        path = run(passed(), passed(draw=1), passed(16)).save(tmp_path)
    assert len(Run.load(path).records) == 3


def _save(folder: Path, draw: int, gate, ends) -> None:
    gate.wait()
    try:
        run(passed(draw=draw)).save(folder)
        ends.put("saved")
    except lab.LabError:
        ends.put("refused")


def test_of_two_that_save_the_same_run_at_once_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    gate, ends = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_save, args=(tmp_path, 7, gate, ends)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert sorted(ends.get(timeout=60) for _ in workers) == ["refused"] * 3 + ["saved"]
    for worker in workers:
        worker.join()
    (path,) = tmp_path.iterdir()
    assert len(Run.load(path).records) == 1


def test_environment_is_measured_when_none_is_given() -> None:
    made = Run("bench", [passed()])
    assert {*LAPTOP} == {*made.environment}
    assert made.environment["moe_lab"] == lab.__version__
    assert made.environment["dirty"] in ("yes", "no", "unknown")
    assert not made.environment["commit"].endswith("+")
    assert abs(time.time() - _seconds(made.date)) < 60
    assert made.environment["driver"] == measured()["driver"]


def _seconds(date: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(date).timestamp()


@pytest.mark.wrong_types
@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"what": "a/b"}, "a/b"), ({"what": ""}, "''"), ({"what": "Ä"}, "Ä"), ({"what": ".."}, "'..'"),
        ({"date": "yesterday"}, "yesterday"), ({"seed": "x"}, "'x'"), ({"workload": None}, "None"),
        ({"options": {"arm": object()}}, "JSON"), ({"options": ["gemv"]}, "list"),
        ({"environment": {"device": "x"}}, "backend"), ({"environment": {**LAPTOP, "arm": "x"}}, "arm"),
        ({"environment": {**LAPTOP, "run": "x"}}, "run"), ({"environment": {**LAPTOP, "threads": 2}}, "threads"),
        ({"records": [1]}, "int"), ({"label": 3}, "3"),
    ],
    ids=str,
)  # fmt: skip
def test_run_refuses_what_no_file_could_hold(change: dict, word: str) -> None:
    given = {"what": "bench", "records": [passed()], "environment": LAPTOP} | change
    with pytest.raises(lab.LabError, match=re.escape(word)):
        Run(**given)


def test_dates_are_kept_in_utc() -> None:
    assert run(passed(), date="2026-02-01T01:00:00+05:00").date == "2026-01-31T20:00:00Z"
    assert run(passed(), date="2026-02-01T01:00:00").date == "2026-02-01T01:00:00Z"


def test_a_laptop_and_an_h200_load_together(tmp_path: Path) -> None:
    here, there = run(passed(), ended(Status.OOM)), h200_run()
    for made in (here, there):
        made.save(tmp_path)
    frame = lab.runs(f"{tmp_path}/*")
    assert list(frame.columns[:2]) == ["run", "what"]
    assert set(frame["run"]) == {here.label, there.label}
    by_run = frame.drop_duplicates("run").set_index("run")
    assert by_run.loc[there.label, ["device", "run_backend", "triton"]].tolist() == ["NVIDIA H200", "cuda", "3.6.0"]
    assert by_run.loc[here.label, ["device", "run_backend", "triton"]].tolist() == ["A laptop", "torch", "3.7.1"]
    assert by_run["threads"].isna().to_dict() == {here.label: False, there.label: True}
    assert len(frame) == len(here.records) + len(there.records)


def test_an_h200_run_is_recorded() -> None:
    """Without one, the tests below would have nothing to show."""
    (device,) = {run.environment["device"] for run in map(Run.load, RECORDED) if run.environment["backend"] == "cuda"}
    assert device == "NVIDIA H200"


@EACH_RECORDED
def test_a_recorded_run_loads_beside_one_made_here(path: Path) -> None:
    there, here = Run.load(path), Run("bench", [passed()])
    frame = lab.runs([there, here])
    assert list(frame["device"].unique()) == [there.environment["device"], here.environment["device"]]
    listed = {difference.name for difference in lab.diff(there, here).differences}
    both = there.environment.keys() & here.environment.keys()
    assert {name for name in both if there.environment[name] != here.environment[name]} <= listed
    assert there.environment["commit"] != "none"
    assert {"moe_lab", "torch", "triton", "driver", "device", "backend", "commit"} <= both


@EACH_RECORDED
def test_a_slowdown_planted_into_a_recorded_run_is_found(path: Path) -> None:
    before = Run.load(path)
    timed = [(r, r.spread) for r in before.records if r.spread is not None]
    slow, spread = next((r, s) for r, s in timed if s.p20 and s.p80 and s.p80 < 1.05 * s.p20)
    after = replace(slow, spread=Spread.of([1.1 * v for v in spread.samples]))
    changed = replace(before, records=tuple(after if r is slow else r for r in before.records))
    assert (str(lab.diff(before, before).verdict), lab.diff(before, before).ok) == ("same", True)
    found = lab.diff(before, changed)
    (pair,) = [p for p in found.pairs if str(p.verdict) != "same"]
    assert (str(found.verdict), str(pair.verdict), found.ok) == ("slower", "slower", False)
    assert pair.low is not None
    assert pair.high is not None
    assert 1.02 < pair.low <= 1.1 <= pair.high < 1.2


def test_runs_come_from_folders_files_patterns_and_memory(tmp_path: Path) -> None:
    first, second = run(passed()), run(passed(16))
    path = first.save(tmp_path)
    second.save(tmp_path)
    assert len(lab.runs(tmp_path)) == len(lab.runs(f"{tmp_path}/*.parquet")) == len(lab.runs([first, second])) == 2
    assert len(lab.runs([path, str(path), tmp_path])) == 2, "a file counts once"
    with pytest.raises(lab.LabError, match="nowhere"):
        lab.runs(f"{tmp_path}/nowhere*")


def test_files_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    made = run(passed())
    paths = [made.save(tmp_path / name) for name in ("a", "[b]")]
    assert list(lab.runs(paths)["run"]) == [str(path.with_suffix("")) for path in paths]


@pytest.mark.wrong_types
def test_loading_10_000_records_takes_less_than_a_second(tmp_path: Path) -> None:
    """CPU seconds of this process: what else the machine does at the moment is not the code's."""
    seeds = [passed(draw=draw, n=20) for draw in range(100)]
    records = [replace(r, case=replace(r.case, tokens=100 * i + j)) for i in range(100) for j, r in enumerate(seeds)]
    run(*records).save(tmp_path)
    spent = []
    for _ in range(3):
        start = time.process_time()
        assert len(lab.runs(tmp_path)) == 10_000
        spent.append(time.process_time() - start)
    assert min(spent) < 1.0, spent


def test_repr_html_is_small_and_escaped() -> None:
    evil = "<script>alert(1)</script>"
    made = run(*(passed(t, arm=evil) for t in range(50)), ended(Status.ERROR, reason=evil), workload=evil)
    html = made._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "50 PASSED, 1 ERROR" in html
    assert "A laptop" in html
    assert len(html) < 8000


def test_layout_and_tiles_are_kept_and_older_runs_have_none(tmp_path: Path) -> None:
    kept = replace(passed(), layout="planar", tiles="mmq rows=64 num_warps=4")
    (back,) = Run.load(run(kept).save(tmp_path)).records
    assert (back.layout, back.tiles) == ("planar", "mmq rows=64 num_warps=4")
    older = next((Path(__file__).resolve().parents[2] / "benchmarks/results/h200").glob("*.parquet"))
    assert json.loads(pq.read_schema(older).metadata[b"moe_lab_run"])["schema"] == 1
    assert {(r.layout, r.tiles) for r in Run.load(older).records} == {("", "")}


def test_metadata_is_readable_without_the_lab(tmp_path: Path) -> None:
    path = run(passed(), options={"a": 1}).save(tmp_path)
    about = json.loads(pq.read_schema(path).metadata[b"moe_lab_run"])
    assert about["schema"] == 2
    assert about["environment"] == LAPTOP
    assert about["date"] == DATE
    assert pq.read_table(path, columns=["arm"]).to_pydict() == {"arm": ["gemv"]}


def test_texts_that_are_no_utf8_are_kept_readable(tmp_path: Path) -> None:
    path = run(ended(Status.ERROR, reason=os.fsdecode(b"caf\xe9.gguf"))).save(tmp_path)
    assert Run.load(path).records[0].reason == r"caf\udce9.gguf"
