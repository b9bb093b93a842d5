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
from moe_lab.formats import get_format

LIMIT_BYTES = 20_000_000


def stored_rows(pair: Pair, value: Tensor) -> Tensor:
    """The fp32 tensor that `pair` stores, in the shape the file gives it."""
    value = value.float()
    if pair.rows != "all":
        half = value.shape[1] // 2
        value = value[:, :half] if pair.rows == "gate" else value[:, half:]
    return value.reshape(-1) if pair.gguf.endswith("ffn_gate_inp_shexp.weight") else value.contiguous()


def write(state: dict[str, Tensor], tokenizer: Any, out: Path, *, model: dict[str, Any] | None = None) -> int:
    """Quantise and write everything; the file's size in bytes. KeyError for a parameter that `state` lacks."""
    import gguf

    model = model or MODEL
    writer = gguf.GGUFWriter(str(out), ARCHITECTURE)
    _metadata(writer, model)
    _vocabulary(writer, tokenizer)
    used = set()
    for pair in pairs(model["num_hidden_layers"]):
        value, codec = stored_rows(pair, state[pair.parameter]), get_format(pair.format)
        used.add(pair.parameter)
        if pair.format == "f32":
            writer.add_tensor(pair.gguf, value.numpy())
            continue
        raw = codec.quantize(value)
        writer.add_tensor(pair.gguf, raw.numpy(), raw_dtype=gguf.GGMLQuantizationType(codec.ggml_type))
    if unused := sorted(set(state) - used):
        raise ValueError(f"no place in the file for {', '.join(unused)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out.stat().st_size


def _metadata(writer: Any, model: dict[str, Any]) -> None:
    import gguf

    writer.add_name("lab-42m")
    writer.add_description("A small mixture-of-experts language model, trained for MoE Lab on eight domains of text.")
    writer.add_license("apache-2.0")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q2_K)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model["vocab_size"])
    writer.add_context_length(model["max_position_embeddings"])
    writer.add_embedding_length(model["hidden_size"])
    writer.add_block_count(model["num_hidden_layers"])
    writer.add_feed_forward_length(model["intermediate_size"])
    writer.add_head_count(model["num_attention_heads"])
    writer.add_head_count_kv(model["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model["rms_norm_eps"])
    writer.add_rope_freq_base(model["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(model["hidden_size"] // model["num_attention_heads"])
    writer.add_expert_count(model["num_experts"])
    writer.add_expert_used_count(model["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(model["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(model["shared_expert_intermediate_size"])


def _vocabulary(writer: Any, tokenizer: Any) -> None:
    import gguf

    tokens, merges = bpe.vocabulary(tokenizer)
    types = [gguf.TokenType.CONTROL if i == END_OF_DOCUMENT else gguf.TokenType.NORMAL for i in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_DOCUMENT)
    writer.add_eos_token_id(END_OF_DOCUMENT)
    writer.add_add_bos_token(False)


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
