"""The table of public models: sizes against what their makers state, and against transformers' configurations."""

import pytest

from moe_lab.families import FAMILIES
from moe_lab.models import MODELS

# Total parameters in billions, as published (a name that has them says the same). Routed experts are most of it.
TOTAL_BILLION = {
    "mixtral-8x7b": 46.7, "mixtral-8x22b": 141, "qwen1.5-moe-a2.7b": 14.3, "qwen2-57b-a14b": 57.4,
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235, "qwen3-next-80b-a3b": 80, "olmoe-1b-7b": 6.9, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8, "deepseek-v2-lite": 15.7, "deepseek-v2": 236, "deepseek-v3": 671, "kimi-k2": 1040,
    "glm-4.5-air": 106, "glm-4.5": 355, "kimi-linear-48b-a3b": 48, "longcat-flash": 560, "llama-4-scout": 109,
    "llama-4-maverick": 400, "gemma-4-26b-a4b": 26, "granite-3.0-1b-a400m": 1.35, "granite-3.0-3b-a800m": 3.4,
    "phi-3.5-moe": 41.9, "hunyuan-a13b": 80, "ernie-4.5-21b-a3b": 21.8, "minimax-m2": 230, "lfm2-8b-a1b": 8.3,
    "nemotron-3-nano-30b-a3b": 31.6,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sizes_make_a_layer_of_the_family(name: str) -> None:
    model = MODELS[name]
    spec = model.spec()
    assert spec.family == model.family
    assert model.family in FAMILIES
    assert 0 < model.moe_layers <= model.layers


@pytest.mark.parametrize("name", TOTAL_BILLION)
def test_routed_experts_are_most_of_the_stated_parameters(name: str) -> None:
    share = MODELS[name].routed_weights / (TOTAL_BILLION[name] * 1e9)
    assert 0.84 < share < 1


def test_the_streaming_models_pairs_and_weights() -> None:
    model = MODELS["deepseek-v4.1-flash"]
    assert model.moe_layers * model.num_experts == 15_360
    assert model.expert_weights == 3 * 5120 * 2304
    assert (model.spec().limit, model.spec().shared.limit, model.spec().router.score) == (10.0, 10.0, "sqrt_softplus")


def test_router_width_of_zero_experts() -> None:
    assert MODELS["longcat-flash"].spec().router.width == 768


CONFIGS = {
    "deepseek-v3": ("deepseek_v3", "DeepseekV3Config", "moe_intermediate_size"),
    "deepseek-v4-flash": ("deepseek_v4", "DeepseekV4Config", "moe_intermediate_size"),
    "glm-4.5-air": ("glm4_moe", "Glm4MoeConfig", "moe_intermediate_size"),
    "gpt-oss-120b": ("gpt_oss", "GptOssConfig", "intermediate_size"),
    "hy-v3": ("hy_v3", "HYV3Config", "moe_intermediate_size"),
    "kimi-linear-48b-a3b": ("kimi_linear", "KimiLinearConfig", "moe_intermediate_size"),
    "llama-4-scout": ("llama4", "Llama4TextConfig", "intermediate_size"),
    "longcat-flash": ("longcat_flash", "LongcatFlashConfig", "expert_ffn_hidden_size"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2Config", "intermediate_size"),
    "mixtral-8x7b": ("mixtral", "MixtralConfig", "intermediate_size"),
    "phi-3.5-moe": ("phimoe", "PhimoeConfig", "intermediate_size"),
    "qwen1.5-moe-a2.7b": ("qwen2_moe", "Qwen2MoeConfig", "moe_intermediate_size"),
    "qwen3-next-80b-a3b": ("qwen3_next", "Qwen3NextConfig", "moe_intermediate_size"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_the_configurations_defaults(name: str) -> None:
    """Where transformers' defaults are that very model's."""
    import importlib

    pytest.importorskip("transformers")
    module, config_class, width = CONFIGS[name]
    file = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
    config, model = getattr(file, config_class)(), MODELS[name]
    layers = getattr(config, "num_layers", None) or config.num_hidden_layers
    assert (config.hidden_size, getattr(config, width), layers) == (model.d_model, model.d_expert, model.layers)
    picks = getattr(config, "moe_topk", None) or config.num_experts_per_tok
    experts = [getattr(config, n, None) for n in ("num_local_experts", "num_experts", "n_routed_experts")]
    assert picks == model.top_k
    assert model.num_experts in experts
