"""GGUF files small enough to make in a test: a qwen2moe model through the `gguf` package, and raw headers by hand."""

import functools
import struct
from pathlib import Path
from typing import Any

import gguf
import torch

from moe_lab.formats import QuantTensor, quantize

EXPERTS, TOP_K, D_MODEL, D_EXPERT, LAYERS = 8, 2, 256, 256, 2


def tiny_weights(
    layer: int, *, experts: int = EXPERTS, d_model: int = D_MODEL, d_expert: int = D_EXPERT
) -> dict[str, torch.Tensor]:
    """Seeded fp32 weights of one layer by GGUF tensor name, numpy order."""
    rng = torch.Generator().manual_seed(1000 + layer)
    shapes = {
        "ffn_gate_inp": (experts, d_model),
        "ffn_gate_exps": (experts, d_expert, d_model),
        "ffn_up_exps": (experts, d_expert, d_model),
        "ffn_down_exps": (experts, d_model, d_expert),
        "ffn_gate_shexp": (d_expert, d_model),
        "ffn_up_shexp": (d_expert, d_model),
        "ffn_down_shexp": (d_model, d_expert),
        "ffn_gate_inp_shexp": (d_model,),
    }
    return {
        f"blk.{layer}.{name}.weight": torch.randn(shape, generator=rng) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def storage_of(name: str) -> str:
    """The format a tensor of `tiny_weights` is written in: as the shipped model's."""
    if name.endswith("_exps.weight"):
        return "q3_k" if "down" in name else "q2_k"
    return "q8_0" if name.endswith(("gate_shexp.weight", "up_shexp.weight", "down_shexp.weight")) else "f32"


def write_tiny_qwen2moe(
    path: Path, *, keys: dict[str, Any] | None = None, drop: tuple[str, ...] = (), layers: int = LAYERS
) -> Path:
    """Write the model. `keys` adds or replaces `qwen2moe.*` metadata (None removes); `drop` leaves tensors out."""
    writer = gguf.GGUFWriter(path, "qwen2moe")
    sizes = {
        "block_count": layers, "embedding_length": D_MODEL, "expert_count": EXPERTS, "expert_used_count": TOP_K,
        "expert_feed_forward_length": D_EXPERT, "expert_shared_feed_forward_length": D_EXPERT,
    }  # fmt: skip
    for key, value in {**sizes, **(keys or {})}.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}.get(type(value))
        if add is not None:
            add(f"qwen2moe.{key}", value)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q2_K)
    for layer in range(layers):
        for name, weight in stored_weights(layer).items():
            if name not in drop:
                _add(writer, name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@functools.cache
def stored_weights(layer: int) -> dict[str, torch.Tensor | QuantTensor]:
    """The layer's weights as `write_tiny_qwen2moe` stores them; made once a process (quantising takes seconds)."""
    weights = tiny_weights(layer)
    return {n: w if storage_of(n) == "f32" else quantize(w, storage_of(n)) for n, w in weights.items()}


def _add(writer: gguf.GGUFWriter, name: str, weight: torch.Tensor | QuantTensor) -> None:
    if isinstance(weight, QuantTensor):
        writer.add_tensor(name, weight.data.numpy(), raw_dtype=gguf.GGMLQuantizationType[weight.format.upper()])
    else:
        writer.add_tensor(name, weight.numpy())


def text(value: str | bytes) -> bytes:
    """A length-prefixed string as GGUF stores it."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata entry with its value's raw bytes."""
    return text(key) + struct.pack("<I", kind) + value


def tensor_row(name: str | bytes, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    """A row of the tensor table; `dims` fastest first, as stored."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(
    entries: tuple[bytes, ...] = (),
    rows: tuple[bytes, ...] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    align: int = 32,
) -> bytes:
    """A whole file from its pieces, with padding to `align` before the data."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(entries)) + b"".join(entries) + b"".join(rows)
    return head + bytes(-len(head) % align if rows else 0) + data
