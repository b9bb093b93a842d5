"""Files far larger than memory, and headers made to exhaust it: opening costs the header alone."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_lab.checkpoint.safetensors_header import MAX_HEADER_BYTES
from moe_lab.checkpoint.strict_json import MAX_ITEMS
from tests.support.tiny_gguf import entry, raw_gguf, tensor_row, text

ROOT = Path(__file__).resolve().parents[2]
HUGE = 300 * 10**9
LAYERS, EXPERTS = 61, 256
STRING, U16 = 8, 2


def sparse(path: Path, head: bytes, size: int) -> Path:
    path.write_bytes(head)
    os.truncate(path, size)
    return path


def safetensors_head(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def experts(count: int) -> dict[str, Any]:
    """The header of `count` MB-sized bf16 tensors under the names of a large model."""
    header, at, each = {}, 0, 7168 * 2048 * 2
    for number in range(count):
        layer, rest = divmod(number, EXPERTS * 3)
        name = f"model.layers.{layer}.mlp.experts.{rest // 3}.{('gate', 'up', 'down')[rest % 3]}_proj.weight"
        header[name] = {"dtype": "BF16", "shape": [2048, 7168], "data_offsets": [at, at + each]}
        at += each
    return header


def gguf_300gb(folder: Path) -> Path:
    rows = (tensor_row("output.weight", (4096, 4096, 4096), 0, 0), tensor_row("w", (8,), 0, 4096**3 * 4))
    head = raw_gguf((entry("general.architecture", STRING, text("llama")),), rows)
    return sparse(folder / "huge.gguf", head, HUGE)


def split_gguf(folder: Path) -> Path:
    parts = 60
    for number in range(parts):
        entries = tuple(entry(f"split.{k}", U16, struct.pack("<H", n)) for k, n in (("no", number), ("count", parts)))
        head = raw_gguf(entries, (tensor_row(f"w{number}", (1 << 20, 1190), 0, 0),))
        sparse(folder / f"m-{number + 1:05d}-of-{parts:05d}.gguf", head, HUGE // parts)
    return folder / "m-00001-of-00060.gguf"


def single_safetensors(folder: Path) -> Path:
    header = experts(10_300)
    head = safetensors_head(json.dumps(header).encode())
    return sparse(folder / "m.safetensors", head, len(head) + 10_300 * 7168 * 2048 * 2)


def sharded_safetensors(folder: Path) -> Path:
    """All experts of a model of 61 layers: 46,848 tensors in 61 shards, 1.4 TB."""
    index = {}
    for layer in range(LAYERS):
        header = {name.replace("layers.0", f"layers.{layer}"): facts for name, facts in experts(EXPERTS * 3).items()}
        shard = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"
        head = safetensors_head(json.dumps(header).encode())
        sparse(folder / shard, head, len(head) + EXPERTS * 3 * 7168 * 2048 * 2)
        index |= dict.fromkeys(header, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def big_header(folder: Path) -> Path:
    return sparse(folder / "m.safetensors", struct.pack("<Q", 100_000_001) + b'{"', 200_000_000)


def many_lists(folder: Path) -> Path:
    text = b'{"a":[' + b"[]," * (MAX_ITEMS // 2 - 10) + b"[]]}"
    return sparse(folder / "m.safetensors", safetensors_head(text), 20 << 20)


def too_many_items(folder: Path) -> Path:
    text = b'{"a":[' + b"1," * (MAX_HEADER_BYTES // 2 - 10) + b"1]}"
    return sparse(folder / "m.safetensors", safetensors_head(text), 20 << 20)


def wide_text(folder: Path) -> Path:
    """One character outside the first plane makes Python keep four bytes for each."""
    text = '{"😀' + "n" * (MAX_HEADER_BYTES - 20)
    return sparse(folder / "m.safetensors", safetensors_head(text.encode() + b'":1}'), 20 << 20)


LARGE = {make.__name__: make for make in (gguf_300gb, split_gguf, single_safetensors, sharded_safetensors)}
HOSTILE = {make.__name__: make for make in (big_header, many_lists, too_many_items, wide_text)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a fresh process makes of each, by name."""
    paths = {name: make(tmp_path_factory.mktemp(name)) for name, make in (LARGE | HOSTILE).items()}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.file_worker", "open"],
        cwd=ROOT, input="".join(f"{p}\n" for p in paths.values()), capture_output=True, text=True, timeout=300,
        check=True,
    )  # fmt: skip
    return dict(zip(paths, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", LARGE)
def test_large_models_open_by_their_headers(name: str, seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[name]
    assert answer["outcome"] == "load", answer
    assert answer["bytes"] >= HUGE - 60
    assert answer["count"] == {"gguf_300gb": 2, "split_gguf": 60, "single_safetensors": 10_300}.get(name, 46_848)
    assert answer["extra_mb"] < 200
    # of one core, so that a busy machine does not fail it; 46,848 tensors are forty times what one shard holds
    assert answer["cpu_seconds"] < (5 if name == "sharded_safetensors" else 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_within_the_limits(name: str, seen: dict[str, dict[str, Any]]) -> None:
    answer = seen[name]
    assert answer["outcome"] == "error", answer
    assert answer["errors"][0]["reason"] == ("header length" if name == "big_header" else "header text")
    assert len(answer["errors"][0]["message"]) < 1000
    assert answer["extra_mb"] < 200
    assert answer["cpu_seconds"] < 5
