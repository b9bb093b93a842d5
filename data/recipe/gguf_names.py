"""The names of the model's tensors in transformers and in a GGUF of architecture `qwen2moe`."""

from typing import NamedTuple

ARCHITECTURE = "qwen2moe"


class Pair(NamedTuple):
    """One stored tensor: its GGUF name and format, the transformers parameter it comes from, and which rows of it."""

    gguf: str
    format: str
    parameter: str
    rows: str = "all"
    """all, or gate / up: the first or second half of the rows of each expert in `gate_up_proj`."""


_OUTER = (
    Pair("token_embd.weight", "q8_0", "model.embed_tokens.weight"),
    Pair("output.weight", "q8_0", "lm_head.weight"),
    Pair("output_norm.weight", "f32", "model.norm.weight"),
)
_LAYER = (
    Pair("attn_norm.weight", "f32", "input_layernorm.weight"),
    Pair("attn_q.weight", "q8_0", "self_attn.q_proj.weight"),
    Pair("attn_q.bias", "f32", "self_attn.q_proj.bias"),
    Pair("attn_k.weight", "q8_0", "self_attn.k_proj.weight"),
    Pair("attn_k.bias", "f32", "self_attn.k_proj.bias"),
    Pair("attn_v.weight", "q8_0", "self_attn.v_proj.weight"),
    Pair("attn_v.bias", "f32", "self_attn.v_proj.bias"),
    Pair("attn_output.weight", "q8_0", "self_attn.o_proj.weight"),
    Pair("ffn_norm.weight", "f32", "post_attention_layernorm.weight"),
    Pair("ffn_gate_inp.weight", "f32", "mlp.gate.weight"),
    Pair("ffn_gate_exps.weight", "q2_k", "mlp.experts.gate_up_proj", "gate"),
    Pair("ffn_up_exps.weight", "q2_k", "mlp.experts.gate_up_proj", "up"),
    Pair("ffn_down_exps.weight", "q3_k", "mlp.experts.down_proj"),
    Pair("ffn_gate_inp_shexp.weight", "f32", "mlp.shared_expert_gate.weight"),
    Pair("ffn_gate_shexp.weight", "q8_0", "mlp.shared_expert.gate_proj.weight"),
    Pair("ffn_up_shexp.weight", "q8_0", "mlp.shared_expert.up_proj.weight"),
    Pair("ffn_down_shexp.weight", "q8_0", "mlp.shared_expert.down_proj.weight"),
)
"""q and k rows are not permuted: `qwen2moe` rotates halves, as transformers does."""


def pairs(layers: int) -> list[Pair]:
    """Every tensor of the file, in the order in which it is written."""
    inner = [
        p._replace(gguf=f"blk.{layer}.{p.gguf}", parameter=f"model.layers.{layer}.{p.parameter}")
        for layer in range(layers)
        for p in _LAYER
    ]
    return [*_OUTER, *inner]
