"""transformers as the oracle of the shipped model: its own GGUF loader, its own MoE block."""

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_lab.tolerances import tol

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

import moe_lab as lab  # noqa: E402
from data.recipe.config import model_config  # noqa: E402
from data.recipe.gguf_names import pairs  # noqa: E402
from data.recipe.shipped import shipped_model  # noqa: E402

DATA = Path(__file__).resolve().parents[2] / "data"
MODEL = DATA / "lab-42m.gguf"


@pytest.fixture(scope="module")
def ours():
    """transformers' model holding what our reader and formats give."""
    torch.set_num_threads(1)
    return shipped_model(MODEL)


@pytest.fixture(scope="module")
def theirs():
    """The same file through transformers' own GGUF loader."""
    kind = transformers.Qwen2MoeForCausalLM
    return kind.from_pretrained(DATA, gguf_file=MODEL.name, config=model_config(), dtype=torch.float32).eval()


def held_out_tokens(count: int) -> torch.Tensor:
    with np.load(DATA / "activations.npz") as arrays:
        return torch.from_numpy(arrays["token_ids"][:count].astype(np.int64))[None]


def test_every_parameter_is_in_the_file(ours):
    assert {pair.parameter for pair in pairs(6)} == set(ours.state_dict())


def test_the_gguf_loader_gives_our_weights_bit_for_bit(ours, theirs):
    other = theirs.state_dict()
    differ = [name for name, value in ours.state_dict().items() if not torch.equal(value, other[name])]
    assert differ == []


def test_the_gguf_loader_gives_our_logits(ours, theirs):
    tokens = held_out_tokens(128)
    with torch.inference_mode():
        assert torch.equal(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits)


@pytest.mark.parametrize("layer", range(6))
def test_our_layer_equals_the_sparse_moe_block(ours, layer):
    with np.load(DATA / "activations.npz") as arrays:
        x = torch.from_numpy(arrays["x"][layer, :96].astype(np.float32))
    with torch.inference_mode():
        block = ours.model.layers[layer].mlp(x[None])[0]
    with lab.open(MODEL) as checkpoint:
        out = checkpoint.layer(layer)(x, arm="reference").out
    assert ((out - block).abs().max() / block.abs().max()).item() <= tol("reference/transformers")


def test_the_model_predicts_held_out_text_far_better_than_chance(theirs):
    tokens = held_out_tokens(512).reshape(8, 64)
    with torch.inference_mode():
        logits = theirs(input_ids=tokens).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert loss < 0.5 * np.log(4096)
