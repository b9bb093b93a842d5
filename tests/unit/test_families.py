"""Family rows: settings that reach the spec, and rows that cannot be."""

from pathlib import Path

import pytest

from moe_lab.checkpoint.names import moe_layers
from moe_lab.errors import LabError, LabTypeError
from moe_lab.families import (
    FAMILIES,
    Family,
    FileSetting,
    TensorNames,
    family_of_config,
    family_of_gguf,
    get_family,
    gguf_file,
    hf_file,
)
from moe_lab.families.gguf_files import GGUF_NAMES
from tests.support.tiny_gguf import tiny_weights

ALL_BUT_BIAS = TensorNames(router="r", gate="g", up="u", down="d")
SIZES = {"num_experts": 8, "top_k": 2, "d_model": 256, "d_expert": 128}


def test_names_and_architectures_are_unique() -> None:
    assert all(name == row.name for name, row in FAMILIES.items())
    kinds = [kind for row in FAMILIES.values() if row.hf is not None for kind in row.hf.types]
    assert len(set(kinds)) == len(kinds)
    classes = [name for row in FAMILIES.values() if row.module is not None for name in row.module.classes]
    assert len(set(classes)) == len(classes)


def test_qwen2_moe_is_softmax_without_renormalising_and_a_gated_shared_expert() -> None:
    spec = FAMILIES["qwen2_moe"].spec(**SIZES, d_shared=512)
    router = spec.router
    assert (router.score, router.weights_from, router.normalize, router.scale) == ("softmax", "score", False, 1.0)
    assert (router.num_experts, router.top_k, spec.d_model, spec.d_expert, spec.activation) == (8, 2, 256, 128, "silu")
    assert spec.shared is not None
    assert (spec.shared.d_expert, spec.shared.gated) == (512, True)
    assert spec.family == "qwen2_moe"


def test_architecture_finds_its_row_and_nothing_else_does() -> None:
    assert family_of_gguf({"general.architecture": "qwen2moe"}) is FAMILIES["qwen2_moe"]
    assert family_of_config({"model_type": "qwen2_moe"}) is FAMILIES["qwen2_moe"]
    for other in ("qwen2", "", None, 7, ["qwen2moe"]):
        assert family_of_gguf({"general.architecture": other}) is None
        assert family_of_config({"model_type": other}) is None


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({"deepseek2.expert_gating_func": 2}, "deepseek_v3"),
        ({"deepseek2.expert_gating_func": 1}, "deepseek_v2"),
        ({"deepseek2.expert_gating_func": 0}, "deepseek_v2"),
        ({}, "deepseek_v2"),
        ({"deepseek2.expert_gating_func": 4}, None),
        ({"deepseek2.expert_gating_func": [2]}, None),
    ],
    ids=["sigmoid", "softmax", "unset", "absent", "another", "a-list"],
)
def test_two_families_of_one_architecture_are_told_apart_by_a_key(metadata: dict, family: str | None) -> None:
    found = family_of_gguf({"general.architecture": "deepseek2", **metadata})
    assert (found.name if found else None) == family


def test_granite_with_and_without_a_shared_expert() -> None:
    plain = {"general.architecture": "granitemoe"}
    assert family_of_gguf(plain) is FAMILIES["granitemoe"]
    assert family_of_gguf({**plain, "granitemoe.expert_shared_feed_forward_length": 0}) is FAMILIES["granitemoe"]
    assert family_of_gguf({**plain, "granitemoe.expert_shared_feed_forward_length": 64}) is FAMILIES["granitemoeshared"]


def test_every_family_has_its_files_named() -> None:
    assert [name for name, row in FAMILIES.items() if row.hf is None] == []
    assert [name for name, row in FAMILIES.items() if row.gguf is None] == ["longcat_flash"]


def test_a_familys_settings_reach_the_spec() -> None:
    row = Family(
        name="mine", shared="plain",
        router={"score": "sigmoid", "normalize": True, "norm_eps": 1e-20, "scale": 2.5},
        layer={"limit": 7.0, "limit_mode": "oai", "router_bias": True},
    )  # fmt: skip
    spec = row.spec(**SIZES, d_shared=64, settings={"scale": 3.0})
    assert (spec.router.score, spec.router.normalize, spec.router.scale) == ("sigmoid", True, 3.0)
    assert (spec.limit, spec.limit_mode, spec.router_bias) == (7.0, "oai", True)
    assert spec.shared is not None
    assert not spec.shared.gated
    assert get_family(row) is row


def test_the_documents_table_is_this_one() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "families.md").read_text()
    rows = [[cell.strip(" `") for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| ")]
    wanted = [
        [name, *(", ".join(f"`{t}`" for t in row.types).strip("`") if row else "-" for row in (family.gguf, family.hf))]
        for name, family in FAMILIES.items()
    ]
    assert rows[1:] == wanted


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"router": {"scoring": "softmax"}}, "scoring"),
        ({"router": {"num_experts": 8}}, "num_experts"),
        ({"layer": {"d_model": 8}}, "d_model"),
        ({"layer": {"activations": "silu"}}, "activations"),
        ({"gguf": gguf_file("mine", FileSetting("router.norm", "k", bool))}, "norm"),
        ({"gguf": gguf_file("mine", FileSetting("normalize", "k", bool))}, "router.x"),
        ({"gguf": gguf_file("mine", router={"top_k": 2})}, "top_k"),
        ({"hf": hf_file(("mine",), TensorNames(router="r", down="d", up="u"))}, "no tensor for gate"),
        ({"layer": {"correction_bias": True}, "hf": hf_file(("m",), ALL_BUT_BIAS)}, "correction_bias"),
        ({"shared": "some"}, "some"),
        ({"shared_layer": {"width": 3}}, "width"),
    ],
    ids=[
        "router-unknown",
        "router-size",
        "layer-size",
        "layer-unknown",
        "file-unknown",
        "file-record",
        "file-size",
        "file-lacks-gate",
        "file-lacks-bias",
        "shared-unknown",
        "shared-field-unknown",
    ],
)
@pytest.mark.wrong_types
def test_a_row_that_cannot_be_is_refused_when_it_is_made(fields: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        Family(name="mine", **fields)


@pytest.mark.parametrize(("shared", "width"), [("none", 64), ("gated", None)])
def test_shared_width_must_go_with_the_shared_expert(shared: str, width: int | None) -> None:
    with pytest.raises(LabError, match="shared expert"):
        Family(name="mine", shared=shared).spec(**SIZES, d_shared=width)  # type: ignore[arg-type]


@pytest.mark.wrong_types
def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(LabError, match="qwen2_moe"):
        get_family("qwen9")
    with pytest.raises(LabTypeError):
        get_family(9)  # type: ignore[arg-type]


class TestNames:
    def test_roles_follow_the_shared_expert(self) -> None:
        counts = {kind: len(Family(name="m", shared=kind).roles()) for kind in ("none", "plain", "gated")}
        assert counts == {"none": 4, "plain": 7, "gated": 8}

    def test_names_of_a_layer_are_those_a_writer_gives(self) -> None:
        names = [(GGUF_NAMES.pattern(role) or "").format(layer=11) for role in FAMILIES["qwen2_moe"].roles()]
        assert sorted(names) == sorted(tiny_weights(11))

    def test_layers_are_sorted_as_numbers_and_lookalikes_ignored(self) -> None:
        names = [f"blk.{n}.ffn_up_exps.weight" for n in (10, 2, 2)]
        others = [
            "blk.x.ffn_up_exps.weight",
            "xblk.3.ffn_up_exps.weight",
            "blk.4.ffn_up_exps.weight2",
            "blk.5.ffn_up.weight",
        ]
        assert moe_layers(GGUF_NAMES, names + others) == [2, 10]
