"""transformers' MoE modules, tiny, one a case: H = 32, I = 24, E = 8, vocabulary 61.

Weights are normals seeded by their names, so a case's numbers depend neither on the order of construction nor on the
other cases.
"""

import importlib
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

H, I, E, V = 32, 24, 8, 61  # noqa: E741
BASE = {"hidden_size": H, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": V}
MOE = {**BASE, "intermediate_size": I, "moe_intermediate_size": I}


@dataclass(frozen=True)
class Case:
    """`settings` go to the config class, `arguments` to the block after the config."""

    name: str
    family: str
    block: str
    config: str
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()
    gain: dict[str, float] = field(default_factory=dict)
    hashed: bool = False

    def build(self) -> torch.nn.Module:
        """The module in eval mode, fp32, weights filled."""
        modeling = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        configuration = importlib.import_module(f"transformers.models.{self.family}.configuration_{self.family}")
        config = getattr(configuration, self.config)(**self.settings)
        config._experts_implementation = config._attn_implementation = "eager"
        block = getattr(modeling, self.block)(config, *self.arguments).eval()
        fill(block, self.gain)
        if hasattr(block, "self_attn"):
            block.self_attn = NoAttention()
        return block


class NoAttention(torch.nn.Module):
    """Attention that adds nothing, so that a decoder layer is its feed-forward half."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


def normal(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normals by name."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def fill(block: torch.nn.Module, gain: dict[str, float]) -> None:
    """Every parameter and buffer: projections with variance 1 / columns, vectors by what they are."""
    with torch.no_grad():
        for name, t in [*block.named_parameters(), *block.named_buffers()]:
            last = name.rsplit(".", 1)[-1]
            values = normal(name, tuple(t.shape)) if t.is_floating_point() else None
            if values is None:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                t.copy_(torch.stack([torch.randperm(E, generator=generator)[: t.shape[1]] for _ in range(t.shape[0])]))
            elif "correction_bias" in last or last == "expert_bias":
                t.copy_(0.3 * values)
            elif last in ("scale", "per_expert_scale", "layer_scalar") or "norm" in name:
                t.copy_(1 + 0.2 * values)
            elif last == "bias" or last.endswith("_bias"):
                t.copy_(0.5 * values)
            else:
                t.copy_(values * 2 * H**-0.5)
            if last in gain:
                t.mul_(gain[last])


def rows(tokens: int) -> torch.Tensor:
    """x [T, H]."""
    return normal(f"x{tokens}", (tokens, H))


def token_ids(tokens: int) -> torch.Tensor:
    """Token ids [T]."""
    return torch.randint(0, V, (tokens,), generator=torch.Generator().manual_seed(tokens))


def call(block: torch.nn.Module, x: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The block's output [T, H] for x [T, H]."""
    with torch.inference_mode():
        out = block(x[None]) if ids is None else block(x[None], ids[None])
    return (out[0] if isinstance(out, tuple) else out).reshape(x.shape)


def _with(**more: Any) -> dict[str, Any]:
    return {**MOE, **more}


_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}


def _v3(**more: Any) -> dict[str, Any]:
    return _with(n_routed_experts=E, num_experts_per_tok=3, **{**_GROUPS, **more})


def _qwen(**more: Any) -> dict[str, Any]:
    return _with(num_experts=E, num_experts_per_tok=3, shared_expert_intermediate_size=40, **more)


def _v4(**more: Any) -> dict[str, Any]:
    kinds = ["hash_moe", "moe"]
    return _with(
        n_routed_experts=E, num_experts_per_tok=3, swiglu_limit=1.5, mlp_layer_types=kinds, n_shared_experts=1, **more
    )


_V4 = ("deepseek_v4", "DeepseekV4SparseMoeBlock", "DeepseekV4Config")
_GEMMA = _with(
    enable_moe_block=True, num_experts=E, top_k_experts=3, head_dim=16, intermediate_size=40,
    hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"],
)  # fmt: skip

CASES = (
    Case("mixtral", "mixtral", "MixtralSparseMoeBlock", "MixtralConfig", _with(num_local_experts=E)),
    Case("qwen2_moe", "qwen2_moe", "Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", _qwen()),
    Case("qwen3_moe-norm", "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", _qwen(norm_topk_prob=True)),
    Case("qwen3_moe-raw", "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", _qwen(norm_topk_prob=False)),
    Case("qwen3_next", "qwen3_next", "Qwen3NextSparseMoeBlock", "Qwen3NextConfig", _qwen()),
    Case("olmoe", "olmoe", "OlmoeSparseMoeBlock", "OlmoeConfig", _with(num_experts=E, num_experts_per_tok=3)),
    Case("gpt_oss", "gpt_oss", "GptOssMLP", "GptOssConfig",
         _with(num_local_experts=E, num_experts_per_tok=3), gain={"gate_up_proj": 3.0}),
    Case("deepseek_v2-greedy", "deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config", _v3(topk_method="greedy")),
    Case("deepseek_v2-group", "deepseek_v2", "DeepseekV2Moe", "DeepseekV2Config",
         _v3(topk_method="group_limited_greedy")),
    Case("deepseek_v3-group", "deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", _v3()),
    Case("deepseek_v3-raw", "deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config",
         _v3(norm_topk_prob=False, n_group=1, topk_group=1)),
    Case("glm4_moe", "glm4_moe", "Glm4MoeMoE", "Glm4MoeConfig", _v3(n_group=1, topk_group=1)),
    Case("kimi_linear", "kimi_linear", "KimiLinearMoE", "KimiLinearConfig",
         _with(num_experts=E, num_experts_per_token=3, num_shared_experts=1, num_expert_group=2, topk_group=1,
               moe_renormalize=True, routed_scaling_factor=2.446)),
    Case("deepseek_v4-hash", *_V4, _v4(), (0,), hashed=True),
    Case("deepseek_v4-topk", *_V4, _v4(), (1,)),
    Case("longcat_flash", "longcat_flash", "LongcatFlashMoE", "LongcatFlashConfig",
         {**BASE, "n_routed_experts": E, "zero_expert_num": 4, "moe_topk": 4, "expert_ffn_hidden_size": I,
          "routed_scaling_factor": 6.0}, gain={"e_score_correction_bias": 0.3}),
    Case("llama4", "llama4", "Llama4TextMoe", "Llama4TextConfig",
         _with(num_local_experts=E, num_experts_per_tok=1, pad_token_id=0)),
    Case("gemma4-layer", "gemma4", "Gemma4TextDecoderLayer", "Gemma4TextConfig", _GEMMA, (0,)),
    Case("granitemoe", "granitemoe", "GraniteMoeMoE", "GraniteMoeConfig",
         _with(num_local_experts=E, num_experts_per_tok=3)),
    Case("granitemoeshared", "granitemoeshared", "GraniteMoeSharedMoE", "GraniteMoeSharedConfig",
         _with(num_local_experts=E, num_experts_per_tok=3, shared_intermediate_size=40)),
    Case("phimoe", "phimoe", "PhimoeSparseMoeBlock", "PhimoeConfig", _with(num_local_experts=E)),
    Case("hunyuan_v1_moe", "hunyuan_v1_moe", "HunYuanMoEV1Moe", "HunYuanMoEV1Config",
         _with(num_experts=E, moe_topk=3), (0,)),
    Case("ernie4_5_moe", "ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig",
         _with(moe_num_experts=E, moe_k=3, moe_num_shared_experts=2), gain={"e_score_correction_bias": 0.3}),
    Case("minimax_m2", "minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config",
         _with(num_local_experts=E, num_experts_per_tok=3)),
    Case("hy_v3", "hy_v3", "HYV3MoE", "HYV3Config",
         _with(num_experts=E, num_experts_per_tok=3, num_shared_experts=1, router_scaling_factor=2.826)),
    Case("lfm2_moe", "lfm2_moe", "Lfm2MoeSparseMoeBlock", "Lfm2MoeConfig",
         _with(num_experts=E, num_experts_per_tok=3, use_expert_bias=True, norm_topk_prob=True)),
    Case("nemotron_h-latent", "nemotron_h", "NemotronHMoE", "NemotronHConfig",
         _v3(moe_latent_size=16, moe_shared_expert_intermediate_size=40, mlp_hidden_act="relu2")),
    Case("cohere2_moe-sigmoid-avg", "cohere2_moe", "Cohere2MoeSparseMoeBlock", "Cohere2MoeConfig",
         _with(num_experts=E, num_experts_per_tok=3, num_shared_experts=1, expert_selection_fn="sigmoid",
               norm_topk_prob=True, shared_expert_combination_strategy="average")),
    Case("step3p7-post-clamp", "step3p7", "Step3p7SparseMoeBlock", "Step3p7TextConfig",
         _with(num_local_experts=E, n_routed_experts=E, num_experts_per_tok=3, share_expert_dim=40,
               moe_router_scaling_factor=3.0, swiglu_limits=[0.7, 0.0], swiglu_limits_shared=[0.5, 0.0]), (0,)),
)  # fmt: skip
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
