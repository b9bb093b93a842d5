"""`moe-lab trace`: the summary, the last token, conversion, a model's own trace, and one line for bad usage."""

import json
from pathlib import Path

import numpy as np
import pytest

import moe_lab as lab
from moe_lab.cli import main
from moe_lab.trace import RoutingTrace, summarize
from tests.support.tiny_gguf import write_tiny_qwen2moe

DATA = Path(__file__).resolve().parents[2] / "data"
TRACE, MODEL = DATA / "trace.parquet", DATA / "lab-42m.gguf"
COLUMNS = ["picks", "max_over_mean", "idle_share", "top_quarter_share", "zero_share", "skipped_share", "margin_median"]
WHOLE = ["tokens", "layers", "experts", "router_width", "top_k", "model_hash"]


def rows(capsys, *arguments: str | Path) -> list[dict]:
    code = main(["trace", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    answer = json.loads(captured.out)
    assert set(answer) == {"command", "ok", "device", "backend", "rows"}
    assert (answer["command"], answer["ok"]) == ("trace", True)
    return answer["rows"]


def test_the_summary_of_the_shipped_trace(capsys) -> None:
    found = rows(capsys, TRACE)
    trace = RoutingTrace.load(TRACE)
    assert list(found[0]) == [*WHOLE, "layer", *COLUMNS]
    assert [r["layer"] for r in found] == list(trace.layers)
    for row, i in zip(found, range(6), strict=True):
        counts = np.bincount(trace.ids[:, i].reshape(-1), minlength=32)
        assert row["picks"] == trace.tokens * trace.top_k
        assert row["max_over_mean"] == counts.max() / counts.mean()
        assert row["margin_median"] == float(np.sort(trace.margin[:, i])[(trace.tokens - 1) // 2].astype(np.float16))
    assert main(["trace", str(TRACE)]) == 0
    out = capsys.readouterr().out
    assert "tokens: 65536" in out
    assert trace.model_hash in out


def test_the_last_token(capsys, tmp_path: Path) -> None:
    trace = RoutingTrace.load(TRACE)
    found = rows(capsys, TRACE, "--last")
    assert [r["ids"] for r in found] == trace.ids[-1].tolist()
    assert [r["weights"] for r in found] == trace.weights[-1].astype(float).tolist()
    assert main(["trace", str(TRACE), "--last"]) == 0
    assert " ".join(map(str, trace.ids[-1, 5])) in capsys.readouterr().out
    np.savez(tmp_path / "t.npz", idx=np.array([[[3, -1]]]))
    assert rows(capsys, tmp_path / "t.npz", "--last") == [{"layer": 0, "ids": [3, None], "weights": None}]


def test_csv_becomes_parquet(capsys, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("token,layer,ids,weights\n0,7,5 1,0.5 0.25\n1,7,0 3,0.5 0.5\n")
    (row,) = rows(capsys, tmp_path / "t.csv", "--experts", "8", "--out", tmp_path / "t.parquet")
    assert (row["experts"], row["picks"], row["idle_share"], row["margin_median"]) == (8, 4, 0.5, None)
    back = RoutingTrace.load(tmp_path / "t.parquet")
    assert back.ids.tolist() == [[[5, 1]], [[0, 3]]]
    assert back.num_experts == 8


def test_a_model_is_recorded_on_its_activations(capsys, tmp_path: Path) -> None:
    found = rows(capsys, MODEL, "--out", tmp_path / "t.parquet")
    trace = RoutingTrace.load(tmp_path / "t.parquet")
    assert (trace.tokens, trace.layers) == (512, (0, 1, 2, 3, 4, 5))
    assert [r["picks"] for r in found] == [2048] * 6
    assert summarize(trace)[1] == [{k: v for k, v in r.items() if k not in WHOLE} for r in found]
    layer = lab.open(MODEL).layer(3)
    x = lab.Activations.load(DATA / "activations.npz").layer(3)
    assert np.array_equal(trace.layer(3), layer.route(x).ids.numpy())
    assert np.array_equal(trace.margin[:, 3], layer.margin(x).numpy())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.parquet"], "does not exist"),
        ([str(TRACE), "--input", "a.npz"], "is a trace already"),
        ([str(TRACE), "--out", "t.csv"], "written as .parquet"),
        ([str(TRACE), "--experts", "0"], "--experts 0"),
        ([str(TRACE), "--experts", "4"], "there are 32 experts"),
        ([str(MODEL), "--experts", "4"], "is a model"),
        ([str(MODEL), "--input", "none.npz"], "none.npz"),
        (["{tiny}"], "synthetic"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_usage_is_one_line(arguments, words: str, capsys, tmp_path: Path) -> None:
    tiny = write_tiny_qwen2moe(tmp_path / "tiny.gguf")
    code = main(["trace", *(a.format(tiny=tiny) for a in arguments)])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    assert words in captured.err
