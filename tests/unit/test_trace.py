"""Traces, activations, the clock, and comparisons of arms."""

import time

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Activations, Inputs
from moe_lab.errors import LabError
from moe_lab.timing import PhaseClock
from moe_lab.trace import RoutingTrace


def small_trace() -> RoutingTrace:
    rng = np.random.default_rng(0)
    ids = np.stack([np.stack([rng.permutation(12)[:3] for _ in range(2)]) for _ in range(50)]).astype(np.uint16)
    return RoutingTrace(
        ids=ids, weights=rng.random(ids.shape).astype(np.float16), layers=(1, 4), num_experts=12, width=14,
        model_hash="abc", token_ids=np.arange(50, dtype=np.int32), domains=np.array(["de", "fr"] * 25),
        margin=rng.random((50, 2)).astype(np.float32),
    )  # fmt: skip


def test_parquet_round_trip(tmp_path) -> None:
    trace = small_trace()
    back = RoutingTrace.load(trace.save(tmp_path / "t.parquet"))
    for name in ("ids", "weights", "token_ids", "domains", "margin"):
        assert np.array_equal(getattr(back, name), getattr(trace, name)), name
    assert (back.layers, back.num_experts, back.width, back.model_hash) == ((1, 4), 12, 14, "abc")


def test_parquet_has_the_documented_columns(tmp_path) -> None:
    import pyarrow.parquet as pq

    schema = pq.read_schema(small_trace().save(tmp_path / "t.parquet"))
    types = {name: str(schema.field(name).type) for name in schema.names}
    assert types["token"] == "int64"
    assert types["layer"] == "int16"
    assert types["ids"].startswith("list<")
    assert "uint16" in types["ids"]
    assert "halffloat" in types["weights"]
    assert (types["token_id"], types["domain"], types["margin"]) == ("int32", "string", "float")


def test_last_token_and_load() -> None:
    trace = small_trace()
    assert trace.last_token()["ids"].tolist() == trace.ids[-1].tolist()
    table = trace.load_table()
    assert table.assignments.sum() == trace.ids.size
    assert table.groupby("layer").load_ratio.mean().tolist() == pytest.approx([1.0, 1.0])


def test_a_file_that_is_no_trace_is_refused(tmp_path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("not parquet")
    with pytest.raises(LabError, match=r"x\.parquet"):
        RoutingTrace.load(path)
    with pytest.raises(LabError, match=r"id 12"):
        RoutingTrace(
            ids=np.full((1, 1, 1), 12, np.uint16),
            weights=np.ones((1, 1, 1), np.float16),
            layers=(0,),
            num_experts=12,
            width=12,
        )


def test_activations_load_and_refuse(tmp_path) -> None:
    x = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", x=x, layers=[3, 5], token_ids=np.arange(3, dtype=np.int32))
    a = Activations.load(tmp_path / "a.npz")
    assert a.layer(5, 2).tolist() == x[1, :2].tolist()
    for call, words in ((lambda: a.layer(4), "3, 5"), (lambda: a.layer(3, 9), "9 tokens")):
        with pytest.raises(LabError, match=words):
            call()
    np.savez(tmp_path / "b.npz", y=x)
    with pytest.raises(LabError, match="must hold x"):
        Activations.load(tmp_path / "b.npz")
    (tmp_path / "c.npz").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(LabError, match=r"c\.npz"):
        Activations.load(tmp_path / "c.npz")


def test_inputs_say_when_they_are_synthetic(tmp_path) -> None:
    made = Inputs(tmp_path / "m.gguf", 8, 5)
    assert made.synthetic
    assert "synthetic" in made.about
    assert torch.equal(made.layer(1), Inputs(tmp_path / "m.gguf", 8, 5).layer(1))
    assert not torch.equal(made.layer(1), made.layer(2))
    np.savez(tmp_path / "activations.npz", x=np.zeros((2, 5, 8), np.float16))
    assert not Inputs(tmp_path / "m.gguf", 8, 5).synthetic
    with pytest.raises(LabError, match=r"D=8.*D=16"):
        Inputs(tmp_path / "m.gguf", 16, 5)


def test_the_clock_adds_up_and_refuses_overlap() -> None:
    clock = PhaseClock(torch.device("cpu"))
    with clock.phase("route"):
        time.sleep(0.002)
    with clock.phase("fetch"), pytest.raises(LabError, match="inside another"), clock.phase("compute"):
        pass
    clock.stop()
    t = clock.read()
    assert t["route"] >= 2
    assert t["route"] + t["fetch"] + t["compute"] <= t["wall"]


def test_compare_reports_equal_and_different_pairs() -> None:
    layer = lab.open(lab.sample()).layer(0)
    x = Inputs(lab.sample(), 256, 16).layer(0)
    report = lab.compare(layer, x, ["per_token", "gemv", "reference"])
    by_pair = report.table.set_index(["arm_a", "arm_b"])
    assert bool(by_pair.bit_equal["per_token", "gemv"])
    assert by_pair.max_ulp["per_token", "gemv"] == 0
    assert 0 < by_pair.nmse_ab["gemv", "reference"] <= lab.tolerances.tol("gemv/layer")
    assert report.first_difference.arm_b == "reference"
    assert report.bins().groupby(["arm_a", "arm_b"])["count"].sum().tolist() == [x.numel()] * 3
    with pytest.raises(LabError, match="at least two"):
        lab.compare(layer, x, ["gemv"])
    with pytest.raises(LabError, match="named twice"):
        lab.compare(layer, x, ["gemv", "gemv"])
