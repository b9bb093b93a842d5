"""Models of hundreds of gigabytes that take a few kilobytes of disk: a true header, then a hole."""

import json
import struct
from pathlib import Path
from typing import Any

from moe_lab.formats import get_format
from tests.support.tiny_gguf import entry, raw_gguf, tensor_row, text

UINT32, STRING = 4, 8
# DeepSeek-V3's sizes: D, F, E, K, and its MoE layers.
D, F, E, K, LAYERS = 7168, 2048, 256, 8, range(3, 61)


def sparse_gguf(path: Path, layers: range = LAYERS, formats: tuple[str, str] = ("q3_k", "q4_k")) -> Path:
    """A DeepSeek-V3 as a GGUF; `formats`: of gate and up, of down. 58 layers are some 300 GB."""
    expert = {"ffn_gate_exps.weight": ((D, F, E), formats[0]), "ffn_up_exps.weight": ((D, F, E), formats[0]),
              "ffn_down_exps.weight": ((F, D, E), formats[1])}  # fmt: skip
    around = {"ffn_gate_inp.weight": ((D, E), "f32"), "exp_probs_b.bias": ((E,), "f32"),
              "ffn_gate_shexp.weight": ((D, F), "q8_0"), "ffn_up_shexp.weight": ((D, F), "q8_0"),
              "ffn_down_shexp.weight": ((F, D), "q8_0")}  # fmt: skip
    rows, at = [], 0
    for layer in layers:
        for name, (ne, fmt) in {**expert, **around}.items():
            codec = get_format(fmt)
            assert codec.ggml_type is not None
            rows.append(tensor_row(f"blk.{layer}.{name}", ne, codec.ggml_type, at))
            at += codec.row_bytes(ne[0]) * (ne[1] if len(ne) > 1 else 1) * (ne[2] if len(ne) > 2 else 1)
            at += -at % 32
    sizes = {"embedding_length": D, "expert_count": E, "expert_used_count": K, "expert_feed_forward_length": F,
             "expert_gating_func": 2}  # fmt: skip
    entries = [entry("general.architecture", STRING, text("deepseek2"))]
    entries += [entry(f"deepseek2.{key}", UINT32, struct.pack("<I", value)) for key, value in sizes.items()]
    return _with_hole(path, raw_gguf(tuple(entries), tuple(rows)), at)


def sparse_folder(folder: Path, layers: range = LAYERS) -> Path:
    """The same in bf16 as Hugging Face has it: a tensor for each expert, a file for each layer, 1.3 TB in all."""
    index: dict[str, str] = {}
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    for number, layer in enumerate(layers):
        mlp, header, at = f"model.layers.{layer}.mlp.", {}, 0
        wanted: dict[str, tuple[tuple[int, ...], str]] = {
            f"{mlp}experts.{e}.{part}.weight": (shape, "BF16") for e in range(E) for part, shape in shapes.items()
        }
        wanted |= {f"{mlp}shared_experts.{part}.weight": (shape, "BF16") for part, shape in shapes.items()}
        wanted |= {f"{mlp}gate.weight": ((E, D), "BF16"), f"{mlp}gate.e_score_correction_bias": ((E,), "F32")}
        for name, (shape, dtype) in wanted.items():
            end = at + {"BF16": 2, "F32": 4}[dtype] * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
            at = end
        part = f"model-{number + 1:05d}-of-{len(layers):05d}.safetensors"
        head = json.dumps(header).encode()
        _with_hole(folder / part, struct.pack("<Q", len(head)) + head, at)
        index |= dict.fromkeys(header, part)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config: dict[str, Any] = {"model_type": "deepseek_v3", "n_routed_experts": E, "num_experts_per_tok": K,
                              "hidden_size": D, "moe_intermediate_size": F}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _with_hole(path: Path, head: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
    return path
