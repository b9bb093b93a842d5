"""Recording from transformers' models: what is captured is what the block was fed, the picks are its own."""

import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.tolerances import tol

transformers = pytest.importorskip("transformers")

import moe_lab as lab  # noqa: E402
from moe_lab.cli.trace import record_model  # noqa: E402
from moe_lab.tap import moe_blocks  # noqa: E402
from moe_lab.trace import RoutingTrace  # noqa: E402
from tests.support.moe_modules import BY_NAME, Case, H, V, call, normal  # noqa: E402

DATA = Path(__file__).resolve().parents[2] / "data"
# id 0 is some models' padding, whose embedding is 0: every expert then ties
TEXTS = [[1 + 7 * i % (V - 1) for i in range(11)], [5, 4, 3, 9], [60, 1, 2, 3, 33, 8, 13]]


class OneBlock(torch.nn.Module):
    """A bare model: an embedding, then one block called in its own way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed, self.block, self.hashed = torch.nn.Embedding(V, H), case.build(), case.hashed
        self.embed.weight.data.copy_(normal("embedding", (V, H)))
        self.fed: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self.fed.append(x[0])
        return call(self.block, x[0].clone(), ids[0] if self.hashed else None)


def routed_by_us(block: torch.nn.Module, x: torch.Tensor, token_ids: np.ndarray) -> np.ndarray:
    """ids [T, K], sorted, of our layer on the rows x."""
    layer = lab.hf.from_module(block)
    ids = torch.from_numpy(token_ids.astype(np.int64)) if layer.spec.router.hash_routing else None
    return np.sort(layer.route(x, ids).ids.numpy(), -1)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_family_is_recorded_exactly(name: str) -> None:
    model = OneBlock(BY_NAME[name]).eval()
    a = lab.Activations.capture(model, TEXTS, dtype="float32")
    assert torch.equal(a.layer(0), torch.cat(model.fed))
    trace = lab.hf.record(model, TEXTS, domains=["a", "b", "c"])
    assert trace.token_ids.tolist() == [i for text in TEXTS for i in text]
    assert np.array_equal(
        np.sort(trace.layer(0).astype(np.int64), -1), routed_by_us(model.block, a.layer(0), a.token_ids)
    )
    spec = lab.hf.from_module(model.block).spec
    assert (trace.num_experts, trace.width, trace.top_k) == (spec.num_experts, spec.router.width, spec.top_k)
    assert bool(np.isnan(trace.margin).all()) == BY_NAME[name].hashed
    assert not (trace.margin == 0).any()


def causal_lm(name: str, kind: str, **settings) -> torch.nn.Module:
    """A tiny whole model of a case's family, random weights of seed 0."""
    case = replace(BY_NAME[name], settings={**BY_NAME[name].settings, **settings})
    modeling = importlib.import_module(f"transformers.models.{case.family}.modeling_{case.family}")
    configuration = importlib.import_module(f"transformers.models.{case.family}.configuration_{case.family}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(modeling, kind)(getattr(configuration, case.config)(**case.settings))


WHOLE = {
    "mixtral": ("mixtral", "MixtralForCausalLM", {}, (0, 1)),
    "deepseek_v3": ("deepseek_v3-group", "DeepseekV3ForCausalLM",
                    {"num_hidden_layers": 3, "first_k_dense_replace": 1}, (1, 2)),
    "deepseek_v4": ("deepseek_v4-hash", "DeepseekV4ForCausalLM", {}, (0, 1)),
    "gemma4": ("gemma4-layer", "Gemma4ForCausalLM", {}, (0, 1)),
    "llama4": ("llama4", "Llama4ForCausalLM", {}, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models(name: str) -> None:
    case, kind, settings, layers = WHOLE[name]
    model = causal_lm(case, kind, **settings)
    a = lab.Activations.capture(model, TEXTS, dtype="float32", domains="x")
    trace = lab.hf.record(model, TEXTS, domains="x")
    assert a.layers == trace.layers == layers
    assert model.training
    assert a.model_hash == trace.model_hash
    for block in moe_blocks(model):
        ours = routed_by_us(block.module, a.layer(block.number), a.token_ids)
        theirs = np.sort(trace.layer(block.number).astype(np.int64), -1)
        close = trace.margin[:, trace.layers.index(block.number)] <= tol("route/transformers")
        assert np.array_equal(ours[~close], theirs[~close])
        assert close.mean() < 0.1 or np.isnan(trace.margin).any()


def test_the_captured_rows_give_the_blocks_output() -> None:
    """x as the decoder layer's feed-forward half reads it: after attention, before its first norm."""
    model = causal_lm("gemma4-layer", "Gemma4ForCausalLM").eval()
    outputs = []
    layer = model.model.layers[1]
    with torch.no_grad():
        layer.layer_scalar.fill_(1.5)
    hook = layer.register_forward_hook(lambda m, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    a = lab.Activations.capture(model, TEXTS[0], dtype="float32")
    hook.remove()
    ours, theirs = lab.hf.from_module(layer)(a.layer(1), "reference").out, outputs[0].reshape(-1, H)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) <= tol("reference/transformers")


def test_recorded_inputs_of_the_shipped_model_give_its_trace() -> None:
    ours, shipped = record_model(DATA / "lab-42m.gguf", None), RoutingTrace.load(DATA / "trace.parquet")
    with np.load(DATA / "activations.npz") as arrays:
        at = arrays["trace_token"]
    assert np.abs(ours.margin - shipped.margin[at]).max() <= tol("margin/fp16 inputs")
    differ = (np.sort(ours.ids, -1) != np.sort(shipped.ids[at], -1)).any(-1)
    assert shipped.margin[at][differ].max(initial=0) <= tol("margin/fp16 inputs")
    assert differ.mean() < 0.01
    assert ours.model_hash == shipped.model_hash
    assert np.array_equal(ours.token_ids, shipped.token_ids[at])
