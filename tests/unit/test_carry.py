"""Residual and attention between MoE layers, against rows that transformers recorded with the same weights."""

import numpy as np
import pytest
import torch

import moe_lab as lab
from moe_lab.activations import Inputs
from moe_lab.errors import LabError
from moe_lab.parity import NextLayer, between, tokens_of, walk
from moe_lab.tolerances import tol

KEPT, BEFORE = 64, 64  # recorded tokens of each domain, and the tokens of their text that stand before them


@pytest.fixture(scope="module")
def ckpt() -> lab.open:
    return lab.open(lab.sample())


@pytest.fixture(scope="module")
def recorded_texts() -> torch.Tensor:
    """Token ids [8, 128]: the recorded ones and what the model had read before them."""
    trace = lab.RoutingTrace.load(lab.sample().parent / "trace.parquet")
    at = np.load(lab.sample().parent / "activations.npz")["trace_token"].reshape(-1, KEPT)[:, 0]
    return torch.from_numpy(np.stack([trace.token_ids[a - BEFORE : a + KEPT] for a in at]).astype("int64"))


def test_rows_are_the_recorded_ones(ckpt, recorded_texts: torch.Tensor) -> None:
    recorded_texts = recorded_texts[::4]
    count, length = recorded_texts.shape
    texts = [(i * length, (i + 1) * length) for i in range(count)]
    recorded = lab.Activations.load(lab.sample().parent / "activations.npz")
    for here in walk(ckpt, recorded_texts.flatten(), texts):
        rows = here.rows.view(count, length, -1)[:, BEFORE:].flatten(0, 1)
        kept = recorded.layer(here.number).view(8, KEPT, -1)[::4].flatten(0, 1)
        apart = (rows - kept).abs().amax(1)
        # a token whose picks were a tie elsewhere goes its own way, and takes those that attend to it along
        assert float((apart <= tol("carry/recorded")).double().mean()) > 0.97, f"layer {here.number}"


def test_carrying_an_output_is_the_models_next_step(ckpt, recorded_texts: torch.Tensor) -> None:
    ids = recorded_texts[:2].flatten()
    texts = [(0, 128), (128, 256)]
    walking = walk(ckpt, ids, texts)
    first, second = next(walking), next(walking)
    out = ckpt.layer(0)(first.rows, "reference").out
    assert torch.equal(first(out), second.rows)


def test_texts_do_not_see_each_other(ckpt, recorded_texts: torch.Tensor) -> None:
    ids = recorded_texts[:2].flatten()
    both = between(ckpt, 0, ids, [(0, 128), (128, 256)]).rows
    alone = between(ckpt, 0, ids[128:], [(0, 128)]).rows
    assert torch.allclose(both[128:], alone, atol=1e-4)
    later = between(ckpt, 0, ids[:100], [(0, 100)]).rows
    assert torch.allclose(both[:100], later, atol=1e-4), "a token saw what comes after it"


def test_recorded_ids_make_texts_of_their_domains(ckpt) -> None:
    found = tokens_of(ckpt, Inputs(ckpt.path, 256, 100))
    assert found.texts == ((0, 64), (64, 100))
    assert len(found.ids) == 100
    assert tokens_of(ckpt, Inputs("nowhere/model.gguf", 256, 8)) is None


def test_flips_of_a_real_model_are_few_and_none_without_a_difference(ckpt) -> None:
    known = tokens_of(ckpt, Inputs(ckpt.path, 256, 96))
    assert known is not None
    here = between(ckpt, 1, *known)
    after = NextLayer(ckpt.layer(2), here)
    table = lab.compare(ckpt.layer(1), here.rows, ["gemv", "mmq"], after=after).table
    assert table["flip_share"][0] < 0.1
    assert not after.flips(here.residual, here.residual)["flipped"].any()


@pytest.mark.parametrize(
    ("ids", "texts", "says"),
    [([1, 2, 3], [(0, 2)], "do not follow each other"), ([1, 9999], [(0, 2)], "V is 4096")],
    ids=["gap", "vocabulary"],
)
def test_what_cannot_be_read_is_refused(ckpt, ids: list[int], texts: list, says: str) -> None:
    with pytest.raises(LabError, match=says):
        between(ckpt, 0, torch.tensor(ids), texts)
    with pytest.raises(LabError, match="no MoE layer 9"):
        between(ckpt, 9, torch.tensor([1]), [(0, 1)])
