"""lab.hf.from_module: which modules it takes, and what it refuses instead of leaving out."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

import moe_lab as lab
from moe_lab.errors import LabError
from moe_lab.families import FAMILIES, ModuleNames
from tests.support.moe_modules import BY_NAME, E, H, I, call, rows


def test_the_spec_says_what_the_module_is() -> None:
    spec = lab.hf.from_module(BY_NAME["gpt_oss"].build(), number=3).spec
    assert (spec.family, spec.d_model, spec.d_expert, spec.num_experts, spec.top_k) == ("gpt_oss", H, I, E, 3)
    assert (spec.limit, spec.limit_mode, spec.alpha, spec.router_bias, spec.expert_bias) == (
        7.0,
        "oai",
        1.702,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_moe-norm", "normalize", True),
        ("qwen3_moe-raw", "normalize", False),
        ("deepseek_v2-greedy", "n_group", 1),
        ("deepseek_v2-group", "n_group", 4),
        ("longcat_flash", "zero_experts", 4),
        ("cohere2_moe-sigmoid-avg", "weights_from", "sigmoid_topk"),
        ("step3p7-post-clamp", "scale", 3.0),
        ("deepseek_v4-hash", "hash_routing", True),
    ],
)
def test_the_modules_own_settings_win_over_the_row(name: str, field: str, value: object) -> None:
    assert getattr(lab.hf.from_module(BY_NAME[name].build()).spec.router, field) == value


def test_a_subclass_is_read_as_its_base() -> None:
    block = BY_NAME["mixtral"].build()
    block.__class__ = type("MyMixtralBlock", (type(block),), {})
    assert lab.hf.from_module(block).spec.family == "mixtral"


def test_weights_are_taken_as_they_are() -> None:
    block = BY_NAME["mixtral"].build().to(torch.bfloat16)
    layer = lab.hf.from_module(block)
    assert layer.experts.formats == ("bf16", "bf16", "bf16")
    assert layer.experts.stack.down.data.data_ptr() == block.experts.down_proj.data_ptr()


@pytest.mark.parametrize(("name", "path"), [("mixtral", "experts"), ("deepseek_v3-group", "gate")])
def test_a_parameter_the_row_does_not_know_is_refused_by_name(name: str, path: str) -> None:
    block = BY_NAME[name].build()
    block.get_submodule(path).register_parameter("surprise", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(LabError, match=rf"{path}\.surprise"):
        lab.hf.from_module(block)


def test_an_unknown_activation_is_refused() -> None:
    block = BY_NAME["mixtral"].build()
    block.experts.act_fn = torch.nn.Tanh()
    with pytest.raises(LabError, match=r"experts\.act_fn is 'Tanh'"):
        lab.hf.from_module(block)


def test_what_is_no_block_is_refused() -> None:
    with pytest.raises(LabError, match="Linear"):
        lab.hf.from_module(torch.nn.Linear(2, 2))
    with pytest.raises(LabError, match=r"gate\.weight"):
        lab.hf.from_module(torch.nn.Linear(2, 2), family="mixtral")


def test_a_family_of_the_users_own_reads_a_module_of_their_own() -> None:
    block = BY_NAME["mixtral"].build()
    block.__class__ = type("Mine", (torch.nn.Module,), {"forward": type(block).forward})
    own = replace(FAMILIES["mixtral"], name="mine", module=ModuleNames(classes=("Mine",)))
    layer, x = lab.hf.from_module(block, family=own), rows(10)
    assert layer.spec.family == "mine"
    assert torch.allclose(layer(x, "reference").out, call(block, x, None), atol=1e-5)


def test_blocks_without_their_shared_expert() -> None:
    case = BY_NAME["ernie4_5_moe"]
    block = replace(case, settings={**case.settings, "moe_num_shared_experts": 0}).build()
    layer, x = lab.hf.from_module(block), rows(10)
    assert layer.spec.shared is None
    assert torch.allclose(layer(x, "reference").out, call(block, x, None), atol=1e-5)
