"""Expert files without a model: seeded bytes in the layout of a GGUF (experts of a tensor one after another)."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from moe_lab.stream.lease import Lease
from moe_lab.stream.source import ExpertSource

PARTS = ("gate", "up", "down")
# (N, Kd) of gate, up, down in f32: odd sizes, so that parts neither fill their 256-byte places nor equal each other.
SHAPES = ((3, 5), (3, 5), (5, 7))


def expert_bytes(layer: int, expert: int, part: str, nbytes: int) -> bytes:
    """What stands in the file for one part of one expert."""
    return np.random.default_rng([layer, expert, PARTS.index(part)]).bytes(nbytes)


def write_experts(
    path: Path,
    *,
    layers: Sequence[int] = (0, 1),
    experts: int = 8,
    shapes: Callable[[int], Sequence[tuple[int, int]]] = lambda layer: SHAPES,
    read_call: Callable | None = None,
) -> ExpertSource:
    """Write f32 experts of every layer behind a 37-byte head, and return the source that describes them."""
    slices = {}
    with path.open("wb") as file:
        file.write(b"h" * 37)
        for layer in layers:
            slices[layer] = []
            for part, (rows, columns) in zip(PARTS, shapes(layer), strict=True):
                nbytes = rows * columns * 4
                slices[layer].append((f"blk.{layer}.{part}", "f32", file.tell(), nbytes, (experts, rows, columns)))
                for expert in range(experts):
                    file.write(expert_bytes(layer, expert, part, nbytes))
    return ExpertSource(path, slices, read_call=read_call)


def held(lease: Lease) -> list[dict[str, bytes]]:
    """The bytes a lease shows, a dict of parts for each expert in the order asked for."""
    return [{part: lease.views(part)[slot].cpu().numpy().tobytes() for part in PARTS} for slot in lease.slots.tolist()]


def wanted(source: ExpertSource, layer: int, experts: Sequence[int]) -> list[dict[str, bytes]]:
    """The bytes it has to show."""
    sizes = {part.name: part.nbytes for part in source.parts(layer)}
    return [{part: expert_bytes(layer, e, part, sizes[part]) for part in PARTS} for e in experts]


class CountingReads:
    """`os.preadv` that remembers each call's (offset, bytes asked for)."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.calls.append((offset, sum(len(b) for b in buffers)))
        return os.preadv(fd, buffers, offset)
