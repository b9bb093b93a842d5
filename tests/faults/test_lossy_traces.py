"""Traces that would change silently on the way in or out: numbers that wrap, rows that disagree, unreadable files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.cli import main
from moe_lab.errors import LabError, LabTypeError
from moe_lab.trace import NO_PICK, RoutingTrace, TraceWriter, scan
from tests.support.tiny_gguf import write_tiny_qwen2moe
from tests.support.toy_moe import toy_model
from tests.support.traces import random_trace

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


def grid(tokens: int = 4, layers: int = 2) -> dict[str, np.ndarray]:
    """Columns of a trace, token by token."""
    rows = np.arange(tokens * layers)
    ids = np.stack([rows % 8, (rows + 1) % 8], 1)
    return {"token": rows // layers, "layer": rows % layers, "ids": ids, "weights": np.ones((len(rows), 2))}


def parquet(path: Path, order: Any = slice(None), **columns: Any) -> Path:
    held = {name: values[order] for name, values in {**grid(), **columns}.items()}
    arrays = {name: pa.array(list(v) if v.ndim == 2 else v) for name, v in held.items()}
    pq.write_table(pa.table(arrays), path, row_group_size=1 << 10)
    return path


def csv(path: Path, **columns: Any) -> Path:
    held = {**grid(), **columns}
    lines = [",".join(held)]
    for row in zip(*held.values(), strict=True):
        lines.append(",".join(" ".join(map(str, v)) if isinstance(v, np.ndarray) else str(v) for v in row))
    path.write_text("\n".join(lines))
    return path


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, idx=np.ones((2, 4, 2), np.int64), **arrays)
    return path


@pytest.mark.parametrize("kind", ["uint8", "uint32", "uint64", "int8"])
@pytest.mark.parametrize("order", ["backwards", "by-layer"])
def test_tokens_of_any_whole_dtype_are_put_in_order(kind: str, order: str, tmp_path: Path) -> None:
    columns = grid(100)
    rows = np.arange(200)[::-1] if order == "backwards" else np.lexsort((columns["token"], columns["layer"]))
    columns |= {name: columns[name].astype(kind) for name in ("token", "layer")}
    shuffled = parquet(tmp_path / "a.parquet", rows, **columns)
    straight = RoutingTrace.load(parquet(tmp_path / "b.parquet", **columns))
    assert np.array_equal(RoutingTrace.load(shuffled).ids, straight.ids)
    with pytest.raises(LabError, match="not in token order"):
        list(scan(shuffled, rows=32))


@pytest.mark.parametrize("make", [csv, parquet, npz], ids=["csv", "parquet", "npz"])
def test_token_ids_do_not_wrap(make: Any, tmp_path: Path) -> None:
    path = tmp_path / f"t.{make.__name__}"
    given = {"token_ids": np.array([1, 2, 3, 2**32 + 7])} if make is npz else {"token_id": np.repeat(2**32 + 7, 8)}
    with pytest.raises(LabError, match=r"4294967303"):
        RoutingTrace.load(make(path, **given))


@pytest.mark.parametrize("make", [csv, parquet], ids=["csv", "parquet"])
@pytest.mark.parametrize("column", ["token_id", "domain"])
def test_rows_of_a_token_that_disagree(make: Any, column: str, tmp_path: Path) -> None:
    values = np.array([5, 5, 6, 7, 8, 8, 9, 9]) if column == "token_id" else np.array([*"aabcddee"])
    with pytest.raises(LabError, match=rf"rows of token 1 have {column} ('b', 'c'|6, 7)"):
        RoutingTrace.load(make(tmp_path / f"t.{make.__name__}", **{column: values}))


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (csv, {"layer": np.tile([0, 100_000], 4)}),
        (parquet, {"layer": np.tile([0, 100_000], 4)}),
        (npz, {"layers": np.array([0, 2**63], np.uint64)}),
    ],
    ids=["csv", "parquet", "npz"],
)
def test_layer_numbers_beyond_the_file_format(make: Any, given: dict[str, Any], tmp_path: Path) -> None:
    path = make(tmp_path / f"t.{make.__name__}", **given)
    with pytest.raises(LabError, match=r"layers holds the number (100000|9223372036854775808)"):
        RoutingTrace.load(path)


IDS, WEIGHTS = np.ones((3, 2, 2), np.uint16), np.ones((3, 2, 2), np.float16)


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"ids": IDS.astype(np.int64) - 3}, LabError, "expert ids run from -2 to -2"),
        ({"ids": IDS.astype(float)}, LabTypeError, "whole numbers, got float64"),
        ({"ids": IDS.tolist()}, LabTypeError, "ids is a list"),
        ({"layers": (0, 0)}, LabError, "number 0 twice"),
        ({"layers": (0, 1.5)}, LabTypeError, "layers[1] is 1.5"),
        ({"weights": WEIGHTS.astype(float) * 1e6}, LabError, "weight inf"),
        ({"weights": IDS}, LabTypeError, "floating point, got uint16"),
        ({"token_ids": np.array([0, 1, 2**31])}, LabError, "to 2147483648"),
        ({"num_experts": "8"}, LabTypeError, "num_experts is '8'"),
        ({"width": 1 << 16}, LabError, "is 65536; wanted 1..65535"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_what_a_trace_cannot_hold(changed: dict[str, Any], kind: type[LabError], words: str) -> None:
    about: dict[str, Any] = {"ids": IDS, "weights": WEIGHTS, "layers": (0, 1), "num_experts": 8, "width": 8, **changed}
    with pytest.raises(kind) as refused:
        RoutingTrace(**about)
    assert words in str(refused.value)


def test_wider_arrays_are_kept_as_the_file_has_them(tmp_path: Path) -> None:
    signed = np.array([[[0, -1]], [[3, 2]]])
    trace = RoutingTrace(
        ids=signed, weights=np.full(signed.shape, 0.25), layers=[7], num_experts=4, width=4,
        token_ids=np.array([5, 6]), margin=np.ones((2, 1)),
    )  # fmt: skip
    kinds = [getattr(trace, name).dtype.name for name in ("ids", "weights", "token_ids", "margin")]
    assert kinds == ["uint16", "float16", "int32", "float32"]
    assert trace.ids[0, 0, 1] == NO_PICK
    assert trace.layers == (7,)
    back = RoutingTrace.load(trace.save(tmp_path / "t.parquet"))
    assert np.array_equal(back.ids, trace.ids)


@pytest.mark.parametrize("name", ["t.csv", "t.npz", "t"])
def test_parquet_is_written_under_its_own_suffix_alone(name: str, tmp_path: Path) -> None:
    trace, path = random_trace(5), tmp_path / name
    layer = lab.open(write_tiny_qwen2moe(tmp_path / "m.gguf")).layer(0)
    writers = (
        lambda: trace.save(path),
        lambda: lab.hf.record_to(path, toy_model(), [1, 2]),
        lambda: record_to(path, layer),
    )
    for write in writers:
        with pytest.raises(LabError, match=r"written as Parquet; give the file the suffix \.parquet"):
            write()
        assert not path.exists()


def record_to(path: Path, layer: lab.MoELayer) -> None:
    with lab.record(to=path):
        layer(torch.zeros(1, 256))


def test_no_tokens_are_no_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(LabError, match="no token was recorded"):
        random_trace(5).part(0, 0).save(path)
    with TraceWriter(path) as writer:
        writer.append(random_trace(5).part(0, 0))
        writer.append(random_trace(5))
    assert RoutingTrace.load(path).tokens == 5


@pytest.mark.parametrize("make", [csv, parquet, npz], ids=["csv", "parquet", "npz"])
def test_tokens_beyond_the_end_and_tokens_by_number(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path / f"t.{make.__name__}")
    assert RoutingTrace.load(path, tokens=(3, 9)).tokens == 1
    with pytest.raises(LabError, match=r"holds no token in 5\.\.9 \(it has (0\.\.3|none)\)"):
        RoutingTrace.load(path, tokens=(5, 9))
    if make is not npz:
        later = make(tmp_path / f"later.{make.__name__}", token=grid()["token"] + 100)
        assert RoutingTrace.load(later, tokens=(101, 103)).tokens == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Token,Layer,ids,weights\n0,0,1,1\n", "Names are lower case."),
        ("token;layer;ids;weights\n0;0;1;1\n", "not separated by commas."),
        ("t,l,ids,weights\n0,0,1,1\n", "weights."),
    ],
    ids=["case", "semicolons", "other"],
)
def test_a_header_that_is_nearly_one(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(tmp_path / "t.csv")
    assert str(refused.value).endswith(words)


def test_npz_errors_name_the_file_once(tmp_path: Path) -> None:
    path = npz(tmp_path / "t.npz", domain=np.array([b"a"] * 4))
    with pytest.raises(LabError) as refused:
        RoutingTrace.load(path)
    assert str(refused.value).count("t.npz") == 1


def test_a_folders_recording_is_the_one_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tiny_qwen2moe(folder / "tiny.gguf")
    assert main(["trace", str(folder)]) == 2
    said = capsys.readouterr().err
    assert f"No recording stands at {folder / 'activations.npz'}" in said
    assert "--input" in said
    lab.Activations(np.ones((2, 4, 256), np.float16), (0, 1)).save(folder / "activations.npz")
    assert main(["trace", str(folder)]) == 0
    assert not Inputs(folder, 256, 4).synthetic
