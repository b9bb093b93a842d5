"""Family rows: settings that reach the spec, and rows that cannot be."""

import pytest

from moe_lab.checkpoint.names import layer_names, moe_layers, roles
from moe_lab.errors import LabError, LabTypeError
from moe_lab.families import FAMILIES, Family, FileSetting, GgufTensors, family_of_arch, get_family
from tests.support.tiny_gguf import tiny_weights

SIZES = {"num_experts": 8, "top_k": 2, "d_model": 256, "d_expert": 128}


def test_names_and_architectures_are_unique() -> None:
    assert all(name == row.name for name, row in FAMILIES.items())
    archs = [row.gguf_arch for row in FAMILIES.values() if row.gguf_arch is not None]
    assert len(set(archs)) == len(archs)
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
    assert family_of_arch("qwen2moe") is FAMILIES["qwen2_moe"]
    assert [family_of_arch(other) for other in ("llama", "", None, 7, ["qwen2moe"])] == [None] * 5


def test_a_familys_settings_reach_the_spec() -> None:
    row = Family(
        name="mine", gguf_arch="mine", shared="plain",
        router={"score": "sigmoid", "normalize": True, "norm_eps": 1e-20, "scale": 2.5},
        layer={"limit": 7.0, "limit_mode": "oai", "router_bias": True},
    )  # fmt: skip
    spec = row.spec(**SIZES, d_shared=64, settings={"scale": 3.0})
    assert (spec.router.score, spec.router.normalize, spec.router.scale) == ("sigmoid", True, 3.0)
    assert (spec.limit, spec.limit_mode, spec.router_bias) == (7.0, "oai", True)
    assert spec.shared is not None
    assert not spec.shared.gated
    assert get_family(row) is row


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"router": {"scoring": "softmax"}}, "scoring"),
        ({"router": {"num_experts": 8}}, "num_experts"),
        ({"layer": {"d_model": 8}}, "d_model"),
        ({"layer": {"activations": "silu"}}, "activations"),
        ({"file_settings": (FileSetting("norm", "k", bool),)}, "norm"),
        ({"shared": "some"}, "some"),
        ({"shared_layer": {"width": 3}}, "width"),
    ],
    ids=[
        "router-unknown",
        "router-size",
        "layer-size",
        "layer-unknown",
        "file-unknown",
        "shared-unknown",
        "shared-field-unknown",
    ],
)
@pytest.mark.wrong_types
def test_a_row_that_cannot_be_is_refused_when_it_is_made(fields: dict, said: str) -> None:
    with pytest.raises(LabError, match=said):
        Family(name="mine", gguf_arch="mine", **fields)


@pytest.mark.parametrize(("shared", "width"), [("none", 64), ("gated", None)])
def test_shared_width_must_go_with_the_shared_expert(shared: str, width: int | None) -> None:
    with pytest.raises(LabError, match="shared expert"):
        Family(name="mine", gguf_arch="mine", shared=shared).spec(**SIZES, d_shared=width)  # type: ignore[arg-type]


@pytest.mark.wrong_types
def test_unknown_family_lists_the_known_ones() -> None:
    with pytest.raises(LabError, match="qwen2_moe"):
        get_family("qwen9")
    with pytest.raises(LabTypeError):
        get_family(9)  # type: ignore[arg-type]


class TestNames:
    def test_roles_follow_the_shared_expert(self) -> None:
        counts = {kind: len(roles(Family(name="m", gguf_arch="m", shared=kind))) for kind in ("none", "plain", "gated")}
        assert counts == {"none": 4, "plain": 7, "gated": 8}

    def test_names_of_a_layer_are_those_a_writer_gives(self) -> None:
        names = layer_names(FAMILIES["qwen2_moe"], 11)
        assert sorted(names.values()) == sorted(tiny_weights(11))
        assert names["router"] == "blk.11.ffn_gate_inp.weight"
        assert names["shared_router"] == "blk.11.ffn_gate_inp_shexp.weight"

    def test_layers_are_sorted_as_numbers_and_lookalikes_ignored(self) -> None:
        names = [f"blk.{n}.ffn_up_exps.weight" for n in (10, 2, 2)]
        others = [
            "blk.x.ffn_up_exps.weight",
            "xblk.3.ffn_up_exps.weight",
            "blk.4.ffn_up_exps.weight2",
            "blk.5.ffn_up.weight",
        ]
        assert moe_layers(GgufTensors(), names + others) == [2, 10]
