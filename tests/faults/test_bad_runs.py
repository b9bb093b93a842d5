"""Files that are no runs, runs that a disk or a newer version broke, and folders where one file of many is bad."""

import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import moe_lab as lab
from moe_lab.runs import Run, Status
from moe_lab.runs.store import SCHEMA
from tests.support.saved_runs import ended, passed, run

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return run(passed(), passed(16), ended(Status.OOM)).save(tmp_path / "runs")


def rewritten(path: Path, about: dict[str, Any] | bytes | None = None, **columns: list) -> Path:
    """A copy of a run's file with other metadata or columns, as if written so: without the checksum of what it was."""
    table = pq.read_table(path)
    for name, values in columns.items():
        table = table.set_column(table.schema.get_field_index(name), name, pa.array(values))
    if not isinstance(about, bytes):
        about = {**json.loads(table.schema.metadata[b"moe_lab_run"]), **(about or {})}
        del about["checksum"]
        about = json.dumps(about).encode()
    table = table.replace_schema_metadata({"moe_lab_run": about})
    pq.write_table(table, path.with_name("changed.parquet"))
    return path.with_name("changed.parquet")


def test_a_newer_version_is_refused_with_both_versions(good: Path) -> None:
    newer = rewritten(good, {"schema": SCHEMA + 1, "environment": {"moe_lab": "7.8.9"}})
    with pytest.raises(lab.LabError) as error:
        Run.load(newer)
    for word in (str(newer), f"version {SCHEMA + 1}", "moe_lab 7.8.9", f"up to {SCHEMA}", f"moe_lab {lab.__version__}"):
        assert word in str(error.value)


def test_a_newer_version_may_have_other_columns_and_metadata(good: Path) -> None:
    table = pq.read_table(good).drop_columns(["p50", "what"])
    path = good.with_name("newer.parquet")
    pq.write_table(table.replace_schema_metadata({"moe_lab_run": '{"schema": 9}'}), path)
    with pytest.raises(lab.LabError, match=r"version 9 \(written by moe_lab unknown\)"):
        Run.load(path)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.7, 0.99, 0.9999])
def test_a_truncated_file_is_named(good: Path, share: float) -> None:
    data = good.read_bytes()
    good.write_bytes(data[: int(share * len(data))])
    with pytest.raises(lab.LabError, match=good.name) as error:
        Run.load(good)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("seed", range(150))
def test_flipped_bytes_give_the_same_run_or_one_error_that_names_the_file(good: Path, seed: int) -> None:
    before = told(Run.load(good))
    draw, data = random.Random(seed), bytearray(good.read_bytes())
    for _ in range(draw.choice((1, 1, 4, 32))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    good.write_bytes(data)
    said = ""
    try:
        assert told(Run.load(good)) == before
    except lab.LabError as error:
        said = str(error)
    assert not said or str(good) in said


def told(made: Run) -> tuple[str, ...]:
    names = ("records", "what", "workload", "options", "seed", "date", "environment")
    return tuple(repr(getattr(made, name)) for name in names)


CHANGED = {
    "a float": {"p95": [1.5, 1.5, None]},
    "a whole number": {"tokens": [9, 16, 8]},
    "a text": {"arm": ["gemw", "gemv", "mine"]},
    "a missing value": {"floor": [None, 0.5, None]},
    "metadata": {"about": {"seed": 1}},
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=list(CHANGED))
def test_values_that_are_possible_but_not_what_was_saved_are_found(good: Path, change: dict[str, Any]) -> None:
    """Nothing but the checksum can tell: the changed file without one loads."""
    without = rewritten(good, **change)
    assert told(Run.load(without)) != told(Run.load(good))
    noted = json.loads(pq.read_schema(good).metadata[b"moe_lab_run"])["checksum"]
    about = json.loads(pq.read_schema(without).metadata[b"moe_lab_run"]) | {"checksum": noted}
    table = pq.read_table(without).replace_schema_metadata({"moe_lab_run": json.dumps(about)})
    pq.write_table(table, good)
    with pytest.raises(lab.LabError, match=rf"{good.name} is a damaged run: .*checksum"):
        Run.load(good)


def test_the_same_values_packed_otherwise_keep_their_checksum(good: Path) -> None:
    before = told(Run.load(good))
    table = pq.read_table(good)
    pq.write_table(table, good, compression="none", use_dictionary=False, row_group_size=1, version="1.0")
    assert told(Run.load(good)) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"about": b"\xff{"}, "is not a readable run"),
        ({"about": b"[]"}, "schema version is None"),
        ({"about": {"schema": "1"}}, "schema version is '1'"),
        ({"about": {"schema": 0}}, "schema version is 0"),
        ({"about": b'{"schema": 1}'}, "lacks what, workload, options, seed, date, environment"),
        ({"about": {"environment": None}}, "environment"),
        ({"about": {"environment": {"device": 3}}}, "environment"),
        ({"about": {"environment": {}}}, "lacks device and backend"),
        ({"about": {"what": "../../x"}}, "../../x"),
        ({"about": {"date": "noon"}}, "noon"),
        ({"about": {"options": [1]}}, "options"),
        ({"status": ["PASSED", "GREAT", "OOM"]}, "record 1: its status is 'GREAT'"),
        ({"status": ["OOM", "PASSED", "OOM"]}, "record 0: record layer of 'gemv' in 'qwen3-30b-a3b uniform T=8 warm'"),
        ({"reason": [None, "", "x"]}, "record 0: a record's reason is None"),
        ({"p50": [1.0, float("nan"), None]}, "record 1: a spread's p50 is nan"),
        ({"n": [40, 39, None]}, "record 1: a spread over n=39 repetitions came with 40 samples"),
        ({"tokens": [-1, 2, 3]}, "record 0: a case's tokens is -1"),
        ({"arm": [1, 2, 3]}, "record 0: a record's arm is 1"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_damaged_run_is_refused_by_name(good: Path, change: dict[str, Any], words: str) -> None:
    path = rewritten(good, **change)
    with pytest.raises(lab.LabError) as error:
        Run.load(path)
    assert str(path) in str(error.value)
    assert words in str(error.value)


def test_other_files_are_no_runs(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    pq.write_table(pa.table({"a": [1]}), tmp_path / "table.parquet")
    for path, words in (
        (root / "data" / "trace.parquet", "no moe_lab_run metadata"),
        (tmp_path / "table.parquet", "no moe_lab_run metadata"),
        (root / "data" / "lab-42m.gguf", "not a readable run"),
        (tmp_path, "not a regular file"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(lab.LabError, match=words) as error:
            Run.load(path)
        assert str(path) in str(error.value)


def test_a_folder_with_bad_files_names_each_of_them(good: Path) -> None:
    bad = [good.with_name("a.parquet"), good.with_name("z.csv")]
    bad[0].write_bytes(good.read_bytes()[:-9])
    with pytest.raises(lab.LabError, match=r"a\.parquet is not a readable run"):
        lab.runs(f"{good.parent}/*")
    bad[1].write_text("what,arm\n")
    with pytest.raises(lab.LabError, match="2 of 3 files are no readable runs") as error:
        lab.runs(f"{good.parent}/*")
    assert all(str(path) in str(error.value) for path in bad)
    assert str(good) not in str(error.value)
    shutil.copy(bad[0], good.with_name("b.parquet"))
    for number in range(9):
        shutil.copy(bad[0], good.with_name(f"c{number}.parquet"))
    with pytest.raises(lab.LabError, match=r"12 of 13 .*\(and 7 more\)"):
        lab.runs(f"{good.parent}/*")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(lab.LabError, match=f"cannot write .*bench-.*: {os.strerror(code)}"):
        run(passed()).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_hard_links_gets_whole_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = run(passed()).save(tmp_path)
    assert len(Run.load(path).records) == 1
    with pytest.raises(lab.LabError, match="there already"):
        run(passed()).save(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(lab.LabError, match="not permitted"):
        run(passed(draw=1)).save(tmp_path)
    assert list(tmp_path.iterdir()) == [path], "the name that was held is free again"


def test_a_file_in_the_folders_place_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("mine")
    with pytest.raises(lab.LabError, match=r"runs is there already|cannot write"):
        run(passed()).save(tmp_path / "runs")
    assert (tmp_path / "runs").read_text() == "mine"


def test_threads_that_save_at_once_lose_nothing(tmp_path: Path) -> None:
    ends: list[str] = []

    def save(draw: int) -> None:
        try:
            ends.append(run(passed(draw=draw)).save(tmp_path).name)
        except lab.LabError:
            ends.append("refused")

    threads = [threading.Thread(target=save, args=(i // 2,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ends.count("refused") == 6
    assert len(list(tmp_path.iterdir())) == len(lab.runs(tmp_path)) == 6
