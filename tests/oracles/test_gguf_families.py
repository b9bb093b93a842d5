"""Every family's GGUF: names as the `gguf` package has them, and layers written, read back, and equal in every bit."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import gguf

import moe_lab as lab
from moe_lab import hf
from moe_lab.export import stored_spec
from moe_lab.families import FAMILIES, Family, TensorNames
from moe_lab.layer import MoELayer, SharedWeights
from moe_lab.spec import SharedSpec
from moe_lab.weights import as_quant
from tests.support.moe_modules import BY_NAME, H, normal, rows, token_ids

WITH_GGUF = {name: row for name, row in FAMILIES.items() if row.gguf is not None}
CASES = [name for name, case in BY_NAME.items() if case.family in WITH_GGUF]
# Not in the package's tables yet: younger than it.
YOUNGER = {"deepseek4", "cohere2moe", "hy_v3"}
NOT_STREAMED = {"gemma4-layer", "nemotron_h-latent"}
SUFFIX = re.compile(r"\.(weight|bias|scale)$")


def known_names(arch: str) -> set[str]:
    """Names, without suffix, of the tensors an architecture has."""
    number = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    return {gguf.TENSOR_NAMES[t].replace("{bid}", "{layer}") for t in gguf.MODEL_TENSORS[number]}


def used_names(family: Family, names: TensorNames) -> set[str]:
    return {SUFFIX.sub("", pattern) for role in family.roles() if (pattern := names.pattern(role)) is not None}


@pytest.mark.parametrize("name", WITH_GGUF)
def test_names_are_those_of_the_package(name: str) -> None:
    family = WITH_GGUF[name]
    assert family.gguf is not None
    for arch in set(family.gguf.types) - YOUNGER:
        known = known_names(arch)
        # Where gate and up come fused only, the package lists that; loaders take them apart as well.
        split = {"blk.{layer}.ffn_gate_exps", "blk.{layer}.ffn_up_exps"}
        fused = split if "blk.{layer}.ffn_gate_up_exps" in known else set()
        assert used_names(family, family.gguf.names[0]) - known - fused == set()
        assert {key.replace("{arch}", arch) for key in _keys(family)} <= _known_keys(arch)


def _keys(family: Family) -> set[str]:
    assert family.gguf is not None
    sizes = family.gguf.sizes
    groups = (sizes.num_experts, sizes.top_k, sizes.d_model, sizes.d_expert, sizes.d_shared)
    return {key for keys in groups for key in keys} | {setting.key for setting in family.gguf.settings}


def _known_keys(arch: str) -> set[str]:
    values = (v for keys in (gguf.Keys.LLM, gguf.Keys.Attention) for v in vars(keys).values() if isinstance(v, str))
    return {value.replace("{arch}", arch) for value in values}


def case_layer(name: str) -> MoELayer:
    """The case's layer as a GGUF can hold it: bf16 down, q8_0 gate and up (whose rows are a block long)."""
    made = hf.from_module(BY_NAME[name].build(), number=1)
    spec, stack = made.spec, made.experts.stack  # type: ignore[union-attr]
    shared, d_shared = made.shared, 32
    if name == "granitemoeshared":
        spec = replace(spec, shared=SharedSpec(d_shared))
        parts = [normal(f"shared{n}", shape) for n, shape in enumerate([(d_shared, H), (d_shared, H), (H, d_shared)])]
        shared = SharedWeights(*(as_quant(w, "shared", tuple(w.shape)) for w in parts))
    packed = {
        part: lab.quantize(q.dequantize(), "q8_0")
        for part, q in stack.parts.items()
        if part != "down" and q.shape[-1] == 32
    }
    weights = {"gate": None, **stack.parts, **packed, "down": stack.down.dequantize().bfloat16()}
    spec = stored_spec(spec, spec.family)
    biases = None if stack.biases is None else {part: getattr(stack.biases, part) for part in ("gate", "up", "down")}
    return MoELayer.from_tensors(
        spec,
        router=made.router_weights,
        biases=biases,
        shared=shared,
        latent=made.latent,
        norms=made.norms,
        number=1,
        **weights,
    )


def run(layer: MoELayer) -> torch.Tensor:
    ids = token_ids(10) if layer.spec.router.hash_routing else None
    return layer(rows(10), "reference", token_ids=ids).out


@pytest.mark.parametrize("name", CASES)
def test_a_written_layer_comes_back_with_its_spec_and_bits(name: str, tmp_path: Path) -> None:
    layer = case_layer(name)
    path = lab.write_gguf(tmp_path / "model.gguf", {0: layer, 2: layer})
    with lab.open(path) as ckpt:
        assert ckpt.moe_layers == [0, 2]
        assert ckpt.spec == layer.spec
        back = ckpt.layer(2)
        assert back.spec == layer.spec
        assert back.experts.formats == layer.experts.formats
        assert torch.equal(run(back), run(layer))
        if name not in NOT_STREAMED:
            with lab.ExpertCache(slots=3) as cache:
                assert torch.equal(run(ckpt.layer(2, cache=cache)), run(layer))


def test_all_families_with_an_architecture_are_written() -> None:
    assert {BY_NAME[name].family for name in CASES} == set(WITH_GGUF)
    assert set(FAMILIES) - set(WITH_GGUF) == {"longcat_flash"}
