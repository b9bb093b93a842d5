"""Traces and recordings that are not what they say: one clear error, and never half a file."""

import json
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from moe_lab.activations import Activations, Inputs, require_recorded
from moe_lab.cli import main
from moe_lab.errors import LabError, LabTypeError
from moe_lab.trace import RoutingTrace, TraceWriter, read_last, scan
from moe_lab.trace.writer import META_KEY

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

GOOD_CSV = "token,layer,ids,weights\n0,0,1 2,0.5 0.5\n1,0,3 4,0.5 0.5\n"


def trace(tokens: int = 6, **more) -> RoutingTrace:
    ids = np.arange(tokens * 4).reshape(tokens, 2, 2).astype(np.uint16) % 8
    settings = {"layers": (0, 1), "num_experts": 8, "width": 8, "weights": np.ones(ids.shape, np.float16), **more}
    return RoutingTrace(ids=ids, **settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks the trace columns token, layer, ids, weights"),
        ("token,layer,ids,weights\n", "no rows"),
        ("token,layer,ids\n0,0,1\n", "lacks the trace columns weights"),
        ("token,layer,ids,ids,weights\n", "stands twice"),
        (GOOD_CSV + "2,0,5,0.5\n", "line 4: 1 ids and 1 weights; wanted 2"),
        (GOOD_CSV + "2,0,5 6,0.5\n", "line 4: 2 ids and 1 weights"),
        (GOOD_CSV + "2,0,5 x,0.5 0.5\n", "line 4: ids has 'x'"),
        (GOOD_CSV + "2,0,5 6.5,0.5 0.5\n", "line 4: ids has '6.5'"),
        (GOOD_CSV + "two,0,5 6,0.5 0.5\n", "line 4: token has 'two'"),
        (GOOD_CSV + "2,0,5 6\n", "line 4: 3 cells under 4 columns"),
        (GOOD_CSV + "2,0,5 6,0.5 nan\n", "weight nan (token 2, layer 0, slot 1)"),
        (GOOD_CSV + "2,0,5 6,0.5 1e9\n", "weight inf (token 2"),
        (GOOD_CSV + "2,0,5 70000,0.5 0.5\n", "1 to 70000"),
        (GOOD_CSV + "2,0,5 -2,0.5 0.5\n", "-2"),
        (GOOD_CSV + "1,0,5 6,0.5 0.5\n", "token 1 has layer 0 twice"),
        (GOOD_CSV + "0,1,5 6,0.5 0.5\n", "token 1 lacks layer 1"),
        (GOOD_CSV + "99999999999999999999,0,5 6,0.5 0.5\n", "not a readable CSV"),
        (GOOD_CSV + '2,0,"5 6,0.5 0.5\n', "not a readable CSV"),
        ("token,layer,ids,weights\n0,0,,\n", "line 2: 0 ids"),
    ],
    ids=lambda v: v.splitlines()[-1][:30] if "\n" in v else "",
)
def test_bad_csv_is_refused_with_its_line(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(tmp_path / "t.csv")
    assert words in str(refused.value)
    assert "t.csv" in str(refused.value)


def test_csv_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"token,layer,ids,weights\n0,0,\xff\xfe,1\n")
    with pytest.raises(LabError, match=r"t\.csv is not a readable CSV"):
        RoutingTrace.load(tmp_path / "t.csv")


def parquet(path: Path, **columns) -> Path:
    base = {
        "token": pa.array([0, 0, 1, 1]),
        "layer": pa.array([0, 1, 0, 1]),
        "ids": pa.array([[1, 2], [3, 4], [5, 6], [7, 0]]),
        "weights": pa.array([[0.5, 0.5]] * 4),
        **columns,
    }
    pq.write_table(pa.table({name: column for name, column in base.items() if column is not None}), path)
    return path


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"weights": None}, "lacks the trace columns weights"),
        ({"ids": pa.array([[1, 2], [3], [5, 6], [7, 0]])}, "lists of 1, 2 values"),
        ({"ids": pa.array([[], [], [], []], pa.list_(pa.int64()))}, "lists of 0 values"),
        ({"ids": pa.array([[1, 2], None, [5, 6], [7, 0]])}, "1 empty cells"),
        ({"ids": pa.array([[1, 2], [3, None], [5, 6], [7, 0]])}, "empty cells"),
        ({"ids": pa.array([["a", "b"]] * 4)}, "ids holds object"),
        ({"ids": pa.array([[1.5, 2.0]] * 4)}, "ids holds float64"),
        ({"ids": pa.array([1, 2, 3, 4])}, "ids is int64; wanted lists"),
        ({"ids": pa.array([[1, 2], [3, 4], [5, 6], [7, 1 << 20]])}, "1048576"),
        ({"weights": pa.array([[0.5, 0.5]] * 3 + [[0.5, float("nan")]])}, "weight nan (token 1, layer 1, slot 1)"),
        ({"weights": pa.array([[0.5]] * 4)}, "K=2 ids but 1 weights"),
        ({"token": pa.array(["0", "0", "1", "1"])}, "token holds object"),
        ({"token": pa.array([0, 0, 1, None])}, "token has 1 empty"),
        ({"token": pa.array([0, 0, 0, 1])}, "token 0 has layer 0 twice"),
        ({"layer": pa.array([0, 1, 0, 2])}, "token 0 lacks layer 2"),
        ({"domain": pa.array(["a", "a", None, "b"])}, "domain has 1 empty"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_parquet_is_refused(columns, words: str, tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", **columns)
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(path)
    assert words in str(refused.value)
    assert "t.parquet" in str(refused.value)
    with pytest.raises(LabError, match=r"t\.parquet"):
        list(scan(path))


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (b"{", "damaged"),
        (b"[1]", "damaged"),
        (b'{"E": "many"}', "damaged"),
        (b'{"E": 3}', "expert id 3"),
        (b'{"E": -3}', "E=-3"),
    ],
)
def test_damaged_metadata_is_refused(about: bytes, words: str, tmp_path: Path) -> None:
    table = pq.read_table(parquet(tmp_path / "t.parquet")).replace_schema_metadata({META_KEY: about})
    pq.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(LabError, match=words):
        RoutingTrace.load(tmp_path / "t.parquet")


def test_every_cut_of_a_parquet_file_is_refused(tmp_path: Path) -> None:
    data = trace(40).save(tmp_path / "t.parquet").read_bytes()
    path = tmp_path / "cut.parquet"
    for size in [0, 3, 4, 12, *range(20, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(LabError, match=r"cut\.parquet"):
            RoutingTrace.load(path)


def test_flipped_bytes_never_give_another_kind_of_error(tmp_path: Path) -> None:
    data = trace(40).save(tmp_path / "t.parquet").read_bytes()
    rng, path, refused = np.random.default_rng(0), tmp_path / "flip.parquet", 0
    for at in rng.integers(4, len(data), 150):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        for read in (RoutingTrace.load, read_last, lambda p: list(scan(p, rows=16))):
            try:
                read(path)
            except LabError:
                refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("name", "words"),
    [("t.json", r"\.parquet, \.pq, \.csv, \.npz"), ("none.parquet", "does not exist"), ("none.csv", "does not exist"),
     ("none.npz", "does not exist"), ("folder.parquet", "not a regular file"), ("folder.csv", "not a regular file")],
)  # fmt: skip
def test_what_is_no_file_of_a_trace(name: str, words: str, tmp_path: Path) -> None:
    if name.startswith("folder"):
        (tmp_path / name).mkdir()
    with pytest.raises(LabError, match=words):
        RoutingTrace.load(tmp_path / name)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"ids": np.zeros((1, 2, 3), int)}, "must hold idx"),
        ({"idx": np.zeros((2, 3), int)}, "(2, 3)"),
        ({"idx": np.zeros((1, 2, 3))}, "float64"),
        ({"idx": np.zeros((1, 0, 3), int)}, "(1, 0, 3)"),
        ({"idx": np.zeros((1, 2, 3), int), "weights": np.zeros((2, 1, 3))}, "weights is float64 of shape (2, 1, 3)"),
        ({"idx": np.zeros((2, 2, 3), int), "layers": [1, 1]}, "different"),
        ({"idx": np.zeros((1, 2, 3), int), "token_ids": [1]}, "token_ids"),
        ({"idx": np.full((1, 2, 3), 9), "num_experts": np.int64(8)}, "expert id 9"),
        ({"idx": np.full((1, 2, 3), 70_000)}, "70000"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_npz_is_refused(arrays, words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(tmp_path / "t.npz")
    assert words in str(refused.value)


class Bomb:
    """What a pickle would do when it is loaded."""

    def __reduce__(self):
        return (os.mkdir, (os.environ["MOE_LAB_TEST_BOMB"],))


def test_pickles_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_LAB_TEST_BOMB", str(tmp_path / "ran"))
    np.savez(tmp_path / "t.npz", idx=np.zeros((1, 1, 1), int), x=np.array([Bomb()], object))
    for load in (RoutingTrace.load, Activations.load):
        with pytest.raises(LabError, match=r"t\.npz is not a readable npz"):
            load(tmp_path / "t.npz")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("tokens", "words"),
    [((3, 1), "3..1"), ((-1, 2), "-1..2"), (slice(0, 4, 2), "step 2"), ((90, 95), "no token in 90..95")],
)
def test_bad_ranges(tokens, words: str, tmp_path: Path) -> None:
    path = trace().save(tmp_path / "t.parquet")
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(path, tokens=tokens)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("piece", "words"),
    [
        (lambda: trace(layers=(0, 2)), "layers was (0, 1)"),
        (lambda: trace(num_experts=7), "num_experts was 8"),
        (lambda: trace(width=9), "width was 8"),
        (lambda: trace(model_hash="b"), "model_hash"),
        (lambda: trace(token_ids=np.arange(6, dtype=np.int32)), "without token_ids, this one with"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_pieces_that_do_not_fit_leave_no_file(piece, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("what was there")
    with pytest.raises(LabError) as refused, TraceWriter(path) as writer:  # noqa: PT012
        writer.append(trace())
        writer.append(piece())
    assert words in str(refused.value)
    assert path.read_text() == "what was there"
    assert os.listdir(tmp_path) == ["t.parquet"]
    with pytest.raises(LabError, match="closed"):
        writer.append(trace())


def test_an_error_in_the_block_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), TraceWriter(tmp_path / "t.parquet", group_rows=2) as writer:  # noqa: PT012
        writer.append(trace())
        raise KeyError
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("group_rows", [1 << 10, 1 << 19], ids=["while-writing", "while-closing"])
def test_a_full_disk_is_one_error_and_no_file(tmp_path: Path, group_rows: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8, (5000, 2, 2)).astype(np.uint16)
    big = RoutingTrace(ids=ids, weights=rng.random(ids.shape).astype(np.float16), layers=(0, 1), num_experts=8, width=8)
    path, limits = tmp_path / "t.parquet", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.write_text("what was there")
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(LabError, match=r"cannot write .*t\.parquet"), TraceWriter(path, group_rows=group_rows) as w:
            w.append(big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text() == "what was there"
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_a_folder_or_a_missing_one_is_not_written_to(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="not a regular file"):
        TraceWriter(tmp_path)
    with pytest.raises(LabError, match="none"):
        trace().save(tmp_path / "none" / "t.parquet")
    with pytest.raises(LabError, match="group_rows=0"):
        TraceWriter(tmp_path / "t.parquet", group_rows=0)


def test_layers_recorded_with_ids_that_do_not_fit() -> None:
    ids, weights = np.array([[1, 65_535]]), np.ones((1, 2))
    with pytest.raises(LabTypeError, match="float64"):
        RoutingTrace.from_layers({0: weights}, {0: weights}, num_experts=4, width=4)
    with pytest.raises(LabError, match=r"expert id|65535"):
        RoutingTrace.from_layers({0: ids + 1}, {0: weights}, num_experts=4, width=4)
    with pytest.raises(LabError, match="weight inf"):
        RoutingTrace.from_layers({0: ids % 4}, {0: weights * 1e6}, num_experts=4, width=4)
    with pytest.raises(LabError, match="E=0"):
        trace(num_experts=0)


def test_claims_on_noise_are_refused(tmp_path: Path) -> None:
    noise = Inputs(tmp_path / "m.gguf", 8, 4)
    with pytest.raises(LabError, match=r"the skew .*synthetic.*Activations\.capture"):
        require_recorded(noise, "the skew of the load")
    recorded = Activations(np.zeros((1, 4, 8), np.float16), (0,))
    recorded.save(tmp_path / "activations.npz")
    require_recorded(recorded, "the skew")
    require_recorded(Inputs(tmp_path / "m.gguf", 8, 4), "the skew")


@pytest.mark.parametrize("damage", ["cut", "json", "metadata"])
def test_the_command_answers_bad_traces_in_one_line(damage: str, tmp_path: Path, capsys) -> None:
    path = trace(40).save(tmp_path / "t.parquet")
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-30])
    elif damage == "json":
        path = path.rename(tmp_path / "t.csv")
    else:
        table = pq.read_table(path)
        pq.write_table(table.replace_schema_metadata({META_KEY: json.dumps({"E": 2}).encode()}), path)
    assert main(["trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert path.name in captured.err
