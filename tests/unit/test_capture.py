"""Recording a model's MoE inputs and picks: order, bounds, modes, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.errors import LabError, LabTypeError
from moe_lab.families import FAMILIES, ModuleNames
from moe_lab.tap import model_hash, moe_blocks, token_texts
from moe_lab.trace import RoutingTrace
from tests.support.toy_moe import D, E, K, ToyModel, V, toy_model

IDS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11]]


@pytest.fixture
def model() -> ToyModel:
    return toy_model()


def test_rows_stand_in_the_order_of_the_texts(model: ToyModel) -> None:
    a = lab.Activations.capture(model, IDS, dtype="float32", domains=["a", "b", "c"])
    assert (a.layers, a.x.shape, a.x.dtype) == ((1, 2), (2, 10, D), np.float32)
    assert model.order == IDS
    assert a.token_ids.tolist() == [*range(1, 6), 7, 8, 9, 10, 11]
    assert "".join(a.domains) == "aaaaabbccc"
    alone = lab.Activations.capture(model, IDS[1], dtype="float32")
    assert np.array_equal(alone.x, a.x[:, 5:7])


def test_the_model_is_left_as_it_was(model: ToyModel) -> None:
    lab.Activations.capture(model, IDS)
    lab.hf.record(model, IDS)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.layers[2].mlp.forward = lambda x: x / 0 * x
    with pytest.raises(LabError, match="not called"):
        lab.hf.record(model, IDS)
    assert all(m.training for m in model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_picks_are_the_models_own(model: ToyModel) -> None:
    trace = lab.hf.record(model, IDS, domains="x")
    a = lab.Activations.capture(model, IDS, dtype="float32")
    assert (trace.layers, trace.ids.shape) == ((1, 2), (10, 2, K))
    assert (trace.num_experts, trace.width, trace.model_hash) == (E, E, model_hash(model))
    for number in trace.layers:
        layer = lab.hf.from_module(model.layers[number].mlp)
        assert torch.equal(layer.route(a.layer(number)).ids, torch.from_numpy(trace.layer(number).astype(np.int32)))
        margin = trace.margin[:, trace.layers.index(number)]
        assert np.array_equal(margin, layer.margin(a.layer(number)).numpy())
    assert lab.hf.record(model, IDS, margin=False).margin is None


def test_recorded_to_a_file_is_what_is_recorded_in_memory(model: ToyModel, tmp_path) -> None:
    path = lab.hf.record_to(tmp_path / "t.parquet", model, IDS, domains=["a", "b", "c"], max_tokens=9)
    back, kept = RoutingTrace.load(path), lab.hf.record(model, IDS, domains=["a", "b", "c"], max_tokens=9)
    for name in ("ids", "weights", "token_ids", "domains", "margin"):
        assert np.array_equal(getattr(back, name), getattr(kept, name)), name
    assert back.tokens == 9


def test_no_file_is_left_when_the_model_fails(model: ToyModel, tmp_path) -> None:
    model.embed.weight.data[10] = float("nan")
    with pytest.raises(LabError, match="not finite"):
        lab.hf.record_to(tmp_path / "t.parquet", model, IDS)
    assert list(tmp_path.iterdir()) == []


def test_max_tokens_cuts_the_last_text(model: ToyModel) -> None:
    a = lab.Activations.capture(model, IDS, max_tokens=6)
    assert model.order == [[1, 2, 3, 4, 5], [7]]
    assert a.tokens == 6
    assert lab.Activations.capture(model, IDS, max_tokens=5, layers=[2]).x.shape == (1, 5, D)


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, np.float16), (1e6, np.float32)])
def test_values_beyond_float16_are_kept_in_float32(model: ToyModel, scale: float, dtype: type) -> None:
    model.layers[1].norm.weight.data.mul_(scale)
    a = lab.Activations.capture(model, IDS)
    assert a.x.dtype == dtype
    assert np.isfinite(a.x).all()
    if scale > 1:
        with pytest.raises(LabError, match=r"layer 1.*float32"):
            lab.Activations.capture(model, IDS, dtype="float16")


def test_values_that_are_not_finite_are_refused(model: ToyModel) -> None:
    model.embed.weight.data[8] = float("inf")
    with pytest.raises(LabError, match=r"layer 1.*token 1"):
        lab.Activations.capture(model, IDS)


class OneWord:
    """A tokenizer in the manner of the package `tokenizers`."""

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[len(word) for word in text.split()])


@pytest.mark.parametrize(
    ("texts", "tokenizer"),
    [
        (["a bb ccc"], OneWord()),
        ("a bb ccc", lambda text: {"input_ids": [len(word) for word in text.split()]}),
        ("a bb ccc", lambda text: torch.tensor([len(word) for word in text.split()])),
        ([1, 2, 3], None),
        (torch.tensor([[1, 2, 3]]), None),
        (np.array([1, 2, 3], np.int32), None),
        ([torch.tensor([1, 2, 3])], None),
        (iter([[1, 2, 3]]), None),
    ],
    ids=["tokenizers", "transformers", "function", "ids", "batch", "numpy", "tensors", "iterator"],
)
def test_texts_in_every_form(texts, tokenizer) -> None:
    (text,) = token_texts(texts, tokenizer)
    assert text.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("texts", "more", "words"),
    [
        ([], {}, "no text"),
        (["a"], {}, "tokenizer="),
        ([[]], {}, "text 0 has no tokens"),
        (torch.zeros(2, 3), {}, "float32"),
        (torch.zeros(1, 2, 3, dtype=torch.int64), {}, "(1, 2, 3)"),
        ([[1], ["x"]], {}, "text 1"),
        (7, {}, "int"),
        (IDS, {"domains": ["a"]}, "1 domains for 3 texts"),
        (IDS, {"max_tokens": 0}, "max_tokens=0"),
        (IDS, {"layers": [0]}, "MoE layers 1, 2"),
        (IDS, {"layers": []}, "MoE layers 1, 2"),
        (IDS, {"dtype": "int8"}, "int8"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_requests_are_named(model: ToyModel, texts, more, words: str) -> None:
    with pytest.raises(LabError) as refused:
        lab.Activations.capture(model, texts, **more)
    assert words in str(refused.value)


@pytest.mark.wrong_types
def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(LabTypeError, match="str"):
        lab.hf.record("model", IDS)


def test_models_that_cannot_be_recorded(model: ToyModel) -> None:
    with pytest.raises(LabError, match="no MoE block"):
        lab.hf.record(torch.nn.Linear(2, 2), IDS)
    # no embedding that the model would tell of: the ids' sign alone can be checked
    with pytest.raises(LabError, match=r"-1\.\.3"):
        lab.hf.record(model, [[-1, 3]])
    model.get_input_embeddings = lambda: model.embed
    with pytest.raises(LabError, match=rf"0\.\.{V - 1}"):
        lab.hf.record(model, [[V]])


def test_a_block_that_sees_other_rows_than_the_text_is_refused(model: ToyModel) -> None:
    block = model.layers[1].mlp
    plain = block.forward
    block.forward = lambda x: plain(torch.cat([x, x], 1))[:, : x.shape[1]]
    model.layers[1].mlp = Twice(block)
    with pytest.raises(LabError, match="saw 10 rows in 2 calls for a text of 5 tokens"):
        lab.Activations.capture(model, IDS)


class Twice(torch.nn.Module):
    """Calls the block it holds two times."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x) + self.block(x)


def test_a_family_of_the_users_own_is_found(model: ToyModel) -> None:
    for layer in model.layers[1:]:
        layer.mlp.__class__ = type("Mine", (torch.nn.Module,), {"forward": type(layer.mlp).forward})
    mixtral = FAMILIES["mixtral"]
    own = type(mixtral)(name="mine", router=mixtral.router, module=ModuleNames(classes=("Mine",)))
    with pytest.raises(LabError, match="no MoE block"):
        moe_blocks(model)
    assert [b.number for b in moe_blocks(model, family=own)] == [1, 2]
    assert lab.hf.record(model, IDS, family=own).layers == (1, 2)


def test_the_hash_tells_two_trainings_apart(model: ToyModel) -> None:
    first = model_hash(model)
    assert first == model_hash(toy_model())
    model.layers[2].mlp.experts.down_proj.data.add_(1)
    assert model_hash(model) != first
