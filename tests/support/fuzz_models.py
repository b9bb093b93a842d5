"""Small good models for the fuzzer: one of each container, its header far larger than its data, and two MoE models.

A model is a folder of files, and what `lab.open` is given. For each tensor it says which bytes of which file
describe it and which hold it, so that a mutation can be told from a fault.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

import moe_lab as lab
from moe_lab.open import Checkpoint
from tests.support.tiny_gguf import entry, raw_gguf, tensor_row, text

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Model:
    """`files`: name -> bytes; `given`: what is opened, "" for the folder. `rows`: tensor -> the bytes that describe it
    in its file; `heads`: file -> (end of the header, start of the data)."""

    name: str
    files: dict[str, bytes]
    given: str
    rows: dict[str, bytes]
    heads: dict[str, tuple[int, int]]

    def write(self, folder: Path) -> Path:
        """Put the files into `folder`; the path to open."""
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / self.given

    def open(self, folder: Path) -> Checkpoint:
        """Open what `write` left there, perhaps changed since."""
        return lab.open(folder / self.given)


def models() -> list[Model]:
    """One model of each container, and a MoE model of each kind."""
    return [_gguf(), _split_gguf(), _safetensors(), _sharded(), _moe_gguf(), _moe_folder()]


def noise(count: int, seed: int) -> bytes:
    """Bytes without zeros, so that data read from the wrong place shows."""
    return bytes(torch.randint(1, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


# dims fastest first, type number, bytes
_GGUF_TENSORS = {
    "blk.0.ffn_gate_exps.weight": ((256, 2, 2), 10, 336), "blk.0.ffn_down_exps.weight": ((256, 2), 11, 220),
    "blk.0.ffn_gate_inp.weight": ((8, 4), 0, 128), "token_embd.weight": ((32, 2), 8, 68), "half": ((5,), 1, 10),
    "brain": ((3, 3), 30, 18), "table": ((4,), 26, 16),
}  # fmt: skip


# E = 4 experts of F = 4 over D = 8.
_MOE_TENSORS = {
    "blk.0.ffn_gate_inp.weight": ((8, 4), 0, 128), "blk.0.ffn_gate_exps.weight": ((8, 4, 4), 0, 512),
    "blk.0.ffn_up_exps.weight": ((8, 4, 4), 1, 256), "blk.0.ffn_down_exps.weight": ((4, 8, 4), 30, 256),
}  # fmt: skip


def _gguf_file(
    tensors: Mapping[str, tuple[tuple[int, ...], int, int]], entries: tuple[bytes, ...], seed: int
) -> tuple[bytes, dict[str, bytes], tuple[int, int]]:
    """(file, rows, where its header ends and its data starts)."""
    rows, data = {}, b""
    for name, (dims, kind, nbytes) in tensors.items():
        rows[name] = tensor_row(name, dims, kind, len(data))
        data += noise(nbytes, seed + len(data)) + bytes(-nbytes % 32)
    head_only = raw_gguf(entries, tuple(rows.values()), align=1)
    return (
        raw_gguf(entries, tuple(rows.values()), data),
        rows,
        (len(head_only.rstrip(b"\0")), -(-len(head_only) // 32) * 32),
    )


def _gguf() -> Model:
    entries = (
        entry("general.architecture", STRING, text("dense")),
        entry("general.alignment", U32, struct.pack("<I", 32)),
        entry("dense.block_count", U32, struct.pack("<I", 4)),
        entry("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bc") + text(b"\xff")),
        entry("scores", ARRAY, struct.pack("<IQ3f", F32, 3, 1, 2, 3)),
        entry("nested", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ2B", U8, 2, 1, 2)),
        entry("flag", BOOL, b"\1"),
        entry("big", U64, struct.pack("<Q", 1 << 40)),
    )
    data, rows, head = _gguf_file(_GGUF_TENSORS, entries, 1)
    return Model("gguf", {"m.gguf": data}, "m.gguf", rows, {"m.gguf": head})


def _moe_gguf() -> Model:
    sizes = {"block_count": 1, "embedding_length": 8, "expert_count": 4, "expert_used_count": 2,
             "expert_feed_forward_length": 4, "feed_forward_length": 4, "expert_gating_func": 1}  # fmt: skip
    entries = (
        entry("general.architecture", STRING, text("qwen3moe")),
        *(entry(f"qwen3moe.{key}", U32, struct.pack("<I", value)) for key, value in sizes.items()),
        entry("qwen3moe.expert_weights_norm", BOOL, b"\1"),
        entry("qwen3moe.expert_weights_scale", F32, struct.pack("<f", 1)),
    )
    data, rows, head = _gguf_file(_MOE_TENSORS, entries, 20)
    return Model("moe-gguf", {"m.gguf": data}, "m.gguf", rows, {"m.gguf": head})


def _split_gguf() -> Model:
    names = list(_GGUF_TENSORS)[:6]
    files, heads, rows = {}, {}, {}
    for number, part in enumerate((names[:3], names[3:])):
        entries = (
            entry("split.no", U16, struct.pack("<H", number)),
            entry("split.count", U16, struct.pack("<H", 2)),
            entry("split.tensors.count", I32, struct.pack("<i", len(names))),
        )
        name = f"m-{number + 1:05d}-of-00002.gguf"
        files[name], of_part, head = _gguf_file({n: _GGUF_TENSORS[n] for n in part}, entries, 10 + number)
        heads[name] = head
        rows |= of_part
    return Model("split-gguf", files, "m-00001-of-00002.gguf", rows, heads)


def _made(seed: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer(bytearray(noise(count, seed)), dtype=torch.uint8).view(dtype).reshape(shape)


def _tensors() -> dict[str, torch.Tensor]:
    f8, e8m0 = torch.float8_e4m3fn, torch.float8_e8m0fnu

    return {
        "l.0.w.weight": _made(1, f8, 4, 64), "l.0.w.weight_scale_inv": _made(2, torch.float32, 1, 1),
        "l.0.v.weight": _made(3, torch.uint8, 2, 16), "l.0.v.weight_scale": _made(4, f8, 2, 2),
        "l.0.v.weight_scale_2": _made(5, torch.float32, 1),
        "l.1.experts_blocks": _made(6, torch.uint8, 2, 2, 1, 16), "l.1.experts_scales": _made(7, torch.uint8, 2, 2, 1),
        "l.1.x.weight": _made(8, f8, 2, 32), "l.1.x.weight_scale": _made(9, e8m0, 2, 1),
        "l.1.norm": _made(10, torch.bfloat16, 3), "l.1.ids": _made(11, torch.int64, 2), "l.1.none": torch.empty(0, 2),
    }  # fmt: skip


def _safetensors_rows(data: bytes) -> tuple[dict[str, bytes], int]:
    """Tensor -> its entry's bytes as they stand in the header; the header's end."""
    end = 8 + int.from_bytes(data[:8], "little")
    rows = {}
    for name, facts in json.loads(data[8:end]).items():
        row = json.dumps({name: facts}, separators=(",", ":"))[1:-1].encode()
        assert name == "__metadata__" or row in data[:end]
        rows[name] = row
    rows.pop("__metadata__", None)
    return rows, end


def _safetensors() -> Model:
    data = save(_tensors(), metadata={"format": "pt"})
    rows, end = _safetensors_rows(data)
    return Model("safetensors", {"m.safetensors": data}, "m.safetensors", rows, {"m.safetensors": (end, end)})


def _sharded() -> Model:
    shards = {f"model-{n + 1:05d}-of-00002.safetensors": f"l.{n}." for n in range(2)}
    files, rows, heads = {}, {}, {}
    for shard, layer in shards.items():
        files[shard] = save({name: t for name, t in _tensors().items() if name.startswith(layer)})
        of_shard, end = _safetensors_rows(files[shard])
        rows |= of_shard
        heads[shard] = (end, end)
    weight_map = {name: shard for shard, layer in shards.items() for name in _tensors() if name.startswith(layer)}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index, indent=1).encode()
    config = {"num_experts": 4, "num_experts_per_tok": 2, "text_config": {"x": [1, 2.5, None, True]}}
    files["config.json"] = json.dumps(config).encode()
    return Model("sharded", files, "", rows, heads)


def _moe_folder() -> Model:
    """Mixtral's names: w1 gate, w3 up [F, D], w2 down [D, F]."""
    layer = "model.layers.0.block_sparse_moe"
    shapes = {f"{layer}.gate.weight": (4, 8)}
    for expert in range(4):
        shapes |= {f"{layer}.experts.{expert}.w{n}.weight": ((8, 4) if n == 2 else (4, 8)) for n in (1, 2, 3)}
    tensors = {name: _made(seed, torch.bfloat16, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    data = save(tensors)
    rows, end = _safetensors_rows(data)
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 8, "intermediate_size": 4,
        "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1, "hidden_act": "silu",
        "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "vocab_size": 32,
    }  # fmt: skip
    files = {"model.safetensors": data, "config.json": json.dumps(config, indent=1).encode()}
    return Model("moe-folder", files, "", rows, {"model.safetensors": (end, end)})
