"""A model file of any size for streaming runs: genuinely quantised experts, shaped as DeepSeek-V4.1-Flash's layers.

A few distinct gate, up and down matrices are drawn heavy-tailed from a seed and quantised; each (layer, expert) is a
combination of one of each that no other expert has, so that a wrong slot shows as wrong bits. The file is a GGUF whose
tensors begin at multiples of 4096 bytes, written past the page cache by several threads where the disk serves that.
"""

import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_lab.errors import LabError
from moe_lab.formats import get_format, quantize
from moe_lab.stream.memory import host_block

ALIGN = 4096
WRITERS = 8
_UINT32, _FLOAT32, _BOOL, _STRING = 4, 6, 7, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """L layers of E experts, K a token; D and F; the formats of gate and up, and of down."""

    layers: int
    experts: int
    top_k: int
    d_model: int
    d_expert: int
    gate_up: str = "q2_k"
    down: str = "q3_k"

    def sizes(self, role: str) -> tuple[int, int, str]:
        """(N, Kd, format) of one expert's matrix."""
        if role == "down":
            return self.d_model, self.d_expert, self.down
        return self.d_expert, self.d_model, self.gate_up

    def part_bytes(self, role: str) -> int:
        """Bytes of one expert's matrix."""
        rows, columns, name = self.sizes(role)
        return rows * get_format(name).row_bytes(columns)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(self.part_bytes(role) for role in ROLES)


ROLES = ("gate", "up", "down")
V41 = Shape(layers=4, experts=384, top_k=6, d_model=5120, d_expert=2304)
SMALL = Shape(layers=4, experts=64, top_k=6, d_model=512, d_expert=256)


def distinct_blocks(shape: Shape, count: int, device: str) -> dict[str, list[np.ndarray]]:
    """`count` quantised matrices a role, as raw bytes: Student-t weights of 4 degrees of freedom."""
    made: dict[str, list[np.ndarray]] = {}
    for place, role in enumerate(ROLES):
        rows, columns, name = shape.sizes(role)
        made[role] = []
        for number in range(count):
            g = torch.Generator(device).manual_seed(1000 * place + number)
            z = torch.randn(5, rows * columns, generator=g, device=device)
            w = z[0] / (z[1:].square().mean(0)).sqrt() * (0.7 * columns**-0.5)
            made[role].append(quantize(w.view(rows, columns), name).data.cpu().numpy().reshape(-1))
    return made


def chosen(shape: Shape, count: int, layer: int, expert: int) -> dict[str, int]:
    """Which of the `count` matrices of each role an expert has. No two experts of the file have all three in common."""
    number = layer * shape.experts + expert
    if shape.layers * shape.experts > count**3:
        raise LabError(f"{count} matrices a role make {count**3} experts, {shape.layers * shape.experts} are wanted.")
    return {"gate": number % count, "up": number // count % count, "down": (number // count**2 + number) % count}


def routers(shape: Shape) -> list[torch.Tensor]:
    """Each layer's router, f32 [E, D], rows of length about 1."""
    drawn = (torch.Generator().manual_seed(50 + n) for n in range(shape.layers))
    return [torch.randn(shape.experts, shape.d_model, generator=g) * shape.d_model**-0.5 for g in drawn]


def write_file(path: Path, shape: Shape, blocks: dict[str, list[np.ndarray]], experts: bool = True) -> int:
    """Write the model; its bytes. Experts go out in groups of 8 from `WRITERS` threads; without `experts` there are
    holes.
    """
    tensors = list(_tensors(shape))
    head, places, end = _head(shape, tensors)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if experts:
            os.posix_fallocate(fd, 0, end)
        else:
            os.truncate(fd, end)
        os.pwrite(fd, head, 0)
        for layer, weight in enumerate(routers(shape)):
            os.pwrite(fd, weight.numpy().tobytes(), places[f"blk.{layer}.ffn_gate_inp.weight"])
            os.pwrite(fd, np.zeros(shape.experts, np.float32).tobytes(), places[f"blk.{layer}.exp_probs_b.bias"])
            for role in ROLES:
                at = places[f"blk.{layer}.ffn_{role}_shexp.weight"]
                os.pwrite(fd, blocks[role][layer % len(blocks[role])].tobytes(), at)
        os.fsync(fd)
        if experts:
            _write_experts(path, shape, blocks, places)
            os.fsync(fd)
    finally:
        os.close(fd)
    return end


def fill_memory(shape: Shape, blocks: dict[str, list[np.ndarray]], source: Any, rows: memoryview) -> None:
    """The experts' bytes to where `source` (a MemorySource) has them in its memory `rows`, without a file."""
    count = len(blocks["gate"])
    todo = [(n, e) for n in range(shape.layers) for e in range(shape.experts)]

    def work(mine: list[tuple[int, int]]) -> None:
        for layer, expert in mine:
            which = chosen(shape, count, layer, expert)
            for run in source.geometry(layer).runs:
                into = np.frombuffer(rows[run.starts[expert] :][: run.part.nbytes], np.uint8)
                np.copyto(into, blocks[run.part.name][which[run.part.name]])

    threads = [threading.Thread(target=work, args=(todo[n::WRITERS],)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def head_of(shape: Shape) -> tuple[bytes, int]:
    """The file's head, and the bytes of the whole file."""
    head, _, end = _head(shape, list(_tensors(shape)))
    return head, end


def _write_experts(path: Path, shape: Shape, blocks: dict[str, list[np.ndarray]], places: dict[str, int]) -> None:
    group = 8
    todo = [(n, role, e) for n in range(shape.layers) for role in ROLES for e in range(0, shape.experts, group)]
    failed: list[BaseException] = []
    count = len(blocks["gate"])

    def work(mine: list[tuple[int, str, int]]) -> None:
        try:
            fd = _open_direct(path)
            buffer = host_block(max(shape.part_bytes(role) for role in ROLES) * group).numpy()
            for layer, role, first in mine:
                each = shape.part_bytes(role)
                experts = range(first, min(first + group, shape.experts))
                for place, expert in enumerate(experts):
                    which = chosen(shape, count, layer, expert)[role]
                    np.copyto(buffer[place * each : (place + 1) * each], blocks[role][which])
                at = places[f"blk.{layer}.ffn_{role}_exps.weight"] + first * each
                _write_all(fd, buffer[: len(experts) * each], at)
            os.close(fd)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(todo[n::WRITERS],)) for n in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:  # a memory file system
        return os.open(path, os.O_WRONLY)


def _write_all(fd: int, data: np.ndarray, at: int) -> None:
    """Past the page cache where place and length allow it, else through it."""
    if at % ALIGN or data.nbytes % ALIGN:
        import fcntl

        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    view, done = data.data, 0
    while done < view.nbytes:
        done += os.pwrite(fd, view[done:], at + done)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """(name, sizes fastest first, format) of every tensor of the file."""
    for n in range(shape.layers):
        yield f"blk.{n}.ffn_gate_inp.weight", (shape.d_model, shape.experts), "f32"
        yield f"blk.{n}.exp_probs_b.bias", (shape.experts,), "f32"
        for role in ROLES:
            rows, columns, name = shape.sizes(role)
            yield f"blk.{n}.ffn_{role}_shexp.weight", (columns, rows), name
            yield f"blk.{n}.ffn_{role}_exps.weight", (columns, rows, shape.experts), name


def _head(shape: Shape, tensors: list[tuple[str, tuple[int, ...], str]]) -> tuple[bytes, dict[str, int], int]:
    """The file's head, where each tensor begins in the file, and its end."""
    arch = "deepseek4"
    values: list[tuple[str, int, bytes]] = [
        ("general.architecture", _STRING, _text(arch)), ("general.alignment", _UINT32, struct.pack("<I", ALIGN)),
        (f"{arch}.block_count", _UINT32, struct.pack("<I", shape.layers)),
        (f"{arch}.embedding_length", _UINT32, struct.pack("<I", shape.d_model)),
        (f"{arch}.expert_count", _UINT32, struct.pack("<I", shape.experts)),
        (f"{arch}.expert_used_count", _UINT32, struct.pack("<I", shape.top_k)),
        (f"{arch}.expert_feed_forward_length", _UINT32, struct.pack("<I", shape.d_expert)),
        (f"{arch}.expert_gating_func", _UINT32, struct.pack("<I", 4)),
        (f"{arch}.expert_weights_norm", _BOOL, b"\1"),
        (f"{arch}.expert_weights_scale", _FLOAT32, struct.pack("<f", 1.5)),
        (f"{arch}.swiglu_clamp_exp", _FLOAT32, struct.pack("<f", 10.0)),
    ]  # fmt: skip
    table, at, offsets = b"", 0, {}
    for name, sizes, fmt in tensors:
        codec = get_format(fmt)
        offsets[name] = at
        table += _text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, codec.ggml_type, at)
        at += codec.row_bytes(sizes[0]) * int(np.prod(sizes[1:], initial=1))
        at += -at % ALIGN
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    head += b"".join(_text(key) + struct.pack("<I", kind) + value for key, kind, value in values) + table
    head += bytes(-len(head) % ALIGN)
    return head, {name: len(head) + offset for name, offset in offsets.items()}, len(head) + at


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()
