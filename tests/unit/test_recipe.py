"""Parts of the recipe that a wrong model would come from: text, batches, shards, routers, quantisers, configuration."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from torch import nn

from data.recipe import shards
from data.recipe.batches import Batches
from data.recipe.config import DOMAINS, MODEL, ROUTED_FORMATS, TrainConfig
from data.recipe.corpus import cut, split_held_out
from data.recipe.extract import EXTRACTORS, html_text
from data.recipe.packages import SOURCES
from data.recipe.qat import ExpertQuantiser, plain_state_dict
from data.recipe.routers import BalanceControl, RouterTap, balance_loss, lookahead_recall
from moe_lab.formats import get_format


def tap(logits: torch.Tensor, k: int) -> RouterTap:
    ids = logits.topk(k, dim=-1).indices
    return RouterTap(
        nn.Linear(logits.shape[-1], logits.shape[-1], bias=False), torch.eye(logits.shape[-1]), logits, ids
    )


def test_every_domain_has_packages_and_an_extractor():
    assert [source.domain for source in SOURCES] == list(DOMAINS)
    assert set(EXTRACTORS) == set(DOMAINS)


def test_html_text_keeps_what_is_seen():
    page = "<head><title>t</title></head><p>a&amp;b</p><script>x()</script><ul><li>one</li><li>two</li></ul>"
    assert html_text(page) == "a&b\n\none\n\ntwo"


def test_novels_come_out_of_the_lazy_load_database(tmp_path):
    lines = ["SENSE", "", "na\u00efve"]
    strings = b"".join(struct.pack(">ii", 9, len(s.encode())) + s.encode() for s in lines)
    header = b"X\n" + struct.pack(">iii", 3, 0x40000, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
    vector = header + struct.pack(">ii", 16, len(lines)) + strings
    number = header + struct.pack(">ii", 14, 1) + struct.pack(">d", 1.0)
    chunks = [struct.pack(">I", len(c)) + zlib.compress(c) for c in (number, vector)]
    (tmp_path / "Rdata.rdb").write_bytes(b"".join(chunks))
    assert list(EXTRACTORS["austen"]([tmp_path])) == ["\n".join(lines)]


def test_long_documents_are_cut_without_losing_text():
    document = "\n\n".join(f"paragraph {i} " + "x" * 50 for i in range(100))
    pieces = cut(document, limit=700)
    assert "\n\n".join(pieces) == document
    assert max(len(piece) for piece in pieces) <= 700


def test_held_out_documents_are_apart_from_training():
    texts = [f"{i:04d}" * 25 for i in range(100)]
    training, held_out = split_held_out(texts)
    assert training + held_out == texts
    assert len(held_out) == 2


def test_an_epoch_reads_every_window_once():
    config = TrainConfig(context=4, sequences_per_step=5)
    batches = Batches(torch.arange(4 * 25 + 8), config, torch.device("cpu"))
    starts = torch.cat([batches.next()[:, 0] for _ in range(5)])
    assert starts.unique().numel() == 25
    assert (starts % 4).unique().numel() == 1


def test_batches_hold_the_token_after_the_window():
    batches = Batches(torch.arange(200), TrainConfig(context=8, sequences_per_step=3), torch.device("cpu"))
    batch = batches.next()
    assert batch.shape == (3, 9)
    assert torch.equal(batch, batch[:, :1] + torch.arange(9))


def test_balance_loss_is_one_when_balanced_and_e_over_k_when_collapsed():
    balanced = tap(torch.eye(4) * 50, k=1)
    collapsed = tap(torch.tensor([[50.0, 0.0, 0.0, 0.0]]).repeat(4, 1), k=1)
    assert balance_loss(balanced).item() == pytest.approx(1.0)
    assert balance_loss(collapsed).item() == pytest.approx(4.0)


def test_balance_control_raises_for_a_starved_layer_alone():
    control = BalanceControl(layers=3, start=0.02)
    control.update([0.001, 0.012, 0.03])
    assert control.weights[0] > 0.02
    assert control.weights[1] == 0.02
    assert control.weights[2] < 0.02
    for _ in range(50):
        control.update([0.0, 0.012, 0.03])
    assert (control.weights[0], control.weights[2]) == (control.cap, control.floor)


def test_lookahead_recall_asks_the_next_router_with_this_input():
    this, following = tap(torch.eye(4), k=2), tap(torch.eye(4), k=2)
    with torch.no_grad():
        following.gate.weight.copy_(torch.eye(4))
    following.ids = torch.tensor([[0, 1], [1, 0], [2, 3], [0, 1]])
    early = torch.eye(4).topk(2, dim=-1).indices
    wanted = np.mean([len(set(a) & set(b)) / 2 for a, b in zip(early.tolist(), following.ids.tolist(), strict=True)])
    assert lookahead_recall(this, following).item() == pytest.approx(wanted)


class TinyExperts(nn.Module):
    """Two expert tensors under the names that transformers gives them; two experts, one super-block wide."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 256, generator=generator) * 0.05)
        self.down_proj = nn.Parameter(torch.randn(2, 4, 256, generator=generator) * 0.05)


def tiny_model(layers: int = 2) -> nn.Module:
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList()
    for layer in range(layers):
        decoder = nn.Module()
        decoder.mlp = nn.Module()
        decoder.mlp.experts = TinyExperts(layer)
        model.model.layers.append(decoder)
    return model


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("parameter", "format"), ROUTED_FORMATS.items())
def test_training_sees_the_codes_that_the_saved_weights_get(layer, parameter, format):
    model = tiny_model()
    weight = getattr(model.model.layers[layer].mlp.experts, parameter)
    quantiser, codec = ExpertQuantiser(model, torch.float32), get_format(format)
    quantiser.refresh_all()
    quantiser.enable(True)
    saved = plain_state_dict(model)[f"model.layers.{layer}.mlp.experts.{parameter}"]
    file_gives = codec.dequantize(codec.quantize(saved.float()))
    used = getattr(model.model.layers[layer].mlp.experts, parameter)
    assert torch.equal(used, weight + (file_gives - weight))
    used.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_switched_off_the_quantiser_changes_nothing():
    model = tiny_model()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    quantiser = ExpertQuantiser(model, torch.float32)
    quantiser.refresh_all()
    for layer, decoder in enumerate(model.model.layers):
        for name in ROUTED_FORMATS:
            assert torch.equal(getattr(decoder.mlp.experts, name), plain[f"model.layers.{layer}.mlp.experts.{name}"])


def test_a_slow_quantiser_is_spread_over_steps():
    quantiser = ExpertQuantiser(tiny_model(), torch.float32)
    turns = []
    for number, group in enumerate(quantiser.groups):
        group.seconds = 1.0
        group.refresh = lambda number=number: turns.append(number)
    for _ in range(8):
        quantiser.refresh_within(0.5)
    assert turns == [0, 1, 0, 1]
    quantiser.refresh_within(100.0)
    assert turns == [0, 1, 0, 1, 0, 1]


def test_shards_join_to_what_was_split(tmp_path):
    state = {f"t{i}": torch.full((i + 1, 100), float(i)) for i in range(8)}
    paths = shards.save(state, tmp_path, limit_bytes=3600)
    assert len(paths) > 2
    joined = shards.join(tmp_path)
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], state[name]) for name in state)


@pytest.mark.parametrize("damage", ["flipped byte", "missing"])
def test_damaged_shards_are_named(tmp_path, damage):
    path = shards.save({"t": torch.arange(100)}, tmp_path)[0]
    if damage == "missing":
        path.unlink()
    else:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    with pytest.raises(ValueError, match=path.name):
        shards.join(tmp_path)


def test_a_tensor_above_the_limit_is_refused():
    with pytest.raises(ValueError, match="big has 400 bytes"):
        shards.split({"big": torch.zeros(100)}, limit_bytes=399)


def test_the_shipped_training_configuration_is_the_recorded_one():
    from data.recipe.readme import FOLDER

    recorded = json.loads((FOLDER / "stats.json").read_text())["training"]
    ours = TrainConfig()
    for name in ("seed", "context", "sequences_per_step", "peak_lr", "qat_share", "balance_start", "weight_decay"):
        assert recorded["config"][name] == getattr(ours, name), name
    assert recorded["history"]["steps_done"] == ours.steps
    assert MODEL["num_experts"] == 32
