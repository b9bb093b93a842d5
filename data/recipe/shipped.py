"""The shipped file as a transformers model: every tensor read by our own reader and decoded by our own formats."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.recipe.config import MODEL, model_config
from data.recipe.gguf_names import pairs
from moe_lab.checkpoint.gguf import GgufFile
from moe_lab.formats import QuantTensor


def decoded_state(path: Path, layers: int = MODEL["num_hidden_layers"]) -> dict[str, Tensor]:
    """All parameters in fp32 under transformers' names."""
    state: dict[str, Tensor] = {}
    with GgufFile(path) as file:
        halves: dict[str, dict[str, Tensor]] = {}
        for pair in pairs(layers):
            stored = file.read(pair.gguf)
            value = stored.dequantize() if isinstance(stored, QuantTensor) else stored.float()
            if pair.rows == "all":
                state[pair.parameter] = value
            else:
                halves.setdefault(pair.parameter, {})[pair.rows] = value
    for name, parts in halves.items():
        state[name] = torch.cat([parts["gate"], parts["up"]], dim=1)
    for name in [name for name in state if name.endswith("shared_expert_gate.weight")]:
        state[name] = state[name].reshape(1, -1)
    return state


def model_from(state: dict[str, Tensor], **overrides: Any) -> Any:
    """`Qwen2MoeForCausalLM` in fp32 with these weights, in evaluation mode. Missing or unknown names raise."""
    from transformers import Qwen2MoeForCausalLM

    model = Qwen2MoeForCausalLM(model_config(**overrides))
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    model.set_experts_implementation("grouped_mm")
    return model.eval()


def shipped_model(path: Path) -> Any:
    """The model of `lab-42m.gguf`, dequantised."""
    return model_from(decoded_state(path))
