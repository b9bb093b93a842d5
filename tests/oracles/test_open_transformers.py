"""Checkpoints that transformers writes, opened by the lab: the file's layer has the bits of the module's layer."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import moe_lab as lab
from moe_lab import hf
from moe_lab.families import FAMILIES, FileSetting
from moe_lab.layer import MoELayer, SharedWeights
from moe_lab.open import Checkpoint
from moe_lab.spec import SharedSpec
from moe_lab.weights import as_quant
from tests.support.moe_modules import BY_NAME, rows, token_ids
from tests.support.whole_models import CASES, WholeModel, build

# Layouts whose experts are no runs of bytes, and layers that a cache does not serve, with what the refusal says.
NOT_STREAMED = {
    "gpt_oss": "swapped",
    "llama4": "swapped",
    "gemma4-layer": "build this layer from tensors",
    "nemotron_h-latent": "no gate",
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, WholeModel, Path]:
    name = request.param
    whole = build(name)
    folder = tmp_path_factory.mktemp(name)
    whole.model.save_pretrained(folder)
    return name, whole, folder


def module_layer(name: str, whole: WholeModel, number: int) -> MoELayer:
    """The module's layer; Granite's shared MLP, which stands beside the module, is put in."""
    block = whole.blocks[number]
    layer = hf.from_module(block, number=number)
    if name != "granitemoeshared":
        return layer
    mlp = whole.model.model.layers[number].shared_mlp
    gate, up = mlp.input_linear.weight.detach().chunk(2)
    down = mlp.output_linear.weight.detach()
    parts = [as_quant(w, "shared", tuple(w.shape)) for w in (gate, up, down)]
    spec = replace(layer.spec, shared=SharedSpec(40))
    return MoELayer(spec, layer.router_weights, layer.experts, SharedWeights(*parts))


def inputs(name: str, number: int, ckpt: Checkpoint) -> tuple[torch.Tensor, torch.Tensor | None]:
    hashed = ckpt.layer_spec(number).router.hash_routing
    return rows(10), token_ids(10) if hashed else None


def test_every_layer_has_the_bits_of_its_module(saved: tuple[str, WholeModel, Path]) -> None:
    name, whole, folder = saved
    with lab.open(folder) as ckpt:
        assert ckpt.spec is not None
        assert ckpt.spec.family == BY_NAME[name].family
        assert ckpt.moe_layers == sorted(whole.blocks) != []
        for number in ckpt.moe_layers:
            x, ids = inputs(name, number, ckpt)
            layer, wanted = ckpt.layer(number), module_layer(name, whole, number)
            assert layer.spec == wanted.spec == ckpt.layer_spec(number)
            y, want = (of(x, "reference", token_ids=ids) for of in (layer, wanted))
            assert torch.equal(y.routing.ids, want.routing.ids)
            assert torch.equal(y.out, want.out)
            assert y.out.abs().max() > 0


def test_streamed_experts_have_the_same_bits_or_are_refused_by_name(saved: tuple[str, WholeModel, Path]) -> None:
    name, _, folder = saved
    with lab.open(folder) as ckpt, lab.ExpertCache(slots=3) as cache:
        number = ckpt.moe_layers[-1]
        x, ids = inputs(name, number, ckpt)
        if name in NOT_STREAMED:
            with pytest.raises(lab.LabError, match=NOT_STREAMED[name]):
                ckpt.layer(number, cache=cache)
            return
        streamed = ckpt.layer(number, cache=cache)(x, "reference", token_ids=ids)
        assert torch.equal(streamed.out, ckpt.layer(number)(x, "reference", token_ids=ids).out)
        assert cache.misses > 0


def test_every_setting_of_the_row_is_a_key_of_the_config_and_reaches_the_spec(
    saved: tuple[str, WholeModel, Path],
) -> None:
    name, whole, folder = saved
    written = json.loads((folder / "config.json").read_text())
    section = written.get("text_config", written)
    row = FAMILIES[BY_NAME[name].family].hf
    assert row is not None
    for setting in row.settings:
        record, _, field = setting.field.partition(".")
        said, meant = _another(setting, section[setting.key])
        changed = {**section, setting.key: [said] * 8 if isinstance(section[setting.key], list) else said}
        if setting.when is not None:
            changed[setting.when[0]] = setting.when[1]
        config = {**written, "text_config": changed} if "text_config" in written else changed
        with _config(folder, {**config, **_TOGETHER.get(setting.field, {})}):
            if setting.field == "router.zero_experts":
                with pytest.raises(lab.CheckpointError, match=r"router.*\[12, 32\].*\[13, 32\]"):
                    lab.open(folder)
                continue
            with lab.open(folder) as ckpt:
                spec = ckpt.layer_spec(max(whole.blocks))
        target = {"router": spec.router, "layer": spec, "shared": spec.shared}[record]
        assert getattr(target, field) == meant


@contextmanager
def _config(folder: Path, config: dict) -> Iterator[None]:
    """The folder with another config.json for a while."""
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(config))
    try:
        yield
    finally:
        path.write_text(before)


# Groups that the tiny models' 8 experts can be cut into, whichever of the two keys is being changed.
_TOGETHER = {"router.n_group": {"topk_group": 1}, "router.topk_group": {"n_group": 4, "num_expert_group": 4}}


def _another(setting: FileSetting, value: object) -> tuple[object, object]:
    """A value other than the file's, and what it means."""
    if setting.codes is not None:
        return next((code, meaning) for code, meaning in setting.codes.items() if code != value)
    if isinstance(value, bool):
        return not value, not value
    other = {"router.n_group": 2, "router.topk_group": 3, "router.zero_experts": 5}.get(setting.field, 0.25)
    return other, other


@pytest.mark.parametrize(
    ("name", "key", "change", "said"),
    [
        ("mixtral", "num_experts_per_tok", 9, "num_experts_per_tok is 9"),
        ("mixtral", "num_local_experts", 7, "expert beyond the 7"),
        ("mixtral", "num_local_experts", 9, "experts.8.w1.weight"),
        ("mixtral", "hidden_size", 64, r"\[8, 64\]"),
        ("mixtral", "intermediate_size", 48, r"\[8, 48, 32\]"),
        ("mixtral", "hidden_act", "relu", "relu"),
        ("mixtral", "num_experts_per_tok", None, "num_experts_per_tok"),
        ("mixtral", "num_experts_per_tok", 2.0, "2.0"),
        ("qwen2_moe", "shared_expert_intermediate_size", 41, r"\[41, 32\]"),
        ("qwen2_moe", "norm_topk_prob", "yes", "norm_topk_prob.*yes"),
        ("gpt_oss", "intermediate_size", 12, r"\[8, 32, 24\]"),
        ("hunyuan_v1_moe", "moe_topk", [3], "lists 1 layers"),
    ],
    ids=lambda v: str(v).replace("\\", "") if not isinstance(v, list) else "list",
)
def test_a_config_that_does_not_fit_the_tensors(name: str, key: str, change: object, said: str, tmp_path: Path) -> None:
    build(name).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: change}))
    with pytest.raises(lab.CheckpointError, match=said):
        lab.open(tmp_path)


def test_a_setting_may_be_a_list_with_a_value_for_each_layer(tmp_path: Path) -> None:
    build("hunyuan_v1_moe").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "moe_topk": [1, 4]}))
    with lab.open(tmp_path) as ckpt:
        assert [ckpt.layer_spec(n).top_k for n in ckpt.moe_layers] == [1, 4]
        assert ckpt.layer(1)(rows(3)).routing.ids.shape == (3, 4)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3-group", "gpt_oss", "granitemoeshared", "longcat_flash"])
def test_a_sharded_checkpoint_is_the_same_model(name: str, tmp_path: Path) -> None:
    whole = build(name)
    whole.model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with lab.open(tmp_path) as ckpt, lab.ExpertCache(slots=3) as cache:
        number = ckpt.moe_layers[-1]
        x = rows(10)
        want = module_layer(name, whole, number)(x, "reference").out
        assert torch.equal(ckpt.layer(number)(x, "reference").out, want)
        if name not in NOT_STREAMED:
            assert torch.equal(ckpt.layer(number, cache=cache)(x, "reference").out, want)


def test_bf16_experts_keep_their_format_and_bits(tmp_path: Path) -> None:
    whole = build("qwen2_moe")
    whole.model.to(torch.bfloat16).save_pretrained(tmp_path)
    with lab.open(tmp_path) as ckpt, lab.ExpertCache(slots=2) as cache:
        x = rows(10).bfloat16()
        layer = ckpt.layer(1)
        assert layer.experts.formats == ("bf16",) * 3
        want = hf.from_module(whole.blocks[1])(x, "reference").out
        assert torch.equal(layer(x, "reference").out, want)
        assert torch.equal(ckpt.layer(1, cache=cache)(x, "reference").out, want)
