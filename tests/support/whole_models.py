"""Tiny whole transformers models, one for each family's case: what `save_pretrained` writes is what `lab.open` reads.

Their MoE blocks hold the same seeded values as the blocks alone (moe_modules); the rest of a model is as it was made.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.moe_modules import BY_NAME, I, fill

# What a whole model needs beyond the block's settings: small vocabularies' special tokens, layers that are MoE layers.
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MORE: dict[str, dict[str, Any]] = {
    "kimi_linear": _TOKENS,
    "hunyuan_v1_moe": {"head_dim": 16, "pad_token_id": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "deepseek_v3-group": {"first_k_dense_replace": 1},
    "deepseek_v3-raw": {"first_k_dense_replace": 1},
    "longcat_flash": {"ffn_hidden_size": I},
}
_VISION = {
    "width": 16, "layers": 1, "heads": 2, "mlp_ratio": 2.0, "image_size": 28, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
CASES = tuple(name for name in BY_NAME if name != "deepseek_v4-topk")  # the other V4 case has a layer of each kind


@dataclass(frozen=True)
class WholeModel:
    """A model and its MoE blocks by layer number."""

    model: Any
    blocks: dict[int, torch.nn.Module]


def build(name: str) -> WholeModel:
    """The case's model in eval mode, fp32, blocks filled."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    case = BY_NAME[name]
    configuration = importlib.import_module(f"transformers.models.{case.family}.configuration_{case.family}")
    settings = {**case.settings, **_MORE.get(name, {})}
    if case.family == "step3p7":
        modeling = importlib.import_module("transformers.models.step3p7.modeling_step3p7")
        text = {**settings, **_TOKENS, "mlp_layer_types": ["sparse", "sparse"]}
        config = configuration.Step3p7Config(text_config=text, vision_config=_VISION)
        made = modeling.Step3p7ForConditionalGeneration(config)
    else:
        config = getattr(configuration, case.config)(**settings)
        config._attn_implementation = "eager"
        made = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    made.eval()
    blocks: dict[int, torch.nn.Module] = {}
    for path, module in made.named_modules():
        if type(module).__name__ == case.block:
            number = next(int(step) for step in path.split(".") if step.isdigit())
            fill(module, case.gain)
            blocks[number] = module
    return WholeModel(made, blocks)
