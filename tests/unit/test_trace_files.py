"""Traces from other people's files, in parts, and written piece by piece."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.trace import NO_PICK, RoutingTrace, TraceWriter, read_last, scan, summarize

ROOT = Path(__file__).resolve().parents[2]
ARRAYS = ("ids", "weights", "token_ids", "domains", "margin")


def made(tokens: int = 50, layers: tuple[int, ...] = (1, 4, 9), k: int = 3, experts: int = 12) -> RoutingTrace:
    rng = np.random.default_rng(tokens)
    ids = rng.random((tokens, len(layers), experts)).argsort(-1)[..., :k].astype(np.uint16)
    return RoutingTrace(
        ids=ids, weights=rng.random(ids.shape).astype(np.float16), layers=layers, num_experts=experts, width=14,
        model_hash="abc", token_ids=np.arange(tokens, dtype=np.int32),
        domains=np.array([f"d{i % 3}" for i in range(tokens)]),
        margin=rng.random(ids.shape[:2]).astype(np.float32),
    )  # fmt: skip


def same(a: RoutingTrace, b: RoutingTrace) -> None:
    for name in ARRAYS:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    for name in ("layers", "num_experts", "width", "model_hash"):
        assert getattr(a, name) == getattr(b, name), name


def csv_lines(trace: RoutingTrace, cell) -> list[str]:
    rows = [
        f"{t},{n},{cell(trace.ids[t, i].tolist())},{cell(trace.weights[t, i].tolist())}"
        for t in range(trace.tokens)
        for i, n in enumerate(trace.layers)
    ]
    return ["token,layer,ids,weights", *rows]


@pytest.mark.parametrize(
    "cell",
    [
        lambda v: " ".join(map(str, v)),
        lambda v: ";".join(map(str, v)),
        lambda v: '"[' + ",".join(map(str, v)) + ']"',
        lambda v: '"' + str(v) + '"',
    ],
    ids=["spaces", "semicolons", "brackets", "python"],
)
def test_csv_in_every_spelling(cell, tmp_path: Path) -> None:
    trace = made()
    header, *rows = csv_lines(trace, cell)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    (tmp_path / "t.csv").write_text("\ufeff" + "\n".join([header, *shuffled]) + "\n", encoding="utf-8")
    back = RoutingTrace.load(tmp_path / "t.csv", num_experts=12)
    assert np.array_equal(back.ids, trace.ids)
    assert np.array_equal(back.weights, trace.weights)
    assert (back.layers, back.num_experts, back.width) == (trace.layers, 12, 12)
    assert RoutingTrace.load(tmp_path / "t.csv").num_experts == int(trace.ids.max()) + 1


def test_csv_with_a_column_a_slot_and_optional_ones(tmp_path: Path) -> None:
    text = "layer,token,id0,id1,weight0,weight1,domain,token_id,margin\n"
    text += '2,0,5,1,0.5,0.25,"de, at",70,0.125\n2,1,-1,3,0,1,fr,71,inf\n'
    (tmp_path / "t.csv").write_text(text)
    trace = RoutingTrace.load(tmp_path / "t.csv")
    assert trace.ids.tolist() == [[[5, 1]], [[NO_PICK, 3]]]
    assert trace.domains.tolist() == ["de, at", "fr"]
    assert trace.token_ids.tolist() == [70, 71]
    assert trace.margin.tolist() == [[0.125], [np.inf]]
    assert trace.num_experts == 6


def test_npz_with_and_without_weights(tmp_path: Path) -> None:
    trace = made()
    idx, weights = trace.ids.transpose(1, 0, 2), trace.weights.transpose(1, 0, 2)
    order = [2, 0, 1]  # layers in any order
    np.savez(
        tmp_path / "t.npz", idx=idx[order].astype(np.int64), weights=weights[order], num_experts=12,
        layers=np.array(trace.layers)[order], token_ids=trace.token_ids, domain=trace.domains,
        margin=trace.margin.T[order],
    )  # fmt: skip
    back = RoutingTrace.load(tmp_path / "t.npz")
    for name in ARRAYS:
        assert np.array_equal(getattr(back, name), getattr(trace, name)), name
    np.savez(tmp_path / "ids.npz", idx=np.array([[[3, -1]]]))
    bare = RoutingTrace.load(tmp_path / "ids.npz")
    assert (bare.num_experts, bare.layers, bare.has_weights, back.has_weights) == (4, (0,), False, True)
    again = RoutingTrace.load(bare.save(tmp_path / "ids.parquet"))
    assert not again.has_weights


def test_parquet_of_another_program(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    trace = made(20)
    order = np.random.default_rng(1).permutation(trace.ids.shape[0] * trace.ids.shape[1])
    token, layer = np.divmod(order, len(trace.layers))
    columns = {
        "layer": np.array(trace.layers)[layer],
        "token": token * 10,  # numbered with gaps
        "ids": pa.array(trace.ids[token, layer].tolist(), pa.large_list(pa.int64())),
        "weights": pa.FixedSizeListArray.from_arrays(
            pa.array(trace.weights[token, layer].astype(np.float64).reshape(-1)), trace.top_k
        ),
        "other": token,
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=7)
    back = RoutingTrace.load(tmp_path / "t.parquet", num_experts=12)
    assert np.array_equal(back.ids, trace.ids)
    assert np.array_equal(back.weights, trace.weights)
    assert back.model_hash == ""
    with pytest.raises(LabError, match="not in token order"):
        list(scan(tmp_path / "t.parquet"))


@pytest.mark.parametrize("group_rows", [1, 7, 30, 1000])
def test_pieces_written_are_the_whole(tmp_path: Path, group_rows: int) -> None:
    trace = made()
    with TraceWriter(tmp_path / "t.parquet", group_rows=group_rows) as writer:
        for start, stop in ((0, 0), (0, 1), (1, 20), (20, 50)):
            writer.append(trace.part(start, stop))
    assert writer.tokens == 50
    same(RoutingTrace.load(tmp_path / "t.parquet"), trace)
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


@pytest.mark.parametrize("rows", [1, 4, 50, 10_000])
def test_a_scan_is_the_whole(tmp_path: Path, rows: int) -> None:
    trace = made()
    with TraceWriter(tmp_path / "t.parquet", group_rows=30) as writer:
        writer.append(trace)
    pieces = list(scan(tmp_path / "t.parquet", rows=rows))
    at = 0
    for piece in pieces:
        same(piece, trace.part(at, at + piece.tokens))
        at += piece.tokens
    assert at == trace.tokens
    assert len(pieces) >= min(50, 150 // rows)


def test_a_range_reads_only_its_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet as pq

    trace = made()
    with TraceWriter(tmp_path / "t.parquet", group_rows=30) as writer:  # 10 tokens each
        writer.append(trace)
    read: list[int] = []
    plain = pq.ParquetFile.read_row_groups

    def counted(self, groups, **more):
        read.extend(groups)
        return plain(self, groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    same(RoutingTrace.load(tmp_path / "t.parquet", tokens=(12, 31)), trace.part(12, 31))
    assert read == [1, 2, 3]
    same(RoutingTrace.load(tmp_path / "t.parquet", tokens=slice(45, None)), trace.part(45, 50))
    read.clear()
    same(read_last(tmp_path / "t.parquet"), trace.part(49, 50))
    assert read == [4]


def test_summary_counts_what_is_there() -> None:
    ids = np.array([[[0, 1]], [[0, 5]], [[0, NO_PICK]], [[0, 1]]], np.uint16)
    trace = RoutingTrace(
        ids=ids, weights=np.ones(ids.shape, np.float16), layers=(3,), num_experts=4, width=6,
        margin=np.array([[0.5], [0.25], [np.nan], [1.0]], np.float32),
    )  # fmt: skip
    for pieces in (trace, [trace.part(0, 1), trace.part(1, 4)]):
        about, (row,) = summarize(pieces)
        assert (about["tokens"], about["experts"], about["router_width"], about["top_k"]) == (4, 4, 6, 2)
        assert row == {
            "layer": 3, "picks": 6, "max_over_mean": 4 * 4 / 6, "idle_share": 0.5, "top_quarter_share": 4 / 6,
            "zero_share": 1 / 8, "skipped_share": 1 / 8, "margin_median": 0.5,
        }  # fmt: skip


def test_margin_median_is_the_lower_middle() -> None:
    values = np.random.default_rng(0).random(1001).astype(np.float16)
    ids = np.zeros((1001, 1, 1), np.uint16)
    trace = RoutingTrace(
        ids=ids, weights=np.ones(ids.shape, np.float16), layers=(0,), num_experts=1, width=2,
        margin=values[:, None].astype(np.float32),
    )  # fmt: skip
    assert summarize(trace)[1][0]["margin_median"] == float(np.median(values))


def test_a_recording_of_layers_written_as_it_goes(tmp_path: Path) -> None:
    with lab.open(lab.sample()) as ckpt, lab.ExpertCache(slots=32) as cache:
        layers = [ckpt.layer(n, cache=cache) for n in (0, 2)]
        steps = [lab.Activations.load(ROOT / "data" / "activations.npz").layer(0, n) for n in (4, 1, 3)]

        def run() -> None:
            for x in steps:
                for layer in layers:
                    layer(x, "gemv")

        with lab.record(margin=True) as kept:
            run()
        with lab.record(margin=True, to=tmp_path / "t.parquet") as written:
            run()
    same(written.trace, RoutingTrace.load(tmp_path / "t.parquet"))
    for name in ("ids", "weights", "margin"):
        assert np.array_equal(getattr(written.trace, name), getattr(kept.trace, name)), name
    assert kept.trace.ids.shape == (8, 2, 4)
    assert np.array_equal(kept.trace.margin[:4, 1], layers[1].margin(steps[0]).numpy())
    with pytest.raises(LabError, match="timings are not kept"):
        _ = written.timings
    with pytest.raises(LabError, match="nothing was recorded"), lab.record(to=tmp_path / "none.parquet"):
        pass
    assert not (tmp_path / "none.parquet").exists()


GROWTH = """
import sys
import numpy as np
from moe_lab.trace import RoutingTrace, TraceWriter
rng = np.random.default_rng(0)
ids = rng.integers(0, 256, (500, 40, 8)).astype(np.uint16)
weights, margin = np.ones(ids.shape, np.float16), np.ones((500, 40), np.float32)  # random ones compress slowly
about = {"layers": tuple(range(40)), "num_experts": 256, "width": 256, "token_ids": np.arange(500, dtype=np.int32)}
fresh = lambda: RoutingTrace(ids=ids.copy(), weights=weights.copy(), margin=margin.copy(), **about)
# not ru_maxrss, which a child inherits from the process that started it
peak = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
with TraceWriter(sys.argv[1], group_rows=int(sys.argv[2])) as writer:
    for _ in range(5):
        writer.append(fresh())
    before = peak()
    for _ in range(20):
        writer.append(fresh())
    print(peak() - before)
"""


def test_memory_does_not_grow_with_tokens(tmp_path: Path) -> None:
    """10,000 more tokens x 40 layers hold 15 MB; a writer that kept them would show it."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(tmp_path / "t.parquet"), str(1 << 15)], capture_output=True, text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 6
