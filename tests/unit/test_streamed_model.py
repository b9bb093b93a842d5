"""The streaming benchmark on a small model on the CPU: its file, its inputs, its checks and its table."""

import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import moe_lab as lab
from benchmarks import streamed_model, streamed_where
from benchmarks.streamed_file import ROLES, SMALL, Shape, chosen, distinct_blocks, routers, write_file
from benchmarks.streamed_inputs import inputs, predicted, wide_trace

TINY = Shape(layers=2, experts=32, top_k=6, d_model=256, d_expert=256)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded() -> lab.RoutingTrace:
    return lab.RoutingTrace.load(ROOT / "data" / "trace.parquet", tokens=(0, 200))


def test_the_file_is_a_model_whose_experts_are_the_blocks_they_were_made_of(tmp_path: Path):
    blocks = distinct_blocks(TINY, 4, "cpu")
    path = tmp_path / "m.gguf"
    assert write_file(path, TINY, blocks) == path.stat().st_size
    with lab.open(path) as ckpt:
        assert ckpt.spec is not None
        assert (ckpt.spec.family, ckpt.spec.router.score, ckpt.moe_layers) == ("deepseek_v4", "sqrt_softplus", [0, 1])
        for number in ckpt.moe_layers:
            for part, role in zip(ckpt.expert_source.parts(number), ROLES, strict=True):
                stack = ckpt.raw(f"blk.{number}.ffn_{role}_exps.weight").view(TINY.experts, part.nbytes)
                for expert in range(TINY.experts):
                    which = chosen(TINY, 4, number, expert)[role]
                    assert np.array_equal(stack[expert].numpy(), blocks[role][which])


def test_no_two_experts_are_made_of_the_same_three():
    made = {tuple(chosen(SMALL, 8, n, e).values()) for n in range(SMALL.layers) for e in range(SMALL.experts)}
    assert len(made) == SMALL.layers * SMALL.experts


def test_the_trace_has_distinct_picks_and_keeps_the_texts_repetitions(recorded: lab.RoutingTrace):
    wide = wide_trace(recorded, SMALL, 200)
    assert wide.ids.shape == (200, SMALL.layers, SMALL.top_k)
    assert all(len(set(row)) == SMALL.top_k for row in wide.ids.reshape(-1, SMALL.top_k).tolist())
    again = lab.caching.agreement(wide, lab.caching.previous_token(wide))
    mixed = lab.analysis.shuffled(wide)
    assert again > 1.3 * lab.caching.agreement(mixed, lab.caching.previous_token(mixed))


def test_routers_pick_the_trace_and_the_next_router_what_was_foretold(recorded: lab.RoutingTrace):
    wide = wide_trace(recorded, SMALL, 60)
    named = predicted(wide)
    rows, weights = inputs(wide, named, SMALL, "cpu"), routers(SMALL)
    for place in range(SMALL.layers):
        top = (rows[place].float() @ weights[place].T).topk(SMALL.top_k).indices
        assert torch.equal(top.sort().values, torch.from_numpy(wide.ids[:, place].astype(np.int64)).sort().values)
    share = np.mean([np.isin(wide.ids[:, 1][t], named[t, 1, : SMALL.top_k]).mean() for t in range(60)])
    assert 0.55 < share < 0.8


def test_the_table_has_a_row_a_cell_and_equal_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = "--device cpu --scale small --steps 1 --history 30 --threads 2 --arm table --residency 1,0.25"
    monkeypatch.setattr(sys, "argv", ["streamed_model.py", "--out", str(tmp_path), *words.split()])
    assert streamed_model.main() in (0, 1)  # times are anybody's guess on a shared machine, bits are not
    table = pd.read_csv(tmp_path / "streamed_model.csv")
    assert table["mode"].tolist() == ["demand", "demand", "predicted", "perfect"]
    assert table.outputs.nunique() == 1
    full, demand, foretold, perfect = table.to_dict("records")
    assert full["misses_a_step"] == 0
    assert perfect["misses_a_step"] < demand["misses_a_step"]
    assert foretold["ahead_a_step"] > 0
    assert demand["belady_misses_a_step"] <= demand["misses_a_step"] <= SMALL.layers * SMALL.top_k
    assert demand["gb_a_step"] == pytest.approx(demand["misses_a_step"] * SMALL.expert_bytes / 1e9)
    assert not (tmp_path / "streamed_model.gguf").exists()


def test_where_a_step_goes_counts_each_instant_once():
    found = {("driver", "cudaMemcpyAsync"): [(0.0, 1.0), (4.0, 5.0)], ("copy", "Memcpy HtoD"): [(1.0, 3.0), (2.0, 4.0)],
             ("kernel", "kernels"): [(3.5, 5.0), (9.0, 10.0)]}  # fmt: skip
    told = {(r["lane"], r["name"]): r for r in streamed_where.rows(found, 2)}
    assert told["driver", "cudaMemcpyAsync"]["ms_a_step"] == 1.0
    assert told["copy", "Memcpy HtoD"]["longest_ms"] == 2.0
    assert told["device", "copies beside kernels"]["ms_a_step"] == 0.25
    assert told["device", "neither"]["ms_a_step"] == 2.0
