"""The shipped files: what data/README.md says of them is true, and they belong together."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import moe_lab as lab
from data.recipe import readme
from data.recipe.config import DOMAINS
from data.recipe.gate import LIMITS, cache_rates, expert_shares
from data.recipe.shards import sha256
from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.routing import route
from moe_lab.tolerances import tol
from moe_lab.trace import RoutingTrace

DATA = Path(__file__).resolve().parents[2] / "data"
LAYERS, TOKENS, D_MODEL = 6, 512, 256


@pytest.fixture(scope="module")
def checkpoint():
    with lab.open(DATA / "lab-42m.gguf") as opened:
        yield opened


@pytest.fixture(scope="module")
def trace():
    return RoutingTrace.load(DATA / "trace.parquet")


@pytest.fixture(scope="module")
def activations():
    with np.load(DATA / "activations.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def test_readme_names_every_shipped_file_with_its_hash():
    listed = dict(
        re.findall(r"^\| `([^`]+)` \| [\d,]+ \| .* \| `([0-9a-f]{64})` \|$", (DATA / "README.md").read_text(), re.M)
    )
    shipped = {path.name for path in DATA.iterdir() if path.is_file()} - {"README.md", "NOTICE"}
    assert set(listed) == shipped
    assert {name: sha256(DATA / name) for name in listed} == listed


def test_readme_tables_follow_the_statistics():
    text = (DATA / "README.md").read_text()
    assert readme.refresh(text) == text


def test_statistics_are_those_of_the_shipped_model():
    assert json.loads((DATA / "stats.json").read_text())["model_sha256"] == sha256(DATA / "lab-42m.gguf")


def test_notice_names_every_source():
    from data.recipe.packages import SOURCES

    notice = (DATA / "NOTICE").read_text()
    assert [package for source in SOURCES for package in source.packages if package not in notice] == []


def test_model_has_the_promised_shape_and_size(checkpoint):
    spec = checkpoint.spec
    assert (spec.router.num_experts, spec.router.top_k, spec.d_model, spec.d_expert) == (32, 4, D_MODEL, 256)
    assert not spec.router.normalize
    assert spec.shared.gated
    assert checkpoint.moe_layers == list(range(LAYERS))
    assert checkpoint.size <= 20_000_000


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("blk.0.ffn_gate_exps.weight", "q2_k"),
        ("blk.0.ffn_up_exps.weight", "q2_k"),
        ("blk.0.ffn_down_exps.weight", "q3_k"),
        ("blk.0.ffn_down_shexp.weight", "q8_0"),
        ("blk.0.ffn_gate_inp.weight", "f32"),
        ("output.weight", "q8_0"),
    ],
)
def test_model_formats(checkpoint, name, format):
    assert checkpoint.tensors[name].format == format


def test_tokenizer_of_the_model_file_is_the_shipped_one(checkpoint):
    tokenizer = json.loads((DATA / "tokenizer.json").read_text())["model"]
    with GgufFile(checkpoint.path) as file:
        assert file.metadata["tokenizer.ggml.tokens"] == sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
        assert file.metadata["tokenizer.ggml.merges"] == [" ".join(pair) for pair in tokenizer["merges"]]


def test_trace_belongs_to_the_model_and_covers_the_promised_tokens(trace, checkpoint):
    assert trace.model_hash == checkpoint.model_hash
    assert trace.tokens >= 65_536
    assert trace.layers == tuple(range(LAYERS))
    assert (trace.num_experts, trace.width, trace.top_k) == (32, 32, 4)
    assert list(dict.fromkeys(trace.domains)) == list(DOMAINS)


def test_trace_rows_are_a_routing(trace):
    ranked = np.sort(trace.ids, axis=-1)
    assert (ranked[..., 1:] != ranked[..., :-1]).all()
    assert (np.diff(trace.weights.astype(np.float32), axis=-1) <= 0).all()
    assert (trace.weights > 0).all()
    assert (trace.weights.astype(np.float32).sum(-1) < 1.001).all()
    assert (trace.margin >= 0).all()


def test_trace_columns_have_the_documented_types():
    import pyarrow.parquet as parquet

    schema = parquet.read_schema(DATA / "trace.parquet")
    assert {field.name: str(field.type).replace("element: ", "").replace("item: ", "") for field in schema} == {
        "token": "int64",
        "layer": "int16",
        "ids": "list<uint16>",
        "weights": "list<halffloat>",
        "token_id": "int32",
        "domain": "string",
        "margin": "float",
    }


def test_activations_point_into_the_trace(activations, trace):
    assert activations["x"].shape == (LAYERS, TOKENS, D_MODEL)
    assert activations["x"].dtype == np.float16
    assert np.isfinite(activations["x"]).all()
    at = activations["trace_token"]
    np.testing.assert_array_equal(activations["token_ids"], trace.token_ids[at])
    np.testing.assert_array_equal(activations["domain"], trace.domains[at])


@pytest.mark.parametrize("layer", range(LAYERS))
def test_routing_the_activations_gives_the_trace(checkpoint, activations, trace, layer):
    x = torch.from_numpy(activations["x"][layer]).double()
    router = checkpoint.read(f"blk.{layer}.ffn_gate_inp.weight").double()
    routing = route((x @ router.T).float(), checkpoint.spec.router)
    at = activations["trace_token"]
    clear = torch.from_numpy(trace.margin[at, layer]) > tol("trace/activations")
    recorded = torch.from_numpy(trace.ids[at, layer].astype(np.int32))
    assert clear.float().mean() > 0.8  # else the comparison below would say little
    assert torch.equal(routing.ids[clear].sort(-1).values, recorded[clear].sort(-1).values)


def test_gate_holds_on_the_shipped_trace(trace):
    ids = trace.ids.transpose(1, 0, 2).astype(np.int64)
    first = np.concatenate([np.flatnonzero(trace.domains == name)[:1024] for name in DOMAINS])
    rates = {name: np.mean(values) for name, values in cache_rates(ids[:, first], slots=8).items()}
    assert expert_shares(ids, 32).min() >= LIMITS["min_share"]
    assert rates["lru"] / rates["lru_shuffled"] >= LIMITS["lru_over_shuffled"]
    assert rates["belady"] - rates["lru"] >= LIMITS["belady_minus_lru"]


def test_held_out_text_is_clean_and_of_the_promised_size():
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    assert 200_000 <= len(text.encode()) <= 500_000
    assert "\ufffd" not in text
    assert "MANSFIELD PARK" in text
