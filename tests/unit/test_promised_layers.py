"""A MoE layer that a model's settings promise is there, whole or not at all is told; what they call dense has none."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_lab as lab
from moe_lab.checkpoint.promised import WRITTEN, check_layers
from moe_lab.cli import main
from moe_lab.errors import CheckpointError
from moe_lab.families import FAMILIES, WhichLayers
from tests.support.tiny_gguf import write_tiny_qwen2moe

pytestmark = pytest.mark.wrong_types  # settings alone stand in for a file

save_file = pytest.importorskip("safetensors.torch").save_file

E, D, F = 2, 8, 4
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": D, "num_experts": E, "num_experts_per_tok": 1, "hidden_act": "silu",
    "moe_intermediate_size": F, "num_hidden_layers": 2,
}  # fmt: skip


def qwen3(folder: Path, layers: tuple[int, ...], **config: Any) -> Path:
    tensors = {"model.embed_tokens.weight": torch.zeros(4, D)}
    for n in layers:
        tensors[f"model.layers.{n}.mlp.gate.weight"] = torch.zeros(E, D)
        for e in range(E):
            at = f"model.layers.{n}.mlp.experts.{e}."
            shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
            tensors |= {f"{at}{part}.weight": torch.zeros(shape) for part, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.mark.parametrize(
    ("layers", "config"),
    [
        ((0, 1), {}),
        ((1,), {"mlp_only_layers": [0]}),
        ((1, 3), {"num_hidden_layers": 4, "decoder_sparse_step": 2}),
        ((), {"num_experts": 0, "num_experts_per_tok": 0}),
        ((), {"mlp_only_layers": [0, 1]}),
        ((3,), {"num_hidden_layers": None}),
    ],
    ids=["all", "dense-first", "every-second", "no-experts", "all-dense", "no-count"],
)
def test_what_is_promised_opens(layers: tuple[int, ...], config: dict[str, Any], tmp_path: Path) -> None:
    with lab.open(qwen3(tmp_path, layers, **config)) as ckpt:
        assert ckpt.moe_layers == list(layers)


@pytest.mark.parametrize(
    ("layers", "config", "reason", "words"),
    [
        ((0,), {}, "missing tensor", r"layers\.1\.mlp\.gate.*layer 1 is a MoE layer by 'num_hidden_layers' = 2"),
        ((1,), {}, "missing tensor", r"layers\.0\.mlp\.gate"),
        ((), {}, "missing tensor", r"model\.layers\.0\.mlp\.gate"),
        ((0, 1), {"num_hidden_layers": 5}, "missing tensor", r"layers\.2\.mlp\.gate"),
        ((0, 1), {"num_hidden_layers": 10**18}, "missing tensor", r"layers\.2\.mlp\.gate"),
        ((0, 1), {"num_hidden_layers": 0}, "model shape", "holds experts of layer 0.*'num_hidden_layers' = 0"),
        ((0, 1), {"mlp_only_layers": [0]}, "model shape", r"layer 0.*'mlp_only_layers' = \[0\]"),
        ((0, 2), {"num_hidden_layers": None}, "missing tensor", "layer 1 is a MoE layer by those around it"),
    ],
    ids=["last", "first", "all", "more", "hostile-count", "none-counted", "dense", "hole"],
)
def test_what_is_not_there_is_told(
    layers: tuple[int, ...], config: dict[str, Any], reason: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words) as refused:
        lab.open(qwen3(tmp_path, layers, **config))
    assert refused.value.reason == reason


def told(family: str, kind: str, found: list[int], **settings: Any) -> str:
    """What `check_layers` says about a file of these settings, "" where it has nothing to say."""
    row = FAMILIES[family].hf if kind == "safetensors" else FAMILIES[family].gguf
    assert row is not None
    arch = row.types[0]
    experts = row.sizes.num_experts[0].replace("{arch}", arch)
    keys = {experts: 8, **{(f"{arch}.{k}" if kind == "gguf" and "." not in k else k): v for k, v in settings.items()}}
    metadata = {"general.architecture": arch, **keys} if kind == "gguf" else {}
    file = SimpleNamespace(kind=kind, path=Path("m"), metadata=metadata, config=keys if kind != "gguf" else {})
    try:
        check_layers(file, FAMILIES[family], row, row.names[0], found)  # type: ignore[arg-type]
    except CheckpointError as error:
        return f"{error.reason}: {error}"
    return ""


HF, GGUF = "safetensors", "gguf"
FIRST_3 = {"num_hidden_layers": 6, "first_k_dense_replace": 3}


@pytest.mark.parametrize(
    ("family", "kind", "settings", "right", "missing", "extra"),
    [
        ("mixtral", HF, {"num_hidden_layers": 3}, [0, 1, 2], 1, 3),
        ("deepseek_v3", HF, {**FIRST_3, "num_nextn_predict_layers": 1}, [3, 4, 5, 6], 3, 2),
        ("glm4_moe", HF, FIRST_3, [3, 4, 5], 5, 6),
        ("hy_v3", HF, {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, [1, 2], 2, 0),
        ("deepseek_v4", HF, {"num_hidden_layers": 2, "mlp_layer_types": ["hash_moe", "moe"]}, [0, 1], 0, 2),
        ("longcat_flash", HF, {"num_layers": 2, "num_hidden_layers": 4}, [0, 1], 1, 2),
        ("llama4", HF, {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}, [1, 3], 3, 2),
        ("llama4", HF, {"num_hidden_layers": 4, "moe_layers": [0, 3]}, [0, 3], 3, 1),
        (
            "ernie4_5_moe", HF,
            {"num_hidden_layers": 5, "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1},
            [1, 2, 3], 2, 4,
        ),
        ("lfm2_moe", HF, {"num_hidden_layers": 4, "num_dense_layers": 2}, [2, 3], 3, 1),
        ("nemotron_h", HF, {"hybrid_override_pattern": "MEM*E"}, [1, 4], 4, 0),
        ("nemotron_h", HF, {"layers_block_type": ["mamba", "moe", "moe"]}, [1, 2], 2, 0),
        ("step3p7", HF, {"num_hidden_layers": 4, "moe_layers_enum": "2,3"}, [2, 3], 3, 1),
        ("mixtral", GGUF, {"block_count": 2}, [0, 1], 0, 2),
        ("deepseek_v3", GGUF, {"block_count": 4, "leading_dense_block_count": 1}, [1, 2, 3], 1, 0),
        (
            "glm4_moe", GGUF,
            {"block_count": 5, "leading_dense_block_count": 1, "nextn_predict_layers": 1}, [1, 2, 3, 4], 3, 5,
        ),
        ("llama4", GGUF, {"block_count": 4, "interleave_moe_layer_step": 2}, [1, 3], 3, 0),
        ("qwen3_moe", GGUF, {"block_count": 9, WRITTEN: [2, 5]}, [2, 5], 5, 3),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_each_way_of_saying_it(
    family: str, kind: str, settings: dict[str, Any], right: list[int], missing: int, extra: int
) -> None:
    assert told(family, kind, right, **settings) == ""
    fewer = told(family, kind, [n for n in right if n != missing], **settings)
    assert fewer.startswith("missing tensor")
    assert f"layer {missing} is a MoE layer" in fewer
    more = told(family, kind, sorted([*right, extra]), **settings)
    assert more.startswith("model shape")
    assert f"holds experts of layer {extra}," in more


@pytest.mark.parametrize(
    ("family", "kind", "settings", "found"),
    [
        ("nemotron_h", GGUF, {"block_count": 9}, [1, 4]),
        ("nemotron_h", HF, {"num_hidden_layers": 9}, [1, 4]),
        ("deepseek_v3", HF, {"num_hidden_layers": 6}, [3, 4, 5]),
        ("deepseek_v3", HF, {"num_hidden_layers": 6}, []),
        ("deepseek_v2", GGUF, {"block_count": 4}, [1, 2, 3]),
        ("mixtral", GGUF, {"block_count": 2, "expert_count": 0}, []),
        ("qwen3_moe", GGUF, {"block_count": 3, "expert_count": [8, 0, 8]}, [0, 2]),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_no_setting_says_is_not_asked(family: str, kind: str, settings: dict[str, Any], found: list[int]) -> None:
    assert told(family, kind, found, **settings) == ""


def test_every_familys_row_says_which_layers() -> None:
    rows = [row for family in FAMILIES.values() for row in (family.gguf, family.hf) if row is not None]
    assert all(isinstance(row.layers, WhichLayers) for row in rows)


def test_a_family_that_the_file_is_not_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = qwen3(tmp_path, (0, 1))
    with pytest.raises(CheckpointError, match=r"no MoE layer of a mixtral model.*w2.*says .* that it is qwen3_moe"):
        lab.open(folder, family="mixtral")
    dense = tmp_path / "dense"
    dense.mkdir()
    qwen3(dense, (), model_type="llama", num_experts=None)
    with pytest.raises(CheckpointError, match="no MoE layer of a mixtral model"):
        lab.open(dense, family="mixtral")
    assert main(["inspect", str(dense)]) == 0
    assert "no MoE layer" in capsys.readouterr().out


def test_some_layers_of_a_model_are_written_and_read(tmp_path: Path) -> None:
    layer = lab.open(write_tiny_qwen2moe(tmp_path / "tiny.gguf")).layer(0)
    for numbers in ((0, 1), (2,), (0, 3)):
        with lab.open(lab.write_gguf(tmp_path / "some.gguf", dict.fromkeys(numbers, layer))) as ckpt:
            assert ckpt.moe_layers == list(numbers)
            assert (WRITTEN in ckpt.metadata) == (numbers != (0, 1))
