"""bf16 shards -> `data/lab-42m.gguf`: `python -m data.recipe.export --weights DIR --tokenizer FILE --out FILE`.

Architecture `qwen2moe` with the standard names and keys, so that llama.cpp and transformers' GGUF loader read it.
Routed experts Q2_K (gate, up) and Q3_K (down), other matrices Q8_0, vectors and the router F32. The same weights give
the same bytes.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.recipe import shards
from data.recipe import tokenizer as bpe
from data.recipe.config import END_OF_DOCUMENT, MODEL
from data.recipe.gguf_names import ARCHITECTURE, Pair, pairs
from moe_lab.checkpoint.gguf_writer import write_gguf_tensors
from moe_lab.formats import QuantTensor, quantize

LIMIT_BYTES = 20_000_000
DESCRIPTION = "A small mixture-of-experts language model, trained for MoE Lab on eight domains of text."


def stored_rows(pair: Pair, value: Tensor) -> Tensor:
    """The fp32 tensor that `pair` stores, in the shape the file gives it."""
    value = value.float()
    if pair.rows != "all":
        half = value.shape[1] // 2
        value = value[:, :half] if pair.rows == "gate" else value[:, half:]
    return value.reshape(-1) if pair.gguf.endswith("ffn_gate_inp_shexp.weight") else value.contiguous()


def write(state: dict[str, Tensor], tokenizer: Any, out: Path, *, model: dict[str, Any] | None = None) -> int:
    """Quantise and write everything; the file's size in bytes. KeyError for a parameter that `state` lacks."""
    model = model or MODEL
    tensors: dict[str, Tensor | QuantTensor] = {}
    for pair in pairs(model["num_hidden_layers"]):
        value = stored_rows(pair, state[pair.parameter])
        tensors[pair.gguf] = value if pair.format == "f32" else quantize(value, pair.format)
    if unused := sorted(set(state) - {pair.parameter for pair in pairs(model["num_hidden_layers"])}):
        raise ValueError(f"no place in the file for {', '.join(unused)}")
    write_gguf_tensors(out, ARCHITECTURE, tensors, {**_metadata(model), **_vocabulary(tokenizer)})
    return out.stat().st_size


def _metadata(model: dict[str, Any]) -> dict[str, Any]:
    import gguf

    sizes = {
        "vocab_size": model["vocab_size"],
        "context_length": model["max_position_embeddings"],
        "embedding_length": model["hidden_size"],
        "block_count": model["num_hidden_layers"],
        "feed_forward_length": model["intermediate_size"],
        "attention.head_count": model["num_attention_heads"],
        "attention.head_count_kv": model["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": model["rms_norm_eps"],
        "rope.freq_base": model["rope_parameters"]["rope_theta"],
        "rope.dimension_count": model["hidden_size"] // model["num_attention_heads"],
        "expert_count": model["num_experts"],
        "expert_used_count": model["num_experts_per_tok"],
        "expert_feed_forward_length": model["moe_intermediate_size"],
        "expert_shared_feed_forward_length": model["shared_expert_intermediate_size"],
    }
    return {
        "general.name": "lab-42m",
        "general.description": DESCRIPTION,
        "general.license": "apache-2.0",
        "general.file_type": int(gguf.LlamaFileType.MOSTLY_Q2_K),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
        **{f"{ARCHITECTURE}.{key}": value for key, value in sizes.items()},
    }


def _vocabulary(tokenizer: Any) -> dict[str, Any]:
    import gguf

    tokens, merges = bpe.vocabulary(tokenizer)
    types = [gguf.TokenType.CONTROL if i == END_OF_DOCUMENT else gguf.TokenType.NORMAL for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": END_OF_DOCUMENT,
        "tokenizer.ggml.eos_token_id": END_OF_DOCUMENT,
        "tokenizer.ggml.add_bos_token": False,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="folder with the shards and shards.json")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("data/lab-42m.gguf"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = write(shards.join(args.weights), bpe.load(args.tokenizer), args.out)
    print(f"{args.out}: {size / 1e6:.2f} MB, sha256 {shards.sha256(args.out)}")
    if size > LIMIT_BYTES:
        print(f"above the limit of {LIMIT_BYTES / 1e6:.0f} MB")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
